// SPDX-License-Identifier: Apache-2.0

// Package tree converts between the Directory messages of the Remote Execution API and files. Load decodes and checks
// an input root, and a Cache shares decoded Directories between input roots. Plan and a Stager lay an input root out
// for one run. Capture collects the outputs of a run. Ingest and Extract do the same for a user's directory.
// The package neither mounts nor confines anything: a Mounter mounts its images, and the remaining mounts are returned
// as lists of Lowers and Binds.
//
// Every directory of the exec root accepts new entries, and no input can be changed: it belongs to the worker, is not
// writable for others, and its directory is sticky. The exec root is out/ in the workspace. With an image, which points
// at the files of the store, out/ is the upper layer of an overlay: it contains the planned directories (the root, the
// working directory, the parents of outputs) and private inputs, and the image contains everything else. If a run has
// the worker's user ID, copies are a lower layer instead: in/. Large files are bound from the store over empty
// placeholders.
//
// Inputs without node properties get one of a few modes and a fixed modification time. Inputs that state mtime or
// unix_mode get these, but no file is writable for others. Planned directories always have the mode that the run needs.
//
// The files of the package, by job:
//
//   - decoding: directory.go, decode.go, properties.go, load.go, cache.go
//   - staging: plan.go, size.go, order.go, stage.go, stage_copy.go, restage.go, stager.go, stage_image.go,
//     stage_compose.go, imagefile.go
//   - the cache of mounted images: mountcache.go, mountcache_bind.go
//   - capturing: capture.go, capture_scan.go, capture_put.go, capture_undeclared.go
//   - users' directories: ingest.go, extract.go
//
// An action is resolved before it is queued and again in its slot, both times through the Cache: the second time costs
// microseconds, while keeping the trees of 100,000 queued actions would cost gigabytes. A large input is fetched in one
// stream: four concurrent ranges took 0.92 to 1.22 times as long.
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

// ErrOutput is returned for an output that cannot be returned to the client: one of the wrong kind, or with a name
// that the API cannot express.
var ErrOutput = errors.New("unusable output")

// A MissingError lists blobs that are needed and absent from the store. It wraps cas.ErrNotFound.
type MissingError struct {
	Blobs []cas.Digest // in walk order, without duplicates
}

// Error names the first few blobs and their total count.
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

// A kindError is an error of a kind, whose text does not repeat the kind.
type kindError struct {
	kind error
	text string
}

func (e *kindError) Error() string { return e.text }
func (e *kindError) Unwrap() error { return e.kind }

func errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, text: fmt.Sprintf(format, args...)}
}

// notFound returns a *MissingError for d if err is cas.ErrNotFound, and err otherwise.
func notFound(d cas.Digest, err error) error {
	if errors.Is(err, cas.ErrNotFound) {
		return &MissingError{Blobs: []cas.Digest{d}}
	}
	return err
}

// An Input is a decoded and checked input root. It is immutable and safe for concurrent use.
type Input struct {
	root *directory
}

// Digest returns the digest of the root Directory.
func (in *Input) Digest() cas.Digest { return in.root.digest }

// Files returns the number of files in the expanded tree.
func (in *Input) Files() int64 { return in.root.files }

// Bytes returns the size of all files in the expanded tree, at most MaxInt64.
func (in *Input) Bytes() int64 { return in.root.bytes }

// An InputFile is a file or symlink of an input root.
type InputFile struct {
	Path    string     // relative to the root
	Digest  cas.Digest // zero for a symlink
	Symlink bool
	Tool    bool // it is marked as a part of the tool
}

// AllFiles yields each file and symlink in the expanded tree.
func (in *Input) AllFiles() iter.Seq[InputFile] {
	return func(yield func(InputFile) bool) {
		for p, d := range in.root.all(".") {
			for i := range d.entries {
				e := &d.entries[i]
				if e.kind != Directory && !yield(InputFile{join(p, e.name), e.digest, e.kind == Symlink, e.tool}) {
					return
				}
			}
		}
	}
}

// Lookup returns the kind of the entry at p, a clean path relative to the root. "" and "." are the root. It does not
// follow symlinks.
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

// parallel is the number of blobs that are read or written at once.
const parallel = 4

// each calls f with 0 to n-1, some in parallel, and waits for all calls. After an error, which it returns, or the end
// of ctx it starts no further call.
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

// join is path.Join for a clean directory and a name, without cleaning.
func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// resolve returns p, which is relative to dir, as a clean path relative to the root. The root itself is ".". A path
// that is absolute, leaves the root or is malformed is cas.ErrInvalid.
func resolve(dir, p string) (string, error) {
	clean := path.Join(dir, p)
	switch {
	case clean == "":
		return ".", nil
	case path.IsAbs(p) || path.IsAbs(dir):
		return "", errorf(cas.ErrInvalid, "path %+.256q is absolute", p)
	case clean == ".." || strings.HasPrefix(clean, "../"):
		return "", errorf(cas.ErrInvalid, "path %+.256q leaves the input root", p)
	case len(clean) > maxPath:
		return "", errorf(cas.ErrInvalid, "path %+.64q... is longer than %d bytes", p, maxPath)
	}
	if clean == "." {
		return clean, nil
	}
	for name := range strings.SplitSeq(clean, "/") {
		if why := badName(name); why != "" {
			return "", errorf(cas.ErrInvalid, "path %+.256q: the name %+.256q %s", p, name, why)
		}
	}
	return clean, nil
}
