// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// restart replaces the overlay of p, which stays open, as after a kill.
func (p *pair) restart(t *testing.T, policy overlay.Policy) {
	t.Helper()
	p.Overlay = open(t, overlay.Config{
		Local: one(p.faultyLocal, p.faultyLocal), Upstream: one(p.faultyUpstream, p.faultyUpstream),
		Policy: policy, Journal: p.journal,
	})
	in := instance(t, p.Overlay)
	p.store, p.actions = in.Store, in.Actions
}

// A writer puts a blob of three chunks of size bytes.
type writer func(t *testing.T, s cas.Store, size int) (cas.Digest, error)

// writers are the ways to write a blob.
var writers = map[string]writer{
	"Put": func(t *testing.T, s cas.Store, size int) (cas.Digest, error) {
		b, d := castest.Blob(1, size)
		return d, s.Put(t.Context(), d, bytes.NewReader(b))
	},
	"PutAll": func(t *testing.T, s cas.Store, size int) (cas.Digest, error) {
		b, d := castest.Blob(1, size)
		return d, cas.PutAll(t.Context(), s, []cas.Blob{{Digest: d, Data: b}})[0]
	},
}

// TestRefusedBlobsAreMissing checks that a blob that the upstream has not accepted is missing, also after a restart,
// until it has been put again.
func TestRefusedBlobsAreMissing(t *testing.T) {
	for name, write := range writers {
		for _, size := range []int{100, 3 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				p := newPair(t, overlay.WriteThrough)
				disconnect(p.faultyUpstream)
				d, err := write(t, p.store, size)
				wantError(t, "write", err, cas.ErrUnavailable)
				p.faultyUpstream.Heal()
				for range 3 {
					wantMissing(t, "refused", p.store, []cas.Digest{d}, []cas.Digest{d})
					missing, err := cas.MissingForPut(t.Context(), p.store, []cas.Digest{d})
					expect.That(t, err == nil && len(missing) == 1,
						"MissingForPut: got %v, %v, want the blob", missing, err)
					p.restart(t, overlay.WriteThrough)
				}
				if _, err := write(t, p.store, size); err != nil || !has(t, p.upstream, d) {
					t.Fatalf("write again: %v, upstream has it: %v", err, has(t, p.upstream, d))
				}
				for range 2 {
					wantMissing(t, "written again", p.store, []cas.Digest{d}, nil)
					p.restart(t, overlay.WriteThrough)
				}
			})
		}
	}
}

// TestRefusedSpliceIsMissing checks that a chunked blob that the upstream refuses is missing, also after a restart.
func TestRefusedSpliceIsMissing(t *testing.T) {
	p, m := newSplicer(t, overlay.WriteThrough)
	_, d, of := castest.PutChunks(t, p.store, 1, 1<<20, 2<<20)
	p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Put)
	wantError(t, "Splice", m.Splice(t.Context(), d, of), cas.ErrUnavailable)
	p.faultyUpstream.Heal()
	p.faultyLocal = faulty.New(p.local, p.local)
	p.restart(t, overlay.WriteThrough)
	wantMissing(t, "after a restart", p.store, []cas.Digest{d}, []cas.Digest{d})
}

// TestUnfinishedUploadIsMissing checks that a blob is missing while its upload runs, after a kill meanwhile, and not
// afterwards.
func TestUnfinishedUploadIsMissing(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	gate := p.faultyUpstream.Hold(faulty.Put)
	b, d := castest.Blob(1, 3<<20)
	done := make(chan error, 2)
	upload := func(s cas.Store) { done <- s.Put(t.Context(), d, bytes.NewReader(b)) }
	go upload(p.store)
	gate.Arrived()
	must.Be(t, has(t, p.local, d), "a large blob is not stored locally first; adapt this test")
	wantMissing(t, "during the upload", p.store, []cas.Digest{d}, []cas.Digest{d})
	p.restart(t, overlay.WriteThrough)
	wantMissing(t, "after a kill", p.store, []cas.Digest{d}, []cas.Digest{d})
	go upload(p.store)
	gate.Arrived()
	gate.Open()
	for range 2 {
		must.Succeed(t, <-done)
	}
	wantMissing(t, "after the upload", p.store, []cas.Digest{d}, nil)
}

