// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// TestWriteBack checks that acknowledged writes are local, and reach the upstream despite failures.
func TestWriteBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newStrict(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		_, small := put(t, p.store, 1, 100)
		_, large := put(t, p.store, 2, 3<<20)
		b, batched := castest.Blob(3, 100)
		if errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: batched, Data: b}}); errs[0] != nil {
			t.Fatal(errs[0])
		}
		action, r := built(t, p.store, 4)
		must.Succeed(t, p.actions.Record(t.Context(), action, r))
		synctest.Wait()
		if n := p.Stats().Pending; n != 7 || p.upstream.Len() != 0 || !has(t, p.local, large) {
			t.Errorf("got %d pending and %d upstream, want 7 and 0", n, p.upstream.Len())
		}
		// The upstream recovers in steps.
		p.faultyUpstream.Heal()
		p.faultyUpstream.Fail(cas.ErrFull, faulty.Put)
		time.Sleep(time.Minute)
		expect.That(t, has(t, p.upstream, small) && has(t, p.upstream, batched) && !has(t, p.upstream, large),
			"rejected blobs delay accepted ones")
		expect.Error(t, expect.Err(p.upstream.Lookup(t.Context(), action)), cas.ErrNotFound,
			"a result with absent blobs was sent")
		p.faultyUpstream.Heal()
		p.drain(t)
		if got, err := p.upstream.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) ||
			!has(t, p.upstream, large) {
			t.Errorf("got %v, %v", got, err)
		}
		if s := p.Stats(); s.Sent != 7 || s.Pending != 0 || s.Lost != 0 {
			t.Errorf("got %+v", s)
		}
	})
}

// TestSmallBlobsAreBatched checks that blobs of separate writes are sent in one batch.
func TestSmallBlobsAreBatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		gate := p.faultyUpstream.Hold(faulty.PutAll)
		for i := range 100 {
			put(t, p.store, byte(i), 1000)
			synctest.Wait() // the first is being sent
		}
		gate.Open()
		p.drain(t)
		if n, m := p.faultyUpstream.Calls(faulty.PutAll), p.faultyUpstream.Calls(faulty.Put); n > 2 || m > 0 ||
			p.upstream.Len() != 100 {
			t.Errorf("got %d batches and %d single writes for %d of 100 blobs", n, m, p.upstream.Len())
		}
	})
}

// TestNewerResultIsSent checks that a result recorded while an older one of its action is being sent follows it.
func TestNewerResultIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		action := cas.SHA256.Sum([]byte("a"))
		gate := p.faultyUpstream.Hold(faulty.Record)
		for i := range 2 {
			must.Succeed(t, p.actions.Record(t.Context(), action, &repb.ActionResult{ExitCode: int32(i)}))
			synctest.Wait() // the first waits at the gate
		}
		gate.Open()
		p.drain(t)
		expect.Equal(t, must.Get(p.upstream.Lookup(t.Context(), action))(t).ExitCode, 1, "upstream result")
	})
}

// TestLocallyLostBlobsAreSkipped checks that they do not delay others.
func TestLocallyLostBlobsAreSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		_, lost := put(t, p.store, 1, 100)
		_, kept := put(t, p.store, 2, 100)
		p.local.Delete(lost)
		p.faultyUpstream.Heal()
		p.drain(t)
		if s := p.Stats(); s.Lost != 1 || !has(t, p.upstream, kept) {
			t.Errorf("got %+v", s)
		}
	})
}

// TestPendingLeasesAreRenewed checks that the local leases of pending entries are renewed in intervals.
func TestPendingLeasesAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		_, d := put(t, p.store, 1, 100)
		must.Succeed(t, p.actions.Record(t.Context(), cas.SHA256.Sum(nil),
			&repb.ActionResult{StdoutDigest: d.Proto()}))
		synctest.Wait()
		renewals, lookups := p.faultyLocal.Calls(faulty.Missing), p.faultyLocal.Calls(faulty.Lookup)
		p.faultyUpstream.Hold(faulty.PutAll) // sending queries the local store, too
		time.Sleep(10*time.Hour + time.Minute)
		synctest.Wait()
		expect.Equal(t, p.faultyLocal.Calls(faulty.Missing)-renewals, 10, "blobs were renewed N times in 10 hours")
		expect.Equal(t, p.faultyLocal.Calls(faulty.Lookup)-lookups, 10, "results were looked up N times in 10 hours")
	})
}

