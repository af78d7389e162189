// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/spf13/cobra"
)

func attestCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "attest",
		Short: "Writes and checks statements about actions: how a result came about, whether it is reproducible",
		Example: `  cloister repro --attest app.intoto.json --key ~/.ssh/id_ed25519 9f2c...e1/142
  cloister attest provenance 9f2c...e1/142 --attest app.intoto.json --key ~/.ssh/id_ed25519
  cloister attest verify app.intoto.json --key builders.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(attestProvenanceCommand(), attestVerifyCommand())
	return cmd
}

// claims are what the flags of attest verify demand of a statement.
type claims struct {
	keys         []string
	unsigned     bool
	files        []string
	action       string
	reproducible bool
}

func attestVerifyCommand() *cobra.Command {
	var want claims
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
			s, by, err := want.check(cmd.Context(), args[0])
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
	f.StringArrayVar(&want.keys, "key", nil, "file of public keys, one of which must have signed; repeatable")
	f.BoolVar(&want.unsigned, "unsigned", false, "check no signature: then nobody stands for what is said")
	f.StringArrayVar(&want.files, "file", nil, "a file that must be one of the subjects; repeatable")
	f.StringVar(&want.action, "action", "", "the action that it must be about, HASH/SIZE")
	f.BoolVar(&want.reproducible, "reproducible", false, "its verdict must be that all runs gave the same")
	f.BoolVar(&asJSON, "json", false, "print the statement itself")
	return cmd
}

// check reads a statement and returns it, with the keys that signed it, if it is what is demanded.
func (c *claims) check(ctx context.Context, path string) (*attest.Statement, []string, error) {
	if (len(c.keys) > 0) == c.unsigned {
		return nil, nil, errors.New("say whose signature counts by --key, or --unsigned if nobody's is to be checked")
	}
	action := cas.Digest{}
	if c.action != "" {
		var err error
		if action, err = cas.ParseDigest(c.action); err != nil {
			return nil, nil, fmt.Errorf("--action: %w", err)
		}
	}
	var keys []*attest.Key
	for _, name := range c.keys {
		text, err := readSmall(name)
		if err != nil {
			return nil, nil, newExit(exitUsage, fmt.Errorf("--key: %w", err))
		}
		more, err := attest.ParsePublicKeys(text)
		if err != nil {
			return nil, nil, newExit(exitUsage, fmt.Errorf("--key %s: %w", name, err))
		}
		keys = append(keys, more...)
	}
	text, err := readSmall(path)
	if err != nil {
		return nil, nil, newExit(exitUsage, err)
	}
	no := func(format string, args ...any) (*attest.Statement, []string, error) {
		return nil, nil, newExit(exitNo, fmt.Errorf("%s: %w", path, fmt.Errorf(format, args...)))
	}
	s, by, err := attest.Open(ctx, text, keys)
	if err != nil {
		return no("%w", err)
	}
	if about := statedAction(s); c.action != "" && about != action.String() {
		return no("it is about action %s, not %s", quote(about), action)
	}
	if c.reproducible && (s.Reproducibility == nil || s.Reproducibility.Verdict != attest.Same) {
		return no("it does not say that the action is reproducible")
	}
	for _, name := range c.files {
		sum, err := sha256File(name)
		if err != nil {
			return nil, nil, newExit(exitUsage, fmt.Errorf("--file: %w", err))
		}
		// Of a link and of a directory the digest is that of no file's content.
		if !slices.ContainsFunc(s.Subjects, func(d attest.Descriptor) bool { return d.MediaType == "" && d.Digest["sha256"] == sum }) {
			return no("%s, with SHA-256 %s, is no file among its %d subjects", name, sum, len(s.Subjects))
		}
	}
	return s, by, nil
}

// statedAction returns the digest of the action that a statement is about, as a command line states it.
func statedAction(s *attest.Statement) string {
	if s.Provenance != nil {
		return s.Provenance.BuildDefinition.ExternalParameters.Action
	}
	return s.Reproducibility.Action.Name
}

// readSmall reads a file that is to be held in memory.
func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, attest.MaxFile+1))
	if err == nil && len(text) > attest.MaxFile {
		err = fmt.Errorf("%s has more than %d bytes", path, attest.MaxFile)
	}
	return text, err
}

func sha256File(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// printStatement says what a statement states.
func printStatement(w io.Writer, s *attest.Statement, by []string) error {
	p := &page{w: w}
	for _, id := range by {
		p.line("signed by", id)
	}
	if len(by) == 0 {
		p.line("signed by", "nobody: not checked")
	}
	p.line("action", quote(statedAction(s)))
	if r := s.Reproducibility; r != nil {
		p.line("verdict", fmt.Sprintf("%s in %d runs", r.Verdict, len(r.Runs)))
		for i := range r.Runs {
			run := &r.Runs[i]
			varied := "as usual"
			if len(run.Varied) > 0 {
				varied = strings.Join(run.Varied, ", ")
			}
			p.line("run", fmt.Sprintf("%d  exit code %d  on %s  varied: %s", i+1, run.ExitCode, quote(run.Worker), quote(varied)))
		}
		for _, cause := range r.Causes {
			p.line("cause", quote(cause))
		}
	} else {
		p.line("builder", quote(s.Provenance.RunDetails.Builder.ID))
		p.line("command", quoteAll(s.Provenance.BuildDefinition.ExternalParameters.Arguments))
	}
	for _, d := range s.Subjects {
		for _, function := range slices.Sorted(maps.Keys(d.Digest)) {
			p.line("subject", fmt.Sprintf("%s  %s:%s", quote(d.Name), quote(function), d.Digest[function]))
		}
	}
	return p.err
}
