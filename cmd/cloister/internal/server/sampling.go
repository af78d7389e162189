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

// sampling is the flags of serve that say which actions are run again.
type sampling struct {
	fraction flags.Percent
	gate     bool
}

func (s *sampling) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(&s.fraction, "repro-sample", "fraction of executed actions to run again with variations, while a slot is free unless --repro-gate is given")
	f.BoolVar(&s.gate, "repro-gate", false, "run actions again before recording their results, and record only reproducible ones; all actions without --repro-sample")
}

// Check returns what is wrong with the flags.
func (s *sampling) check(cmd *cobra.Command) error {
	switch {
	case !s.gate:
	case !cmd.Flags().Changed("repro-sample"):
		s.fraction = 1
	case s.fraction == 0:
		return errors.New("--repro-gate with --repro-sample 0 lets everything through: state a share, or leave one out")
	}
	return nil
}

// known opens what is known of actions, by earlier servers of the directory as well if this one checks any. The caller closes
// it when nothing is executed any more.
func (s *sampling) known(c *node.Config, log *slog.Logger) (*repro.Verdicts, error) {
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

// seen returns next as clients and actions see it.
func (s *sampling) seen(known *repro.Verdicts, next cas.Instances) cas.Instances {
	if s.gate {
		return known.Withhold(next)
	}
	return next
}

// sampler returns what checks the share of what local executes, nil if nothing is to be checked. Past is nil if there is
// no history.
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

// banner prints what somebody wants to know who has just started the server.
func (s *sampling) banner(out io.Writer) {
	switch {
	case s.fraction == 0:
	case s.gate:
		fmt.Fprintf(out, "repro    %s of what is executed runs again, and is recorded if it is the same\n", &s.fraction)
	default:
		fmt.Fprintf(out, "repro    %s of what is executed runs again while a slot is free\n", &s.fraction)
	}
}

// verdicts are those that a history keeps.
type verdicts struct{ to *history.Log }

// Record implements repro.Recorder.
func (v verdicts) Record(s *repro.Summary) {
	v.to.Add(history.Entry{
		Time: s.Time, Instance: s.Instance, How: history.Checked, Action: s.Action.String(),
		Invocation: s.Invocation, Target: s.Target, Mnemonic: s.Mnemonic, Verdict: string(s.Result),
	})
}