// A pausedPut is a Put that waits for the rest of its blob.
type pausedPut struct {
	rest io.WriteCloser
	done chan error
}

// pausePut starts a Put of b that has read nothing but the first byte.
func pausePut(t *testing.T, s cas.Store, d cas.Digest, b []byte) pausedPut {
	t.Helper()
	r, w := io.Pipe()
	put := pausedPut{w, make(chan error, 1)}
	go func() {
		err := s.Put(t.Context(), d, r)
		r.Close()
		put.done <- err
	}()
	must.Get(w.Write(b[:1]))(t)
	return put
}

// finish sends the rest of b, and returns the error of the Put.
func (p pausedPut) finish(b []byte) error {
	p.rest.Write(b[1:])
	p.rest.Close()
	return <-p.done
}

// TestSlowPutHidesNoAcknowledgedBlob puts a blob while another Put of it waits for its client. It is present once it is
// acknowledged, also after a restart, whatever becomes of the slow Put.
func TestSlowPutHidesNoAcknowledgedBlob(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	b, d := castest.Blob(1, 3<<20)
	ds := []cas.Digest{d}
	slow := pausePut(t, p.store, d, b)
	wantMissing(t, "being put", p.store, ds, ds)
	must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(b)))
	wantMissing(t, "acknowledged", p.store, ds, nil)
	wantPutMissing(t, p.store, d)
	first := p.store
	p.restart(t, overlay.WriteThrough)
	wantMissing(t, "after a restart", p.store, ds, nil)
	p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
	wantError(t, "slow Put", slow.finish(b), cas.ErrUpstreamFull)
	wantMissing(t, "after the slow Put", first, ds, nil)
	p.restart(t, overlay.WriteThrough)
	wantMissing(t, "after the slow Put and a restart", p.store, ds, nil)
}

// TestRepeatedPutHidesNoBlob puts a blob that is local and in the upstream again. It stays present meanwhile, and when
// that fails.
func TestRepeatedPutHidesNoBlob(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	b, d := put(t, p.store, 1, 3<<20)
	ds := []cas.Digest{d}
	p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
	gate := p.faultyUpstream.Hold(faulty.Put)
	done := make(chan error, 1)
	go func() { done <- p.store.Put(t.Context(), d, bytes.NewReader(b)) }()
	gate.Arrived()
	wantMissing(t, "put again", p.store, ds, nil)
	wantPutMissing(t, p.store, d)
	gate.Open()
	wantError(t, "Put", <-done, cas.ErrUpstreamFull)
	for range 2 {
		wantMissing(t, "after the failure", p.store, ds, nil)
		wantPutMissing(t, p.store, d)
		p.restart(t, overlay.WriteThrough)
	}
}

// TestFailedPutsStayMissing checks that a second failure does not make an unsent blob present.
func TestFailedPutsStayMissing(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
	b, d := castest.Blob(1, 3<<20)
	for range 3 { // the last one after a restart
		for range 2 {
			wantError(t, "Put", p.store.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrUpstreamFull)
			wantMissing(t, "after a failure", p.store, []cas.Digest{d}, []cas.Digest{d})
		}
		p.restart(t, overlay.WriteThrough)
		wantMissing(t, "after a restart", p.store, []cas.Digest{d}, []cas.Digest{d})
	}
}

// TestBlobLostDuringPutStaysMissing loses the only copy of a blob, or both copies, while it is put again. If the Put
// then fails in the upstream, its local copy must not make the blob present.
func TestBlobLostDuringPutStaysMissing(t *testing.T) {
	for name, notice := range map[string]func(t *testing.T, s cas.Store, d cas.Digest){
		"query": func(t *testing.T, s cas.Store, d cas.Digest) {
			wantMissing(t, "lost", s, []cas.Digest{d}, []cas.Digest{d})
		},
		"read": func(t *testing.T, s cas.Store, d cas.Digest) {
			wantError(t, "Open", expect.Err(s.Open(t.Context(), d, 0)), cas.ErrNotFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, overlay.WriteThrough)
			b, d := put(t, p.local, 1, 3<<20)
			again := pausePut(t, p.store, d, b)
			wantMissing(t, "put again", p.store, []cas.Digest{d}, nil)
			p.local.Delete(d)
			notice(t, p.store, d)
			p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
			wantError(t, "Put", again.finish(b), cas.ErrUpstreamFull)
			must.Be(t, has(t, p.local, d), "the Put has left no local copy; adapt this test")
			for range 2 {
				wantMissing(t, "after the failure", p.store, []cas.Digest{d}, []cas.Digest{d})
				p.restart(t, overlay.WriteThrough)
			}
			p.faultyUpstream.Heal()
			must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(b)))
			wantMissing(t, "sent", p.store, []cas.Digest{d}, nil)
		})
	}
}

