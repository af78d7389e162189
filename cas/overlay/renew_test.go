// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// An expiringStore deletes blobs at an age, like a bucket with a lifecycle rule.
type expiringStore struct {
	*castest.Memory
	lifetime time.Duration
	mu       sync.Mutex
	changed  map[cas.Digest]time.Time // guarded by mu; when each blob was put or renewed
}

func newExpiring(lifetime time.Duration) *expiringStore {
	return &expiringStore{Memory: castest.NewMemory(), lifetime: lifetime, changed: map[cas.Digest]time.Time{}}
}

func (e *expiringStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := e.Memory.Put(ctx, d, r); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.changed[d] = time.Now()
	return nil
}

func (e *expiringStore) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		errs[i] = e.Put(ctx, b.Digest, bytes.NewReader(b.Data))
	}
	return errs
}

// expire deletes the blobs that are too old.
func (e *expiringStore) expire() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for d, at := range e.changed {
		if time.Since(at) >= e.lifetime {
			e.Memory.Delete(d)
			delete(e.changed, d)
		}
	}
}

func (e *expiringStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	e.expire()
	return e.Memory.Missing(ctx, ds)
}

// Lifetime implements cas.Renewer.
func (e *expiringStore) Lifetime() time.Duration { return e.lifetime }

// Renew implements cas.Renewer.
func (e *expiringStore) Renew(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	e.expire()
	e.mu.Lock()
	for _, d := range ds {
		if at, ok := e.changed[d]; ok && time.Since(at) > e.lifetime/2 {
			e.changed[d] = time.Now()
		}
	}
	e.mu.Unlock()
	return e.Missing(ctx, ds)
}

// TestUsedBlobsDoNotExpire checks that any local use renews a blob in an upstream that deletes old ones.
func TestUsedBlobsDoNotExpire(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, s cas.Store, d cas.Digest) error{
		"Missing": func(t *testing.T, s cas.Store, d cas.Digest) error {
			_, err := s.Missing(t.Context(), []cas.Digest{d})
			return err
		},
		"MissingForPut": func(t *testing.T, s cas.Store, d cas.Digest) error {
			_, err := cas.MissingForPut(t.Context(), s, []cas.Digest{d})
			return err
		},
		"Fetch": func(t *testing.T, s cas.Store, d cas.Digest) error {
			return cas.Fetch(t.Context(), s, []cas.Digest{d})
		},
		"ReadLocal": func(t *testing.T, s cas.Store, d cas.Digest) error {
			if readLocal(t, s, d)[0] == nil {
				return cas.ErrNotFound
			}
			return nil
		},
		"Open": func(t *testing.T, s cas.Store, d cas.Digest) error {
			r, err := s.Open(t.Context(), d, 0)
			if err == nil {
				r.Close()
			}
			return err
		},
		"Locate": func(t *testing.T, s cas.Store, d cas.Digest) error {
			l, err := locate(t, s, []cas.Digest{d})
			if err == nil {
				l.Release()
			}
			return err
		},
		"File": func(t *testing.T, s cas.Store, d cas.Digest) error {
			f, ok := cas.As[cas.Filer](s)
			must.Be(t, ok, "the overlay is not a cas.Filer")
			_, release, err := f.File(t.Context(), d, false)
			if err == nil {
				release()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				upstream := newExpiring(24 * time.Hour)
				memory := castest.NewMemory()
				local := one(memory, memory)
				if name == "Locate" || name == "File" {
					local = onDisk(t, t.TempDir())
				}
				o := open(t, overlay.Config{Local: local, Upstream: one(upstream, upstream)})
				s := instance(t, o).Store
				_, used := put(t, s, 1, 100)
				_, idle := put(t, s, 2, 100)
				for range 5 * 24 {
					must.Succeed(t, use(t, s, used))
					time.Sleep(time.Hour)
					upstream.expire()
					must.Be(t, has(t, upstream.Memory, used), "the upstream has deleted a blob that is used")
				}
				expect.That(t, !has(t, upstream.Memory, idle), "the upstream keeps a blob that is not used")
				if n := o.Stats().Renewed; n > 5*8 {
					t.Errorf("it was renewed %d times in 5 days, want at most 40", n)
				}
			})
		})
	}
}

