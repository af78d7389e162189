// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wantMissing checks which of ds are missing.
func wantMissing(t *testing.T, what string, s cas.Store, ds, want []cas.Digest) {
	t.Helper()
	if got, err := s.Missing(t.Context(), ds); err != nil || !slices.Equal(got, want) {
		t.Errorf("%s: got %v, %v, want %v", what, got, err, want)
	}
}

// TestRefusedResult: what far does not record fails nobody, and is not tried for ever.
func TestRefusedResult(t *testing.T) {
	for name, policy := range policies {
		for _, refusal := range []error{os.ErrPermission, errors.ErrUnsupported} {
			t.Run(fmt.Sprint(name, refusal), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPair(t, policy)
					p.faulty.Fail(refusal, castest.Record)
					action, r := built(t, p.store, 1)
					if err := p.actions.Record(t.Context(), action, r); err != nil {
						t.Error(err)
					}
					p.drain(t)
					if n := p.Stats().Refused; n != 1 || p.faulty.Calls(castest.Record) != 1 {
						t.Errorf("%d refused after %d calls, want 1 after 1", n, p.faulty.Calls(castest.Record))
					}
				})
			})
		}
	}
	// Who gives up is not told that it is done.
	p := newPair(t, overlay.WriteThrough)
	gate := p.faulty.Hold(castest.Record)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		gate.Arrived()
		cancel()
	}()
	wantError(t, "gave up", p.actions.Record(ctx, cas.SHA256.Sum(nil), &repb.ActionResult{}), context.Canceled)
}

// TestFarKnowsNothing: that far has no such instance, or none of this name, does not make near's blobs lost.
func TestFarKnowsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrNotFound, castest.Missing, castest.Put, castest.PutAll, castest.Record)
		action, r := built(t, p.store, 1)
		if err := p.actions.Record(t.Context(), action, r); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if s := p.Stats(); s.Lost != 0 || s.Pending != 4 {
			t.Errorf("got %+v, want 4 pending", s)
		}
		p.faulty.Heal()
		p.drain(t)
		if _, err := p.far.Lookup(t.Context(), action); err != nil || p.far.Len() != 3 {
			t.Errorf("far has %d blobs, and of the result %v", p.far.Len(), err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		near, far := castest.NewMemory(), castest.NewMemory()
		_, d := put(t, near, 1, 100)
		journal := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(journal, fmt.Appendf(nil, "add blob \"\" %s\n", d), 0o600); err != nil {
			t.Fatal(err)
		}
		refused := time.Now().Add(time.Minute)
		o := open(t, overlay.Config{Local: one(near, near), Policy: overlay.WriteBack, Journal: journal, Upstream: func(name string) (*cas.Instance, error) {
			if time.Now().Before(refused) {
				return nil, cas.ErrInvalid
			}
			return &cas.Instance{Store: far, Actions: far}, nil
		}})
		if err := o.Close(t.Context()); err != nil || o.Stats().Lost != 0 || !has(t, far, d) {
			t.Errorf("%v, %d lost", err, o.Stats().Lost)
		}
	})
}

// TestRefusedBlobRests: one that far does not take is not sent again with each of the others.
func TestRefusedBlobRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrFull, castest.Put)
		_, large := put(t, p.store, 1, 3<<20)
		for i := range 600 {
			if _, err := cas.PutBytes(t.Context(), p.store, cas.SHA256, fmt.Append(nil, i)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		// After 0, 1, 3, 7, ... 511 seconds.
		if n := p.faulty.Calls(castest.Put); n != 10 || p.far.Len() != 600 {
			t.Errorf("it was sent %d times in 10 minutes, want 10; far has %d of 600", n, p.far.Len())
		}
		asked := p.nearSide.Calls(castest.Missing)
		time.Sleep(time.Hour)
		if p.nearSide.Calls(castest.Missing) == asked {
			t.Error("what rests is not marked as used near")
		}
		p.faulty.Heal()
		time.Sleep(10 * time.Minute)
		if n := p.Stats().Pending; n != 0 || !has(t, p.far, large) {
			t.Errorf("%d pending", n)
		}
	})
}

