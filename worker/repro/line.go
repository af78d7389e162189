// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/compare"
)

// Line returns why the action is not reproducible in one line of ASCII; "" if it is.
func (v *Verdict) Line() string {
	if v.Result.AllEqual() {
		return ""
	}
	var what string
	if v.Result == FlakyExit {
		what = "exit codes differ: " + v.exits()
		if by := v.exitFactors(); len(by) > 0 {
			what += " (" + Join(by) + ")"
		}
	} else {
		names := v.differing()
		for i := range names {
			names[i] = clip(names[i]) // what follows them must be seen
		}
		what = abbreviate(names) + " differs"
		if len(names) > 1 {
			what = abbreviate(names) + " differ"
		}
	}
	for _, d := range v.Differences {
		if d.Cause != compare.Unknown {
			what += fmt.Sprintf(" (%s)", d.Cause)
			break
		}
	}
	return "not reproducible: " + what
}

// differing returns the paths of the outputs that differ.
func (v *Verdict) differing() []string {
	var names []string
	for _, o := range v.Outputs {
		if o.Differ {
			names = append(names, o.Path)
		}
	}
	return names
}

// exits lists how the runs ended.
func (v *Verdict) exits() string {
	var all []string
	for _, r := range v.Runs {
		all = append(all, r.Ended())
	}
	return strings.Join(all, ", ")
}

// Ended returns how the run ended in a few words.
func (r *Run) Ended() string {
	if r.Code != "" {
		return fmt.Sprintf("exit %d (%s)", r.ExitCode, r.Code)
	}
	return fmt.Sprintf("exit %d", r.ExitCode)
}
