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

// TestWriteBack: a write is near when it is acknowledged, and far in the end, through every failure.
func TestWriteBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newStrict(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
		_, small := put(t, p.store, 1, 100)
		_, large := put(t, p.store, 2, 3<<20)
		b, batched := castest.Blob(3, 100)
		if errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: batched, Data: b}}); errs[0] != nil {
			t.Fatal(errs[0])
		}
		action, r := built(t, p.store, 4)
		if err := p.actions.Record(t.Context(), action, r); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := p.Stats().Pending; n != 7 || p.far.Len() != 0 || !has(t, p.near, large) {
			t.Errorf("%d pending, far has %d", n, p.far.Len())
		}
		// Far takes questions again, and some of the blobs; then all.
		p.faulty.Heal()
		p.faulty.Fail(cas.ErrFull, castest.Put)
		time.Sleep(time.Minute)
		if !has(t, p.far, small) || !has(t, p.far, batched) || has(t, p.far, large) {
			t.Error("blobs that far takes are held up by those that it does not")
		}
		if _, err := p.far.Lookup(t.Context(), action); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("the result of absent blobs is far: %v", err)
		}
		p.faulty.Heal()
		p.drain(t)
		if got, err := p.far.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) || !has(t, p.far, large) {
			t.Errorf("got %v, %v", got, err)
		}
		if s := p.Stats(); s.Sent != 7 || s.Pending != 0 || s.Lost != 0 {
			t.Errorf("got %+v", s)
		}
	})
}

// TestSentTogether: what was put one by one goes far in one batch.
func TestSentTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
		for i := range 100 {
			put(t, p.store, byte(i), 1000)
		}
		p.faulty.Heal()
		p.drain(t)
		if n, m := p.faulty.Calls(castest.PutAll), p.faulty.Calls(castest.Put); n > 2 || m > 0 || p.far.Len() != 100 {
			t.Errorf("%d batches and %d blobs brought %d of 100", n, m, p.far.Len())
		}
	})
}

// TestResultOfLater: a result that is recorded while another of its action is sent follows it.
func TestResultOfLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		action := cas.SHA256.Sum([]byte("a"))
		gate := p.faulty.Hold(castest.Record)
		for i := range 2 {
			if err := p.actions.Record(t.Context(), action, &repb.ActionResult{ExitCode: int32(i)}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait() // the first is at the gate
		}
		gate.Open()
		p.drain(t)
		if r, err := p.far.Lookup(t.Context(), action); err != nil || r.ExitCode != 1 {
			t.Errorf("far has %v, %v", r, err)
		}
	})
}

// TestLostNear: what near has lost does not hold up the rest.
func TestLostNear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
		_, lost := put(t, p.store, 1, 100)
		_, kept := put(t, p.store, 2, 100)
		p.near.Delete(lost)
		p.faulty.Heal()
		p.drain(t)
		if s := p.Stats(); s.Lost != 1 || !has(t, p.far, kept) {
			t.Errorf("got %+v", s)
		}
	})
}

// TestPendingIsRenewed: near is told at once and again that what is pending is in use.
func TestPendingIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
		_, d := put(t, p.store, 1, 100)
		if err := p.actions.Record(t.Context(), cas.SHA256.Sum(nil), &repb.ActionResult{StdoutDigest: d.Proto()}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		asked, looked := p.nearSide.Calls(castest.Missing), p.nearSide.Calls(castest.Lookup)
		p.faulty.Hold(castest.Missing) // what is sent asks near, too
		time.Sleep(10*time.Hour + time.Minute)
		synctest.Wait()
		if n := p.nearSide.Calls(castest.Missing) - asked; n != 10 {
			t.Errorf("blobs were marked %d times in 10 hours, want 10", n)
		}
		if n := p.nearSide.Calls(castest.Lookup) - looked; n != 10 {
			t.Errorf("results were looked up %d times in 10 hours, want 10", n)
		}
	})
}

// TestCloseIsBounded: it waits no longer than it may, and the next overlay goes on.
func TestCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		gate := p.faulty.Hold(castest.Missing)
		_, d := put(t, p.store, 1, 100)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 blobs and results") || !strings.Contains(err.Error(), p.journal) {
			t.Errorf("got %v, want how many and where", err)
		}
		gate.Open()
		o, err := overlay.New(overlay.Config{Local: one(p.near, p.near), Upstream: one(p.faulty, p.faulty), Policy: overlay.WriteBack, Journal: p.journal})
		if err != nil {
			t.Fatal(err)
		}
		if err := o.Close(t.Context()); err != nil || !has(t, p.far, d) {
			t.Errorf("the next one: %v", err)
		}
	})
}

// TestCloseEndsFetches: who waits is told, and who comes later.
func TestCloseEndsFetches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, d := put(t, p.far, 1, 100)
		p.faulty.Hold(castest.Open)
		done := make(chan error, 1)
		go func() {
			_, err := p.store.Open(t.Context(), d, 0)
			done <- err
		}()
		synctest.Wait()
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantError(t, "who waits", <-done, cas.ErrUnavailable)
		_, err := p.store.Open(t.Context(), d, 0)
		wantError(t, "who comes later", err, cas.ErrUnavailable)
	})
}

