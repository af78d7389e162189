// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// documented runs check and compares the names of the checks and the tier with docs/backends.md. Results and details
// depend on the machine. If a backend works here that the page shows as refused, there is nothing to compare.
func (s *story) documented(args []string) error {
	page, err := os.ReadFile("../../docs/backends.md")
	if err != nil {
		return err
	}
	_, rest, found := strings.Cut(string(page), "\n$ cloister "+strings.Join(args, " ")+"\n")
	block, _, _ := strings.Cut(rest, "```")
	if !found {
		return fmt.Errorf("docs/backends.md does not show the output of cloister %s", strings.Join(args, " "))
	}
	refused := strings.HasPrefix(block, "FAIL")
	if err := s.script.Exec("cloister", args...); (err != nil) != refused {
		if refused {
			return nil
		}
		return err
	}
	got, want := checkNames(s.script.ReadFile("stdout")), checkNames(block)
	if !slices.Equal(got, want) {
		return fmt.Errorf("cloister %s prints the checks\n%q\nand docs/backends.md shows\n%q", strings.Join(args, " "), got, want)
	}
	return nil
}

// checkLine is the beginning of a line of check: a result, and a name or its first 25 characters.
var checkLine = regexp.MustCompile(`(?m)^(?:ok  |off |FAIL|tier)  (.{1,25})`)

// checkNames returns the names of the checks and the tier in an output of check, without the checks that are the same
// for each backend.
func checkNames(text string) []string {
	var names []string
	for _, m := range checkLine.FindAllStringSubmatch(text, -1) {
		if name := strings.TrimSpace(m[1]); !strings.HasPrefix(name, "backend ") && name != "toolchain of this host" && name != "fingerprint" {
			names = append(names, name)
		}
	}
	return names
}
