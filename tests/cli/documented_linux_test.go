// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"strings"

	"github.com/cloister-build/cloister/tests/internal/checkpage"
)

// documented runs check and compares the names of the checks and the tier with docs/backends.md. If a backend works here
// that the page shows as refused, there is nothing to compare.
func (s *story) documented(args []string) error {
	block, refused, err := checkpage.Documented("../../docs/backends.md", "cloister "+strings.Join(args, " "))
	if err != nil {
		return err
	}
	if err := s.script.Exec("cloister", args...); (err != nil) != refused {
		if refused {
			return nil
		}
		return err
	}
	return checkpage.Compare(s.script.ReadFile("stdout"), block)
}