// TestUnsentIsMissing: what a client was told that it is not far is not called present until it is.
func TestUnsentIsMissing(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.faulty.Fail(cas.ErrUnavailable, castest.Put, castest.PutAll)
	a, first := castest.Blob(1, 100)
	b, second := castest.Blob(2, 100)
	_, known := put(t, p.near, 3, 100)
	wantError(t, "Put", p.store.Put(t.Context(), first, bytes.NewReader(a)), cas.ErrUnavailable)
	errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: second, Data: b}})
	wantError(t, "PutAll", errs[0], cas.ErrUnavailable)
	p.faulty.Heal()
	ds := []cas.Digest{second, known, first, second}
	wantMissing(t, "failed far", p.store, ds, []cas.Digest{second, first})
	put(t, p.store, 1, 100)
	wantMissing(t, "the first was put again", p.store, ds, []cas.Digest{second})
	// A result sends what it needs.
	if err := p.actions.Record(t.Context(), cas.SHA256.Sum(nil), &repb.ActionResult{StdoutDigest: second.Proto()}); err != nil {
		t.Fatal(err)
	}
	wantMissing(t, "both", p.store, ds, nil)
	if !has(t, p.far, first) || !has(t, p.far, second) {
		t.Error("they are not far")
	}
}

// TestManyUnsent: of more than can be remembered, too, none is called present before it is far; and it does not make
// Missing ask far for all others from then on.
func TestManyUnsent(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.faulty.FailNth(castest.PutAll, 1, cas.ErrFull)
	var blobs []cas.Blob
	var ds []cas.Digest
	for i := range 1<<16 + 1 {
		b := fmt.Append(nil, i)
		ds = append(ds, cas.SHA256.Sum(b))
		blobs = append(blobs, cas.Blob{Digest: ds[i], Data: b})
	}
	wantError(t, "PutAll", p.store.(cas.Batcher).PutAll(t.Context(), blobs)[0], cas.ErrFull)
	if missing, err := p.store.Missing(t.Context(), ds); err != nil || len(missing) != len(ds) {
		t.Errorf("%d of %d are missing, %v", len(missing), len(ds), err)
	}
	last := len(blobs) - 1
	for _, err := range p.store.(cas.Batcher).PutAll(t.Context(), blobs[:last]) {
		if err != nil {
			t.Fatal(err)
		}
	}
	_, nowhere := castest.Blob(1, 100)
	_, neither := castest.Blob(2, 100)
	some := []cas.Digest{ds[0], nowhere, ds[last], ds[1], neither, ds[last]}
	wantMissing(t, "all but the last were put again", p.store, some, []cas.Digest{nowhere, ds[last], neither})
	p.store.(cas.Batcher).PutAll(t.Context(), blobs[last:])
	wantMissing(t, "so was the last", p.store, some, []cas.Digest{nowhere, neither})
	p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
	wantMissing(t, "far is away", p.store, ds[:10], nil)
}

// TestUnreadIsMissing: what far has and does not bring is put again, and then is there.
func TestUnreadIsMissing(t *testing.T) {
	for name, policy := range policies {
		for _, failure := range []error{cas.ErrCorrupt, cas.ErrNotFound} {
			t.Run(fmt.Sprint(name, failure), func(t *testing.T) {
				p := newPair(t, policy)
				_, other := put(t, p.far, 1, 100)
				_, d := put(t, p.far, 2, 100)
				ds := []cas.Digest{d, other, d}
				wantMissing(t, "before", p.store, ds, nil)
				p.faulty.Fail(failure, castest.Open)
				_, err := p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, failure)
				wantMissing(t, "it cannot be read", p.store, ds, []cas.Digest{d})
				put(t, p.store, 2, 100)
				wantMissing(t, "it was put", p.store, ds, nil)
				p.near.Delete(d)
				wantMissing(t, "near has lost it", p.store, ds, nil)
				_, err = p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, failure)
				p.faulty.Heal()
				if _, err := cas.ReadAll(t.Context(), p.store, d, 100); err != nil {
					t.Error(err)
				}
				p.near.Delete(d)
				wantMissing(t, "it can be read", p.store, ds, nil)
			})
		}
	}
}

