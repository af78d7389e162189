// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wantMissing checks that exactly the blobs want of ds are missing.
func wantMissing(t *testing.T, what string, s cas.Store, ds, want []cas.Digest) {
	t.Helper()
	expect.Slices(t, must.Get(s.Missing(t.Context(), ds))(t), want, "%s", what)
}

// TestRefusedResultIsNoError checks that a result that the upstream refuses is sent once.
func TestRefusedResultIsNoError(t *testing.T) {
	for name, policy := range policies {
		for _, refusal := range []error{os.ErrPermission, errors.ErrUnsupported} {
			if policy == overlay.WriteBack && refusal == os.ErrPermission {
				continue // TestDeniedResultIsSentLater
			}
			t.Run(fmt.Sprint(name, refusal), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPair(t, policy)
					p.faultyUpstream.Fail(refusal, faulty.Record)
					action, r := built(t, p.store, 1)
					must.Succeed(t, p.actions.Record(t.Context(), action, r))
					p.drain(t)
					if n := p.Stats().Refused; n != 1 || p.faultyUpstream.Calls(faulty.Record) != 1 {
						t.Errorf("%d refused after %d calls, want 1 after 1", n, p.faultyUpstream.Calls(faulty.Record))
					}
				})
			})
		}
	}
	// A cancelled call must not succeed.
	p := newPair(t, overlay.WriteThrough)
	gate := p.faultyUpstream.Hold(faulty.Record)
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
		p.faultyUpstream.Fail(cas.ErrNotFound, faulty.Missing, faulty.Put, faulty.PutAll, faulty.Record)
		action, r := built(t, p.store, 1)
		must.Succeed(t, p.actions.Record(t.Context(), action, r))
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
		must.Succeed(t, os.WriteFile(journal, fmt.Appendf(nil, "add blob \"\" %s\n", d), 0o600))
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
		p.faultyUpstream.Fail(cas.ErrFull, faulty.Put)
		_, large := put(t, p.store, 1, 3<<20)
		for i := range 600 {
			must.Get(cas.PutBytes(t.Context(), p.store, cas.SHA256, fmt.Append(nil, i)))(t)
			time.Sleep(time.Second)
		}
		// After 0, 1, 3, 7, ... 511 seconds.
		if n := p.faultyUpstream.Calls(faulty.Put); n != 10 || p.upstream.Len() != 600 {
			t.Errorf("it was sent %d times in 10 minutes, want 10; upstream has %d of 600", n, p.upstream.Len())
		}
		renewals := p.faultyLocal.Calls(faulty.Missing)
		time.Sleep(time.Hour)
		expect.That(t, p.faultyLocal.Calls(faulty.Missing) != renewals, "the lease of a delayed blob was not renewed")
		p.faultyUpstream.Heal()
		time.Sleep(10 * time.Minute)
		if n := p.Stats().Pending; n != 0 || !has(t, p.upstream, large) {
			t.Errorf("got %d pending, want 0 and the blob in the upstream", n)
		}
	})
}

// TestUnreadableBlobsAreMissing checks that blobs the upstream lists but cannot deliver are missing until put again.
func TestUnreadableBlobsAreMissing(t *testing.T) {
	for name, policy := range policies {
		for failure, want := range map[error]error{
			cas.ErrCorrupt: cas.ErrCorrupt, cas.ErrNotFound: cas.ErrNotFound,
			// The upstream answers, so it is only this blob that it cannot read.
			cas.ErrUnavailable: cas.ErrCorrupt, errors.New("bad sector"): cas.ErrCorrupt,
		} {
			t.Run(fmt.Sprint(name, failure), func(t *testing.T) {
				p := newPair(t, policy)
				_, other := put(t, p.upstream, 1, 100)
				_, d := put(t, p.upstream, 2, 100)
				ds := []cas.Digest{d, other, d}
				wantMissing(t, "before", p.store, ds, nil)
				p.faultyUpstream.Fail(failure, faulty.Open)
				_, err := p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, want)
				wantMissing(t, "after the failed read", p.store, ds, []cas.Digest{d})
				expect.Equal(t, p.Stats().Unreadable, 1, "unreadable")
				put(t, p.store, 2, 100)
				wantMissing(t, "after a put", p.store, ds, nil)
				p.local.Delete(d)
				wantMissing(t, "after a local loss", p.store, ds, nil)
				_, err = p.store.Open(t.Context(), d, 0)
				wantError(t, "Open", err, want)
				p.faultyUpstream.Heal()
				must.Get(cas.ReadAll(t.Context(), p.store, d, 100))(t)
				p.local.Delete(d)
				wantMissing(t, "after a successful read", p.store, ds, nil)
			})
		}
	}
}

// TestAbsentBlobsAreNotUnreadable checks that a blob that the upstream does not list is not reported.
func TestAbsentBlobsAreNotUnreadable(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, err := p.store.Open(t.Context(), cas.SHA256.Sum([]byte("absent")), 0)
	wantError(t, "Open", err, cas.ErrNotFound)
	expect.Equal(t, p.Stats().Unreadable, 0, "unreadable")
}

