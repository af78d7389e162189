// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"maps"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/compare"
	"google.golang.org/protobuf/proto"
)

const (
	// maxEntries is how many files and links of an output directory are compared.
	maxEntries = 200_000
	// maxLevels is how deep it may be.
	maxLevels = 256
	// maxLooked is how many of its files are looked into, of those that differ.
	maxLooked = 20
)

// directories compares two output directories, by the names of what is in them.
func directories(ctx context.Context, name string, a, b *Run, x, y item) ([]compare.Difference, error) {
	left, err := entries(ctx, a, x)
	if err != nil {
		return nil, err
	}
	right, err := entries(ctx, b, y)
	if err != nil {
		return nil, err
	}
	names := maps.Clone(left)
	maps.Copy(names, right)
	var all []compare.Difference
	looked := 0
	for _, p := range slices.Sorted(maps.Keys(names)) {
		x, y := left[p], right[p]
		if x == y || len(all) >= MaxDifferences {
			continue
		}
		where := []string{name, text(p)}
		one := func(what, a, b string) {
			all = append(all, compare.Difference{Where: where, What: what, A: short(a), B: short(b), Offset: -1})
		}
		switch {
		case x.kind != y.kind:
			one("exists", orNone(x.kind), orNone(y.kind))
			continue
		case x.kind == "symlink":
			one("target", x.name, y.name)
			continue
		case x.executable != y.executable:
			one("executable", fmt.Sprint(x.executable), fmt.Sprint(y.executable))
		}
		if x.name == y.name {
			continue
		}
		if looked++; looked > maxLooked {
			one("content", x.name, y.name)
			continue
		}
		found, err := blobs(ctx, where[1], a, b, x.digest(), y.digest())
		if err != nil {
			return all, err
		}
		for _, d := range found {
			d.Where = append([]string{name}, d.Where...)
			all = append(all, d)
		}
	}
	return all, nil
}

// An entry is a file or link of a directory. It is comparable.
type entry struct {
	kind, name string // the hash of a file, the target of a link
	size       int64
	executable bool
}

func (e *entry) digest() *repb.Digest { return &repb.Digest{Hash: e.name, SizeBytes: e.size} }

// entries returns what is in an output directory, by its path there.
func entries(ctx context.Context, r *Run, it item) (map[string]entry, error) {
	root, child, err := directory(ctx, r, it)
	if err != nil {
		return nil, err
	}
	all := map[string]entry{}
	var walk func(prefix string, d *repb.Directory, level int) error
	walk = func(prefix string, d *repb.Directory, level int) error {
		if level > maxLevels {
			return fmt.Errorf("it is deeper than %d directories", maxLevels)
		}
		for _, f := range d.Files {
			all[prefix+f.Name] = entry{"file", f.Digest.GetHash(), f.Digest.GetSizeBytes(), f.IsExecutable}
		}
		for _, l := range d.Symlinks {
			all[prefix+l.Name] = entry{kind: "symlink", name: l.Target}
		}
		if len(d.Files)+len(d.Symlinks)+len(d.Directories) == 0 {
			all[prefix] = entry{kind: "empty directory"}
		}
		for _, n := range d.Directories {
			if len(all) > maxEntries {
				return fmt.Errorf("it holds more than %d files and links", maxEntries)
			}
			inner, err := child(n.Digest)
			if err == nil {
				err = walk(prefix+n.Name+"/", inner, level+1)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return all, walk("", root, 0)
}

// directory returns the Directory that an item names, and what returns those inside.
func directory(ctx context.Context, r *Run, it item) (root *repb.Directory, child func(*repb.Digest) (*repb.Directory, error), err error) {
	read := func(p *repb.Digest, m proto.Message) error {
		d, err := cas.FromProto(r.digests, p)
		if err != nil {
			return err
		}
		return cas.ReadProto(ctx, r.place.Store, d, m)
	}
	if !it.tree {
		child = func(p *repb.Digest) (*repb.Directory, error) {
			d := &repb.Directory{}
			return d, read(p, d)
		}
		root, err = child(it.digest)
		return root, child, err
	}
	t := &repb.Tree{}
	if err := read(it.digest, t); err != nil {
		return nil, nil, err
	}
	inner := make(map[string]*repb.Directory, len(t.Children))
	for _, d := range t.Children {
		_, digest, err := cas.MarshalProto(r.digests, d)
		if err != nil {
			return nil, nil, err
		}
		inner[digest.Hash()] = d
	}
	if t.Root == nil {
		t.Root = &repb.Directory{}
	}
	return t.Root, func(p *repb.Digest) (*repb.Directory, error) {
		if d := inner[p.GetHash()]; d != nil {
			return d, nil
		}
		return nil, fmt.Errorf("its Tree lacks the Directory %s", digestName(p))
	}, nil
}

// settle gives the output directories of all runs names that are equal where what is in them is: a Tree can be written in
// more than one way, and servers differ. Those that cannot be read keep theirs.
func settle(ctx context.Context, runs []Run) {
	for _, name := range paths(runs) {
		same := true
		for i := range runs {
			same = same && runs[i].outputs[name].name == runs[0].outputs[name].name
		}
		if same {
			continue
		}
		for i := range runs {
			it := runs[i].outputs[name]
			if !it.tree {
				continue
			}
			root, _, err := directory(ctx, &runs[i], it)
			if err != nil {
				continue
			}
			if _, d, err := cas.MarshalProto(runs[i].digests, root); err == nil {
				it.name = d.String()
				runs[i].outputs[name] = it
			}
		}
	}
}