// TestCloseEndsWithContext checks that the next overlay then continues.
func TestCloseEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		gate := p.faultyUpstream.Hold(faulty.PutAll)
		_, d := put(t, p.store, 1, 100)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 blobs and results") ||
			!strings.Contains(err.Error(), p.journal) {
			t.Errorf("got %v, want the number of entries and the journal", err)
		}
		gate.Open()
		o := must.Get(overlay.New(overlay.Config{
			Local:    one(p.local, p.local),
			Upstream: one(p.faultyUpstream, p.faultyUpstream), Policy: overlay.WriteBack, Journal: p.journal,
		}))(t)
		if err := o.Close(t.Context()); err != nil || !has(t, p.upstream, d) {
			t.Errorf("the next overlay: %v", err)
		}
	})
}

func TestCloseEndsFetches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, d := put(t, p.upstream, 1, 100)
		p.faultyUpstream.Hold(faulty.Open)
		done := make(chan error, 1)
		go func() {
			_, err := p.store.Open(t.Context(), d, 0)
			done <- err
		}()
		synctest.Wait()
		must.Succeed(t, p.Close(t.Context()))
		wantError(t, "running read", <-done, cas.ErrUnavailable)
		_, err := p.store.Open(t.Context(), d, 0)
		wantError(t, "later read", err, cas.ErrUnavailable)
	})
}

// TestJournalReplay checks that intact lines are sent and damaged ones are counted and kept.
func TestJournalReplay(t *testing.T) {
	for want, change := range map[string]func(*overlay.Config){
		"Config.Local":    func(c *overlay.Config) { c.Local = nil },
		"Config.Upstream": func(c *overlay.Config) { c.Upstream = nil },
		"Config.Journal":  func(c *overlay.Config) { c.Journal = "" },
		"no/journal":      func(*overlay.Config) {}, // its directory is absent
	} {
		c := overlay.Config{
			Local: castest.Instances(), Upstream: castest.Instances(), Policy: overlay.WriteBack,
			Journal: filepath.Join(t.TempDir(), "no/journal"),
		}
		change(&c)
		expect.Message(t, expect.Err(overlay.New(c)), want)
	}
	local, upstream := castest.NewMemory(), castest.NewMemory()
	_, a := put(t, local, 1, 100)
	_, b := put(t, local, 2, 100)
	_, c := put(t, local, 3, 100)
	journal := filepath.Join(t.TempDir(), "journal")
	start := func(text string) (*overlay.Overlay, error) {
		must.Succeed(t, os.WriteFile(journal, []byte(text), 0o600))
		return overlay.New(overlay.Config{
			Local: one(local, local), Upstream: one(upstream, upstream),
			Policy: overlay.WriteBack, Journal: journal,
		})
	}
	// After a power failure.
	for i, line := range []string{
		"x", "add blob x " + a.String(), `sub blob "" ` + a.String(),
		`add blub "" ` + a.String(), `add blob "" 1/2`, "\x00\x00", "",
	} {
		_, sound := put(t, local, byte(100+i), 100)
		text := fmt.Sprintf("%s\n\x00\x00\x00add blob \"\" %s\n", line, sound)
		o, err := start(text)
		must.Be(t, err == nil, "line %q: %v", line, err)
		if err := o.Close(t.Context()); err != nil || o.Stats().Lost != 1 || !has(t, upstream, sound) {
			t.Errorf("line %q: got %v, %d lost, next line sent: %v; want 1 lost and true", line, err, o.Stats().Lost,
				has(t, upstream, sound))
		}
		expect.Equal(t, string(must.Get(os.ReadFile(journal+".damaged"))(t)), text, "line %q", line)
	}
	o, err := start(fmt.Sprintf("add blob %[1]q %[2]s\nadd blob %[1]q %[3]s\nadd blob %[1]q %[2]s\ndone blob %[1]q %[3]s\nadd blob %[1]q %.9[4]s", "an instance", a, b, c))
	must.Succeed(t, err)
	must.Succeed(t, o.Close(t.Context()))
	expect.That(t, has(t, upstream, a) && !has(t, upstream, b) && !has(t, upstream, c),
		"upstream has %v, want only the first blob", upstream.Digests())
	o = must.Get(start(strings.Repeat(fmt.Sprintf("add blob %[1]q %[2]s\ndone blob %[1]q %[2]s\n", "", b), 3) +
		fmt.Sprintf("add blob %q %s\n", "", b)))(t)
	if err := o.Close(t.Context()); err != nil || o.Stats().Sent != 1 || !has(t, upstream, b) {
		t.Errorf("entry struck out and added again: got %v, %d sent, want 1", err, o.Stats().Sent)
	}
}

