// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// alternatives returns the digests with the hash and size of d in the other functions of the instance.
func alternatives(in *cas.Instance, d cas.Digest) (ds []cas.Digest) {
	for _, f := range in.Serves() {
		if f == d.Function() {
			continue
		}
		if other, err := cas.NewDigest(f, d.Hash(), d.Size()); err == nil {
			ds = append(ds, other)
		}
	}
	return ds
}

// candidates returns what else than d an upload may have, whose request has the function f: if that is UNKNOWN, all
// alternatives until the instance's function is known, and then the default, which a second client may mean.
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

// undecided reports whether the function of d was assumed: f, of its request, is UNKNOWN, and nothing is known about the
// clients of the instance.
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
			errs[i] = c.Unstated(in.Name, b.Digest.Function())
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
		if err := c.Unstated(in.Name, d.Function()); err != nil {
			return err
		}
		return in.Store.Put(ctx, d, bytes.NewReader(b.Data))
	}
	return mismatch
}

// A decidingStore is a store whose Put stores a blob under the function that its content matches, and reports that
// function to the instance. It writes the content once for each possible function, since it cannot read it again.
type decidingStore struct {
	cas.Store
	others []cas.Digest
	report func(cas.Function) error
}

// Put implements cas.Store.
func (s decidingStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	ds := append([]cas.Digest{d}, s.others...)
	errs, panics := make([]error, len(ds)), make([]any, len(ds))
	to := make([]*io.PipeWriter, len(ds))
	var puts sync.WaitGroup
	for i, d := range ds {
		var from *io.PipeReader
		from, to[i] = io.Pipe()
		puts.Go(func() {
			defer func() {
				panics[i] = recover()
				from.Close() // the others continue
			}()
			errs[i] = s.Store.Put(ctx, d, from)
		})
	}
	copyToAll(to, r)
	puts.Wait()
	for _, p := range panics {
		if p != nil {
			panic(p) // it ends this call and not the process
		}
	}
	result := errs[0]
	for i, err := range errs {
		switch {
		case err == nil:
			return s.report(ds[i].Function())
		case !errors.Is(err, cas.ErrMismatch):
			result = err // the content may have matched this function
		}
	}
	return result
}

// copyToAll copies r to the writers until it ends or all of them are closed by their readers. The writers end like r.
func copyToAll(to []*io.PipeWriter, r io.Reader) {
	buf := buffers.Get(128 << 10)
	defer buffers.Put(buf)
	for {
		n, err := r.Read(*buf)
		open := 0
		for _, w := range to {
			if n == 0 { // an empty Write would wait for a Read
				open++
			} else if _, closed := w.Write((*buf)[:n]); closed == nil {
				open++
			}
		}
		if err == nil && open > 0 {
			continue
		}
		for _, w := range to {
			w.CloseWithError(err)
		}
		return
	}
}
