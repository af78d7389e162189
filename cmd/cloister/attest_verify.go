// SPDX-License-Identifier: Apache-2.0

package main

import (
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
		Short: "Checks a statement: who signed it, that it does not contradict itself, and what it is about",
		Long: `Verify reads an in-toto Statement, in its envelope, and checks that one of the keys of --key signed it, that
its verdict follows from the runs that it lists, and that its subjects are what these runs made. With --file the file
must be one of its subjects, with --action it must be about that action, and with --reproducible its runs must all have
given the same.

A file of keys has public keys of OpenSSH, one a line, or in PEM.

It exits with 0 if all of that holds, with 1 if something does not, and with 2 if a file or a key cannot be read.`,
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
	f.StringArrayVar(&want.Keys, "key", nil, "file of public keys, one of which must have signed; repeatable")
	f.BoolVar(&want.Unsigned, "unsigned", false, "check no signature: then nobody stands for what is said")
	f.StringArrayVar(&want.Files, "file", nil, "a file that must be one of the subjects; repeatable")
	f.StringVar(&want.Action, "action", "", "the action that it must be about, HASH/SIZE")
	f.BoolVar(&want.Reproducible, "reproducible", false, "its verdict must be that all runs gave the same")
	f.BoolVar(&asJSON, "json", false, "print the statement itself")
	return cmd
}

// printStatement says what a statement states.
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
		p.Line("verdict", fmt.Sprintf("%s in %d runs", r.Verdict, len(r.Runs)))
		for i := range r.Runs {
			run := &r.Runs[i]
			varied := "as usual"
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