// TestLeftoverStaysMissingDuringPut checks that a blob that WriteBack has not sent is not taken for one that was
// present, although it is local: it stays missing while it is put with WriteThrough, and when the Put fails.
func TestLeftoverStaysMissingDuringPut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		b, d := put(t, p.store, 1, 3<<20)
		p.restart(t, overlay.WriteThrough)
		synctest.Wait() // both senders pause
		p.faultyUpstream.Heal()
		p.faultyUpstream.Fail(fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported), faulty.Put)
		slow := pausePut(t, p.store, d, b)
		time.Sleep(time.Minute) // the sender gives it up
		expect.Equal(t, p.Stats().Pending, 0, "pending")
		wantMissing(t, "being put", p.store, []cas.Digest{d}, []cas.Digest{d})
		wantError(t, "Put", slow.finish(b), cas.ErrUpstreamFull)
		for range 2 {
			wantMissing(t, "after the failure", p.store, []cas.Digest{d}, []cas.Digest{d})
			p.restart(t, overlay.WriteThrough)
		}
	})
}

// TestPutAtTheEndOfAnUpload puts a blob again while the end of its upload is being recorded. It must not be missing
// afterwards.
func TestPutAtTheEndOfAnUpload(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	gate := p.faultyUpstream.Hold(faulty.Put)
	b, d := castest.Blob(1, 3<<20)
	done := make(chan error, 2)
	upload := func() { done <- p.store.Put(t.Context(), d, bytes.NewReader(b)) }
	go upload()
	gate.Arrived()
	release := sync.OnceFunc(p.HoldSent())
	defer release()
	gate.Open()
	must.Hold(t, "the upstream has the blob", func() bool { return !p.Unsent(d) })
	go upload()
	must.Hold(t, "the second upload", func() bool { return p.Unsent(d) || p.faultyUpstream.Calls(faulty.Put) == 2 })
	release()
	for range 2 {
		must.Succeed(t, <-done)
	}
	wantMissing(t, "put twice", p.store, []cas.Digest{d}, nil)
}

// TestPutOfEvictedBlobIsUnsent checks that a blob is unsent if both stores have lost it while a slow Put runs, another
// one had sent it, and a third one fails.
func TestPutOfEvictedBlobIsUnsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		b, d := castest.Blob(1, 3<<20)
		slow := pausePut(t, p.store, d, b)
		must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(b)))
		p.local.Delete(d)
		p.upstream.Delete(d)
		p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Put)
		wantError(t, "third Put", p.store.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrUnavailable)
		wantMissing(t, "during the slow Put", p.store, []cas.Digest{d}, []cas.Digest{d})
		wantError(t, "slow Put", slow.finish(b), cas.ErrUnavailable)
		for range 2 {
			wantMissing(t, "afterwards", p.store, []cas.Digest{d}, []cas.Digest{d})
			p.restart(t, overlay.WriteThrough)
		}
	})
}

