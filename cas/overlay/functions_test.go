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
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// serving returns instances of upstream that serve only SHA-256, and report it once known is set.
func serving(upstream *castest.Memory, known *atomic.Bool) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in := &cas.Instance{Name: name, Store: upstream, Actions: upstream}
		if known.Load() {
			in.Functions = []cas.Function{cas.SHA256}
		}
		return in, nil
	}
}

// The local store must not accept blobs that can never be sent.
func TestWritesOfUnservedFunctionsAreRefused(t *testing.T) {
	for _, policy := range []overlay.Policy{overlay.WriteThrough, overlay.WriteBack} {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		var known atomic.Bool
		known.Store(true)
		o := open(t, overlay.Config{
			Local: one(local, local), Upstream: serving(upstream, &known), Policy: policy,
			Journal: filepath.Join(t.TempDir(), "journal"),
		})
		in := instance(t, o)
		b := []byte("of two functions")
		mine, other := cas.SHA256.Sum(b), cas.SHA1.Sum(b)
		expect.Error(t, in.Store.Put(t.Context(), other, bytes.NewReader(b)), cas.ErrInvalid, "%v: Put", policy)
		errs := in.Store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{
			{Digest: other, Data: b},
			{Digest: mine, Data: b},
		})
		expect.That(t, errors.Is(errs[0], cas.ErrInvalid) && errs[1] == nil,
			"%v: PutAll: got %v, want ErrInvalid and nil", policy, errs)
		expect.Error(t, in.Actions.Record(t.Context(), other, &repb.ActionResult{}), cas.ErrInvalid, "%v: Record",
			policy)
		expect.Error(t, in.Store.(cas.Splicer).Splice(t.Context(), other,
			cas.ChunkList{Chunks: []cas.Digest{other}}), cas.ErrInvalid, "%v: Splice", policy)
		expect.That(t, !has(t, local, other) && has(t, local, mine),
			"%v: the local store accepted the unserved function, or rejected the served one", policy)
		if err := o.Close(t.Context()); err != nil || !has(t, upstream, mine) {
			t.Errorf("%v: got %v and %d upstream blobs", policy, err, upstream.Len())
		}
	}
}

// Writes accepted before the functions of the upstream were known are dropped, and do not delay others.
func TestWritesOfUnservedFunctionsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		side := faulty.New(upstream, upstream)
		disconnect(side)
		var known atomic.Bool
		o := open(t, overlay.Config{
			Local: one(local, local), Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "journal"),
			Upstream: func(name string) (*cas.Instance, error) {
				in, err := serving(upstream, &known)(name)
				in.Store = side
				return in, err
			},
		})
		in := instance(t, o)
		b := []byte("of two functions")
		mine, other := cas.SHA256.Sum(b), cas.SHA1.Sum(b)
		for _, d := range []cas.Digest{other, mine} {
			must.Succeed(t, in.Store.Put(t.Context(), d, bytes.NewReader(b)))
		}
		synctest.Wait()
		known.Store(true)
		side.Heal()
		if err := o.Close(t.Context()); err != nil || !has(t, upstream, mine) || has(t, upstream, other) ||
			o.Stats().Lost != 1 {
			t.Errorf("got %v, %d upstream blobs, %+v", err, upstream.Len(), o.Stats())
		}
	})
}
