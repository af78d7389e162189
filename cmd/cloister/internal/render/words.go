// SPDX-License-Identifier: Apache-2.0

package render

import "fmt"

// Count returns a number with its noun, which takes an s unless there is one: "1 action", "2 actions".
func Count[N int | int32 | int64 | uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Red returns text in red if coloured is set. Text must be printable.
func Red(text string, coloured bool) string {
	if !coloured {
		return text
	}
	return "\x1b[31m" + text + "\x1b[0m"
}
