// SPDX-License-Identifier: Apache-2.0

package compare

// FixFor returns what would end differences of a cause in things of a format, "" if nothing is known.
func FixFor(cause Cause, format string) string { return "" }