// TestUnreadableBlobIsReplaced damages a blob of the upstream behind its back: the upstream lists it, but fails to read
// it. A new upload must replace it.
func TestUnreadableBlobIsReplaced(t *testing.T) {
	for name, policy := range policies {
		for _, size := range []int{100, 3 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				p := newPair(t, policy)
				_, d := put(t, p.upstream, 1, size)
				p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Open)
				for range 2 {
					_, err := cas.ReadAll(t.Context(), p.store, d, 4<<20)
					wantError(t, "read", err, cas.ErrCorrupt)
				}
				expect.Equal(t, p.Stats().Unreadable, 2, "unreadable")
				p.upstream.Corrupt(d)
				p.faultyUpstream.Heal()
				wantMissing(t, "unreadable", p.store, []cas.Digest{d}, []cas.Digest{d})
				b, _ := put(t, p.store, 1, size)
				p.drain(t)
				wantWhole(t, p.upstream, d, b)
			})
		}
	}
}

// TestUnavailableUpstreamIsNotSuspect checks that blobs are not suspect because the upstream as a whole fails.
func TestUnavailableUpstreamIsNotSuspect(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, d := put(t, p.upstream, 1, 100)
	disconnect(p.faultyUpstream)
	_, err := p.store.Open(t.Context(), d, 0)
	wantError(t, "upstream unavailable", err, cas.ErrUnavailable)
	p.faultyUpstream.Heal()
	wantMissing(t, "upstream available", p.store, []cas.Digest{d}, nil)
	// It may refuse all reads.
	p.faultyUpstream.Fail(os.ErrPermission, faulty.Open)
	_, err = p.store.Open(t.Context(), d, 0)
	wantError(t, "reads forbidden", err, os.ErrPermission)
	wantMissing(t, "reads forbidden", p.store, []cas.Digest{d}, nil)
	// It may ask for fewer reads.
	p.faultyUpstream.Fail(cas.ErrThrottled, faulty.Open)
	_, err = p.store.Open(t.Context(), d, 0)
	wantError(t, "reads throttled", err, cas.ErrUnavailable)
	wantMissing(t, "reads throttled", p.store, []cas.Digest{d}, nil)
	// A full local store makes reads direct.
	p.faultyUpstream.Heal()
	p.faultyLocal.Fail(cas.ErrFull, faulty.Put)
	p.faultyUpstream.Cut(50)
	_, err = cas.ReadAll(t.Context(), p.store, d, 100)
	wantError(t, "direct read", err, cas.ErrCorrupt)
	wantMissing(t, "direct read", p.store, []cas.Digest{d}, []cas.Digest{d})
}

// TestUnreadableBlobDoesNotEndBatch checks that a batch copies all blobs but the one that the upstream cannot read.
func TestUnreadableBlobDoesNotEndBatch(t *testing.T) {
	local, upstream := castest.NewMemory(), castest.NewMemory()
	flaky := faulty.New(upstream, nil)
	c := &copier{Store: flaky, from: castest.NewMemory(), fail: cas.ErrUnavailable}
	in := instance(t, open(t, overlay.Config{Local: one(local, local), Upstream: one(c, nil)}))
	var ds []cas.Digest
	for i := range 4 {
		_, d := put(t, upstream, byte(i), 1000)
		ds = append(ds, d)
	}
	flaky.FailNth(faulty.Open, 2, cas.ErrUnavailable)
	must.Succeed(t, cas.Fetch(t.Context(), in.Store, ds))
	wantMissing(t, "after the batch", in.Store, ds, ds[1:2])
	expect.That(t, has(t, local, ds[0]), "the batch copied nothing")
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
		must.Succeed(t, cas.Fetch(t.Context(), in.Store, ds))
		wantMissing(t, "not delivered", in.Store, ds, []cas.Digest{ds[1], ds[3]})
	}
	put(t, held, 1, 100)
	put(t, held, 3, 100)
	must.Succeed(t, cas.Fetch(t.Context(), in.Store, ds))
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
		p.faultyUpstream.Fail(failure, faulty.Lookup)
		_, err := p.actions.Lookup(t.Context(), cas.SHA256.Sum(nil))
		if wantError(t, failure.Error(), err, cas.ErrNotFound); p.Stats().Unanswered != int64(i+1) ||
			casstatus.Code(err) != codes.NotFound {
			t.Errorf("%v: got %d unanswered, code %v", failure, p.Stats().Unanswered, casstatus.Code(err))
		}
	}
	gate := p.faultyUpstream.Hold(faulty.Lookup)
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
	p.faultyLocal.FailNth(faulty.Open, 1, cas.ErrCorrupt)
	expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), p.store, d, 100))(t)), string(want), "Open")
	in := instance(t, open(t, overlay.Config{
		Local:    one(&wornStore{Store: p.local, memory: p.local}, nil),
		Upstream: one(p.upstream, nil),
	}))
	filer, _ := cas.As[cas.Filer](in.Store)
	if _, _, err := filer.File(t.Context(), d, true); err != nil {
		t.Errorf("File: %v", err)
	}
}
