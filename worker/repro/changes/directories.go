// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// A Directory is a directory in a store or on disk.
type Directory interface {
	// Entries returns the entries sorted by name.
	Entries(ctx context.Context) ([]Entry, error)
}

// An Entry is a file, directory or symbolic link.
type Entry struct {
	Name       string
	Executable bool
	// Link means that it is a symbolic link to Target.
	Link   bool
	Target string
	// Properties are those of the API's node, or nil.
	Properties *repb.NodeProperties
	// Digest is the digest of a file or of a Directory message; zero if unknown.
	Digest cas.Digest
	// Directory is nil unless the entry is a directory.
	Directory Directory
	// Open opens a file. The caller calls the returned function when done. Nil if only the digest is known.
	Open func(ctx context.Context) (*io.SectionReader, func(), error)
}

// text describes e.
func (e *Entry) text() string {
	switch {
	case e == nil:
		return ""
	case e.Link:
		return "link to " + quote(e.Target) + e.properties()
	case e.Directory != nil && e.Digest.IsZero():
		return "directory"
	case e.Directory != nil:
		return "directory " + e.Digest.String()
	case e.Digest.IsZero():
		return "file" + e.mode()
	}
	return e.Digest.String() + e.mode()
}

func (e *Entry) mode() string {
	if e.Executable {
		return " executable" + e.properties()
	}
	return e.properties()
}

// properties returns the canonical text of Properties.
func (e *Entry) properties() string {
	var b strings.Builder
	p := e.Properties
	if mode := p.GetUnixMode(); mode != nil {
		fmt.Fprintf(&b, " mode %04o", mode.Value)
	}
	if p.GetMtime() != nil {
		b.WriteString(" mtime " + p.Mtime.AsTime().Format(time.RFC3339Nano))
	}
	for _, q := range p.GetProperties() {
		b.WriteString(" " + quote(q.Name) + "=" + quote(q.Value))
	}
	return b.String()
}

// Directories returns how b differs from a by path: added, removed and changed entries, and directories whose digests
// differ although their entries do not. what is the kind of change, such as "input". It returns at most maxChanges, and
// one more that says so if it left any out. A missing directory is one change; other errors are returned.
func Directories(ctx context.Context, what string, a, b Directory) ([]Change, error) {
	f := directoryDiff{ctx: ctx, what: what, seen: map[[2]cas.Digest]string{}}
	x, y := &Entry{Directory: a, Digest: messageDigest(a)}, &Entry{Directory: b, Digest: messageDigest(b)}
	err := f.walk("", x, y)
	if err == nil && len(f.changes) == 0 {
		err = f.encoding("", x, y)
	}
	if errors.Is(err, errEnough) {
		err = nil
	}
	return f.changes, err
}

// messageDigest returns the digest of a stored Directory message, zero for other directories.
func messageDigest(f Directory) cas.Digest {
	if s, ok := f.(*stored); ok && s.message == nil {
		return s.digest
	}
	return cas.Digest{}
}

// A directoryDiff is the state of Directories.
type directoryDiff struct {
	ctx     context.Context
	what    string
	changes []Change
	pairs   int
	// seen maps pairs of compared directories to the path of the first, so that each is compared once.
	seen map[[2]cas.Digest]string
}

// add adds a change, or returns errEnough.
func (f *directoryDiff) add(c Change) error {
	if len(f.changes) >= maxChanges {
		f.changes = append(f.changes, Change{What: f.what, A: "more", B: "more"})
		return errEnough
	}
	f.changes = append(f.changes, c)
	return nil
}

func (f *directoryDiff) entry(at string, a, b *Entry) error { return f.add(f.change(at, a, b)) }

func (f *directoryDiff) change(at string, a, b *Entry) Change {
	return Change{
		What:   f.what,
		Name:   quote(at),
		Path:   at,
		A:      printable.Head(a.text(), maxText),
		B:      printable.Head(b.text(), maxText),
		EntryA: a,
		EntryB: b,
	}
}

// absent marks a directory that the store lacks.
const absent = ", which is absent"

// walk compares two directories at a path.
func (f *directoryDiff) walk(at string, a, b *Entry) error {
	if err := f.ctx.Err(); err != nil {
		return err
	}
	if f.pairs++; f.pairs > maxPairs || len(at) > maxPath {
		return f.add(Change{What: f.what, Name: quote(at), A: "too large to look into", B: "too large to look into"})
	}
	as, errA := a.Directory.Entries(f.ctx)
	bs, errB := b.Directory.Entries(f.ctx)
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

// encoding adds a change if the digests of two directories with equal entries differ: their own properties or encodings
// do.
func (f *directoryDiff) encoding(name string, a, b *Entry) error {
	if a.Digest.IsZero() || b.Digest.IsZero() || a.Digest == b.Digest || a.Digest.Function() != b.Digest.Function() {
		return nil
	}
	return f.entry(name+"/", a, b)
}

// pair compares two entries of a name. One may be nil.
func (f *directoryDiff) pair(at string, a, b *Entry) error {
	if a == nil || b == nil {
		one := a
		if a == nil {
			one = b
		}
		name := path.Join(at, one.Name)
		if one.Directory != nil {
			name += "/"
		}
		return f.entry(name, a, b)
	}
	name := path.Join(at, a.Name)
	same := !a.Digest.IsZero() && a.Digest == b.Digest
	switch {
	case (a.Directory != nil) != (b.Directory != nil) || a.Link != b.Link:
		return f.entry(name, a, b)
	case a.Link:
		if a.Target == b.Target && a.properties() == b.properties() {
			return nil
		}
		return f.entry(name, a, b)
	case a.Directory != nil:
		if same {
			return nil
		}
		if key := [2]cas.Digest{a.Digest, b.Digest}; !a.Digest.IsZero() && !b.Digest.IsZero() {
			if first, ok := f.seen[key]; ok {
				as := "as in " + quote(first)
				return f.add(Change{What: f.what, Name: quote(name + "/"), A: as, B: as, EntryA: a, EntryB: b})
			}
			f.seen[key] = name
		}
		before := len(f.changes)
		if err := f.walk(name, a, b); err != nil || len(f.changes) > before {
			return err
		}
		return f.encoding(name, a, b)
	case a.Executable != b.Executable, a.properties() != b.properties():
		return f.entry(name, a, b)
	case same:
		return nil
	case !a.Digest.IsZero() && !b.Digest.IsZero() && a.Digest.Function() == b.Digest.Function():
		return f.entry(name, a, b)
	}
	equal, err := sameContent(f.ctx, a, b)
	if err != nil {
		return fmt.Errorf("%s: %w", quote(name), err)
	}
	if equal {
		return nil
	}
	return f.entry(name, a, b)
}

// sameContent reports whether two files are equal. If the digest of one is known it reads only the other.
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

// equal compares two readers of equal size.
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
