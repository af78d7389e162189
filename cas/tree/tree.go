// SPDX-License-Identifier: Apache-2.0

// Package tree turns the Directory trees of the API into files and files into Directory trees: Load
// decodes and checks an input root, a Cache keeps what many of them share, Plan and a Stager lay it out for
// one run, Capture collects what the run made, Ingest and Extract do the same for a directory of a person.
// It neither mounts nor confines anything: a Mounter mounts its images, and what is left to be mounted for the
// run is a list of Binds.
//
// A run sees its exec root as a spine of real, partly writable directories (the input root itself, the
// working directory, the parents of outputs and what leads to them), in which every other input is a
// read-only mount over an empty placeholder. All writable directories thus lie on one mount, so that
// the run can rename between them, and no input can be changed. In the workspace the spine is out/. What is
// mounted lies in an EROFS image, whose files are where the store has them, or, copied, in the workspace as
// in/0, in/1 and so on.
//
// What states no node properties has one of a few modes, and is dated as one fixed moment. Inputs that state mtime or
// unix_mode have these; only directories of the spine keep the mode that the run needs, since it may not own them.
package tree

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"path"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cloister-build/cloister/cas"
)

// ErrOutput says that a run left an output that cannot be returned: one of the wrong kind, or with a
// name that the API cannot express.
var ErrOutput = errors.New("unusable output")

// A MissingError lists blobs that are needed and absent from the store. It is cas.ErrNotFound.
type MissingError struct {
	Blobs []cas.Digest // in the order in which a walk meets them, each once
}

// Error names the first few blobs and says how many there are.
func (e *MissingError) Error() string {
	const named = 3
	var b strings.Builder
	fmt.Fprintf(&b, "%d blobs are absent from the store: ", len(e.Blobs))
	for i, d := range e.Blobs[:min(named, len(e.Blobs))] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(d.String())
	}
	if len(e.Blobs) > named {
		b.WriteString(" and others")
	}
	return b.String()
}

// Unwrap returns cas.ErrNotFound.
func (e *MissingError) Unwrap() error { return cas.ErrNotFound }

// A fault is an error of a kind whose text does not repeat the kind.
type fault struct {
	kind error
	text string
}

func (e *fault) Error() string { return e.text }
func (e *fault) Unwrap() error { return e.kind }

func faultf(kind error, format string, args ...any) error {
	return &fault{kind: kind, text: fmt.Sprintf(format, args...)}
}

// An Input is an input root, decoded and checked. It is never changed, so that many goroutines may use
// it.
type Input struct {
	root *directory
}

// Load is Cache.Load without a Cache: it reads each distinct Directory once, and marks all files.
func Load(ctx context.Context, store cas.Store, root cas.Digest) (*Input, error) {
	return NewCache(0, 0).Load(ctx, &cas.Instance{Store: store}, root)
}

// fetch brings the Directories dirs near, if the store is far. One too large to be read is not worth it.
func fetch(ctx context.Context, store cas.Store, dirs []*directory) error {
	var ds []cas.Digest
	for _, d := range dirs {
		if d.digest.Size() <= cas.MaxMessage {
			ds = append(ds, d.digest)
		}
	}
	return cas.Fetch(ctx, store, ds)
}

// Digest returns the digest of the root Directory.
func (in *Input) Digest() cas.Digest { return in.root.digest }

// Files returns how many files the tree has when written out.
func (in *Input) Files() int64 { return in.root.files }

// Bytes returns how many bytes the tree's files have when written out; it never exceeds MaxInt64.
func (in *Input) Bytes() int64 { return in.root.bytes }

// FilePaths yields the path of each file of the tree written out, relative to the root.
func (in *Input) FilePaths() iter.Seq[string] {
	return func(yield func(string) bool) {
		for p, d := range in.root.all(".") {
			for i := range d.entries {
				if e := &d.entries[i]; e.kind == File && !yield(join(p, e.name)) {
					return
				}
			}
		}
	}
}

// Lookup returns what lies at p, a clean path relative to the root; "" and "." are the root. It does
// not follow symlinks.
func (in *Input) Lookup(p string) (Kind, bool) {
	if p == "" || p == "." {
		return Directory, true
	}
	d := in.root
	for {
		name, rest, more := strings.Cut(p, "/")
		e := d.find(name)
		switch {
		case e == nil:
			return 0, false
		case !more:
			return e.kind, true
		case e.kind != Directory:
			return 0, false
		}
		d, p = e.dir, rest
	}
}

// parallel is how many blobs are read or written at once.
const parallel = 4

// each calls f with 0 to n-1, some at a time, and returns after the last call has. After the first
// error, which it returns, and after the end of ctx it begins no further call.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, parallel) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// join is path.Join for a clean directory and a name, without cleaning again.
func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// resolve returns p, relative to dir, as a clean path relative to the root that dir is relative to,
// "." for that root itself. A path that is absolute, leaves the root or cannot be a path is
// cas.ErrInvalid.
func resolve(dir, p string) (string, error) {
	clean := path.Join(dir, p)
	switch {
	case clean == "":
		return ".", nil
	case path.IsAbs(p) || path.IsAbs(dir):
		return "", faultf(cas.ErrInvalid, "path %+.256q is absolute", p)
	case clean == ".." || strings.HasPrefix(clean, "../"):
		return "", faultf(cas.ErrInvalid, "path %+.256q leaves the input root", p)
	case len(clean) > maxPath:
		return "", faultf(cas.ErrInvalid, "path %+.64q... is longer than %d bytes", p, maxPath)
	}
	if clean == "." {
		return clean, nil
	}
	for name := range strings.SplitSeq(clean, "/") {
		if why := badName(name); why != "" {
			return "", faultf(cas.ErrInvalid, "path %+.256q: the name %+.256q %s", p, name, why)
		}
	}
	return clean, nil
}