// TestJournalIsCompacted checks that sent entries do not grow the journal.
func TestJournalIsCompacted(t *testing.T) {
	p := newPair(t, overlay.WriteBack)
	var blobs []cas.Blob
	for i := range 30_000 {
		b := fmt.Append(nil, i)
		blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
	}
	var group sync.WaitGroup
	for part := range 10 {
		group.Go(func() {
			expect.Error(t, errors.Join(p.store.(cas.Batcher).PutAll(t.Context(), blobs[part*3000:][:3000])...), nil)
		})
	}
	group.Wait()
	p.drain(t)
	info := must.Get(os.Stat(p.journal))(t)
	// 60,000 lines of 80 bytes would be 4.8 MB.
	expect.That(t, info.Size() <= 2_000_000 && p.upstream.Len() == len(blobs),
		"the journal has %d bytes, the upstream %d blobs", info.Size(), p.upstream.Len())
}

// TestKill checks that writes acknowledged before a SIGKILL reach the upstream.
func TestKill(t *testing.T) {
	if dir := os.Getenv("OVERLAY_TEST_DIR"); dir != "" {
		writeUntilKilled(t, dir)
		return
	}
	const rounds = 5
	dir := t.TempDir()
	var acknowledged []cas.Digest
	for round := range rounds {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "OVERLAY_TEST_DIR="+dir, fmt.Sprint("OVERLAY_TEST_ROUND=", round))
		cmd.Stderr = os.Stderr
		out := must.Get(cmd.StdoutPipe())(t)
		must.Succeed(t, cmd.Start())
		lines := bufio.NewScanner(out)
		for n := 0; n < 50+37*round && lines.Scan(); n++ {
			d, err := cas.ParseDigest(lines.Text())
			must.Be(t, err == nil, "the writer printed %q", lines.Text())
			acknowledged = append(acknowledged, d)
		}
		must.Succeed(t, cmd.Process.Kill())
		for lines.Scan() { // the rest of its output
			if d, err := cas.ParseDigest(lines.Text()); err == nil {
				acknowledged = append(acknowledged, d)
			}
		}
		cmd.Wait()
	}
	upstream := castest.NewMemory()
	o := must.Get(overlay.New(overlay.Config{
		Local: onDisk(t, filepath.Join(dir, "local")), Upstream: one(upstream, upstream), Policy: overlay.WriteBack,
		Journal: filepath.Join(dir, "journal"),
	}))(t)
	must.Succeed(t, o.Close(t.Context()))
	missing, err := upstream.Missing(t.Context(), acknowledged)
	expect.That(t, err == nil && len(missing) == 0 && len(acknowledged) >= rounds*50,
		"%d of %d acknowledged blobs were lost, %v", len(missing), len(acknowledged), err)
	t.Logf("%d kills, %d acknowledged blobs, %d lost", rounds, len(acknowledged), len(missing))
}

// writeUntilKilled puts blobs and prints each acknowledged digest; the upstream is unavailable.
func writeUntilKilled(t *testing.T, dir string) {
	down := faulty.New(castest.NewMemory(), castest.NewMemory())
	disconnect(down)
	o := open(t, overlay.Config{
		Local: onDisk(t, filepath.Join(dir, "local")), Upstream: one(down, down), Policy: overlay.WriteBack,
		Journal: filepath.Join(dir, "journal"),
	})
	in := instance(t, o)
	for i := range 100_000 {
		b := fmt.Append(nil, os.Getenv("OVERLAY_TEST_ROUND"), " ", i)
		d := cas.SHA256.Sum(b)
		var err error
		if i%3 == 0 {
			err = errors.Join(in.Store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...)
		} else {
			err = in.Store.Put(t.Context(), d, bytes.NewReader(b))
		}
		must.Succeed(t, err)
		fmt.Println(d)
	}
}

