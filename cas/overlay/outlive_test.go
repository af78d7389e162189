// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
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

// TestWriteBackAfterRefusedUploads checks that a blob that the upstream refused with WriteThrough is present once
// WriteBack has acknowledged it.
func TestWriteBackAfterRefusedUploads(t *testing.T) {
	for name, write := range writers {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, overlay.WriteThrough)
			disconnect(p.faultyUpstream)
			d, err := write(t, p.store, 3<<20)
			wantError(t, "write", err, cas.ErrUnavailable)
			p.restart(t, overlay.WriteBack)
			must.Get(write(t, p.store, 3<<20))(t)
			wantMissing(t, "acknowledged", p.store, []cas.Digest{d}, nil)
			wantPutMissing(t, p.store, d)
		})
	}
}

func wantPutMissing(t *testing.T, s cas.Store, d cas.Digest) {
	t.Helper()
	expect.Equal(t, len(must.Get(cas.MissingForPut(t.Context(), s, []cas.Digest{d}))(t)), 0, "MissingForPut")
}

// TestLargeUploadOutlivesItsClient checks that clients that give up on a large upload find it continued.
func TestLargeUploadOutlivesItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		gate := p.faultyUpstream.Hold(faulty.Put)
		data, d := castest.Blob(1, 3<<20)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			expect.Error(t, p.store.Put(ctx, d, bytes.NewReader(data)), context.DeadlineExceeded)
			cancel()
		}
		wantMissing(t, "being sent", p.store, []cas.Digest{d}, []cas.Digest{d})
		gate.Open()
		synctest.Wait()
		wantMissing(t, "sent", p.store, []cas.Digest{d}, nil)
		if n := p.faultyUpstream.Calls(faulty.Put); n != 1 || !has(t, p.upstream, d) {
			t.Errorf("got %d uploads, want 1", n)
		}
	})
}

// TestAbandonedUploadsAreBounded checks that only 16 large uploads continue without waiters, and that the blobs of
// the others are missing until they are put again.
func TestAbandonedUploadsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		for round := range 2 { // finished uploads do not count
			gate := p.faultyUpstream.Hold(faulty.Put)
			var ds []cas.Digest
			for _, n := range []int{8, 8, 20} { // an upload that is abandoned twice counts once
				ctx, leave := context.WithCancel(t.Context())
				var group sync.WaitGroup
				ds = nil
				for i := range n {
					data, d := castest.Blob(byte(20*round+i), 1<<20+1)
					ds = append(ds, d)
					group.Go(func() {
						expect.Error(t, p.store.Put(ctx, d, bytes.NewReader(data)), context.Canceled)
					})
				}
				synctest.Wait()
				leave()
				group.Wait()
				synctest.Wait()
			}
			gate.Open()
			synctest.Wait()
			unsent := must.Get(p.upstream.Missing(t.Context(), ds))(t)
			expect.Equal(t, len(unsent), 4, "unsent blobs of 20")
			wantMissing(t, "ended", p.store, ds, unsent)
			for i := range 20 {
				if data, d := castest.Blob(byte(20*round+i), 1<<20+1); slices.Contains(unsent, d) {
					must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(data)))
				}
			}
			wantMissing(t, "put again", p.store, ds, nil)
		}
	})
}

// TestPendingIsRenewedAtStart: leases may have expired since the last process, and the local store may have a smaller
// budget now, so the leases of everything pending are renewed before the first put can evict it.
func TestPendingIsRenewedAtStart(t *testing.T) {
	p := newPair(t, overlay.WriteBack)
	disconnect(p.faultyUpstream)
	_, d := put(t, p.store, 1, 100)
	must.Succeed(t, p.actions.Record(t.Context(), d, &repb.ActionResult{}))
	queries, lookups := p.faultyLocal.Calls(faulty.Missing), p.faultyLocal.Calls(faulty.Lookup)
	gate := p.faultyLocal.Hold(faulty.Open) // the sender reads nothing
	defer gate.Open()
	p.restart(t, overlay.WriteBack)
	expect.That(t, p.faultyLocal.Calls(faulty.Missing) != queries && p.faultyLocal.Calls(faulty.Lookup) != lookups,
		"pending blobs and results are not renewed before New returns")
}