// TestUnsentBlobIsSentWithItsResult checks that a result sends its unsent blobs, which are then present.
func TestUnsentBlobIsSentWithItsResult(t *testing.T) {
	for name, policy := range policies { // the next process may have another policy
		t.Run(name, func(t *testing.T) {
			p := newPair(t, overlay.WriteThrough)
			p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Put)
			b, d := castest.Blob(1, 3<<20)
			wantError(t, "Put", p.store.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrUnavailable)
			p.faultyUpstream.Heal()
			p.restart(t, policy)
			wantMissing(t, "before the result", p.store, []cas.Digest{d}, []cas.Digest{d})
			r := &repb.ActionResult{StdoutDigest: d.Proto()}
			must.Succeed(t, p.actions.Record(t.Context(), cas.SHA256.Sum(nil), r))
			p.drain(t)
			if wantMissing(t, "after the result", p.store, []cas.Digest{d}, nil); !has(t, p.upstream, d) {
				t.Error("the blob is not in the upstream")
			}
		})
	}
}

// TestUnsentListIsBounded checks that blobs that left the local store, and ended uploads, leave the file.
func TestUnsentListIsBounded(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	b, d := castest.Blob(1, 1<<20+1)
	for range 120 {
		must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(b)))
		p.local.Delete(d)
	}
	p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Put)
	b, lost := castest.Blob(2, 2<<20)
	wantError(t, "Put", p.store.Put(t.Context(), lost, bytes.NewReader(b)), cas.ErrUnavailable)
	p.local.Delete(lost)
	list := func() string {
		p.AwaitCompaction()
		text := must.Get(os.ReadFile(p.journal + ".unsent"))(t)
		return string(text)
	}
	if text := list(); strings.Count(text, "\n") > 202 || !strings.Contains(text, lost.String()) {
		t.Errorf("got %d lines, want at most 202 and the refused blob", strings.Count(text, "\n"))
	}
	p.restart(t, overlay.WriteThrough)
	expect.Equal(t, list(), "", "after a restart")
}

// TestDamagedUnsentListIsCounted: the blobs of damaged lines may never reach the upstream.
func TestDamagedUnsentListIsCounted(t *testing.T) {
	journal := filepath.Join(t.TempDir(), "journal")
	must.Succeed(t, os.WriteFile(journal+".unsent", []byte("damaged\n"), 0o600))
	o := open(t, overlay.Config{
		Local: one(castest.NewMemory(), nil), Upstream: one(castest.NewMemory(), nil), Policy: overlay.WriteThrough, Journal: journal,
	})
	expect.Equal(t, o.Stats().Lost, int64(1), "lost writes")
}

// TestUnsentListHasLimit checks that unsent blobs take bounded memory, and that none beyond the limit becomes visible
// before the upstream has it.
func TestUnsentListHasLimit(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	p.LimitUnsent(2)
	p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
	var ds []cas.Digest
	for seed := range byte(4) {
		b, d := castest.Blob(seed, 2<<20)
		wantError(t, "Put", p.store.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrUpstreamFull)
		ds = append(ds, d)
	}
	p.faultyUpstream.Heal()
	wantMissing(t, "refused", p.store, ds, ds)
	p.restart(t, overlay.WriteThrough)
	wantMissing(t, "after a restart", p.store, ds, ds)
	expect.That(t, has(t, p.local, ds[1]) && !has(t, p.local, ds[2]),
		"want a local copy of each blob within the limit, and of no other")
	p.LimitUnsent(2)
	for i := range ds {
		put(t, p.store, byte(len(ds)-1-i), 2<<20)
	}
	wantMissing(t, "put again", p.store, ds, nil)
	for _, d := range ds {
		expect.That(t, has(t, p.upstream, d), "blob %s is not in the upstream", d)
	}
}

// A deniedStore refuses the credentials of every call, and knows it.
type deniedStore struct{ *faulty.Store }

func (deniedStore) Err() error { return fmt.Errorf("server: %w since noon", cas.ErrDenied) }

