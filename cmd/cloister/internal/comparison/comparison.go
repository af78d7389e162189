// SPDX-License-Identifier: Apache-2.0

// Package comparison finds and prints the differences between two files, directories, actions, results or builds.
package comparison

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// Config is the flags of diff.
type Config struct {
	From             client.Server
	As               string
	Results, Names   bool
	Invocation, JSON bool
	Diffoscope       bool
	// Remote looks names up only on the server and copies no files to this host, for callers who may not read its files.
	Remote bool

	store *remote.Store // nil until it is needed
	roots []*os.Root    // of directories of this host
}

// Kinds are the values of --as, in the order in which they are detected.
var Kinds = []string{"manifest", "action", "tree", "directory", "command", "blob"}

// An operand is one side of the comparison.
type operand struct {
	name   string
	digest cas.Digest // zero for a file of this host
	action bool       // the digest is known to be that of an action
	folder bool       // a directory of this host
}

// A Report has the differences of two operands or builds, as diff prints them in JSON.
type Report interface {
	equal() bool
	print(out io.Writer) error
}

// Reports has a Report of each type: of operands and of builds.
var Reports = []any{&diffReport{}, &buildsReport{}}

// Run compares two operands or builds, and reports whether they are the same.
func (c *Config) Run(ctx context.Context, a, b string, out io.Writer) (same bool, err error) {
	r, err := c.Compare(ctx, a, b)
	switch {
	case err != nil:
		return false, err
	case c.JSON:
		return r.equal(), render.JSON(out, r)
	}
	return r.equal(), r.print(out)
}

// Compare compares two operands or builds.
func (c *Config) Compare(ctx context.Context, a, b string) (Report, error) {
	defer func() {
		if c.store != nil {
			c.store.Close()
		}
		for _, root := range c.roots {
			root.Close()
		}
	}()
	if c.Invocation {
		return c.builds(ctx, a, b)
	}
	var operands [2]operand
	for i, name := range []string{a, b} {
		var err error
		if operands[i], err = c.operand(ctx, name); err != nil {
			return nil, err
		}
	}
	r := &diffReport{A: a, B: b}
	if err := c.compare(ctx, r, operands[0], operands[1]); err != nil {
		return nil, err
	}
	r.Same = len(r.Changes)+len(r.Differences) == 0
	return r, c.runDiffoscope(ctx, r, operands[0], operands[1])
}

// operand resolves a name of the command line.
func (c *Config) operand(ctx context.Context, name string) (operand, error) {
	if d, err := cas.ParseDigest(name); err == nil {
		return operand{name: name, digest: d}, nil
	}
	if c.Remote {
		if err := client.CheckNames(name); err != nil {
			return operand{}, err
		}
	} else if !client.Recent.MatchString(name) && !client.Target.MatchString(name) {
		info, err := os.Stat(name)
		switch {
		case err == nil && !info.IsDir() && !info.Mode().IsRegular():
			return operand{}, fmt.Errorf("%s is neither a file nor a directory", render.Quote(name))
		case err == nil:
			return operand{name: name, folder: info.IsDir()}, nil
		case !client.DigestPrefix.MatchString(name):
			return operand{}, fmt.Errorf("%s is neither a digest, ^1, a target nor a file: %w", render.Quote(name), err)
		}
	}
	s, err := c.From.Action(ctx, name)
	if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != exit.Absent || !client.DigestPrefix.MatchString(name) {
		return operand{name: name, digest: s.Digest, action: true}, err
	}
	blob := operand{name: name}
	err = client.WithStore(ctx, &c.From, func(ctx context.Context, s *remote.Store) error {
		blob.digest, err = blobs.Find(ctx, &c.From, s, name, false)
		return err
	})
	return blob, err
}

// reader returns a reader of the server's store, and connects to it at the first call.
func (c *Config) reader(ctx context.Context) (*changes.Reader, error) {
	if c.store == nil {
		s, err := c.From.Open(ctx)
		if err != nil {
			return nil, err
		}
		c.store = s
	}
	r := &changes.Reader{Store: c.store}
	if c.Remote {
		r.MaxCopy = 1 // only what it reads into memory
	}
	return r, nil
}