// A leasingStore is an expiringStore that renews blobs when it is queried, like a server with leases.
type leasingStore struct {
	cas.Store
	blobs *expiringStore
}

func (l leasingStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return l.blobs.Renew(ctx, ds)
}

// TestUsedBlobsKeepTheirLeases checks that local uses renew a blob in a server with the default lease of serve.
func TestUsedBlobsKeepTheirLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		blobs := newExpiring(3 * time.Hour)
		local := castest.NewMemory()
		s := instance(t, open(t, overlay.Config{
			Local: one(local, local), Upstream: one(leasingStore{blobs, blobs}, blobs), RenewInterval: 8 * time.Hour,
		})).Store
		_, d := put(t, s, 1, 100)
		for range 24 * 6 {
			wantMissing(t, "used", s, []cas.Digest{d}, nil)
			time.Sleep(10 * time.Minute)
			blobs.expire()
			must.Be(t, has(t, blobs.Memory, d), "the upstream has deleted a blob that is used")
		}
	})
}

// A slowRenewer takes a minute to renew one of its blobs. Missing also renews; Absent does not.
type slowRenewer struct {
	*expiringStore
	slow, bad cas.Digest // bad cannot be renewed
	denied    bool       // whether nothing can be renewed
}

func (s *slowRenewer) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.Renew(ctx, ds)
}

func (s *slowRenewer) Absent(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.expiringStore.Missing(ctx, ds)
}

func (s *slowRenewer) Renew(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if slices.Contains(ds, s.slow) {
		time.Sleep(time.Minute)
	}
	if s.denied {
		return nil, cas.ErrDenied
	}
	absent, err := s.expiringStore.Renew(ctx, ds)
	if slices.Contains(ds, s.bad) {
		absent = append(absent, s.bad)
	}
	return absent, err
}

// TestSlowRenewalsDoNotDelayQueries checks that blobs that only the upstream has are renewed in the background, and
// that those that cannot be renewed are then missing.
func TestSlowRenewalsDoNotDelayQueries(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				upstream := &slowRenewer{expiringStore: newExpiring(24 * time.Hour)}
				_, upstream.slow = put(t, upstream, 1, 100)
				_, upstream.bad = put(t, upstream, 2, 100)
				_, other := put(t, upstream, 3, 100)
				time.Sleep(13 * time.Hour)
				local := castest.NewMemory()
				s := instance(t, open(t, overlay.Config{
					Local: one(local, local), Upstream: one(upstream, upstream), Policy: policy,
				})).Store
				wantMissing(t, "at first", s, []cas.Digest{upstream.slow, upstream.bad}, nil)
				wantMissing(t, "meanwhile", s, []cas.Digest{other}, nil)
				time.Sleep(2 * time.Minute)
				wantMissing(t, "afterwards", s, []cas.Digest{upstream.slow, upstream.bad}, []cas.Digest{upstream.bad})
				put(t, s, 2, 100)
				wantMissing(t, "put again", s, []cas.Digest{upstream.bad}, nil)
				time.Sleep(12 * time.Hour)
				wantMissing(t, "upstream after a lifetime", upstream.expiringStore, []cas.Digest{upstream.slow}, nil)
			})
		})
	}
}

