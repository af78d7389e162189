// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"github.com/spf13/cobra"
)

// diffConfig is what the flags of diff say.
type diffConfig struct {
	from             origin
	as               string
	results, names   bool
	invocation, json bool
	diffoscope       bool

	store *remote.Store // nil until it is needed
	roots []*os.Root    // of directories of this host
}

func diffCommand() *cobra.Command {
	var c diffConfig
	cmd := &cobra.Command{
		Use: "diff A B [--as KIND] [--results] [--names] [--cas URL] [--instance NAME] [--json]\n" +
			"  cloister diff --invocation ID ID [--names] [--cas URL] [--instance NAME] [--json]",
		Short: "Says how two blobs, directories, actions, results, manifests or builds differ",
		Long: `Diff compares A and B, each of which is a file or a directory of this host, or the digest of something that a
server has: HASH/SIZE; at a server that keeps a history also the beginning of the digest of an action, of at least
8 digits, or ^1 for the action that was asked for last, ^2 for the one before.

Of actions it says why the result of the one is not found for the other: other arguments, variables, platform, timeout,
inputs. With --results it compares what the action cache has of them. What a digest names is recognised, and stated
with --as where that is not what was meant: action, command, directory, tree, manifest, blob. Files that differ are
compared in the words of their formats, unless --names says that their names are enough.

With --invocation it compares two builds by the server's history: which actions one alone has, which were others
and why, which are so only because of others, and which are the same with another result, and so not reproducible.

It exits with 0 if there is no difference, with 1 if there is one, and with 2 if it cannot say.`,
		Example: `  cloister diff 9f2c...e1/142 77ab...02/142    # why was this a cache miss?
  cloister diff ^2 ^1
  cloister diff ^2 ^1 --results
  cloister diff bazel-bin/app.jar /tmp/app.jar
  cloister diff --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f a0b1c2d3-e4f5-4607-8819-2a3b4c5d6e7f`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.as != "" && !slices.Contains(diffKinds, c.as) {
				return fmt.Errorf("--as %q: there are %s", c.as, strings.Join(diffKinds, ", "))
			}
			if err := haveDiffoscope(c.diffoscope); err != nil {
				return err
			}
			ctx, end := stop(cmd.Context())
			defer end()
			same, err := c.run(ctx, args[0], args[1], cmd.OutOrStdout())
			switch {
			case ctx.Err() != nil:
				return newExit(exitTrouble, context.Cause(ctx))
			case err != nil:
				return newExit(exitTrouble, err)
			case !same:
				return newExit(exitNo, nil)
			}
			return nil
		},
	}
	c.from.register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.as, "as", "", "what A and B are: "+strings.Join(diffKinds, ", ")+" (default: recognised)")
	f.BoolVar(&c.results, "results", false, "A and B are actions: compare their results in the action cache")
	f.BoolVar(&c.names, "names", false, "say which files differ, and not how")
	f.BoolVar(&c.invocation, "invocation", false, "A and B are ids of builds: compare all actions of them")
	f.BoolVar(&c.json, "json", false, "print one JSON object")
	f.BoolVar(&c.diffoscope, "diffoscope", false, diffoscopeHelp)
	cmd.MarkFlagsMutuallyExclusive("as", "results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("invocation", "diffoscope")
	return cmd
}

// diffKinds are what --as takes, in the order in which they are recognised.
var diffKinds = []string{"manifest", "action", "tree", "directory", "command", "blob"}

// A thing is one of what is compared.
type thing struct {
	name   string
	digest cas.Digest // zero for one of this host
	action bool       // it is known to be one
	folder bool       // a directory of this host
}