// TestFrozenUpstream checks that, with WriteBack, writes never wait for an upstream that does not answer, and that
// queries wait once and briefly.
func TestFrozenUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		_, there := put(t, p.upstream, 1, 100)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, p.upstream.Record(t.Context(), action, &repb.ActionResult{}))
		var gates []*faulty.Gate
		for _, op := range []faulty.Op{
			faulty.Open, faulty.Put, faulty.PutAll, faulty.Missing, faulty.Lookup, faulty.Record,
		} {
			gates = append(gates, p.faultyUpstream.Hold(op))
		}
		took := func(f func()) time.Duration {
			start := time.Now()
			f()
			return time.Since(start)
		}
		writes := func() {
			put(t, p.store, 2, 100)
			put(t, p.store, 3, 3<<20)
			b, d := castest.Blob(4, 100)
			must.Succeed(t, p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})[0])
			must.Succeed(t, p.actions.Record(t.Context(), d, &repb.ActionResult{}))
			must.Get(cas.MissingForPut(t.Context(), p.store, []cas.Digest{there, d}))(t)
		}
		queries := func() {
			wantMissing(t, "upstream frozen", p.store, []cas.Digest{there}, []cas.Digest{there})
			_, err := p.actions.Lookup(t.Context(), action)
			wantError(t, "upstream frozen", err, cas.ErrNotFound)
		}
		expect.Equal(t, took(writes), 0, "duration of the writes")
		if n := took(queries); n > 3*time.Second {
			t.Errorf("the first queries took %v, want at most 3s", n)
		}
		expect.Equal(t, took(func() { writes(); queries(); queries() }), 0, "duration of further calls")
		expect.Equal(t, p.Stats().Unanswered, 6, "unanswered")
		for _, gate := range gates {
			gate.Open()
		}
		synctest.Wait()
		wantMissing(t, "upstream answers", p.store, []cas.Digest{there}, nil)
		must.Get(p.actions.Lookup(t.Context(), action))(t)
	})
}

// A distantStore answers queries for many blobs only after the test has closed release. A distant bucket, which takes a
// call for each blob, also answers small queries much earlier.
type distantStore struct {
	cas.Store
	release chan struct{}
}

func (s distantStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if len(ds) > 10 {
		select {
		case <-s.release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.Store.Missing(ctx, ds)
}

// TestLongQueryDoesNotStopOthers checks that, with WriteBack, a query for many blobs that the upstream has not answered
// in time stops other queries for as many, but no small ones. A small one that is late stops all.
func TestLongQueryDoesNotStopOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		_, there := put(t, upstream, 1, 100)
		action := cas.SHA256.Sum([]byte("a"))
		must.Succeed(t, upstream.Record(t.Context(), action, &repb.ActionResult{}))
		must.Succeed(t, upstream.Record(t.Context(), there, &repb.ActionResult{}))
		release := make(chan struct{})
		bucket := faulty.New(distantStore{upstream, release}, upstream)
		o := open(t, overlay.Config{Local: one(local, local), Upstream: one(bucket, bucket), Policy: overlay.WriteBack})
		in := instance(t, o)
		long := []cas.Digest{there}
		for i := range 1000 {
			long = append(long, cas.SHA256.Sum(fmt.Append(nil, i)))
		}
		small := []cas.Digest{there}
		calls := func() int { return bucket.Calls(faulty.Missing) + bucket.Calls(faulty.Lookup) }
		wantMissing(t, "long", in.Store, long, long)
		wantMissing(t, "small, while the long one runs", in.Store, small, nil)
		_, err := in.Actions.Lookup(t.Context(), action)
		expect.Error(t, err, nil, "lookup, while the long one runs")
		expect.Equal(t, o.Stats().Unanswered, 1, "unanswered")
		before := calls()
		wantMissing(t, "as long", in.Store, long, long)
		expect.Equal(t, calls(), before, "calls of the upstream after a query as long as the late one")

		gate := bucket.Hold(faulty.Missing)
		wantMissing(t, "small, upstream frozen", in.Store, small, small)
		before = calls()
		wantMissing(t, "small, upstream still frozen", in.Store, small, small)
		wantMissing(t, "larger, upstream still frozen", in.Store, long[:2], long[:2])
		_, err = in.Actions.Lookup(t.Context(), there)
		wantError(t, "lookup, upstream still frozen", err, cas.ErrNotFound)
		expect.Equal(t, calls(), before, "calls of the upstream after a small query was late")
		gate.Open()
		synctest.Wait()
		wantMissing(t, "small, upstream answers", in.Store, small, nil)
		close(release)
		synctest.Wait()
		wantMissing(t, "long, upstream answers", in.Store, long, long[1:])
	})
}