// TestQueryRenewsWhatCannotBeQueued checks that while the renewal queue is full, a query renews blobs that only the
// upstream has before it reports them present, and reports those that it cannot renew as missing. If the upstream denies
// renewals, the query does not fail.
func TestQueryRenewsWhatCannotBeQueued(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				upstream := &slowRenewer{expiringStore: newExpiring(24 * time.Hour)}
				_, old := put(t, upstream, 1, 100)
				_, upstream.bad = put(t, upstream, 2, 100)
				_, absent := castest.Blob(3, 100)
				time.Sleep(13 * time.Hour)
				local := castest.NewMemory()
				o := open(t, overlay.Config{Local: one(local, local), Upstream: one(upstream, upstream), Policy: policy})
				s := instance(t, o).Store
				o.FillRenewals()
				upstream.denied = true
				wantMissing(t, "with a full queue, renewals denied", s, []cas.Digest{absent, old}, []cas.Digest{absent})
				upstream.denied = false
				wantMissing(t, "with a full queue", s, []cas.Digest{absent, upstream.bad, old},
					[]cas.Digest{absent, upstream.bad})
				time.Sleep(time.Hour)
				wantMissing(t, "afterwards", s, []cas.Digest{upstream.bad}, []cas.Digest{upstream.bad})
				time.Sleep(11 * time.Hour)
				wantMissing(t, "upstream after a lifetime", upstream.expiringStore, []cas.Digest{old}, nil)
			})
		})
	}
}

// TestEmptiedUpstreamIsFilled checks that blobs used locally return to an upstream that somebody has emptied, although
// the overlay has just sent them.
func TestEmptiedUpstreamIsFilled(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, policy)
				var ds []cas.Digest
				for i := range 100 {
					_, d := put(t, p.store, byte(i), 1000+i)
					ds = append(ds, d)
				}
				time.Sleep(time.Hour)
				for _, d := range ds {
					p.upstream.Delete(d)
				}
				for range 3 {
					wantMissing(t, "used", p.store, ds, nil)
					time.Sleep(time.Minute)
				}
				wantMissing(t, "upstream after three minutes", p.upstream, ds, nil)
				if s := p.Stats(); s.Restored != 100 || s.Lost != 0 {
					t.Errorf("got %+v, want 100 restored", s)
				}
			})
		})
	}
}

// TestRenewalIsBounded checks the rate of renewals, and that they survive an outage.
func TestRenewalIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		disconnect(p.faultyUpstream)
		var blobs []cas.Blob
		var ds []cas.Digest
		for i := range 1000 {
			b, d := castest.Blob(byte(i), 100+i/256)
			blobs, ds = append(blobs, cas.Blob{Digest: d, Data: b}), append(ds, d)
		}
		cas.PutAll(t.Context(), p.local, blobs)
		wantMissing(t, "used", p.store, ds, nil)
		time.Sleep(10*time.Minute + 30*time.Second)
		if n := p.faultyUpstream.Calls(faulty.Missing); n < 9 || n > 11 {
			t.Errorf("got %d attempts in 10 minutes without an upstream, want 10", n)
		}
		p.faultyUpstream.Heal()
		time.Sleep(time.Minute)
		before := p.upstream.Len()
		time.Sleep(5 * time.Second)
		if n := p.upstream.Len() - before; n > 500 {
			t.Errorf("%d blobs were renewed in 5 s, want 500", n)
		}
		time.Sleep(time.Minute)
		// Blobs that share a bit of the filter wait for the next interval: two of 1000 do in one run of 67.
		if absent, err := p.upstream.Missing(t.Context(), ds); err != nil || len(absent) > 3 {
			t.Errorf("upstream: got %v, %v, want all blobs renewed, except three at most", absent, err)
		}
	})
}

// A wornRenewer fails when it is to renew one of its blobs.
type wornRenewer struct {
	*expiringStore
	bad cas.Digest
	err error
}

func (w *wornRenewer) Renew(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if slices.Contains(ds, w.bad) {
		return nil, w.err
	}
	return w.expiringStore.Renew(ctx, ds)
}

// TestOneBlobDoesNotEndRenewals checks that a blob that cannot be renewed does not make others expire.
func TestOneBlobDoesNotEndRenewals(t *testing.T) {
	for _, kind := range []error{cas.ErrUnavailable, cas.ErrDenied, cas.ErrInvalid} {
		synctest.Test(t, func(t *testing.T) {
			upstream := &wornRenewer{expiringStore: newExpiring(24 * time.Hour), err: kind}
			local := castest.NewMemory()
			s := instance(t, open(t, overlay.Config{Local: one(local, local), Upstream: one(upstream, upstream)})).Store
			var ds []cas.Digest
			for i := range 20 {
				_, d := put(t, s, byte(i), 100)
				ds = append(ds, d)
			}
			upstream.bad = ds[7]
			for range 3 * 24 {
				wantMissing(t, "used", s, ds, nil)
				time.Sleep(time.Hour)
				upstream.expire()
			}
			wantMissing(t, kind.Error()+": upstream", upstream.Memory, ds, []cas.Digest{upstream.bad})
		})
	}
}

