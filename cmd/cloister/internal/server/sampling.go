// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
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
	f.Var(&s.fraction, "repro-sample", "fraction of executed actions to run again with variations; without --repro-gate, only while a slot is free")
	f.BoolVar(&s.gate, "repro-gate", false, "run actions again before recording their results, and record only reproducible ones; without --repro-sample, this covers all actions")
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

// VerdictAge is how long a server without --repro-gate reports a verdict after the last check. The toolchain may have
// changed since.
const VerdictAge = 30 * 24 * time.Hour

// openVerdicts opens the verdicts on actions, including those of earlier servers if this one samples. The caller closes
// them when no action is running.
func (s *sampling) openVerdicts(c *node.Config, log *slog.Logger) (*repro.Verdicts, error) {
	v := repro.VerdictsConfig{Log: log}
	if s.fraction > 0 {
		v.Dir, v.Sync = c.Dir, c.Sync
		if !s.gate { // the gate checks again until both runs agree
			v.MaxAge = VerdictAge
		}
	}
	known, err := repro.OpenVerdicts(v)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	return known, nil
}

// sampler returns the configuration of the sampler, nil without sampling.
func (s *server) sampler() *repro.SamplerConfig {
	if s.Sampling.fraction == 0 {
		return nil
	}
	return &repro.SamplerConfig{
		SampleRate: float64(s.Sampling.fraction), Gate: s.Sampling.gate, Verdicts: s.verdicts,
		Command: func(instance string, action cas.Digest) string { return reproHint(s.runFlags)(instance, action) },
	}
}

// reproHint returns a function that returns the command that checks an action of this server, which these flags name.
// It leaves the flags out if a shell would not read them unchanged.
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
