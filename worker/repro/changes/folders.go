// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// A Folder is a directory, wherever it is.
type Folder interface {
	// Entries returns what is in it, in the order of names.
	Entries(ctx context.Context) ([]Entry, error)
}

// An Entry is what one name in a folder stands for.
type Entry struct {
	Name       string
	Executable bool
	// Link says that it is a symbolic link, to Target.
	Link   bool
	Target string
	// Properties are those of the node, as a text that is equal for equal ones; "" if there are none.
	Properties string
	// Digest is that of a file, or of a Directory; zero if it is not known. Equal ones need no look.
	Digest cas.Digest
	// Folder is what a directory has in it, nil if it is none.
	Folder Folder
	// Open opens what a file holds. The caller calls what it returns when done. Nil where it is only known by its digest.
	Open func(ctx context.Context) (*io.SectionReader, func(), error)
}

// text says what e is.
func (e *Entry) text() string {
	switch {
	case e == nil:
		return ""
	case e.Link:
		return "link to " + quoted(e.Target) + e.Properties
	case e.Folder != nil && e.Digest.IsZero():
		return "directory"
	case e.Folder != nil:
		return "directory " + e.Digest.String()
	case e.Digest.IsZero():
		return "file" + e.mode()
	}
	return e.Digest.String() + e.mode()
}

func (e *Entry) mode() string {
	if e.Executable {
		return " executable" + e.Properties
	}
	return e.Properties
}

// nodeProperties returns those of a node as Entry has them.
func nodeProperties(p *repb.NodeProperties) string {
	var b strings.Builder
	if mode := p.GetUnixMode(); mode != nil {
		fmt.Fprintf(&b, " mode %04o", mode.Value)
	}
	if p.GetMtime() != nil {
		b.WriteString(" mtime " + p.Mtime.AsTime().Format(time.RFC3339Nano))
	}
	for _, q := range p.GetProperties() {
		b.WriteString(" " + quoted(q.Name) + "=" + quoted(q.Value))
	}
	return b.String()
}

// Folders returns how b differs from a, by path: each file, link and directory that one alone has, or that is not the
// same in both; and each whose digest is another though nothing in it is. What is a kind of change, such as "input". There are at most MaxChanges, and one more that says so if
// there would be more. A directory that cannot be read because it is absent is a change as a whole; other errors are returned.
func Folders(ctx context.Context, what string, a, b Folder) ([]Change, error) {
	f := folders{ctx: ctx, what: what, seen: map[[2]cas.Digest]string{}}
	x, y := &Entry{Folder: a, Digest: rootOf(a)}, &Entry{Folder: b, Digest: rootOf(b)}
	err := f.walk("", x, y)
	if err == nil && len(f.changes) == 0 {
		err = f.unlike("", x, y)
	}
	if errors.Is(err, errEnough) {
		err = nil
	}
	return f.changes, err
}

// rootOf returns the digest of a folder that is a Directory message, else zero.
func rootOf(f Folder) cas.Digest {
	if s, ok := f.(*stored); ok && s.message == nil {
		return s.digest
	}
	return cas.Digest{}
}

// A folders compares two directories.
type folders struct {
	ctx     context.Context
	what    string
	changes []Change
	pairs   int
	// seen are the pairs of directories that were looked at, and where first: the same ones differ in the same.
	seen map[[2]cas.Digest]string
}

// add adds a change, or says that there are too many.
func (f *folders) add(c Change) error {
	if len(f.changes) >= MaxChanges {
		f.changes = append(f.changes, Change{What: f.what, A: "more", B: "more"})
		return errEnough
	}
	f.changes = append(f.changes, c)
	return nil
}

func (f *folders) entry(at string, a, b *Entry) error { return f.add(f.change(at, a, b)) }

func (f *folders) change(at string, a, b *Entry) Change {
	return Change{What: f.what, Name: quoted(at), Path: at, A: shorten(a.text()), B: shorten(b.text()), EntryA: a, EntryB: b}
}

// absent is said of a directory that the store has not.
const absent = ", which is absent"

// walk compares two directories that are called at.
func (f *folders) walk(at string, a, b *Entry) error {
	if err := f.ctx.Err(); err != nil {
		return err
	}
	if f.pairs++; f.pairs > maxPairs || len(at) > maxPath {
		return f.add(Change{What: f.what, Name: quoted(at), A: "too large to look into", B: "too large to look into"})
	}
	as, errA := a.Folder.Entries(f.ctx)
	bs, errB := b.Folder.Entries(f.ctx)
	if err := errors.Join(errA, errB); err != nil {
		if !errors.Is(err, cas.ErrNotFound) || at == "" {
			return err
		}
		c := f.change(at+"/", a, b)
		if errors.Is(errA, cas.ErrNotFound) {
			c.A += absent
		}
		if errors.Is(errB, cas.ErrNotFound) {
			c.B += absent
		}
		return f.add(c)
	}
	for len(as)+len(bs) > 0 {
		order := 0
		switch {
		case len(as) == 0:
			order = 1
		case len(bs) == 0:
			order = -1
		default:
			order = strings.Compare(as[0].Name, bs[0].Name)
		}
		var x, y *Entry
		if order <= 0 {
			x, as = &as[0], as[1:]
		}
		if order >= 0 {
			y, bs = &bs[0], bs[1:]
		}
		if err := f.pair(at, x, y); err != nil {
			return err
		}
	}
	return nil
}

// unlike says of two directories in which nothing differs that they do, if their digests do: by properties of their own, or
// in their encoding.
func (f *folders) unlike(name string, a, b *Entry) error {
	if a.Digest.IsZero() || b.Digest.IsZero() || a.Digest == b.Digest || a.Digest.Function() != b.Digest.Function() {
		return nil
	}
	return f.entry(name+"/", a, b)
}