// TestPendingIsReported checks the size and the age of pending writes, also after a restart.
func TestPendingIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		disconnect(p.faultyUpstream)
		began := time.Now().Truncate(time.Second)
		_, first := put(t, p.store, 1, 100)
		time.Sleep(time.Hour)
		put(t, p.store, 2, 3<<20)
		must.Succeed(t, p.actions.Record(t.Context(), first, &repb.ActionResult{}))
		for range 2 {
			s := p.Stats()
			expect.That(t, s.Pending == 3 && s.PendingBytes == 3<<20+100 && s.Oldest.Truncate(time.Second).Equal(began),
				"got %+v, want 3 pending since %v", s, began)
			p.restart(t, overlay.WriteBack)
		}
		p.faultyUpstream.Heal()
		p.drain(t)
		if s := p.Stats(); s.Pending != 0 || s.PendingBytes != 0 || !s.Oldest.IsZero() {
			t.Errorf("after sending: got %+v", s)
		}
	})
}

// A slowStore is as slow as a bucket: each blob takes one call, and up to 32 calls run at once.
type slowStore struct {
	cas.Store
	perCall time.Duration
}

func (s slowStore) wait(n int) { time.Sleep(time.Duration((n+31)/32) * s.perCall) }

func (s slowStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	s.wait(1)
	return s.Store.Put(ctx, d, r)
}

func (s slowStore) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	s.wait(len(blobs))
	return cas.PutAll(ctx, s.Store, blobs)
}

func (s slowStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.wait(len(ds))
	return s.Store.Missing(ctx, ds)
}

// TestSenderRests checks that the sender sends nothing while the overlay is in use briefly, and uses a thirtieth of the
// time while it is in use for longer. It does not rest when the overlay is idle or entries have waited for long.
func TestSenderRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const blobs = 10_000
		local, upstream := castest.NewMemory(), castest.NewMemory()
		slow := faulty.New(slowStore{upstream, 10 * time.Millisecond}, nil) // 200 blobs take 70 ms
		s := instance(t, open(t, overlay.Config{
			Local: one(local, local), Upstream: one(slow, nil), Policy: overlay.WriteBack,
		})).Store
		n := 0
		fill := func() {
			var all []cas.Blob
			for range blobs {
				b := fmt.Append(nil, n)
				all = append(all, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
				n++
			}
			must.Succeed(t, errors.Join(s.(cas.Batcher).PutAll(t.Context(), all)...))
		}
		sentWhile := func(use bool, d time.Duration) int {
			before := upstream.Len()
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				if use {
					must.Get(cas.MissingForPut(t.Context(), s, nil))(t)
				}
			}
			return upstream.Len() - before
		}
		fill()
		expect.Equal(t, sentWhile(true, 900*time.Millisecond), 0, "blobs sent while in use for less than a second")
		if got := sentWhile(true, 22*time.Second); got < 1800 || got > 2400 {
			t.Errorf("in use: %d blobs were sent in 22 s, want about 2000", got)
		}
		if sentWhile(false, 7*time.Second); upstream.Len() != blobs {
			t.Errorf("idle: %d of %d blobs were sent", upstream.Len(), blobs)
		}
		disconnect(slow)
		fill()
		sentWhile(true, 16*time.Minute)
		slow.Heal()
		if sentWhile(true, 40*time.Second); upstream.Len() != 2*blobs {
			t.Errorf("after an outage: %d of %d blobs were sent", upstream.Len()-blobs, blobs)
		}
	})
}

// A rejectingStore rejects one blob.
type rejectingStore struct {
	cas.Store
	rejected cas.Digest
}

func (s rejectingStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if d == s.rejected {
		return cas.ErrInvalid
	}
	return s.Store.Put(ctx, d, r)
}

