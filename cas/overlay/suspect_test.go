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

// wantMissing checks that exactly the blobs want of ds are missing.
func wantMissing(t *testing.T, what string, s cas.Store, ds, want []cas.Digest) {
	t.Helper()
	if got, err := s.Missing(t.Context(), ds); err != nil || !slices.Equal(got, want) {
		t.Errorf("%s: got %v, %v, want %v", what, got, err, want)
	}
}

// TestRefusedResultIsNoError checks that a result that the upstream refuses is sent once.
func TestRefusedResultIsNoError(t *testing.T) {
	for name, policy := range policies {
		for _, refusal := range []error{os.ErrPermission, errors.ErrUnsupported} {
			t.Run(fmt.Sprint(name, refusal), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPair(t, policy)
					p.faultyUpstream.Fail(refusal, castest.Record)
					action, r := built(t, p.store, 1)
					if err := p.actions.Record(t.Context(), action, r); err != nil {
						t.Error(err)
					}
					p.drain(t)
					if n := p.Stats().Refused; n != 1 || p.faultyUpstream.Calls(castest.Record) != 1 {
						t.Errorf("%d refused after %d calls, want 1 after 1", n, p.faultyUpstream.Calls(castest.Record))
					}
				})
			})
		}
	}
	// A cancelled call must not succeed.
	p := newPair(t, overlay.WriteThrough)
	gate := p.faultyUpstream.Hold(castest.Record)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		gate.Arrived()
		cancel()
	}()
	wantError(t, "cancelled", p.actions.Record(ctx, cas.SHA256.Sum(nil), &repb.ActionResult{}), context.Canceled)
}

// TestUnknownInstanceLosesNothing covers an upstream that does not know the instance, or rejects its name.
func TestUnknownInstanceLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrNotFound, castest.Missing, castest.Put, castest.PutAll, castest.Record)
		action, r := built(t, p.store, 1)
		must(t, p.actions.Record(t.Context(), action, r))
		time.Sleep(time.Minute)
		if s := p.Stats(); s.Lost != 0 || s.Pending != 4 {
			t.Errorf("got %+v, want 4 pending", s)
		}
		p.faultyUpstream.Heal()
		p.drain(t)
		if _, err := p.upstream.Lookup(t.Context(), action); err != nil || p.upstream.Len() != 3 {
			t.Errorf("upstream: got %d blobs and result error %v, want 3 and nil", p.upstream.Len(), err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		_, d := put(t, local, 1, 100)
		journal := filepath.Join(t.TempDir(), "journal")
		must(t, os.WriteFile(journal, fmt.Appendf(nil, "add blob \"\" %s\n", d), 0o600))
		refused := time.Now().Add(time.Minute)
		o := open(t, overlay.Config{
			Local: one(local, local), Policy: overlay.WriteBack, Journal: journal,
			Upstream: func(name string) (*cas.Instance, error) {
				if time.Now().Before(refused) {
					return nil, cas.ErrInvalid
				}
				return &cas.Instance{Store: upstream, Actions: upstream}, nil
			},
		})
		if err := o.Close(t.Context()); err != nil || o.Stats().Lost != 0 || !has(t, upstream, d) {
			t.Errorf("got %v, %d lost", err, o.Stats().Lost)
		}
	})
}

// TestRejectedBlobIsDelayed checks that a rejected blob is retried with increasing delays, and stays leased.
func TestRejectedBlobIsDelayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrFull, castest.Put)
		_, large := put(t, p.store, 1, 3<<20)
		for i := range 600 {
			if _, err := cas.PutBytes(t.Context(), p.store, cas.SHA256, fmt.Append(nil, i)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		// After 0, 1, 3, 7, ... 511 seconds.
		if n := p.faultyUpstream.Calls(castest.Put); n != 10 || p.upstream.Len() != 600 {
			t.Errorf("it was sent %d times in 10 minutes, want 10; upstream has %d of 600", n, p.upstream.Len())
		}
		renewals := p.faultyLocal.Calls(castest.Missing)
		time.Sleep(time.Hour)
		if p.faultyLocal.Calls(castest.Missing) == renewals {
			t.Error("the lease of a delayed blob was not renewed")
		}
		p.faultyUpstream.Heal()
		time.Sleep(10 * time.Minute)
		if n := p.Stats().Pending; n != 0 || !has(t, p.upstream, large) {
			t.Errorf("got %d pending, want 0 and the blob in the upstream", n)
		}
	})
}

