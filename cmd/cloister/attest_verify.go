// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/spf13/cobra"
)

func attestVerifyCommand() *cobra.Command {
	var want attestation.Claims
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verify FILE (--key PUBLIC... | --unsigned) [--file PATH]... [--action DIGEST] [--reproducible] [--json]",
		Short: "Verify a signed statement",
		Long: `Verify reads an in-toto Statement in its envelope, and checks that one of the keys of --key signed it, that its verdict
follows from the listed runs, and that its subjects are what these runs made. --file, --action and --reproducible add
requirements.

A key file holds OpenSSH public keys, one per line, or PEM. The exit code is 0 if everything holds, 1 if not, and 2 if a
file or key cannot be read.`,
		Example: `  cloister attest verify app.intoto.json --key builders.pub --file bin/app --reproducible
  cloister attest verify app.intoto.json --unsigned`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, by, err := want.Check(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if asJSON {
				text, err := s.Encode()
				if err != nil {
					return err
				}
				_, err = cmd.OutOrStdout().Write(append(text, '\n'))
				return err
			}
			return printStatement(cmd.OutOrStdout(), s, by)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&want.Keys, "key", nil, "file of accepted public keys; repeatable")
	f.BoolVar(&want.Unsigned, "unsigned", false, "skip the signature check; nobody vouches for the statement then")
	f.StringArrayVar(&want.Files, "file", nil, "file that must be a subject; repeatable")
	f.StringVar(&want.Action, "action", "", "required action, HASH/SIZE")
	f.BoolVar(&want.Reproducible, "reproducible", false, "require the verdict that all runs gave the same result")
	render.JSONFlag(f, &asJSON, "print the statement", statement{})
	return cmd
}

// A statement is an in-toto Statement, whose predicate is SLSA provenance or a verdict about reproducibility.
type statement struct {
	Type          string              `json:"_type"`
	Subject       []attest.Descriptor `json:"subject"`
	PredicateType string              `json:"predicateType"`
	Predicate     json.RawMessage     `json:"predicate"`
}

// printStatement prints a statement.
func printStatement(w io.Writer, s *attest.Statement, by []string) error {
	p := &render.Page{W: w}
	for _, id := range by {
		p.Line("signed by", id)
	}
	if len(by) == 0 {
		p.Line("signed by", "nobody: not checked")
	}
	p.Line("action", render.Quote(attestation.StatedAction(s)))
	if r := s.Reproducibility; r != nil {
		p.Line("verdict", fmt.Sprintf("%s in %s", r.Verdict, render.Count(len(r.Runs), "run")))
		for i := range r.Runs {
			run := &r.Runs[i]
			varied := "nothing"
			if len(run.Varied) > 0 {
				varied = strings.Join(run.Varied, ", ")
			}
			p.Line("run", fmt.Sprintf("%d  exit code %d  on %s  varied: %s", i+1, run.ExitCode, render.Quote(run.Worker), render.Quote(varied)))
		}
		for _, cause := range r.Causes {
			p.Line("cause", render.Quote(cause))
		}
	} else {
		p.Line("builder", render.Quote(s.Provenance.RunDetails.Builder.ID))
		p.Line("command", render.QuoteAll(s.Provenance.BuildDefinition.ExternalParameters.Arguments))
	}
	for _, d := range s.Subjects {
		for _, function := range slices.Sorted(maps.Keys(d.Digest)) {
			p.Line("subject", fmt.Sprintf("%s  %s:%s", render.Quote(d.Name), render.Quote(function), d.Digest[function]))
		}
	}
	return p.Err
}
