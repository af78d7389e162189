// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro/changes"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Names of the output streams of a command.
const (
	Stdout = "(standard output)"
	Stderr = "(standard error)"
)

// Entries compares two entries; nil means none. It returns what Blobs returns.
func Entries(ctx context.Context, name string, a, b *changes.Entry, k Known) ([]Difference, error) {
	c := newComparison(ctx, k)
	if err := c.entry(name, a, b); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.sums.name(c.found.all()), nil
}

func entryKind(e *changes.Entry) string {
	switch {
	case e == nil:
		return ""
	case e.Link:
		return "symbolic link"
	case e.Directory != nil:
		return "directory"
	}
	return "file"
}

// entry compares two entries at a path.
func (c *comparison) entry(name string, a, b *changes.Entry) error {
	if c.found.full() {
		return errEnough
	}
	if ka, kb := entryKind(a), entryKind(b); ka != kb {
		what := "type"
		if a == nil || b == nil {
			what = "entry"
		}
		c.differ(what, ka, kb, -1, Unknown, name)
		return nil
	}
	if a.Executable != b.Executable {
		c.differ("executable", fmt.Sprint(a.Executable), fmt.Sprint(b.Executable), -1, Mode, name)
	}
	c.compareFields(properties(a.Properties), properties(b.Properties), name)
	switch {
	case a.Target != b.Target:
		c.differ("target of the link", a.Target, b.Target, -1, c.classify(a.Target, b.Target), name)
	case a.Directory != nil:
		return c.directories(name, a.Directory, b.Directory)
	case !a.Link && (a.Digest != b.Digest || a.Digest.IsZero()):
		return c.files(name, a, b)
	}
	return nil
}

// properties returns the properties of a node as fields.
func properties(p *repb.NodeProperties) []field {
	var fs []field
	if mode := p.GetUnixMode(); mode != nil {
		fs = append(fs, field{"mode", fmt.Sprintf("%04o", mode.Value), Mode})
	}
	if p.GetMtime() != nil {
		fs = append(fs, field{"mtime", instant(p.Mtime.AsTime()), Timestamp})
	}
	for _, other := range p.GetProperties() {
		fs = append(fs, field{"property " + other.Name, other.Value, Unknown})
	}
	return fs
}

// files compares two files.
func (c *comparison) files(name string, a, b *changes.Entry) error {
	x, closeX, err := a.Open(c.ctx)
	if err == nil {
		defer closeX()
		y, closeY, errY := b.Open(c.ctx)
		if err = errY; err == nil {
			defer closeY()
			return c.descend(name, x, y)
		}
	}
	if errors.Is(err, changes.ErrTooLarge) {
		c.differ("content, "+err.Error(), a.Digest.String(), b.Digest.String(), -1, Unknown, name)
		return nil
	}
	return fmt.Errorf("%s: %w", printable.Head(name, maxText), err)
}

// directories compares two directories. It pairs paths that differ only in words that depend on the run.
func (c *comparison) directories(at string, a, b changes.Directory) error {
	found, err := changes.Directories(c.ctx, "entries", a, b)
	if err != nil {
		return err
	}
	inA, inB := map[string]*changes.Entry{}, map[string]*changes.Entry{} // entries that only one has, by path
	var onlyA, onlyB []string
	for i := range found {
		ch := &found[i]
		x, y, path := ch.EntryA, ch.EntryB, pathOf(at, ch)
		isFolder := func(e *changes.Entry) bool { return e != nil && e.Directory != nil }
		switch {
		case x == nil && y == nil || isFolder(x) && isFolder(y):
			if ch.A != ch.B || x == nil { // else an equal pair of directories was compared before
				c.differ(ch.What, ch.A, ch.B, -1, Unknown, path)
			}
		case x == nil:
			inB[path], onlyB = y, append(onlyB, path)
		case y == nil:
			inA[path], onlyA = x, append(onlyA, path)
		default:
			if err := c.entry(path, x, y); err != nil {
				return err
			}
		}
	}
	renamed, onlyA, onlyB := c.renamed(onlyA, onlyB)
	for _, pair := range renamed {
		c.differ("name", pair[0], pair[1], -1, c.classify(pair[0], pair[1]), pair[0])
		if err := c.entry(pair[0], inA[pair[0]], inB[pair[1]]); err != nil {
			return err
		}
	}
	for _, path := range slices.Concat(onlyA, onlyB) {
		if err := c.entry(path, inA[path], inB[path]); err != nil {
			return err
		}
	}
	return nil
}

// pathOf returns the path of a change in the directory at. It does not clean it, because names may be invalid.
func pathOf(at string, ch *changes.Change) string {
	return strings.Trim(at+"/"+ch.Path, "/")
}