// TestUnservedBlobsAreNotRenewed checks that the upstream is not asked about blobs of a digest function that it does
// not serve, which the local store may have from a time without an upstream.
func TestUnservedBlobsAreNotRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		flaky := faulty.New(upstream, upstream)
		s := instance(t, open(t, overlay.Config{
			Local: one(local, local), Upstream: func(name string) (*cas.Instance, error) {
				return &cas.Instance{Name: name, Store: flaky, Actions: flaky, Functions: []cas.Function{cas.SHA256}}, nil
			},
		})).Store
		d := must.Get(cas.PutBytes(t.Context(), local, cas.SHA1, []byte("unserved")))(t)
		wantMissing(t, "used", s, []cas.Digest{d}, nil)
		time.Sleep(time.Hour)
		if n := flaky.Calls(faulty.Missing); n != 0 || has(t, upstream, d) {
			t.Errorf("got %d upstream queries, and the blob there: %t, want none", n, has(t, upstream, d))
		}
	})
}

// TestPendingBlobsAreNotRenewed checks that the upstream is not asked about a blob that is about to be sent to it.
func TestPendingBlobsAreNotRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		frozen := p.faultyUpstream.Hold(faulty.PutAll)
		defer frozen.Open()
		put(t, p.store, 1, 100) // the sender hangs with it,
		synctest.Wait()
		_, d := put(t, p.store, 2, 100) // so that this one is not even looked at
		for range 3 {
			readLocal(t, p.store, d)
			time.Sleep(13 * time.Hour)
		}
		expect.Equal(t, p.faultyUpstream.Calls(faulty.Missing), 0, "upstream queries")
	})
}

// TestUsedResultsAreRenewed checks that a local result is looked up in the upstream once an hour, and not sent again:
// somebody may have removed it.
func TestUsedResultsAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, p.local.Record(t.Context(), action, &repb.ActionResult{ExitCode: 3}))
		for range 12 * 3 {
			expect.Equal(t, must.Get(p.actions.Lookup(t.Context(), action))(t).ExitCode, 3)
			time.Sleep(5 * time.Minute)
		}
		if n := p.faultyUpstream.Calls(faulty.Lookup); n != 3 || p.faultyUpstream.Calls(faulty.Record) != 0 {
			t.Errorf("got %d upstream lookups in 3 hours, and %d records; want 3 and 0", n,
				p.faultyUpstream.Calls(faulty.Record))
		}
	})
}

// TestFailedResultIsRenewedAtItsNextUse checks that a result that the upstream fails to renew, for example because it
// has no room for a copy, does not wait for the next interval.
func TestFailedResultIsRenewedAtItsNextUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		action := cas.SHA256.Sum([]byte("a"))
		for _, s := range []cas.ActionCache{p.local, p.upstream} {
			must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{}))
		}
		p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Lookup)
		for use := range 3 {
			must.Get(p.actions.Lookup(t.Context(), action))(t)
			time.Sleep(10 * time.Minute)
			n, s := p.faultyUpstream.Calls(faulty.Lookup), p.Stats()
			if n != min(use+1, 2) || s.Renewed != int64(min(use, 1)) {
				t.Errorf("after %d uses: got %d upstream lookups and %d renewals", use+1, n, s.Renewed)
			}
			p.faultyUpstream.Heal()
		}
	})
}

// A fullStore belongs to an action cache that returns results but has no room to renew them.
type fullStore struct {
	cas.Store
	renewals int
}