// TestUnreadOfMany: a copy of many that does not bring one of them leaves that one in doubt, and puts it there.
func TestUnreadOfMany(t *testing.T) {
	near, listed, held := castest.NewMemory(), castest.NewMemory(), castest.NewMemory()
	// What far lists is not all that it brings.
	o := open(t, overlay.Config{Local: one(near, nil), Upstream: one(&copier{Store: listed, from: held}, nil)})
	in, err := o.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	var ds []cas.Digest
	for i := range 4 {
		_, d := put(t, listed, byte(i), 100)
		ds = append(ds, d)
	}
	put(t, held, 0, 100)
	put(t, held, 2, 100)
	for range 2 {
		if err := cas.Fetch(t.Context(), in.Store, ds); err != nil {
			t.Fatal(err)
		}
		wantMissing(t, "not brought", in.Store, ds, []cas.Digest{ds[1], ds[3]})
	}
	put(t, held, 1, 100)
	put(t, held, 3, 100)
	if err := cas.Fetch(t.Context(), in.Store, ds); err != nil {
		t.Fatal(err)
	}
	near.Delete(ds[1])
	wantMissing(t, "brought", in.Store, ds, nil)
}

// TestFarDoesNotSay: whatever keeps far from looking up a result, it is a miss.
func TestFarDoesNotSay(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	for i, failure := range []error{
		cas.ErrUnavailable, os.ErrPermission, context.DeadlineExceeded, status.Error(codes.Unimplemented, ""), status.Error(codes.Internal, ""),
	} {
		p.faulty.Fail(failure, castest.Lookup)
		_, err := p.actions.Lookup(t.Context(), cas.SHA256.Sum(nil))
		if wantError(t, failure.Error(), err, cas.ErrNotFound); p.Stats().Unanswered != int64(i+1) || cas.Code(err) != codes.NotFound {
			t.Errorf("%v: %d unasked, code %v", failure, p.Stats().Unanswered, cas.Code(err))
		}
	}
	gate := p.faulty.Hold(castest.Lookup)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		gate.Arrived()
		cancel()
	}()
	_, err := p.actions.Lookup(ctx, cas.SHA256.Sum(nil))
	wantError(t, "gave up", err, context.Canceled)
}

// A worn store finds its only copy of a blob damaged, once.
type worn struct {
	cas.Store
	memory *castest.Memory
	worn   bool
}

func (w *worn) File(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	if !w.worn {
		w.worn = true
		w.memory.Delete(d)
		return "", nil, cas.ErrCorrupt
	}
	missing, err := w.Missing(ctx, []cas.Digest{d})
	if len(missing) > 0 {
		err = cas.ErrNotFound
	}
	return "/a/file", func() {}, err
}

// TestDamageNear: what near finds damaged comes from far.
func TestDamageNear(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	want, d := put(t, p.store, 1, 100)
	p.nearSide.FailNth(castest.Open, 1, cas.ErrCorrupt)
	if got, err := cas.ReadAll(t.Context(), p.store, d, 100); err != nil || !bytes.Equal(got, want) {
		t.Errorf("Open: got %d bytes, %v", len(got), err)
	}
	in, err := open(t, overlay.Config{Local: one(&worn{Store: p.near, memory: p.near}, nil), Upstream: one(p.far, nil)}).Instance("")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := in.Store.(cas.Filer).File(t.Context(), d, true); err != nil {
		t.Errorf("File: %v", err)
	}
}
