// SPDX-License-Identifier: Apache-2.0

package compare

// guess returns the likely cause of why two pieces of bytes differ, which were at the same place of two things: by
// words in them, and by what numbers there could be.
func guess(a, b []byte, k Known) Cause {
	n := min(len(a), len(b))
	if r, ok := nextRun(a[:n], b[:n], 0); ok {
		if x, y, end := textsAt(a, b, r); end > 0 {
			if c := attribute(x, y, "", k); c != Unknown {
				return c
			}
		}
	}
	return numbers(a, b, k)
}