// TestSenderRestsDespiteDelayedEntries checks that the sender sends nothing in the first second of a burst even if an
// entry waits for its delay.
func TestSenderRestsDespiteDelayedEntries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		_, rejected := castest.Blob(0, 100)
		o := open(t, overlay.Config{
			Local: one(local, local), Upstream: one(rejectingStore{upstream, rejected}, nil), Policy: overlay.WriteBack,
		})
		s := instance(t, o).Store
		put(t, s, 0, 100)
		time.Sleep(100 * time.Second) // it is sent after 63 s and 127 s
		for i := range 20 {
			put(t, s, byte(i+1), 100)
		}
		for range 9 {
			must.Get(cas.MissingForPut(t.Context(), s, nil))(t)
			time.Sleep(100 * time.Millisecond)
		}
		expect.Equal(t, upstream.Len(), 0, "blobs that were sent within 900 ms")
		time.Sleep(10 * time.Second)
		expect.Equal(t, upstream.Len(), 20, "blobs that were sent")
		expect.Equal(t, o.Stats().Pending, 1, "pending")
	})
}

// A waveStore is a bucket, which makes four calls at once, with the sizes of the batches that it got.
type waveStore struct {
	slowStore
	mu    sync.Mutex
	sizes []int // guarded by mu
}

func (w *waveStore) Calls() int { return 4 }

func (w *waveStore) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	w.mu.Lock()
	w.sizes = append(w.sizes, len(blobs))
	w.mu.Unlock()
	return w.slowStore.PutAll(ctx, blobs)
}

// TestSenderYields checks that a round to a bucket is small, so that it delays a use that begins meanwhile only
// briefly, and that a large blob is sent slowly while the overlay is in use.
func TestSenderYields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		bucket := &waveStore{slowStore: slowStore{upstream, 10 * time.Millisecond}}
		s := instance(t, open(t, overlay.Config{
			Local: one(local, local), Upstream: one(bucket, nil), Policy: overlay.WriteBack,
		})).Store
		use := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				must.Get(cas.MissingForPut(t.Context(), s, nil))(t)
			}
		}
		var all []cas.Blob
		for i := range 20 {
			data := fmt.Append(nil, i)
			all = append(all, cas.Blob{Digest: cas.SHA256.Sum(data), Data: data})
		}
		must.Succeed(t, errors.Join(s.(cas.Batcher).PutAll(t.Context(), all)...))
		use(time.Minute)
		must.Succeed(t, errors.Join(s.(cas.Batcher).PutAll(t.Context(), all)...))
		time.Sleep(time.Second) // the overlay is idle
		must.Succeed(t, errors.Join(s.(cas.Batcher).PutAll(t.Context(), all)...))
		time.Sleep(time.Minute)
		bucket.mu.Lock()
		if most := slices.Max(bucket.sizes); slices.Max(bucket.sizes[:20]) > 1 || most > 4 {
			t.Errorf("got batches of %v blobs, want 1 while the overlay is in use, and 4 at most", bucket.sizes)
		}
		bucket.mu.Unlock()
		_, large := put(t, s, 1, 10<<20)
		if use(400 * time.Millisecond); has(t, upstream, large) {
			t.Error("in use: 10 MiB were sent at full speed")
		}
		if time.Sleep(time.Second); !has(t, upstream, large) {
			t.Error("idle: 10 MiB were not sent in a second")
		}
	})
}

