// SPDX-License-Identifier: Apache-2.0

// Package checkpage compares outputs of cloister check with those that docs/backends.md shows.
package checkpage

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Documented returns the output of a command that the page at path shows, and whether it shows that the sandbox is
// refused.
func Documented(path, command string) (block string, refused bool, err error) {
	page, err := os.ReadFile(path)
	if err != nil {
		return "", false, err
	}
	_, rest, found := strings.Cut(string(page), "\n$ "+command+"\n")
	block, _, _ = strings.Cut(rest, "```")
	if !found {
		return "", false, fmt.Errorf("%s does not show the output of %s", path, command)
	}
	return block, strings.HasPrefix(block, "FAIL"), nil
}

// Compare returns an error unless an output has the checks and the tier of a documented one. Their results and details
// depend on the machine.
func Compare(output, block string) error {
	if got, want := names(output), names(block); !slices.Equal(got, want) {
		return fmt.Errorf("check prints the checks\n%q\nand docs/backends.md shows\n%q", got, want)
	}
	return nil
}

// line is the beginning of a line of check: a result, and a name or its first 25 characters.
var line = regexp.MustCompile(`(?m)^(?:ok  |off |FAIL|tier)  (.{1,25})`)

// names returns the names of the checks and the tier in an output of check, without the checks that are the same for each
// backend.
func names(text string) []string {
	var names []string
	for _, m := range line.FindAllStringSubmatch(text, -1) {
		if name := strings.TrimSpace(m[1]); !strings.HasPrefix(name, "backend ") && name != "toolchain of this host" && name != "fingerprint" {
			names = append(names, name)
		}
	}
	return names
}
