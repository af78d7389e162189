// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// maxClosure limits the number of blobs that one result refers to: each costs a few hundred bytes of memory. Capture of
// cas/tree stays below it.
const maxClosure = 2_000_000

// Closure returns the digests of all blobs that r refers to: output files, stdout, stderr, Trees, root Directories, and
// everything in those. Each is listed once. Closure reads each Tree and Directory from s once, and prefetches all Trees
// and the Directories of one level together. It returns ErrNotFound if one is absent, and ErrInvalid if one or its
// digest is malformed, r refers to more than 2,000,000 blobs, or r is nil.
func Closure(ctx context.Context, s Store, f Function, r *repb.ActionResult) ([]Digest, error) {
	if err := checkResult(r); err != nil {
		return nil, err
	}
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
		if err := c.visit(dir.TreeDigest, c.trees, &trees); err != nil {
			return nil, err
		}
		if err := c.visit(dir.RootDirectoryDigest, c.dirs, &dirs); err != nil {
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

// DirectoryClosure returns the digests of the Directory root, such as an input root, and of all Directories and files
// below it, each once, root first. It reads blobs in the same way as Closure and returns the same errors.
func DirectoryClosure(ctx context.Context, s Store, root Digest) ([]Digest, error) {
	if err := CheckDigests(root); err != nil {
		return nil, err
	}
	c := newClosure(s, root.fn)
	c.listed[root], c.dirs[root] = true, true
	c.blobs = []Digest{root}
	if err := c.readDirectories(ctx, []Digest{root}); err != nil {
		return nil, err
	}
	return c.blobs, nil
}

// A closure is the state of a call of Closure or DirectoryClosure.
type closure struct {
	store  Store
	f      Function
	blobs  []Digest
	listed map[Digest]bool // set of blobs
	// The Trees and Directories visited. The same bytes may be a file, a Tree and a Directory.
	trees, dirs map[Digest]bool
}

func newClosure(s Store, f Function) *closure {
	return &closure{store: s, f: f, listed: map[Digest]bool{}, trees: map[Digest]bool{}, dirs: map[Digest]bool{}}
}

// add lists the blob p unless it is listed.
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

// addAll lists the blobs of nodes, the files of a result or of a Directory.
func addAll[N interface{ GetDigest() *repb.Digest }](c *closure, nodes []N) error {
	for _, n := range nodes {
		if _, err := c.add(n.GetDigest()); err != nil {
			return err
		}
	}
	return nil
}

// visit lists the blob p, if it is set, and appends it to todo unless it was visited.
func (c *closure) visit(p *repb.Digest, visited map[Digest]bool, todo *[]Digest) error {
	if p == nil {
		return nil
	}
	d, err := c.add(p)
	if err == nil && !visited[d] {
		visited[d] = true
		*todo = append(*todo, d)
	}
	return err
}

// prefetch fetches the messages of at most limit bytes; larger ones are never read.
func (c *closure) prefetch(ctx context.Context, ds []Digest, limit int64) error {
	if _, ok := As[Fetcher](c.store); !ok {
		return nil
	}
	small := slices.DeleteFunc(slices.Clone(ds), func(d Digest) bool { return d.size > limit })
	return Fetch(ctx, c.store, small)
}

// readTrees lists the files in Trees.
func (c *closure) readTrees(ctx context.Context, trees []Digest) error {
	if err := c.prefetch(ctx, trees, MaxTree); err != nil {
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

// readDirectories lists the contents of Directories, a level at a time: memory use depends on the number of distinct
// Directories, not on depth or repetition.
func (c *closure) readDirectories(ctx context.Context, level []Digest) error {
	for len(level) > 0 {
		if err := c.prefetch(ctx, level, MaxMessage); err != nil {
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
					return invalidf("Directory %s: subdirectory %+.256q has no digest", d, sub.Name)
				}
				if err := c.visit(sub.Digest, c.dirs, &next); err != nil {
					return err
				}
			}
		}
		level = next
	}
	return nil
}

// LookupComplete returns the result recorded for action if every blob of its closure is present, and marks these as
// used. Otherwise it returns ErrNotFound with the reason: there is no result, or it is malformed, or some of its blobs
// are absent, or an upstream that may have them is down, full or denies us. The caller runs the action again.
func LookupComplete(ctx context.Context, in *Instance, action Digest) (*repb.ActionResult, error) {
	if in == nil {
		return nil, errors.New("cas: the Instance is missing")
	}
	if in.Store == nil || in.Actions == nil {
		return nil, fmt.Errorf("cas: instance %q lacks Store or Actions", in.Name)
	}
	r, err := in.Actions.Lookup(ctx, action)
	if err != nil {
		return nil, err
	}
	ds, err := Closure(ctx, in.Store, action.fn, r)
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrInvalid), errors.Is(err, ErrCorrupt), ofUpstream(err):
		return nil, unusable(action, err.Error())
	case err != nil:
		return nil, fmt.Errorf("result of action %s: %w", action, err)
	}
	missing, err := in.Store.Missing(ctx, ds)
	if ofUpstream(err) {
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

// ofUpstream reports whether err means that an upstream does not answer or refuses the call. A query for a blob may also
// renew it, which a full upstream, or one that permits only reads, refuses.
func ofUpstream(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrDenied) || errors.Is(err, ErrUpstreamFull)
}

// unusable returns ErrNotFound for a recorded result that cannot be used. It hides the kind of the underlying error,
// which is not the caller's fault.
func unusable(action Digest, why string) error {
	return &labelled{kind: ErrNotFound, text: fmt.Sprintf("the result of action %s cannot be used: %s", action, why)}
}