// TestUnsentBlobsAreMissing checks that a blob whose upstream write failed is missing until it is there.
func TestUnsentBlobsAreMissing(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Put, castest.PutAll)
	a, first := castest.Blob(1, 100)
	b, second := castest.Blob(2, 100)
	_, known := put(t, p.local, 3, 100)
	wantError(t, "Put", p.store.Put(t.Context(), first, bytes.NewReader(a)), cas.ErrUnavailable)
	errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: second, Data: b}})
	wantError(t, "PutAll", errs[0], cas.ErrUnavailable)
	p.faultyUpstream.Heal()
	ds := []cas.Digest{second, known, first, second}
	wantMissing(t, "after failed writes", p.store, ds, []cas.Digest{second, first})
	put(t, p.store, 1, 100)
	wantMissing(t, "after the first was put again", p.store, ds, []cas.Digest{second})
	// A result sends its blobs.
	if err := p.actions.Record(t.Context(), cas.SHA256.Sum(nil),
		&repb.ActionResult{StdoutDigest: second.Proto()}); err != nil {
		t.Fatal(err)
	}
	wantMissing(t, "after the result", p.store, ds, nil)
	if !has(t, p.upstream, first) || !has(t, p.upstream, second) {
		t.Error("the blobs are not in the upstream")
	}
}

// TestManyUnsentBlobs exceeds the limit of remembered blobs. Missing must not query the upstream for all others then.
func TestManyUnsentBlobs(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.faultyUpstream.FailNth(castest.PutAll, 1, cas.ErrFull)
	var blobs []cas.Blob
	var ds []cas.Digest
	for i := range 1<<16 + 1 {
		b := fmt.Append(nil, i)
		ds = append(ds, cas.SHA256.Sum(b))
		blobs = append(blobs, cas.Blob{Digest: ds[i], Data: b})
	}
	wantError(t, "PutAll", p.store.(cas.Batcher).PutAll(t.Context(), blobs)[0], cas.ErrFull)
	if missing, err := p.store.Missing(t.Context(), ds); err != nil || len(missing) != len(ds) {
		t.Errorf("got %d of %d missing, %v", len(missing), len(ds), err)
	}
	last := len(blobs) - 1
	for _, err := range p.store.(cas.Batcher).PutAll(t.Context(), blobs[:last]) {
		must(t, err)
	}
	_, nowhere := castest.Blob(1, 100)
	_, neither := castest.Blob(2, 100)
	some := []cas.Digest{ds[0], nowhere, ds[last], ds[1], neither, ds[last]}
	wantMissing(t, "all but the last put again", p.store, some, []cas.Digest{nowhere, ds[last], neither})
	p.store.(cas.Batcher).PutAll(t.Context(), blobs[last:])
	wantMissing(t, "the last put again", p.store, some, []cas.Digest{nowhere, neither})
	p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Missing)
	wantMissing(t, "upstream unavailable", p.store, ds[:10], nil)
}

