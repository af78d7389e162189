// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// maxClosure limits the blobs that one result refers to, each of which costs a few hundred bytes here.
// It is more than Capture of cas/tree leaves.
const maxClosure = 2_000_000

// Closure returns the digests of every blob that r refers to: output files, stdout and stderr, Trees
// and what they hold, root Directories and what they hold. Each comes once, where it is first met. Each
// Tree and Directory is read from s once, so that one that is absent is ErrNotFound; where s is a Fetcher, all Trees
// and the Directories of one level come near at once. One that is malformed is ErrInvalid, as are a malformed digest
// and more than 2,000,000 blobs.
func Closure(ctx context.Context, s Store, f Function, r *repb.ActionResult) ([]Digest, error) {
	c := newClosure(s, f)
	if err := addAll(c, r.OutputFiles); err != nil {
		return nil, err
	}
	for _, p := range []*repb.Digest{r.StdoutDigest, r.StderrDigest} {
		if p == nil {
			continue
		}
		if _, err := c.add(p); err != nil {
			return nil, err
		}
	}
	var trees, dirs []Digest
	for _, dir := range r.OutputDirectories {
		if err := c.meet(dir.TreeDigest, c.trees, &trees); err != nil {
			return nil, err
		}
		if err := c.meet(dir.RootDirectoryDigest, c.dirs, &dirs); err != nil {
			return nil, err
		}
	}
	if err := c.readTrees(ctx, trees); err != nil {
		return nil, err
	}
	if err := c.readDirectories(ctx, dirs); err != nil {
		return nil, err
	}
	return c.blobs, nil
}

// A closure is what has been found so far.
type closure struct {
	store  Store
	f      Function
	blobs  []Digest
	listed map[Digest]bool // those of blobs
	// What was met, and as what: the same bytes may be a file, a Tree and a Directory.
	trees, dirs map[Digest]bool
}

func newClosure(s Store, f Function) *closure {
	return &closure{store: s, f: f, listed: map[Digest]bool{}, trees: map[Digest]bool{}, dirs: map[Digest]bool{}}
}

// add lists the blob p.
func (c *closure) add(p *repb.Digest) (Digest, error) {
	d, err := FromProto(c.f, p)
	if err != nil || c.listed[d] {
		return d, err
	}
	if len(c.blobs) == maxClosure {
		return d, invalidf("a result may refer to at most %d blobs", maxClosure)
	}
	c.listed[d] = true
	c.blobs = append(c.blobs, d)
	return d, nil
}

// addAll lists the blobs that nodes, of a result or of a Directory, name.
func addAll[N interface{ GetDigest() *repb.Digest }](c *closure, nodes []N) error {
	for _, n := range nodes {
		if _, err := c.add(n.GetDigest()); err != nil {
			return err
		}
	}
	return nil
}

// meet lists the blob p, if it is set, and adds it to todo unless it is among met.
func (c *closure) meet(p *repb.Digest, met map[Digest]bool, todo *[]Digest) error {
	if p == nil {
		return nil
	}
	d, err := c.add(p)
	if err == nil && !met[d] {
		met[d] = true
		*todo = append(*todo, d)
	}
	return err
}

// near brings messages of at most limit bytes near: others are not read.
func (c *closure) near(ctx context.Context, ds []Digest, limit int64) error {
	if _, ok := As[Fetcher](c.store); !ok {
		return nil
	}
	small := slices.DeleteFunc(slices.Clone(ds), func(d Digest) bool { return d.size > limit })
	return Fetch(ctx, c.store, small)
}

// readTrees lists the files that Trees hold.
func (c *closure) readTrees(ctx context.Context, trees []Digest) error {
	if err := c.near(ctx, trees, MaxTree); err != nil {
		return err
	}
	for _, d := range trees {
		var t repb.Tree
		if err := ReadProto(ctx, c.store, d, &t); err != nil {
			return err
		}
		for _, dir := range append(t.Children, t.Root) {
			if err := addAll(c, dir.GetFiles()); err != nil {
				return err
			}
		}
	}
	return nil
}

// readDirectories lists all that Directories hold, a level at a time: neither depth nor repetition costs more memory
// than those that differ.
func (c *closure) readDirectories(ctx context.Context, level []Digest) error {
	for len(level) > 0 {
		if err := c.near(ctx, level, MaxMessage); err != nil {
			return err
		}
		var next []Digest
		for _, d := range level {
			var dir repb.Directory
			if err := ReadProto(ctx, c.store, d, &dir); err != nil {
				return err
			}
			if err := addAll(c, dir.Files); err != nil {
				return err
			}
			for _, sub := range dir.Directories {
				if sub.Digest == nil {
					return invalidf("Directory %s: digest of the directory %+.256q is not set", d, sub.Name)
				}
				if err := c.meet(sub.Digest, c.dirs, &next); err != nil {
					return err
				}
			}
		}
		level = next
	}
	return nil
}

// LookupComplete returns the result recorded for action if every blob of its closure is present, and
// marks them as used. A miss, an incomplete result, a malformed one and one whose blobs cannot be asked for are
// all ErrNotFound, and the error says which: the caller can only run the action again.
func LookupComplete(ctx context.Context, in *Instance, action Digest) (*repb.ActionResult, error) {
	r, err := in.Actions.Lookup(ctx, action)
	if err != nil {
		return nil, err
	}
	ds, err := Closure(ctx, in.Store, action.fn, r)
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrInvalid), errors.Is(err, ErrCorrupt), errors.Is(err, ErrUnavailable):
		return nil, unusable(action, err.Error())
	case err != nil:
		return nil, fmt.Errorf("result of action %s: %w", action, err)
	}
	missing, err := in.Store.Missing(ctx, ds)
	if errors.Is(err, ErrUnavailable) {
		return nil, unusable(action, err.Error())
	}
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		return nil, unusable(action,
			fmt.Sprintf("%d of the %d blobs it refers to are absent, first %s", len(missing), len(ds), missing[0]))
	}
	return r, nil
}

// unusable returns the ErrNotFound for a result that is recorded but cannot be used. It hides the kind of
// the error that is the reason, which is nothing that the caller did.
func unusable(action Digest, why string) error {
	return &labelled{kind: ErrNotFound, text: fmt.Sprintf("the result of action %s cannot be used: %s", action, why)}
}
