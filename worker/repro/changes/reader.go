// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// A Reader reads blobs for a comparison.
type Reader struct {
	Store cas.Store
	// Open opens a blob. If nil, blobs of up to 64 MiB are read into memory.
	Open func(ctx context.Context, d cas.Digest) (*io.SectionReader, func(), error)
}

// open returns an Entry.Open for a blob.
func (r *Reader) open(d cas.Digest) func(ctx context.Context) (*io.SectionReader, func(), error) {
	return func(ctx context.Context) (*io.SectionReader, func(), error) {
		if r.Open != nil {
			return r.Open(ctx, d)
		}
		data, err := cas.ReadAll(ctx, r.Store, d, maxInMemory)
		if err != nil {
			return nil, nil, err
		}
		return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), func() {}, nil
	}
}

// Directory returns the directory of a Directory message.
func (r *Reader) Directory(d cas.Digest) Directory { return &stored{r: r, digest: d} }

// Tree returns the root directory of a Tree message. It fails with cas.ErrInvalid if the blob is not a Tree.
func (r *Reader) Tree(ctx context.Context, d cas.Digest) (Directory, error) {
	var t repb.Tree
	if err := cas.ReadProto(ctx, r.Store, d, &t); err != nil {
		return nil, err
	}
	if t.Root == nil {
		return nil, fmt.Errorf("%w: %s is not a Tree: it has no root", cas.ErrInvalid, d)
	}
	children := map[cas.Digest]*repb.Directory{}
	for _, dir := range t.Children {
		_, child, err := cas.MarshalProto(d.Function(), dir)
		if err != nil {
			return nil, err
		}
		children[child] = dir
	}
	return &stored{r: r, digest: d, message: t.Root, children: children}, nil
}

// File returns the entry of a stored file.
func (r *Reader) File(name string, d cas.Digest, executable bool) *Entry {
	return &Entry{Name: name, Executable: executable, Digest: d, Open: r.open(d)}
}

// stored is a Directory message.
type stored struct {
	r        *Reader
	digest   cas.Digest
	message  *repb.Directory                // read from the store if nil
	children map[cas.Digest]*repb.Directory // of its Tree, if any
}

// Entries implements Directory.
func (s *stored) Entries(ctx context.Context) ([]Entry, error) {
	dir := s.message
	if dir == nil {
		dir = &repb.Directory{}
		if err := cas.ReadProto(ctx, s.r.Store, s.digest, dir); err != nil {
			return nil, fmt.Errorf("directory %s: %w", s.digest, err)
		}
	}
	f := s.digest.Function()
	var all []Entry
	for _, n := range dir.Files {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, fmt.Errorf("directory %s: %w", s.digest, err)
		}
		e := s.r.File(n.Name, d, n.IsExecutable)
		e.Properties = nodeProperties(n.NodeProperties)
		all = append(all, *e)
	}
	for _, n := range dir.Directories {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, fmt.Errorf("directory %s: %w", s.digest, err)
		}
		all = append(all, Entry{Name: n.Name, Digest: d, Directory: &stored{s.r, d, s.children[d], s.children}})
	}
	for _, n := range dir.Symlinks {
		all = append(all,
			Entry{Name: n.Name, Link: true, Target: n.Target, Properties: nodeProperties(n.NodeProperties)})
	}
	slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// memory returns an entry of inline data.
func memory(name string, data []byte) *Entry {
	return &Entry{
		Name:   name,
		Digest: cas.SHA256.Sum(data),
		Open: func(context.Context) (*io.SectionReader, func(), error) {
			return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), func() {}, nil
		},
	}
}