// TestDeniedUpstreamLosesNothing checks that with WriteBack, an upstream that refuses our credentials is like one that
// is down: queries do not fail, and results wait for longer than those that are refused individually.
func TestDeniedUpstreamLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, memory := castest.NewMemory(), castest.NewMemory()
		upstream := faulty.New(memory, memory)
		denied := []faulty.Op{faulty.Open, faulty.Put, faulty.PutAll, faulty.Missing, faulty.Lookup, faulty.Record}
		upstream.Fail(cas.ErrDenied, denied...)
		o := open(t, overlay.Config{
			Local: one(local, local), Upstream: one(deniedStore{upstream}, upstream), Policy: overlay.WriteBack,
		})
		in := instance(t, o)
		_, d := put(t, in.Store, 1, 100)
		_, absent := castest.Blob(2, 100)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, in.Actions.Record(t.Context(), action, &repb.ActionResult{ExitCode: 3}))
		wantMissing(t, "denied", in.Store, []cas.Digest{d, absent}, []cas.Digest{absent})
		time.Sleep(72 * time.Hour)
		upstream.Heal()
		must.Succeed(t, o.Close(t.Context()))
		expect.That(t, has(t, memory, d), "the blob was not sent")
		expect.Equal(t, must.Get(memory.Lookup(t.Context(), action))(t).ExitCode, 3, "exit code of the sent result")
	})
}

// A renewingStore renews blobs when it is queried, like a bucket.
type renewingStore struct{ *faulty.Store }

func (renewingStore) Lifetime() time.Duration { return 24 * time.Hour }

func (r renewingStore) Renew(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return r.Missing(ctx, ds)
}

// TestDeniedRenewalsAreUnanswered checks that with WriteBack, a blob or chunk counts as missing if the upstream, which
// is up, refuses to renew it. With WriteThrough, or if the upstream renews nothing, the query fails: otherwise, clients
// would upload blobs that the upstream refuses as well.
func TestDeniedRenewalsAreUnanswered(t *testing.T) {
	for name, policy := range policies {
		for _, renews := range []bool{true, false} {
			p, m := newSplicer(t, policy)
			if renews {
				m = p.openSplicer(t, policy, renewingStore{p.faultyUpstream})
			}
			_, d := put(t, p.upstream, 1, 100)
			_, whole, of := castest.PutChunks(t, p.upstream, 2, 1<<20, 2<<20)
			p.faultyUpstream.Fail(cas.ErrDenied, faulty.Missing)
			if !renews || policy == overlay.WriteThrough {
				_, err := p.store.Missing(t.Context(), []cas.Digest{d})
				wantError(t, fmt.Sprintf("%s, renews: %t", name, renews), err, cas.ErrDenied)
				wantError(t, "Splice", m.Splice(t.Context(), whole, of), cas.ErrDenied)
				continue
			}
			wantMissing(t, name, p.store, []cas.Digest{d}, []cas.Digest{d})
			wantError(t, "Splice", m.Splice(t.Context(), whole, of), cas.ErrNotFound)
			expect.Equal(t, p.Stats().Unanswered, 2, "unanswered")
		}
	}
}

// TestFailedBatchEndsClose checks that Close does not wait for a batch of which no blob was stored.
func TestFailedBatchEndsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		_, d := castest.Blob(1, 100)
		for _, err := range p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: d, Data: []byte("other")}}) {
			expect.Error(t, err, cas.ErrMismatch)
		}
		start := time.Now()
		must.Succeed(t, p.Close(t.Context()))
		expect.Equal(t, time.Since(start), 0, "time to close")
	})
}

// A downStore knows that it is down.
type downStore struct{ cas.Store }

func (downStore) Err() error { return fmt.Errorf("bucket: %w since noon", cas.ErrUnavailable) }

// TestUploadsAreRefusedBeforeTheyAreSent checks that a large blob is refused before the client sends it if the upstream
// is known to be down.
func TestUploadsAreRefusedBeforeTheyAreSent(t *testing.T) {
	o := open(t, overlay.Config{
		Local: one(castest.NewMemory(), nil), Upstream: one(downStore{castest.NewMemory()}, nil),
	})
	b, d := castest.Blob(1, 3<<20)
	r := bytes.NewReader(b)
	wantError(t, "Put", instance(t, o).Store.Put(t.Context(), d, r), cas.ErrUnavailable)
	if read := len(b) - r.Len(); read > 0 {
		t.Errorf("%d bytes were received before the upload was refused, want none", read)
	}
}

