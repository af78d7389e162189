// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"golang.org/x/sync/semaphore"
)

// alternatives returns the digests with the hash and size of d in the other functions of the instance.
func alternatives(in *cas.Instance, d cas.Digest) (ds []cas.Digest) {
	for _, f := range in.Serves() {
		if f == d.Function() || f.Size() != d.Function().Size() {
			continue
		}
		if other, err := cas.NewDigest(f, d.Hash(), d.Size()); err == nil {
			ds = append(ds, other)
		}
	}
	return ds
}

// candidates returns the other digests that an upload may have if its request states no function (f is UNKNOWN): all
// alternatives until the instance's function is known, then only the default, which a second client may use.
func (c *Config) candidates(in *cas.Instance, f repb.DigestFunction_Value, d cas.Digest) []cas.Digest {
	if f != repb.DigestFunction_UNKNOWN || c.Unstated == nil {
		return nil
	}
	known := slices.Contains(in.Unstated, d.Function())
	for _, f := range in.Serves() {
		switch {
		case f.Size() != d.Function().Size():
		case !known:
			return alternatives(in, d)
		case f == d.Function():
			return nil
		default:
			return alternatives(in, d)[:1]
		}
	}
	return nil
}

// undecided reports whether the function of d was assumed: the request's function f is UNKNOWN, and the functions of
// the instance's clients are unknown.
func (c *Config) undecided(in *cas.Instance, f repb.DigestFunction_Value, d cas.Digest) bool {
	return !slices.Contains(in.Unstated, d.Function()) && len(c.candidates(in, f, d)) > 0
}

// putAll is cas.PutAll for a request with the function f. If that is UNKNOWN, the contents decide between functions.
func (c *Config) putAll(ctx context.Context, in *cas.Instance, f repb.DigestFunction_Value, blobs []cas.Blob) []error {
	errs := cas.PutAll(ctx, in.Store, blobs)
	if f != repb.DigestFunction_UNKNOWN || c.Unstated == nil {
		return errs
	}
	for i, b := range blobs {
		switch {
		case errors.Is(errs[i], cas.ErrMismatch):
			errs[i] = c.putAs(ctx, in, b, errs[i])
		case errs[i] == nil && c.undecided(in, f, b.Digest):
			errs[i] = c.Unstated(ctx, in.Name, b.Digest.Function())
		}
	}
	return errs
}

// putAs stores a blob under another function that its content matches. Otherwise it returns mismatch.
func (c *Config) putAs(ctx context.Context, in *cas.Instance, b cas.Blob, mismatch error) error {
	for _, d := range alternatives(in, b.Digest) {
		if d.Function().Sum(b.Data) != d {
			continue
		}
		if err := c.Unstated(ctx, in.Name, d.Function()); err != nil {
			return err
		}
		return in.Store.Put(ctx, d, bytes.NewReader(b.Data))
	}
	return mismatch
}

const (
	// maxDeciding is the size up to which a decidingStore keeps a blob in memory until it knows its function.
	maxDeciding = 16 << 20
	// maxDecidingMemory limits all of these blobs together.
	maxDecidingMemory = 4 * maxDeciding
	// maxForked limits the bytes of concurrent uploads that are written under every candidate function, each of which
	// takes room in the store.
	maxForked = 16 * maxDeciding
)

// A decidingStore is a store whose Put stores a blob under the function that its content matches, and reports it. A
// larger blob, or any blob while memory is short, is written once per candidate function, and only the write that
// matches succeeds. If forked is nil or exhausted, it is written only under the assumed function; if its content has
// another one, the client must send it again.
type decidingStore struct {
	cas.Store
	memory *semaphore.Weighted
	forked *semaphore.Weighted // nil if the functions of the instance's clients are known
	others []cas.Digest
	report func(cas.Function) error
}

// Put implements cas.Store.
func (s decidingStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if d.Size() > maxDeciding || !s.memory.TryAcquire(d.Size()) {
		if s.forked == nil || !s.forked.TryAcquire(d.Size()) {
			return s.putUnread(ctx, d, r)
		}
		defer s.forked.Release(d.Size())
		return s.putAsEach(ctx, d, r)
	}
	defer s.memory.Release(d.Size())
	data, err := io.ReadAll(io.LimitReader(r, d.Size()+1))
	if err != nil {
		return err
	}
	for _, d := range append([]cas.Digest{d}, s.others...) {
		if d.Function().Sum(data) != d {
			continue
		}
		if err := s.report(d.Function()); err != nil {
			return err
		}
		return s.Store.Put(ctx, d, bytes.NewReader(data))
	}
	return cas.Mismatch(d, d.Function().Sum(data))
}

