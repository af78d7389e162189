// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/cloister-build/cloister/worker/repro"
)

// checkProof returns an error if the runs are equal but prove nothing: a command that fails every time may have ended
// before it wrote anything, and an output that is never produced cannot differ.
func (c *Config) checkProof(v *repro.Verdict) error {
	if c.AllowFailure || c.Which.Failed || !v.Result.AllEqual() {
		return nil
	}
	first := v.Runs[0]
	if first.ExitCode != 0 || first.Code != "" {
		why := first.Stderr
		if why != "" {
			why = " (" + why + ")"
		}
		return fmt.Errorf("the command fails in all %d runs with %s%s, which proves nothing; %s, or pass --allow-failure",
			len(v.Runs), first.Ended(), why, cmp.Or(c.ExplainAbsent(), "fix the command"))
	}
	if missing := c.MissingOutputs(first.Result); len(missing) > 0 {
		return fmt.Errorf("no run produced %s, which proves nothing; correct the command or --out, or pass --allow-failure", strings.Join(missing, ", "))
	}
	return nil
}