// TestUnsentBlobsOfLostLogAreMissing loses the log of the disk: it finds its files again, some of them only after the
// overlay has looked which unsent blobs are left.
func TestUnsentBlobsOfLostLogAreMissing(t *testing.T) {
	dir := t.TempDir()
	journal, down := filepath.Join(dir, "journal"), faulty.New(castest.NewMemory(), castest.NewMemory())
	disconnect(down)
	run := func(f func(s cas.Store)) {
		c := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "local"), MaxBytes: 512 << 20}))(t)
		o := open(t, overlay.Config{Local: c.Instance, Upstream: one(down, down), Journal: journal})
		f(instance(t, o).Store)
		must.Succeed(t, errors.Join(o.Close(t.Context()), c.Close()))
	}
	var ds []cas.Digest
	run(func(s cas.Store) {
		for i := range 4 {
			b, d := castest.Blob(byte(i), 25<<20)
			wantError(t, "Put", s.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrUnavailable)
			ds = append(ds, d)
		}
	})
	logs := must.Get(filepath.Glob(filepath.Join(dir, "local", "segments", "*")))(t)
	for _, log := range logs {
		must.Succeed(t, os.Remove(log))
	}
	run(func(s cas.Store) {
		for _, d := range ds {
			must.Succeed(t, must.Get(s.Open(t.Context(), d, 0))(t).Close())
		}
		wantMissing(t, "unsent", s, ds, ds)
	})
}

// TestKillDuringUpload kills a process whose large uploads have reached the local store but not the upstream.
func TestKillDuringUpload(t *testing.T) {
	const blobs, size = 4, 2 << 20
	through := func(t *testing.T, dir string, upstream cas.Store) cas.Store {
		o := open(t, overlay.Config{
			Local: onDisk(t, filepath.Join(dir, "local")), Upstream: one(upstream, nil),
			Journal: filepath.Join(dir, "journal"),
		})
		return instance(t, o).Store
	}
	if dir := os.Getenv("OVERLAY_TEST_DIR"); dir != "" {
		stuck := faulty.New(castest.NewMemory(), nil)
		gate := stuck.Hold(faulty.Put)
		s := through(t, dir, stuck)
		for i := range blobs {
			b, d := castest.Blob(byte(i), size)
			go s.Put(t.Context(), d, bytes.NewReader(b))
		}
		for range blobs {
			gate.Arrived()
		}
		fmt.Println("uploading")
		select {}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestKillDuringUpload$")
	cmd.Env = append(os.Environ(), "OVERLAY_TEST_DIR="+dir)
	cmd.Stderr = os.Stderr
	out := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Errorf("the process printed %q, %v", line, err)
	}
	must.Succeed(t, cmd.Process.Kill())
	cmd.Wait()

	upstream := castest.NewMemory()
	s := through(t, dir, upstream)
	var ds []cas.Digest
	for i := range blobs {
		_, d := castest.Blob(byte(i), size)
		ds = append(ds, d)
	}
	wantMissing(t, "after the kill", s, ds, ds)
	for i := range blobs {
		put(t, s, byte(i), size)
	}
	wantMissing(t, "uploaded again", s, ds, nil)
	if got := upstream.Digests(); len(got) != blobs || !slices.Contains(got, ds[0]) {
		t.Errorf("upstream: got %v, want %v", got, ds)
	}
}

// TestDeniedResultIsSentLater checks that a result that the upstream denies us stays in the journal while the operator
// may correct the permissions, and is counted when it is given up.
func TestDeniedResultIsSentLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrDenied, faulty.Record)
		action, r := built(t, p.store, 1)
		must.Succeed(t, p.actions.Record(t.Context(), action, r))
		time.Sleep(time.Hour)
		if s := p.Stats(); s.Pending != 1 || s.Refused != 0 {
			t.Errorf("denied: got %d pending and %d refused, want 1 and 0", s.Pending, s.Refused)
		}
		p.faultyUpstream.Heal()
		time.Sleep(10 * time.Minute)
		if _, err := p.upstream.Lookup(t.Context(), action); err != nil || p.Stats().Pending != 0 {
			t.Errorf("permitted: got %v and %d pending, want the result upstream", err, p.Stats().Pending)
		}
		p.faultyUpstream.Fail(cas.ErrDenied, faulty.Record)
		must.Succeed(t, p.actions.Record(t.Context(), action, r))
		time.Sleep(25 * time.Hour)
		if s := p.Stats(); s.Pending != 0 || s.Refused != 1 {
			t.Errorf("denied for a day: got %d pending and %d refused, want 0 and 1", s.Pending, s.Refused)
		}
	})
}