// run compares, and reports whether there is no difference.
func (c *diffConfig) run(ctx context.Context, a, b string, out io.Writer) (same bool, err error) {
	defer func() {
		if c.store != nil {
			c.store.Close()
		}
		for _, root := range c.roots {
			root.Close()
		}
	}()
	if c.invocation {
		return c.builds(ctx, a, b, out)
	}
	var things [2]thing
	for i, name := range []string{a, b} {
		if things[i], err = c.thing(ctx, name); err != nil {
			return false, err
		}
	}
	r := &diffReport{A: a, B: b}
	if err := c.compare(ctx, r, things[0], things[1]); err != nil {
		return false, err
	}
	r.Same = len(r.Changes)+len(r.Differences) == 0
	if err := c.lookDeeper(ctx, r, things[0], things[1]); err != nil {
		return false, err
	}
	if c.json {
		return r.Same, printJSON(out, r)
	}
	return r.Same, r.print(out)
}

// thing returns what a name of the command line means.
func (c *diffConfig) thing(ctx context.Context, name string) (thing, error) {
	if d, err := cas.ParseDigest(name); err == nil {
		return thing{name: name, digest: d}, nil
	}
	if !nth.MatchString(name) {
		info, err := os.Stat(name)
		switch {
		case err == nil && !info.IsDir() && !info.Mode().IsRegular():
			return thing{}, fmt.Errorf("%s is neither a file nor a directory", quote(name))
		case err == nil:
			return thing{name: name, folder: info.IsDir()}, nil
		case !shortened.MatchString(name):
			return thing{}, fmt.Errorf("%s is no digest (HASH/SIZE), and there is no such file: %w", quote(name), err)
		}
	}
	s, err := c.from.subject(ctx, name)
	return thing{name: name, digest: s.digest, action: true}, err
}

// reader returns what reads from the server, which it connects to when it is first called.
func (c *diffConfig) reader(ctx context.Context) (*changes.Reader, error) {
	if c.store == nil {
		s, err := c.from.open(ctx)
		if err != nil {
			return nil, err
		}
		c.store = s
	}
	return &changes.Reader{Store: c.store, Open: contents(c.store)}, nil
}

// compare compares two things, and says in r how they differ.
func (c *diffConfig) compare(ctx context.Context, r *diffReport, a, b thing) error {
	var err error
	if c.results {
		r.Kind = "result"
		return c.compareResults(ctx, r, a, b)
	}
	if r.Kind, err = c.kind(ctx, a, b); err != nil {
		return err
	}
	switch r.Kind {
	case "directory", "tree":
		return c.compareFolders(ctx, r, a, b)
	case "blob", "manifest":
		return c.compareFiles(ctx, r, a, b)
	}
	if a.digest.IsZero() || b.digest.IsZero() {
		return fmt.Errorf("an %s is compared by its digest, and %s is of this host", r.Kind, quote(map[bool]string{true: a.name, false: b.name}[a.digest.IsZero()]))
	}
	reader, err := c.reader(ctx)
	if err != nil {
		return err
	}
	of := changes.Actions
	if r.Kind == "command" {
		of = changes.Commands
	}
	found, err := of(ctx, reader, a.digest, b.digest)
	if err != nil {
		return err
	}
	return c.explain(ctx, r, found, compare.Known{})
}

// compareResults compares what the action cache has of two actions.
func (c *diffConfig) compareResults(ctx context.Context, r *diffReport, a, b thing) error {
	reader, err := c.reader(ctx)
	if err != nil {
		return err
	}
	var known [2]*compare.Facts
	x, err := c.result(ctx, a, &known[0])
	if err != nil {
		return err
	}
	y, err := c.result(ctx, b, &known[1])
	if err != nil {
		return err
	}
	if a.digest.Function() != b.digest.Function() {
		return errors.New("results of different digest functions have no blob in common: they are not compared")
	}
	found, err := changes.Results(ctx, reader, a.digest.Function(), x, y)
	if err != nil {
		return err
	}
	return c.explain(ctx, r, found, compare.Known{A: known[0], B: known[1]})
}

