// SPDX-License-Identifier: Apache-2.0

package faulty_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFaultyWithoutFaults: without faults it keeps the contracts.
func TestFaultyWithoutFaults(t *testing.T) {
	castest.TestStore(t, func(*testing.T) cas.Store { return faulty.New(castest.NewMemory(), nil) })
	castest.TestStore(t, func(*testing.T) cas.Store {
		return faulty.New(struct{ cas.Store }{castest.NewMemory()}, nil)
	})
	castest.TestActionCache(t, func(*testing.T) cas.ActionCache { return faulty.New(nil, castest.NewMemory()) })
}

func TestFaultyFails(t *testing.T) {
	f := faulty.New(castest.NewMemory(), nil)
	f.FailNth(faulty.Missing, 2, cas.ErrUnavailable)
	for i, want := range []error{nil, cas.ErrUnavailable, nil} {
		expect.Error(t, expect.Err(f.Missing(t.Context(), nil)), want, "call %d", i+1)
	}
	f.Fail(cas.ErrFull, faulty.Put, faulty.PutAll)
	b, d := castest.Blob(1, 100)
	for range 3 {
		expect.Error(t, f.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrFull, "Put")
		if errs := f.PutAll(t.Context(), make([]cas.Blob, 2)); len(errs) != 2 || !errors.Is(errs[1], cas.ErrFull) {
			t.Errorf("PutAll: got %v, want ErrFull twice", errs)
		}
	}
	f.Heal()
	if err := f.Put(t.Context(), d, bytes.NewReader(b)); err != nil || f.Calls(faulty.Put) != 4 {
		t.Errorf("after Heal: got %v, %d calls", err, f.Calls(faulty.Put))
	}
}

func TestFaultyLoses(t *testing.T) {
	lose := func(seed uint64) (*faulty.Store, []cas.Digest) {
		f := faulty.New(castest.NewMemory(), nil)
		for i := range 100 {
			must.Get(cas.PutBytes(t.Context(), f, cas.SHA256, []byte{byte(i)}))(t)
		}
		return f, f.Lose(seed, 0.1)
	}
	f, lost := lose(1)
	if _, again := lose(1); len(lost) != 10 || !slices.Equal(lost, again) {
		t.Errorf("the same seed lost %d blobs, then others", len(lost))
	}
	if _, other := lose(2); slices.Equal(lost, other) {
		t.Error("two seeds lost the same blobs")
	}
	expect.Slices(t, must.Get(f.Missing(t.Context(), lost))(t), lost, "Missing")
	expect.Error(t, expect.Err(f.Open(t.Context(), lost[0], 0)), cas.ErrNotFound, "Open")
	expect.Error(t, f.Put(t.Context(), lost[0], bytes.NewReader([]byte("x"))), cas.ErrMismatch, "Put of other content")
	for i := range 100 {
		must.Get(cas.PutBytes(t.Context(), f, cas.SHA256, []byte{byte(i)}))(t)
	}
	expect.Equal(t, len(must.Get(f.Missing(t.Context(), lost))(t)), 0, "after Put")
}

func TestFaultyReaders(t *testing.T) {
	f := faulty.New(castest.NewMemory(), nil)
	b, d := castest.Blob(1, 1000)
	must.Succeed(t, f.Put(t.Context(), d, bytes.NewReader(b)))
	read := func() ([]byte, error) {
		r := must.Get(f.Open(t.Context(), d, 0))(t)
		defer r.Close()
		return io.ReadAll(r)
	}
	for _, n := range []int64{0, 999} {
		f.Cut(n)
		if got, err := read(); err == nil || int64(len(got)) != n {
			t.Errorf("cut at %d: got %d bytes, %v", n, len(got), err)
		}
	}
	f.Cut(1000)
	expect.Equal(t, string(must.Get(read())(t)), string(b), "cut at the end")
	f.Flip()
	if got, err := read(); !errors.Is(err, cas.ErrCorrupt) || bytes.Equal(got, b) {
		t.Errorf("flipped: got %v, want other content and ErrCorrupt", err)
	}
}

func TestFaultyHolds(t *testing.T) {
	f := faulty.New(castest.NewMemory(), nil)
	gate := f.Hold(faulty.Missing)
	done := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	for _, ctx := range []context.Context{ctx, t.Context()} {
		go func() {
			_, err := f.Missing(ctx, nil)
			done <- err
		}()
		gate.Arrived()
	}
	cancel()
	expect.Error(t, <-done, context.Canceled, "cancelled at the gate")
	gate.Open()
	gate.Open()
	expect.Error(t, <-done, nil, "after Open of the gate")
}