// TestBlobTooLargeForUpstreamStaysLocal checks that a blob that the upstream never accepts, and a result that refers to
// it, leave the journal, so that the local store may evict them. A blob that does not fit into a full upstream stays in
// the journal.
func TestBlobTooLargeForUpstreamStaysLocal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported), faulty.Put)
		_, large := put(t, p.store, 1, 3<<20)
		_, small := put(t, p.store, 2, 100)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, p.actions.Record(t.Context(), action, &repb.ActionResult{StdoutDigest: large.Proto()}))
		time.Sleep(time.Minute)
		s := p.Stats()
		expect.That(t, s.Pending == 0 && s.Refused == 2 && s.Lost == 0, "got %+v, want nothing pending and 2 refused", s)
		expect.That(t, has(t, p.local, large) && has(t, p.upstream, small), "the blob is not local, or another was not sent")
		p.faultyUpstream.Fail(cas.ErrUpstreamFull, faulty.Put)
		put(t, p.store, 3, 3<<20)
		time.Sleep(48 * time.Hour)
		expect.Equal(t, p.Stats().Pending, 1, "pending while the upstream is full")
		p.faultyUpstream.Heal()
		must.Succeed(t, p.Close(t.Context()))
	})
}

// TestRejectedBlobIsGivenUp checks that a blob that the upstream calls invalid, and a result that refers to it, leave
// the journal after a day. A later use of the blob logs no loss, and sends it once the upstream accepts it.
func TestRejectedBlobIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, memory := castest.NewMemory(), castest.NewMemory()
		upstream := faulty.New(memory, memory)
		upstream.Fail(cas.ErrInvalid, faulty.Put)
		var log bytes.Buffer
		o := open(t, overlay.Config{
			Local: one(local, local), Upstream: one(upstream, upstream), Policy: overlay.WriteBack,
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		in := instance(t, o)
		_, d := put(t, in.Store, 1, 3<<20)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, in.Actions.Record(t.Context(), action, &repb.ActionResult{StdoutDigest: d.Proto()}))
		time.Sleep(23 * time.Hour)
		s := o.Stats()
		expect.That(t, s.Pending == 2 && s.Refused == 0, "after 23 hours: got %+v, want 2 pending", s)
		time.Sleep(2 * time.Hour)
		s = o.Stats()
		expect.That(t, s.Pending == 0 && s.Refused == 2 && s.Lost == 0, "after 25 hours: got %+v, want 2 refused", s)
		expect.That(t, has(t, local, d), "the blob is not local")
		wantMissing(t, "used", in.Store, []cas.Digest{d}, nil)
		time.Sleep(2 * time.Minute)
		expect.That(t, !has(t, memory, d), "the upstream has accepted the blob")
		expect.That(t, !strings.Contains(log.String(), "lost"), "got the log:\n%s", log.String())
		upstream.Heal()
		time.Sleep(25 * time.Hour)
		wantMissing(t, "used again", in.Store, []cas.Digest{d}, nil)
		time.Sleep(2 * time.Minute)
		expect.That(t, has(t, memory, d), "the blob was not sent at its next use")
		must.Succeed(t, o.Close(t.Context()))
	})
}

// TestBlobTooLargeForUpstreamIsNotReportedLost checks that using a blob that the upstream never accepts logs no loss.
func TestBlobTooLargeForUpstreamIsNotReportedLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, memory := castest.NewMemory(), castest.NewMemory()
		upstream := faulty.New(memory, memory)
		upstream.Fail(fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported), faulty.Put)
		var log bytes.Buffer
		o := open(t, overlay.Config{
			Local: one(local, local), Upstream: one(upstream, upstream), Policy: overlay.WriteBack,
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		s := instance(t, o).Store
		_, d := put(t, s, 1, 3<<20)
		for range 5 {
			time.Sleep(2 * time.Minute)
			wantMissing(t, "used", s, []cas.Digest{d}, nil)
		}
		time.Sleep(2 * time.Minute)
		must.Succeed(t, o.Close(t.Context()))
		expect.That(t, upstream.Calls(faulty.Put) > 1, "the blob was not sent again")
		expect.That(t, !strings.Contains(log.String(), "lost blobs"), "got the log:\n%s", log.String())
	})
}

