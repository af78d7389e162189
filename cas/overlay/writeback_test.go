// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
	"google.golang.org/protobuf/proto"
)

// TestWriteBack checks that acknowledged writes are local, and reach the upstream despite failures.
func TestWriteBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newStrict(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Missing)
		_, small := put(t, p.store, 1, 100)
		_, large := put(t, p.store, 2, 3<<20)
		b, batched := castest.Blob(3, 100)
		if errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: batched, Data: b}}); errs[0] != nil {
			t.Fatal(errs[0])
		}
		action, r := built(t, p.store, 4)
		must(t, p.actions.Record(t.Context(), action, r))
		synctest.Wait()
		if n := p.Stats().Pending; n != 7 || p.upstream.Len() != 0 || !has(t, p.local, large) {
			t.Errorf("got %d pending and %d upstream, want 7 and 0", n, p.upstream.Len())
		}
		// The upstream recovers in steps.
		p.faultyUpstream.Heal()
		p.faultyUpstream.Fail(cas.ErrFull, castest.Put)
		time.Sleep(time.Minute)
		if !has(t, p.upstream, small) || !has(t, p.upstream, batched) || has(t, p.upstream, large) {
			t.Error("rejected blobs delay accepted ones")
		}
		if _, err := p.upstream.Lookup(t.Context(), action); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("a result with absent blobs was sent: %v", err)
		}
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
		p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Missing)
		for i := range 100 {
			put(t, p.store, byte(i), 1000)
		}
		p.faultyUpstream.Heal()
		p.drain(t)
		if n, m := p.faultyUpstream.Calls(castest.PutAll), p.faultyUpstream.Calls(castest.Put); n > 2 || m > 0 ||
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
		gate := p.faultyUpstream.Hold(castest.Record)
		for i := range 2 {
			must(t, p.actions.Record(t.Context(), action, &repb.ActionResult{ExitCode: int32(i)}))
			synctest.Wait() // the first waits at the gate
		}
		gate.Open()
		p.drain(t)
		if r, err := p.upstream.Lookup(t.Context(), action); err != nil || r.ExitCode != 1 {
			t.Errorf("upstream result: got %v, %v, want exit code 1", r, err)
		}
	})
}

// TestLocallyLostBlobsAreSkipped checks that they do not delay others.
func TestLocallyLostBlobsAreSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Missing)
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
		p.faultyUpstream.Fail(cas.ErrUnavailable, castest.Missing)
		_, d := put(t, p.store, 1, 100)
		if err := p.actions.Record(t.Context(), cas.SHA256.Sum(nil),
			&repb.ActionResult{StdoutDigest: d.Proto()}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		renewals, lookups := p.faultyLocal.Calls(castest.Missing), p.faultyLocal.Calls(castest.Lookup)
		p.faultyUpstream.Hold(castest.Missing) // sending queries the local store, too
		time.Sleep(10*time.Hour + time.Minute)
		synctest.Wait()
		if n := p.faultyLocal.Calls(castest.Missing) - renewals; n != 10 {
			t.Errorf("blobs were renewed %d times in 10 hours, want 10", n)
		}
		if n := p.faultyLocal.Calls(castest.Lookup) - lookups; n != 10 {
			t.Errorf("results were looked up %d times in 10 hours, want 10", n)
		}
	})
}

// TestCloseEndsWithContext checks that the next overlay then continues.
func TestCloseEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		gate := p.faultyUpstream.Hold(castest.Missing)
		_, d := put(t, p.store, 1, 100)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 blobs and results") ||
			!strings.Contains(err.Error(), p.journal) {
			t.Errorf("got %v, want the number of entries and the journal", err)
		}
		gate.Open()
		o, err := overlay.New(overlay.Config{
			Local:    one(p.local, p.local),
			Upstream: one(p.faultyUpstream, p.faultyUpstream), Policy: overlay.WriteBack, Journal: p.journal,
		})
		must(t, err)
		if err := o.Close(t.Context()); err != nil || !has(t, p.upstream, d) {
			t.Errorf("the next overlay: %v", err)
		}
	})
}

func TestCloseEndsFetches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, d := put(t, p.upstream, 1, 100)
		p.faultyUpstream.Hold(castest.Open)
		done := make(chan error, 1)
		go func() {
			_, err := p.store.Open(t.Context(), d, 0)
			done <- err
		}()
		synctest.Wait()
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantError(t, "running read", <-done, cas.ErrUnavailable)
		_, err := p.store.Open(t.Context(), d, 0)
		wantError(t, "later read", err, cas.ErrUnavailable)
	})
}