func (f *fullStore) RenewResult(context.Context, cas.Digest) error {
	f.renewals++
	return cas.ErrUpstreamFull
}

// A decorator hides the optional methods of a store, as serve's own decorators do.
type decorator struct{ cas.Store }

func (d decorator) Unwrap() cas.Store { return d.Store }

// TestFoundResultMayNotBeRenewed checks that a result that the upstream finds but has no room to renew does not count
// as renewed.
func TestFoundResultMayNotBeRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		full := &fullStore{Store: upstream}
		o := open(t, overlay.Config{Local: one(local, local), Upstream: one(decorator{full}, upstream)})
		action := cas.SHA256.Sum([]byte("a"))
		for _, s := range []cas.ActionCache{local, upstream} {
			must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{}))
		}
		for range 3 {
			must.Get(instance(t, o).Actions.Lookup(t.Context(), action))(t)
			time.Sleep(2 * time.Minute)
			synctest.Wait()
		}
		expect.Equal(t, full.renewals, 3, "attempts")
		expect.Equal(t, o.Stats().Renewed, 0, "renewals")
	})
}

// TestLostBlobIsSentAtItsNextUse checks that a blob that the upstream has lost and does not accept again does not count
// as renewed, and is sent at its next use, not in the next interval.
func TestLostBlobIsSentAtItsNextUse(t *testing.T) {
	for _, refusal := range []error{cas.ErrUpstreamFull, cas.ErrDenied} {
		synctest.Test(t, func(t *testing.T) {
			p := newPair(t, overlay.WriteThrough)
			var ds []cas.Digest
			for i := range 10 {
				_, d := put(t, p.store, byte(i), 100)
				ds = append(ds, d)
			}
			time.Sleep(13 * time.Hour)
			for _, d := range ds {
				p.upstream.Delete(d)
			}
			p.faultyUpstream.Fail(refusal, faulty.PutAll)
			for range 30 {
				wantMissing(t, "used", p.store, ds, nil)
				time.Sleep(2 * time.Second)
			}
			expect.Equal(t, p.Stats().Renewed, 0, "%v: renewals", refusal)
			expect.Equal(t, p.faultyUpstream.Calls(faulty.PutAll), 1, "%v: attempts in a minute", refusal)
			p.faultyUpstream.Heal()
			wantMissing(t, "used", p.store, ds, nil)
			time.Sleep(time.Minute)
			wantMissing(t, refusal.Error()+": upstream", p.upstream, ds, nil)
			expect.Equal(t, p.Stats().Renewed, 10, "%v: renewals afterwards", refusal)
		})
	}
}

// TestRefusedResultsAreRenewedOncePerInterval checks that an upstream that refuses lookups does not get one for each
// local use.
func TestRefusedResultsAreRenewedOncePerInterval(t *testing.T) {
	for _, refusal := range []error{cas.ErrDenied, errors.ErrUnsupported} {
		synctest.Test(t, func(t *testing.T) {
			p := newPair(t, overlay.WriteThrough)
			action := cas.SHA256.Sum([]byte("a"))
			must.Succeed(t, p.local.Record(t.Context(), action, &repb.ActionResult{}))
			p.faultyUpstream.Fail(refusal, faulty.Lookup)
			for range 12 * 3 {
				must.Get(p.actions.Lookup(t.Context(), action))(t)
				time.Sleep(5 * time.Minute)
			}
			expect.Equal(t, p.faultyUpstream.Calls(faulty.Lookup), 3, "%v: upstream lookups in 3 hours", refusal)
		})
	}
}

func TestRenewalCanBeDisabled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		flaky := faulty.New(upstream, upstream)
		s := instance(t, open(t, overlay.Config{
			Local: one(local, local), Upstream: one(flaky, flaky), UpstreamInterval: -1,
		})).Store
		_, d := put(t, local, 1, 100)
		for range 48 {
			wantMissing(t, "used", s, []cas.Digest{d}, nil)
			time.Sleep(time.Hour)
		}
		expect.Equal(t, flaky.Calls(faulty.Missing), 0, "upstream queries")
	})
}
