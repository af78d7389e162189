// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
)

// serving returns the instances of far, which serves SHA-256 alone, and says so once known is set.
func serving(far *castest.Memory, known *atomic.Bool) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in := &cas.Instance{Name: name, Store: far, Actions: far}
		if known.Load() {
			in.Functions = []cas.Function{cas.SHA256}
		}
		return in, nil
	}
}

// What far does not serve is not taken near either, where it would stay unsent for ever.
func TestWritesOfUnservedFunctionsAreRefused(t *testing.T) {
	for _, policy := range []overlay.Policy{overlay.WriteThrough, overlay.WriteBack} {
		near, far := castest.NewMemory(), castest.NewMemory()
		var known atomic.Bool
		known.Store(true)
		o := open(t, overlay.Config{Local: one(near, near), Upstream: serving(far, &known), Policy: policy, Journal: filepath.Join(t.TempDir(), "journal")})
		in, err := o.Instance("")
		if err != nil {
			t.Fatal(err)
		}
		b := []byte("of two functions")
		mine, other := cas.SHA256.Sum(b), cas.SHA1.Sum(b)
		if err := in.Store.Put(t.Context(), other, bytes.NewReader(b)); !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("%v: Put: got %v, want ErrInvalid", policy, err)
		}
		errs := in.Store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: other, Data: b}, {Digest: mine, Data: b}})
		if !errors.Is(errs[0], cas.ErrInvalid) || errs[1] != nil {
			t.Errorf("%v: PutAll: got %v, want ErrInvalid and nil", policy, errs)
		}
		if err := in.Actions.Record(t.Context(), other, &repb.ActionResult{}); !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("%v: Record: got %v, want ErrInvalid", policy, err)
		}
		if err := in.Store.(cas.Splicer).Splice(t.Context(), other, cas.ChunkList{Chunks: []cas.Digest{other}}); !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("%v: Map: got %v, want ErrInvalid", policy, err)
		}
		if has(t, near, other) || !has(t, near, mine) {
			t.Errorf("%v: near has what far does not serve, or lacks what it does", policy)
		}
		if err := o.Close(t.Context()); err != nil || !has(t, far, mine) {
			t.Errorf("%v: %v, and far has %d blobs", policy, err, far.Len())
		}
	}
}

// What was taken before far had said what it serves is given up when it has, and holds up nothing else.
func TestUnservedFunctionsAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := castest.NewMemory(), castest.NewMemory()
		side := castest.NewFaulty(far, far)
		side.Fail(cas.ErrUnavailable, castest.Missing)
		var known atomic.Bool
		o := open(t, overlay.Config{
			Local: one(near, near), Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "journal"),
			Upstream: func(name string) (*cas.Instance, error) {
				in, err := serving(far, &known)(name)
				in.Store = side
				return in, err
			},
		})
		in, err := o.Instance("")
		if err != nil {
			t.Fatal(err)
		}
		b := []byte("of two functions")
		mine, other := cas.SHA256.Sum(b), cas.SHA1.Sum(b)
		for _, d := range []cas.Digest{other, mine} {
			if err := in.Store.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		known.Store(true)
		side.Heal()
		if err := o.Close(t.Context()); err != nil || !has(t, far, mine) || has(t, far, other) || o.Stats().Lost != 1 {
			t.Errorf("%v; far has %d blobs, %+v", err, far.Len(), o.Stats())
		}
	})
}
