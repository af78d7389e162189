// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/spf13/cobra"
)

// sampling is the flags of serve that select actions to run again.
type sampling struct {
	fraction flags.Percent
	gate     bool
}

// Register adds the flags.
func (s *sampling) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(&s.fraction, "repro-sample", "fraction of executed actions to run again with variations, while a slot is free unless --repro-gate is given")
	f.BoolVar(&s.gate, "repro-gate", false, "run actions again before recording their results, and record only reproducible ones; all actions without --repro-sample")
}

// check validates the flags.
func (s *sampling) check(cmd *cobra.Command) error {
	switch {
	case !s.gate:
	case !cmd.Flags().Changed("repro-sample"):
		s.fraction = 1
	case s.fraction == 0:
		return errors.New("--repro-gate with --repro-sample 0 would check nothing: raise the fraction, or omit one of them")
	}
	return nil
}

// openVerdicts opens the verdicts on actions, including those of earlier servers if this one samples. The caller closes
// them when no action is running.
func (s *sampling) openVerdicts(c *node.Config, log *slog.Logger) (*repro.Verdicts, error) {
	v := repro.VerdictsConfig{Log: log}
	if s.fraction > 0 {
		v.Path, v.Sync = filepath.Join(c.Dir, repro.VerdictsFile), c.Sync
	}
	known, err := repro.OpenVerdicts(v)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	return known, nil
}

// withhold returns next without the results of actions that are not reproducible, with --repro-gate.
func (s *sampling) withhold(known *repro.Verdicts, next cas.Instances) cas.Instances {
	if s.gate {
		return known.Withhold(next)
	}
	return next
}

// sampler returns the sampler of the actions that local executes, nil without sampling. past is nil without a history.
func (s *sampling) sampler(local *worker.Local, flags []string, counted func(string), past *history.Log, known *repro.Verdicts) *repro.Sampler {
	if s.fraction == 0 {
		return nil
	}
	c := repro.SamplerConfig{
		Executor: local, Instances: local.Instances, Name: local.Name, Features: local.Features, Host: repro.ThisHost(), Command: reproHint(flags),
		SampleRate: float64(s.fraction), Gate: s.gate, Count: counted, Verdicts: known, Log: local.Log,
	}
	if past != nil {
		c.Recorder = verdicts{past}
	}
	return repro.NewSampler(c)
}

// reproHint returns a function that returns the command that checks an action of this server, which these flags name. It
// leaves the flags out if a shell would not read them unchanged.
func reproHint(flags []string) func(string, cas.Digest) string {
	plain := regexp.MustCompile(`^[\w./@:+-]+$`)
	return func(instance string, action cas.Digest) string {
		words := append([]string{"cloister", "repro", action.String()}, flags...)
		if instance != "" {
			words = append(words, "--instance", instance)
		}
		if slices.ContainsFunc(words, func(w string) bool { return !plain.MatchString(w) }) {
			return "cloister repro " + action.String()
		}
		return strings.Join(words, " ")
	}
}

// banner describes the sampling of a server that has just started.
func (s *sampling) banner(out io.Writer) {
	switch {
	case s.fraction == 0:
	case s.gate:
		fmt.Fprintf(out, "repro    %s of executed actions run again, and results are recorded if they are equal\n", &s.fraction)
	default:
		fmt.Fprintf(out, "repro    %s of executed actions run again while a slot is free\n", &s.fraction)
	}
}

// verdicts records verdicts in a history.
type verdicts struct{ to *history.Log }

// Record implements repro.Recorder.
func (v verdicts) Record(s *repro.Summary) {
	v.to.Add(history.Entry{
		Time: s.Time, Instance: s.Instance, How: history.Checked, Action: s.Action.String(),
		Invocation: s.Invocation, Target: s.Target, Mnemonic: s.Mnemonic, Verdict: string(s.Result),
	})
}
