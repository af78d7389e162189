// SPDX-License-Identifier: Apache-2.0

//go:build !commitpoints

package commit

// Point does nothing.
func Point(string) {}
