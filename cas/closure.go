// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Closure returns the digests of every blob that r refers to: output files, Trees and what they
// hold, root Directories, stdout and stderr. It reads the Trees from s, so that a Tree that is absent
// is ErrNotFound. A malformed digest is ErrInvalid.
func Closure(ctx context.Context, s Store, f Function, r *repb.ActionResult) ([]Digest, error) {
	var ds []Digest
	add := func(p *repb.Digest) (Digest, error) {
		d, err := FromProto(f, p)
		if err == nil {
			ds = append(ds, d)
		}
		return d, err
	}
	for _, file := range r.OutputFiles {
		if _, err := add(file.Digest); err != nil {
			return nil, err
		}
	}
	for _, p := range []*repb.Digest{r.StdoutDigest, r.StderrDigest} {
		if p == nil {
			continue
		}
		if _, err := add(p); err != nil {
			return nil, err
		}
	}
	for _, dir := range r.OutputDirectories {
		if dir.TreeDigest != nil {
			d, err := add(dir.TreeDigest)
			if err != nil {
				return nil, err
			}
			var t repb.Tree
			if err := ReadProto(ctx, s, d, &t); err != nil {
				return nil, err
			}
			for _, child := range append(t.Children, t.Root) {
				for _, file := range child.GetFiles() {
					if _, err := add(file.Digest); err != nil {
						return nil, err
					}
				}
			}
		}
		if dir.RootDirectoryDigest != nil {
			d, err := add(dir.RootDirectoryDigest)
			if err != nil {
				return nil, err
			}
			if err := directoryClosure(ctx, s, d, map[Digest]bool{}, &ds); err != nil {
				return nil, err
			}
		}
	}
	return ds, nil
}

// directoryClosure appends what the Directory d holds to ds, each Directory once. It keeps its own
// stack, so that depth costs memory in proportion and nothing else.
func directoryClosure(ctx context.Context, s Store, d Digest, seen map[Digest]bool, ds *[]Digest) error {
	for todo := []Digest{d}; len(todo) > 0; {
		d, todo = todo[len(todo)-1], todo[:len(todo)-1]
		if seen[d] {
			continue
		}
		seen[d] = true
		var dir repb.Directory
		if err := ReadProto(ctx, s, d, &dir); err != nil {
			return err
		}
		for _, file := range dir.Files {
			fd, err := FromProto(d.fn, file.Digest)
			if err != nil {
				return err
			}
			*ds = append(*ds, fd)
		}
		for _, sub := range dir.Directories {
			sd, err := FromProto(d.fn, sub.Digest)
			if err != nil {
				return err
			}
			*ds = append(*ds, sd)
			todo = append(todo, sd)
		}
	}
	return nil
}

// LookupComplete returns the result recorded for action if every blob of its closure is present, and
// marks them as used. A miss, an incomplete result and a malformed one are all ErrNotFound: the caller
// can only run the action again.
func LookupComplete(ctx context.Context, in *Instance, action Digest) (*repb.ActionResult, error) {
	r, err := in.Actions.Lookup(ctx, action)
	if err != nil {
		return nil, err
	}
	ds, err := Closure(ctx, in.Store, action.fn, r)
	if errors.Is(err, ErrInvalid) || errors.Is(err, ErrCorrupt) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		return nil, ErrNotFound
	}
	return r, nil
}