// putAsEach writes a blob under every candidate function. All writes but one fail, since the content does not match. If
// the store has no room for the one that matches, which may be due to the others, the client must send the blob again.
func (s decidingStore) putAsEach(ctx context.Context, d cas.Digest, r io.Reader) error {
	f := &fork{put: func(d cas.Digest, r io.Reader) error { return s.Store.Put(ctx, d, r) }, others: s.others}
	defer f.end(errNotMeant)
	all := append([]cas.Digest{d}, s.others...)
	hashes, sums := newHashes(all)
	tee := io.TeeReader(io.TeeReader(r, sums), f)
	err := s.Store.Put(ctx, d, tee)
	switch {
	case err == nil:
		return s.report(d.Function())
	case errors.Is(err, cas.ErrMismatch), errors.Is(err, cas.ErrFull) && f.to != nil:
	default:
		return err
	}
	if _, err := io.Copy(io.Discard, tee); err != nil { // the other puts need the rest
		return err
	}
	f.end(nil)
	for i, e := range append([]error{err}, f.errs...) {
		switch {
		case e == nil:
			return s.report(all[i].Function())
		case errors.Is(e, cas.ErrFull) && all[i].Function().Digest(hashes[i], d.Size()) == all[i]:
			return s.refuse(all[i].Function())
		case !errors.Is(e, cas.ErrMismatch):
			err = e
		}
	}
	return err
}

// errNotMeant ends puts under functions that a blob does not have.
var errNotMeant = errors.New("the blob has another digest function")

// A fork copies its input to one put per other digest. These puts begin with the first write, so that the main put
// reserves its space first.
type fork struct {
	put     func(cas.Digest, io.Reader) error
	others  []cas.Digest
	to      []*io.PipeWriter // nil before the first write
	errs    []error          // of others
	running sync.WaitGroup
	// panicked is the value and the stack of a put's panic.
	panicked atomic.Value
}

// Write implements io.Writer. It does not fail: a put that has ended ignores the rest.
func (f *fork) Write(p []byte) (int, error) {
	if f.to == nil {
		f.errs = make([]error, len(f.others))
		for i, d := range f.others {
			r, w := io.Pipe()
			f.to = append(f.to, w)
			f.running.Go(func() {
				defer r.Close()
				defer func() {
					if p := recover(); p != nil { // the caller's goroutine handles it
						f.panicked.Store(fmt.Sprintf("%v\n%s", p, debug.Stack()))
					}
				}()
				f.errs[i] = f.put(d, r)
			})
		}
	}
	for _, w := range f.to {
		_, _ = w.Write(p)
	}
	return len(p), nil
}

// end closes the content with err, or with io.EOF if err is nil, and waits for the puts. Later calls do nothing.
func (f *fork) end(err error) {
	for _, w := range f.to {
		_ = w.CloseWithError(err)
	}
	f.running.Wait()
	if p := f.panicked.Swap(""); p != nil && p != "" {
		panic(p)
	}
}

// putUnread stores a blob if it has the assumed function. Otherwise it reports the actual one and asks the client to
// send the blob again.
func (s decidingStore) putUnread(ctx context.Context, d cas.Digest, r io.Reader) error {
	hashes, sums := newHashes(s.others)
	err := s.Store.Put(ctx, d, io.TeeReader(r, sums))
	if err == nil {
		return s.report(d.Function())
	}
	if !errors.Is(err, cas.ErrMismatch) {
		return err
	}
	for i, other := range s.others {
		if other.Function().Digest(hashes[i], d.Size()) == other {
			return s.refuse(other.Function())
		}
	}
	return err
}

// newHashes returns a new hash for the function of each digest in ds, and a writer to all of them.
func newHashes(ds []cas.Digest) (hashes []hash.Hash, to io.Writer) {
	var all []io.Writer
	for _, d := range ds {
		h := d.Function().New(d.Size())
		hashes, all = append(hashes, h), append(all, h)
	}
	return hashes, io.MultiWriter(all...)
}

// refuse reports the function of a blob that is not stored, and asks the client to send the blob again.
func (s decidingStore) refuse(f cas.Function) error {
	if err := s.report(f); err != nil {
		return err
	}
	return fmt.Errorf("%w: the digest function of this client was unknown before this upload: %v; send the blob again",
		cas.ErrUnavailable, f)
}