// TestLeftoverGivenUpStaysMissing checks a blob that WriteBack has not sent because it is too large for the upstream,
// or because the upstream has rejected it for a day. After a change to WriteThrough it is missing, also after a
// restart, until the upstream accepts it.
func TestLeftoverGivenUpStaysMissing(t *testing.T) {
	for name, c := range map[string]struct {
		failure error
		after   time.Duration
	}{
		"too large": {fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported), time.Minute},
		"rejected":  {cas.ErrInvalid, 25 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, overlay.WriteBack)
				disconnect(p.faultyUpstream)
				data, d := put(t, p.store, 1, 3<<20)
				p.restart(t, overlay.WriteThrough)
				synctest.Wait() // no blob is sent before Fail
				p.faultyUpstream.Heal()
				p.faultyUpstream.Fail(c.failure, faulty.Put)
				time.Sleep(c.after)
				expect.Equal(t, p.Stats().Pending, 0, "pending")
				for range 2 {
					wantMissing(t, "given up", p.store, []cas.Digest{d}, []cas.Digest{d})
					p.restart(t, overlay.WriteThrough)
				}
				p.faultyUpstream.Heal()
				must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(data)))
				wantMissing(t, "put again", p.store, []cas.Digest{d}, nil)
			})
		})
	}
}

// TestLeftoversAreSentWithWriteThrough checks that entries that WriteBack has not sent are sent after a change to
// WriteThrough, and that their blobs are missing until then or until they are put again.
func TestLeftoversAreSentWithWriteThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		action, r := built(t, p.store, 1)
		must.Succeed(t, p.actions.Record(t.Context(), action, r))
		first, d := put(t, p.store, 9, 100)
		_, other := put(t, p.store, 10, 3<<20)
		p.restart(t, overlay.WriteThrough)
		wantMissing(t, "not sent", p.store, []cas.Digest{d, other}, []cas.Digest{d, other})
		expect.Equal(t, len(must.Get(cas.MissingForPut(t.Context(), p.store, []cas.Digest{d}))(t)), 1, "MissingForPut")
		p.faultyUpstream.Heal()
		must.Succeed(t, p.store.Put(t.Context(), d, bytes.NewReader(first))) // before the sender tries again
		wantMissing(t, "put again", p.store, []cas.Digest{d, other}, []cas.Digest{other})
		time.Sleep(time.Minute)
		wantMissing(t, "sent", p.store, []cas.Digest{d, other}, nil)
		if _, err := p.upstream.Lookup(t.Context(), action); err != nil || !has(t, p.upstream, d) || !has(t, p.upstream, other) || p.Stats().Pending != 0 {
			t.Errorf("got %v and %d pending, want everything upstream", err, p.Stats().Pending)
		}
		p.restart(t, overlay.WriteThrough)
		wantMissing(t, "after a restart", p.store, []cas.Digest{d, other}, nil)
	})
}

// TestResultsFollowTheirBlobs checks that a result sends no query for blobs that were just sent.
func TestResultsFollowTheirBlobs(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, policy)
				action, r := built(t, p.store, 1)
				before := p.faultyUpstream.Calls(faulty.Missing)
				must.Succeed(t, p.actions.Record(t.Context(), action, r))
				time.Sleep(30 * time.Second)
				must.Get(p.upstream.Lookup(t.Context(), action))(t)
				expect.Equal(t, p.faultyUpstream.Calls(faulty.Missing)-before, 0, "queries")
				// A blob that the upstream has lost since is sent again.
				if policy == overlay.WriteThrough {
					time.Sleep(10 * time.Minute)
					lost := p.faultyUpstream.Lose(1, 1)
					must.Succeed(t, p.actions.Record(t.Context(), action, r))
					for _, d := range lost {
						expect.That(t, has(t, p.faultyUpstream, d), "blob %s was not sent again", d)
					}
				}
			})
		})
	}
}