// compare compares two operands and adds their differences to r.
func (c *Config) compare(ctx context.Context, r *diffReport, a, b operand) error {
	var err error
	if c.Results {
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
		return fmt.Errorf("--as %s needs digests, and %s is a file of this host", r.Kind, render.Quote(map[bool]string{true: a.name, false: b.name}[a.digest.IsZero()]))
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

// compareResults compares the cached results of two actions.
func (c *Config) compareResults(ctx context.Context, r *diffReport, a, b operand) error {
	for _, t := range []operand{a, b} {
		if t.digest.IsZero() {
			return fmt.Errorf("--results needs the digests of actions, and %s is a file", render.Quote(t.name))
		}
	}
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
		return errors.New("cannot compare results of different digest functions, because they share no blobs")
	}
	found, err := changes.Results(ctx, reader, a.digest.Function(), x, y)
	if err != nil {
		return err
	}
	return c.explain(ctx, r, found, compare.Known{A: known[0], B: known[1]})
}

// compareFolders compares two directories.
func (c *Config) compareFolders(ctx context.Context, r *diffReport, a, b operand) error {
	var folders [2]changes.Directory
	for i, t := range []operand{a, b} {
		if t.digest.IsZero() {
			f, err := openFolder(t.name)
			if err != nil {
				return err
			}
			c.roots = append(c.roots, f.root) // their files are opened later
			folders[i] = f
			continue
		}
		reader, err := c.reader(ctx)
		if err != nil {
			return err
		}
		folders[i] = reader.Directory(t.digest)
		if r.Kind == "tree" {
			folders[i] = reader.Tree(t.digest)
		}
	}
	found, err := changes.Directories(ctx, "file", folders[0], folders[1])
	if err != nil {
		return err
	}
	return c.explain(ctx, r, found, compare.Known{})
}

// compareFiles compares two files or blobs.
func (c *Config) compareFiles(ctx context.Context, r *diffReport, a, b operand) error {
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

// content opens a file or a blob. The caller calls the returned function.
func (c *Config) content(ctx context.Context, t operand) (*io.SectionReader, func(), error) {
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
			return fmt.Errorf("%s: %w", render.Quote([]string{r.A, r.B}[i]), err)
		}
	}
	for _, d := range manifest.Diff(both[0], both[1]) {
		r.Changes = append(r.Changes, shownChange{Change: changes.Change{What: "line", A: d.A, B: d.B}})
	}
	return nil
}

// maxExplained limits the number of files whose contents are compared, and maxExplainedBytes the size of each.
const (
	maxExplained      = 20
	maxExplainedBytes = 256 << 20
)

// explain adds changes to r, with the differences between the first files.
func (c *Config) explain(ctx context.Context, r *diffReport, found []changes.Change, known compare.Known) error {
	all, err := c.explained(ctx, found, known)
	r.Changes = append(r.Changes, all...)
	return err
}

func (c *Config) explained(ctx context.Context, found []changes.Change, known compare.Known) ([]shownChange, error) {
	var all []shownChange
	explained := 0
	for _, ch := range found {
		s := shownChange{Change: ch}
		a, b := ch.EntryA, ch.EntryB
		if !c.Names && a != nil && b != nil && a.Open != nil && b.Open != nil && explained < maxExplained &&
			a.Digest.Size() <= maxExplainedBytes && b.Digest.Size() <= maxExplainedBytes {
			explained++
			var err error
			if s.Differences, err = differences(ctx, cmp.Or(ch.Name, ch.What), a, b, known); err != nil {
				switch {
				case ctx.Err() == nil && errors.Is(err, cas.ErrNotFound):
					s.Note = "its content is absent from the server"
				case errors.Is(err, changes.ErrTooLarge):
					s.Note = err.Error()
				default:
					return nil, err
				}
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// differences returns the differences between the contents of two files.
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
