// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// A Reader reads blobs for a comparison.
type Reader struct {
	Store cas.Store
	// MaxCopy is the size in bytes of the largest blob that Open copies from a store on another machine; 0 means no limit.
	MaxCopy int64
}

// ErrTooLarge means that a blob exceeds Reader.MaxCopy.
var ErrTooLarge = errors.New("too large to compare")

// Open opens a blob: the file of a store on this machine, or a copy in memory or, if it is large, in a temporary file.
// The caller calls the returned function when done.
func (r *Reader) Open(ctx context.Context, d cas.Digest) (*io.SectionReader, func(), error) {
	const inMemory = 8 << 20
	switch filer, ok := cas.As[cas.Filer](r.Store); {
	case ok && d.Size() > 0:
		path, release, err := filer.File(ctx, d, false)
		if err != nil {
			return nil, nil, err
		}
		f, err := os.Open(path)
		if err != nil {
			release()
			return nil, nil, err
		}
		return io.NewSectionReader(f, 0, d.Size()), func() { f.Close(); release() }, nil
	case d.Size() <= inMemory:
		data, err := cas.ReadAll(ctx, r.Store, d, inMemory)
		return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), func() {}, err
	case r.MaxCopy > 0 && d.Size() > r.MaxCopy:
		return nil, nil, ErrTooLarge
	}
	return r.copy(ctx, d)
}

// copy opens a copy of a blob in a temporary file.
func (r *Reader) copy(ctx context.Context, d cas.Digest) (*io.SectionReader, func(), error) {
	in, err := r.Store.Open(ctx, d, 0)
	if err != nil {
		return nil, nil, err
	}
	defer in.Close()
	file, err := os.CreateTemp("", "cloister-diff-*")
	if err != nil {
		return nil, nil, err
	}
	clean := func() { file.Close(); os.Remove(file.Name()) }
	n, err := io.Copy(file, in)
	if err != nil {
		clean()
		return nil, nil, err
	}
	return io.NewSectionReader(file, 0, n), clean, nil
}

// Directory returns the directory of a Directory message.
func (r *Reader) Directory(d cas.Digest) Directory { return &stored{r: r, digest: d} }

// Tree returns the root directory of a Tree message.
func (r *Reader) Tree(d cas.Digest) Directory { return &treeRoot{r, d} }

// File returns the entry of a stored file.
func (r *Reader) File(name string, d cas.Digest, executable bool) *Entry {
	return &Entry{
		Name: name, Executable: executable, Digest: d,
		Open: func(ctx context.Context) (*io.SectionReader, func(), error) { return r.Open(ctx, d) },
	}
}

// A treeRoot is the root of a Tree message.
type treeRoot struct {
	r      *Reader
	digest cas.Digest
}

// Entries implements Directory. It fails with cas.ErrInvalid if the blob is not a Tree.
func (t *treeRoot) Entries(ctx context.Context) ([]Entry, error) {
	var m repb.Tree
	if err := cas.ReadProto(ctx, t.r.Store, t.digest, &m); err != nil {
		return nil, fmt.Errorf("tree %s: %w", t.digest, err)
	}
	if m.Root == nil {
		return nil, fmt.Errorf("%w: %s is not a Tree: it has no root", cas.ErrInvalid, t.digest)
	}
	children := map[cas.Digest]*repb.Directory{}
	for _, dir := range m.Children {
		_, child, err := cas.MarshalProto(t.digest.Function(), dir)
		if err != nil {
			return nil, err
		}
		children[child] = dir
	}
	return (&stored{t.r, t.digest, m.Root, children}).Entries(ctx)
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
		e.Properties = n.NodeProperties
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
			Entry{Name: n.Name, Link: true, Target: n.Target, Properties: n.NodeProperties})
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