// TestLargeBlobsDelayNoOthers checks that small blobs and results are sent while large blobs are being sent, at most
// four of these at once, that a result waits for its large blob, and that Close waits for all.
func TestLargeBlobsDelayNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newStrict(t, overlay.WriteBack)
		gate := p.faultyUpstream.Hold(faulty.Put)
		var large []cas.Digest
		for i := range 6 {
			_, d := put(t, p.store, byte(i), 2<<20)
			large = append(large, d)
		}
		waiting, sent := cas.SHA256.Sum([]byte("waiting")), cas.SHA256.Sum([]byte("sent"))
		must.Succeed(t, p.actions.Record(t.Context(), waiting, &repb.ActionResult{StdoutDigest: large[5].Proto()}))
		time.Sleep(time.Minute)
		expect.Equal(t, p.faultyUpstream.Calls(faulty.Put), 4, "large blobs that are being sent")
		_, small := put(t, p.store, 9, 100)
		must.Succeed(t, p.actions.Record(t.Context(), sent, &repb.ActionResult{StdoutDigest: small.Proto()}))
		time.Sleep(time.Minute)
		must.Be(t, has(t, p.upstream, small), "large blobs delay a small one")
		must.Get(p.upstream.Lookup(t.Context(), sent))(t)
		_, err := p.upstream.Lookup(t.Context(), waiting)
		wantError(t, "result of a large blob", err, cas.ErrNotFound)
		expect.Equal(t, p.Stats().Pending, 7, "pending")
		closed := make(chan error, 1)
		go func() { closed <- p.Close(t.Context()) }()
		synctest.Wait()
		expect.Equal(t, len(closed), 0, "Close has returned")
		gate.Open()
		must.Succeed(t, <-closed)
		must.Get(p.upstream.Lookup(t.Context(), waiting))(t)
		wantMissing(t, "closed", p.upstream, large, nil)
	})
}

// TestCompactionKeepsEntriesBeingSent checks that the journal keeps large blobs that are being sent, and results that
// wait for them, when it is compacted meanwhile, and that their local leases are renewed.
func TestCompactionKeepsEntriesBeingSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Hold(faulty.Put)
		_, large := put(t, p.store, 1, 2<<20)
		r := &repb.ActionResult{StdoutDigest: large.Proto()}
		must.Succeed(t, p.actions.Record(t.Context(), cas.SHA256.Sum(nil), r))
		time.Sleep(time.Minute)
		var blobs []cas.Blob
		for i := range 12_000 {
			b := fmt.Append(nil, i)
			blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
		}
		must.Succeed(t, errors.Join(p.store.(cas.Batcher).PutAll(t.Context(), blobs)...))
		time.Sleep(time.Hour)
		expect.Equal(t, p.Stats().Pending, 2, "pending")
		info := must.Get(os.Stat(p.journal))(t)
		must.Be(t, info.Size() < 1_500_000, "the journal of %d bytes is not compacted; adapt this test", info.Size())
		renewals := p.faultyLocal.Calls(faulty.Missing)
		time.Sleep(10*time.Hour + time.Minute)
		expect.Equal(t, p.faultyLocal.Calls(faulty.Missing)-renewals, 10, "renewals of the lease of the large blob")
		p.restart(t, overlay.WriteBack)
		expect.Equal(t, p.Stats().Pending, 2, "pending after a restart")
	})
}

// TestResultOfRejectedBlobIsGivenUp checks that a result does not wait forever for a large blob that the upstream
// denies us.
func TestResultOfRejectedBlobIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrDenied, faulty.Put)
		_, large := put(t, p.store, 1, 2<<20)
		r := &repb.ActionResult{StdoutDigest: large.Proto()}
		must.Succeed(t, p.actions.Record(t.Context(), cas.SHA256.Sum(nil), r))
		time.Sleep(23 * time.Hour)
		expect.Equal(t, p.Stats().Pending, 2, "pending")
		time.Sleep(2 * time.Hour)
		if s := p.Stats(); s.Pending != 1 || s.Refused != 1 {
			t.Errorf("got %+v, want only the blob to be pending", s)
		}
		p.faultyUpstream.Heal()
		time.Sleep(time.Hour)
		expect.Equal(t, p.Stats().Pending, 0, "pending")
		expect.That(t, has(t, p.upstream, large), "the blob was not sent")
	})
}

// TestLargeBlobsArePaced checks that large blobs are not sent in the first second of a burst, and that those that are
// sent in parallel share their rate while the overlay is in use.
func TestLargeBlobsArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		for i := range 40 {
			put(t, p.store, byte(i), 2<<20)
		}
		use := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				must.Get(cas.MissingForPut(t.Context(), p.store, nil))(t)
			}
		}
		use(900 * time.Millisecond)
		expect.Equal(t, p.upstream.Len(), 0, "blobs sent at first")
		use(time.Second)
		before := p.upstream.Len()
		use(2 * time.Second)
		if n := p.upstream.Len() - before; n < 10 || n > 14 { // each rests twice for 60 ms, and for 40 ms
			t.Errorf("%d blobs of 2 MiB were sent in 2 s, want about 12", n)
		}
	})
}
