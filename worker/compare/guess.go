// SPDX-License-Identifier: Apache-2.0

package compare

// guess returns the likely cause of why two pieces of bytes differ, which were at the same place of two things: by words
// in them, and by what numbers there could be.
func guess(a, b []byte, k Known) Cause { return Unknown }