// TestJournalReplay checks that intact lines are sent and damaged ones are counted and kept.
func TestJournalReplay(t *testing.T) {
	if _, err := overlay.New(overlay.Config{
		Policy:  overlay.WriteBack,
		Journal: filepath.Join(t.TempDir(), "no/journal"),
	}); err == nil {
		t.Error("a journal in an absent directory: got no error")
	}
	local, upstream := castest.NewMemory(), castest.NewMemory()
	_, a := put(t, local, 1, 100)
	_, b := put(t, local, 2, 100)
	_, c := put(t, local, 3, 100)
	journal := filepath.Join(t.TempDir(), "journal")
	start := func(text string) (*overlay.Overlay, error) {
		must(t, os.WriteFile(journal, []byte(text), 0o600))
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
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		if err := o.Close(t.Context()); err != nil || o.Stats().Lost != 1 || !has(t, upstream, sound) {
			t.Errorf("line %q: got %v, %d lost, next line sent: %v; want 1 lost and true", line, err, o.Stats().Lost,
				has(t, upstream, sound))
		}
		if left, err := os.ReadFile(journal + ".damaged"); err != nil || string(left) != text {
			t.Errorf("line %q: got copy %q, %v", line, left, err)
		}
	}
	o, err := start(fmt.Sprintf("add blob %[1]q %[2]s\nadd blob %[1]q %[3]s\nadd blob %[1]q %[2]s\ndone blob %[1]q %[3]s\nadd blob %[1]q %.9[4]s", "an instance", a, b, c))
	must(t, err)
	if err := o.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if !has(t, upstream, a) || has(t, upstream, b) || has(t, upstream, c) {
		t.Errorf("upstream has %v, want only the first blob", upstream.Digests())
	}
	if o, err = start(strings.Repeat(fmt.Sprintf("add blob %[1]q %[2]s\ndone blob %[1]q %[2]s\n", "", b), 3) +
		fmt.Sprintf("add blob %q %s\n", "", b)); err != nil {
		t.Fatal(err)
	}
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
			if err := errors.Join(p.store.(cas.Batcher).PutAll(t.Context(), blobs[part*3000:][:3000])...); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	p.drain(t)
	info, err := os.Stat(p.journal)
	must(t, err)
	// 60,000 lines of 80 bytes would be 4.8 MB.
	if info.Size() > 2_000_000 || p.upstream.Len() != len(blobs) {
		t.Errorf("the journal has %d bytes, the upstream %d blobs", info.Size(), p.upstream.Len())
	}
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
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		lines := bufio.NewScanner(out)
		for n := 0; n < 50+37*round && lines.Scan(); n++ {
			d, err := cas.ParseDigest(lines.Text())
			if err != nil {
				t.Fatalf("the writer printed %q", lines.Text())
			}
			acknowledged = append(acknowledged, d)
		}
		must(t, cmd.Process.Kill())
		for lines.Scan() { // the rest of its output
			if d, err := cas.ParseDigest(lines.Text()); err == nil {
				acknowledged = append(acknowledged, d)
			}
		}
		cmd.Wait()
	}
	upstream := castest.NewMemory()
	o, err := overlay.New(overlay.Config{
		Local: onDisk(t, filepath.Join(dir, "local")), Upstream: one(upstream, upstream), Policy: overlay.WriteBack,
		Journal: filepath.Join(dir, "journal"),
	})
	must(t, err)
	if err := o.Close(t.Context()); err != nil {
		t.Error(err)
	}
	missing, err := upstream.Missing(t.Context(), acknowledged)
	if err != nil || len(missing) > 0 || len(acknowledged) < rounds*50 {
		t.Errorf("%d of %d acknowledged blobs were lost, %v", len(missing), len(acknowledged), err)
	}
	t.Logf("%d kills, %d acknowledged blobs, %d lost", rounds, len(acknowledged), len(missing))
}

// writeUntilKilled puts blobs and prints each acknowledged digest; the upstream is unavailable.
func writeUntilKilled(t *testing.T, dir string) {
	down := castest.NewFaulty(castest.NewMemory(), castest.NewMemory())
	down.Fail(cas.ErrUnavailable, castest.Missing)
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
		must(t, err)
		fmt.Println(d)
	}
}
