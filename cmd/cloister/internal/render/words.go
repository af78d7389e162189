// SPDX-License-Identifier: Apache-2.0

package render

import (
	"fmt"
	"strings"
)

// Count returns a number with its noun, which is plural unless there is one: "1 action", "2 actions", "2 entries".
func Count[N int | int32 | int64 | uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if stem, ok := strings.CutSuffix(noun, "ry"); ok {
		noun = stem + "rie"
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