// compareFolders compares two directories.
func (c *diffConfig) compareFolders(ctx context.Context, r *diffReport, a, b thing) error {
	var folders [2]changes.Directory
	for i, t := range []thing{a, b} {
		if t.digest.IsZero() {
			f, err := openFolder(t.name)
			if err != nil {
				return err
			}
			c.roots = append(c.roots, f.root) // what is in them is opened later, too
			folders[i] = f
			continue
		}
		reader, err := c.reader(ctx)
		if err != nil {
			return err
		}
		folders[i] = reader.Directory(t.digest)
		if r.Kind == "tree" {
			if folders[i], err = reader.Tree(ctx, t.digest); err != nil {
				return err
			}
		}
	}
	found, err := changes.Directories(ctx, "file", folders[0], folders[1])
	if err != nil {
		return err
	}
	return c.explain(ctx, r, found, compare.Known{})
}

// compareFiles compares two files or blobs.
func (c *diffConfig) compareFiles(ctx context.Context, r *diffReport, a, b thing) error {
	if !a.digest.IsZero() && a.digest == b.digest {
		return nil
	}
	x, closeX, err := c.content(ctx, a)
	if err != nil {
		return err
	}
	defer closeX()
	y, closeY, err := c.content(ctx, b)
	if err != nil {
		return err
	}
	defer closeY()
	if r.Kind == "manifest" {
		return r.manifests(x, y)
	}
	name := a.name
	if !a.digest.IsZero() {
		name = b.name
	}
	r.Differences, err = compare.Blobs(ctx, name, x, y, compare.Known{})
	return err
}

// content opens a file or a blob. The caller calls what it returns.
func (c *diffConfig) content(ctx context.Context, t thing) (*io.SectionReader, func(), error) {
	if t.digest.IsZero() {
		f, err := os.Open(t.name)
		if err != nil {
			return nil, nil, err
		}
		return sectionOf(f)
	}
	r, err := c.reader(ctx)
	if err != nil {
		return nil, nil, err
	}
	return r.Open(ctx, t.digest)
}

// manifests compares two manifests.
func (r *diffReport) manifests(a, b io.Reader) error {
	var both [2]*manifest.Manifest
	for i, in := range []io.Reader{a, b} {
		text, err := io.ReadAll(io.LimitReader(in, manifest.MaxBytes+1))
		if err != nil {
			return err
		}
		if both[i], err = manifest.Parse(text); err != nil {
			return fmt.Errorf("%s: %w", quote([]string{r.A, r.B}[i]), err)
		}
	}
	for _, d := range manifest.Diff(both[0], both[1]) {
		r.Changes = append(r.Changes, shownChange{Change: changes.Change{What: "line", A: oneWord(d.A), B: oneWord(d.B)}})
	}
	return nil
}

// maxExplained is of how many files it is said how they differ, and maxExplainedBytes how large each may be.
const (
	maxExplained      = 20
	maxExplainedBytes = 256 << 20
)

// explain adds changes to r, and of the first files how they differ.
func (c *diffConfig) explain(ctx context.Context, r *diffReport, found []changes.Change, known compare.Known) error {
	all, err := c.explained(ctx, found, known)
	r.Changes = append(r.Changes, all...)
	return err
}

func (c *diffConfig) explained(ctx context.Context, found []changes.Change, known compare.Known) ([]shownChange, error) {
	var all []shownChange
	explained := 0
	for _, ch := range found {
		s := shownChange{Change: ch}
		a, b := ch.EntryA, ch.EntryB
		if !c.names && a != nil && b != nil && a.Open != nil && b.Open != nil && explained < maxExplained &&
			a.Digest.Size() <= maxExplainedBytes && b.Digest.Size() <= maxExplainedBytes {
			explained++
			var err error
			if s.Differences, err = differences(ctx, cmp.Or(ch.Name, ch.What), a, b, known); err != nil {
				if ctx.Err() != nil || !errors.Is(err, cas.ErrNotFound) {
					return nil, err
				}
				s.Note = "its content is absent from the server"
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// differences returns how what two files hold differs.
func differences(ctx context.Context, name string, a, b *changes.Entry, known compare.Known) ([]compare.Difference, error) {
	x, closeX, err := a.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer closeX()
	y, closeY, err := b.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer closeY()
	return compare.Blobs(ctx, name, x, y, known)
}