// pair compares what two folders that are called at have by the same name; one may be nil.
func (f *folders) pair(at string, a, b *Entry) error {
	if a == nil || b == nil {
		one := a
		if a == nil {
			one = b
		}
		name := path.Join(at, one.Name)
		if one.Folder != nil {
			name += "/"
		}
		return f.entry(name, a, b)
	}
	name := path.Join(at, a.Name)
	same := !a.Digest.IsZero() && a.Digest == b.Digest
	switch {
	case (a.Folder != nil) != (b.Folder != nil) || a.Link != b.Link:
		return f.entry(name, a, b)
	case a.Link:
		if a.Target == b.Target && a.Properties == b.Properties {
			return nil
		}
		return f.entry(name, a, b)
	case a.Folder != nil:
		if same {
			return nil
		}
		if key := [2]cas.Digest{a.Digest, b.Digest}; !a.Digest.IsZero() && !b.Digest.IsZero() {
			if first, ok := f.seen[key]; ok {
				as := "as in " + quoted(first)
				return f.add(Change{What: f.what, Name: quoted(name + "/"), A: as, B: as, EntryA: a, EntryB: b})
			}
			f.seen[key] = name
		}
		told := len(f.changes)
		if err := f.walk(name, a, b); err != nil || len(f.changes) > told {
			return err
		}
		return f.unlike(name, a, b)
	case a.Executable != b.Executable, a.Properties != b.Properties:
		return f.entry(name, a, b)
	case same:
		return nil
	case !a.Digest.IsZero() && !b.Digest.IsZero() && a.Digest.Function() == b.Digest.Function():
		return f.entry(name, a, b)
	}
	equal, err := sameContent(f.ctx, a, b)
	if err != nil {
		return fmt.Errorf("%s: %w", quoted(name), err)
	}
	if equal {
		return nil
	}
	return f.entry(name, a, b)
}

// sameContent reports whether two files hold the same. Where the digest of one is known, only the other is read.
func sameContent(ctx context.Context, a, b *Entry) (bool, error) {
	if a.Digest.IsZero() && !b.Digest.IsZero() {
		a, b = b, a
	}
	if !a.Digest.IsZero() && b.Digest.IsZero() {
		r, done, err := b.Open(ctx)
		if err != nil {
			return false, err
		}
		defer done()
		if r.Size() != a.Digest.Size() {
			return false, nil
		}
		d, err := a.Digest.Function().SumSeeker(r)
		return d == a.Digest, err
	}
	ra, closeA, err := a.Open(ctx)
	if err != nil {
		return false, err
	}
	defer closeA()
	rb, closeB, err := b.Open(ctx)
	if err != nil {
		return false, err
	}
	defer closeB()
	if ra.Size() != rb.Size() {
		return false, nil
	}
	return equal(ra, rb)
}

// equal reports whether two readers of equal size hold the same.
func equal(a, b io.Reader) (bool, error) {
	const chunk = 64 << 10
	bufA, bufB := make([]byte, chunk), make([]byte, chunk)
	for {
		n, errA := io.ReadFull(a, bufA)
		m, errB := io.ReadFull(b, bufB)
		if !bytes.Equal(bufA[:n], bufB[:m]) {
			return false, nil
		}
		switch {
		case errA == io.EOF || errA == io.ErrUnexpectedEOF:
			return true, nil
		case errA != nil || errB != nil:
			return false, errors.Join(errA, errB)
		}
	}
}

// A Reader reads blobs for a comparison.
type Reader struct {
	Store cas.Store
	// Open opens a blob to look into it; nil reads it into memory, up to 64 MiB.
	Open func(ctx context.Context, d cas.Digest) (*io.SectionReader, func(), error)
}

// open opens a blob.
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

// Directory returns the folder of a Directory message.
func (r *Reader) Directory(d cas.Digest) Folder { return &stored{r: r, digest: d} }

// Tree returns the folder of the root of a Tree message, or cas.ErrInvalid if the blob is none.
func (r *Reader) Tree(ctx context.Context, d cas.Digest) (Folder, error) {
	var t repb.Tree
	if err := cas.ReadProto(ctx, r.Store, d, &t); err != nil {
		return nil, err
	}
	if t.Root == nil {
		return nil, fmt.Errorf("%w: %s is not the digest of a Tree: it has no root", cas.ErrInvalid, d)
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

// File returns the entry of a file of a store.
func (r *Reader) File(name string, d cas.Digest, executable bool) *Entry {
	return &Entry{Name: name, Executable: executable, Digest: d, Open: r.open(d)}
}

// stored is a Directory of a store.
type stored struct {
	r        *Reader
	digest   cas.Digest
	message  *repb.Directory                // nil: it is read
	children map[cas.Digest]*repb.Directory // those of its Tree, nil if it is in none
}

// Entries implements Folder.
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
		all = append(all, Entry{Name: n.Name, Digest: d, Folder: &stored{s.r, d, s.children[d], s.children}})
	}
	for _, n := range dir.Symlinks {
		all = append(all, Entry{Name: n.Name, Link: true, Target: n.Target, Properties: nodeProperties(n.NodeProperties)})
	}
	slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// memory returns an entry of what a message holds itself.
func memory(name string, data []byte) *Entry {
	return &Entry{Name: name, Digest: cas.SHA256.Sum(data), Open: func(context.Context) (*io.SectionReader, func(), error) {
		return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), func() {}, nil
	}}
}