// TestUnreadableBlobsAreMissing checks that blobs the upstream lists but cannot deliver are missing until put again.
func TestUnreadableBlobsAreMissing(t *testing.T) {
	for name, policy := range policies {
		for _, failure := range []error{cas.ErrCorrupt, cas.ErrNotFound} {
			t.Run(fmt.Sprint(name, failure), func(t *testing.T) {
				p := newPair(t, policy)
				_, other := put(t, p.upstream, 1, 100)
				_, d := put(t, p.upstream, 2, 100)
				ds := []cas.Digest{d, other, d}
				wantMissing(t, "before", p.store, ds, nil)
				p.faultyUpstream.Fail(failure, castest.Open)
				_, err := p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, failure)
				wantMissing(t, "after the failed read", p.store, ds, []cas.Digest{d})
				put(t, p.store, 2, 100)
				wantMissing(t, "after a put", p.store, ds, nil)
				p.local.Delete(d)
				wantMissing(t, "after a local loss", p.store, ds, nil)
				_, err = p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, failure)
				p.faultyUpstream.Heal()
				if _, err := cas.ReadAll(t.Context(), p.store, d, 100); err != nil {
					t.Error(err)
				}
				p.local.Delete(d)
				wantMissing(t, "after a successful read", p.store, ds, nil)
			})
		}
	}
}

// TestUnreadableBlobsOfBatch covers a Copier that does not deliver every listed blob.
func TestUnreadableBlobsOfBatch(t *testing.T) {
	local, listed, held := castest.NewMemory(), castest.NewMemory(), castest.NewMemory()
	// It lists more than it delivers.
	o := open(t, overlay.Config{Local: one(local, nil), Upstream: one(&copier{Store: listed, from: held}, nil)})
	in := instance(t, o)
	var ds []cas.Digest
	for i := range 4 {
		_, d := put(t, listed, byte(i), 100)
		ds = append(ds, d)
	}
	put(t, held, 0, 100)
	put(t, held, 2, 100)
	for range 2 {
		must(t, cas.Fetch(t.Context(), in.Store, ds))
		wantMissing(t, "not delivered", in.Store, ds, []cas.Digest{ds[1], ds[3]})
	}
	put(t, held, 1, 100)
	put(t, held, 3, 100)
	must(t, cas.Fetch(t.Context(), in.Store, ds))
	local.Delete(ds[1])
	wantMissing(t, "delivered", in.Store, ds, nil)
}

// TestFailedLookupIsMiss checks that any upstream failure of a lookup is a miss.
func TestFailedLookupIsMiss(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	for i, failure := range []error{
		cas.ErrUnavailable, os.ErrPermission, context.DeadlineExceeded, status.Error(codes.Unimplemented, ""),
		status.Error(codes.Internal, ""),
	} {
		p.faultyUpstream.Fail(failure, castest.Lookup)
		_, err := p.actions.Lookup(t.Context(), cas.SHA256.Sum(nil))
		if wantError(t, failure.Error(), err, cas.ErrNotFound); p.Stats().Unanswered != int64(i+1) ||
			cas.Code(err) != codes.NotFound {
			t.Errorf("%v: got %d unanswered, code %v", failure, p.Stats().Unanswered, cas.Code(err))
		}
	}
	gate := p.faultyUpstream.Hold(castest.Lookup)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		gate.Arrived()
		cancel()
	}()
	_, err := p.actions.Lookup(ctx, cas.SHA256.Sum(nil))
	wantError(t, "cancelled", err, context.Canceled)
}

// A wornStore finds its only copy of a blob damaged, once.
type wornStore struct {
	cas.Store
	memory *castest.Memory
	worn   bool
}

func (w *wornStore) File(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
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

// TestLocalDamageIsRepaired checks that locally damaged blobs are fetched from the upstream.
func TestLocalDamageIsRepaired(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	want, d := put(t, p.store, 1, 100)
	p.faultyLocal.FailNth(castest.Open, 1, cas.ErrCorrupt)
	if got, err := cas.ReadAll(t.Context(), p.store, d, 100); err != nil || !bytes.Equal(got, want) {
		t.Errorf("Open: got %d bytes, %v", len(got), err)
	}
	in := instance(t, open(t, overlay.Config{
		Local:    one(&wornStore{Store: p.local, memory: p.local}, nil),
		Upstream: one(p.upstream, nil),
	}))
	filer, _ := cas.As[cas.Filer](in.Store)
	if _, _, err := filer.File(t.Context(), d, true); err != nil {
		t.Errorf("File: %v", err)
	}
}