// TestJournal: what can be read is sent, and what was never finished was never acknowledged.
func TestJournal(t *testing.T) {
	if _, err := overlay.New(overlay.Config{Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "no/journal")}); err == nil {
		t.Error("a journal in no directory: no error")
	}
	near, far := castest.NewMemory(), castest.NewMemory()
	_, a := put(t, near, 1, 100)
	_, b := put(t, near, 2, 100)
	_, c := put(t, near, 3, 100)
	journal := filepath.Join(t.TempDir(), "journal")
	start := func(text string) (*overlay.Overlay, error) {
		if err := os.WriteFile(journal, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return overlay.New(overlay.Config{Local: one(near, near), Upstream: one(far, far), Policy: overlay.WriteBack, Journal: journal})
	}
	// Power was lost.
	for i, line := range []string{"x", "add blob x " + a.String(), `sub blob "" ` + a.String(), `add blub "" ` + a.String(), `add blob "" 1/2`, "\x00\x00", ""} {
		_, sound := put(t, near, byte(100+i), 100)
		text := fmt.Sprintf("%s\n\x00\x00\x00add blob \"\" %s\n", line, sound)
		o, err := start(text)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		if err := o.Close(t.Context()); err != nil || o.Stats().Lost != 1 || !has(t, far, sound) {
			t.Errorf("line %q: %v, %d lost, and what follows is far: %v", line, err, o.Stats().Lost, has(t, far, sound))
		}
		if left, err := os.ReadFile(journal + ".damaged"); err != nil || string(left) != text {
			t.Errorf("line %q: what is kept is %q, %v", line, left, err)
		}
	}
	o, err := start(fmt.Sprintf("add blob %[1]q %[2]s\nadd blob %[1]q %[3]s\nadd blob %[1]q %[2]s\ndone blob %[1]q %[3]s\nadd blob %[1]q %.9[4]s", "an instance", a, b, c))
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if !has(t, far, a) || has(t, far, b) || has(t, far, c) {
		t.Errorf("far has %v, want the first alone", far.Digests())
	}
	if o, err = start(strings.Repeat(fmt.Sprintf("add blob %[1]q %[2]s\ndone blob %[1]q %[2]s\n", "", b), 3) + fmt.Sprintf("add blob %q %s\n", "", b)); err != nil {
		t.Fatal(err)
	}
	if err := o.Close(t.Context()); err != nil || o.Stats().Sent != 1 || !has(t, far, b) {
		t.Errorf("what was struck out and added again: %v, %d sent", err, o.Stats().Sent)
	}
}

// TestJournalIsMadeAnew: it does not grow with what is over, and loses nothing when it is made anew.
func TestJournalIsMadeAnew(t *testing.T) {
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
	if err != nil {
		t.Fatal(err)
	}
	// 60,000 lines of 80 bytes would be 4.8 MB.
	if info.Size() > 2_000_000 || p.far.Len() != len(blobs) {
		t.Errorf("the journal has %d bytes, far has %d blobs", info.Size(), p.far.Len())
	}
}

// TestKill: what was acknowledged before a kill -9 is far in the end.
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
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 50+37*round && lines.Scan(); n++ {
			d, err := cas.ParseDigest(lines.Text())
			if err != nil {
				t.Fatalf("the writer says %q", lines.Text())
			}
			acknowledged = append(acknowledged, d)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // what it had said by then
			if d, err := cas.ParseDigest(lines.Text()); err == nil {
				acknowledged = append(acknowledged, d)
			}
		}
		cmd.Wait()
	}
	far := castest.NewMemory()
	o, err := overlay.New(overlay.Config{
		Local: onDisk(t, filepath.Join(dir, "near")), Upstream: one(far, far), Policy: overlay.WriteBack, Journal: filepath.Join(dir, "journal"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Close(t.Context()); err != nil {
		t.Error(err)
	}
	missing, err := far.Missing(t.Context(), acknowledged)
	if err != nil || len(missing) > 0 || len(acknowledged) < rounds*50 {
		t.Errorf("%d of %d acknowledged blobs never came far, %v", len(missing), len(acknowledged), err)
	}
	t.Logf("%d kills, %d acknowledged blobs, %d lost", rounds, len(acknowledged), len(missing))
}

// writeUntilKilled puts blobs and says each that is acknowledged; far is away.
func writeUntilKilled(t *testing.T, dir string) {
	away := castest.NewFaulty(castest.NewMemory(), castest.NewMemory())
	away.Fail(cas.ErrUnavailable, castest.Missing)
	o := open(t, overlay.Config{
		Local: onDisk(t, filepath.Join(dir, "near")), Upstream: one(away, away), Policy: overlay.WriteBack, Journal: filepath.Join(dir, "journal"),
	})
	in, err := o.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100_000 {
		b := fmt.Append(nil, os.Getenv("OVERLAY_TEST_ROUND"), " ", i)
		d := cas.SHA256.Sum(b)
		if i%3 == 0 {
			err = errors.Join(in.Store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...)
		} else {
			err = in.Store.Put(t.Context(), d, bytes.NewReader(b))
		}
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println(d)
	}
}
