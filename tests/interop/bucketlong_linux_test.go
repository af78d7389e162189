// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// An uploader uploads distinct blobs until it is stopped or reaches its limit, and records which were acknowledged and
// which refused.
type uploader struct {
	mu      sync.Mutex
	acked   []cas.Digest // guarded by mu
	refused []upload     // guarded by mu
	stop    chan struct{}
	group   sync.WaitGroup
}

// An upload identifies a blob of an uploader.
type upload struct {
	round, worker, n int
	digest           cas.Digest // set afterwards
}

// data returns the blob: one that serve stores in a segment, in a file, or in a file and in parts in the bucket.
func (u *upload) data() []byte {
	data, _ := castest.Blob(byte(u.worker), []int{1000, 100_000, 3 << 20}[u.worker])
	copy(data, fmt.Sprint(u.round, u.worker, u.n, " "))
	return data
}

// startUploader starts an uploader of up to limit small, medium and large blobs each, which differ between rounds.
func startUploader(t *testing.T, store *remote.Store, round, limit int) *uploader {
	u := &uploader{stop: make(chan struct{})}
	for worker := range 3 {
		u.group.Go(func() {
			for n := range limit {
				select {
				case <-u.stop:
					return
				default:
				}
				blob := upload{round: round, worker: worker, n: n}
				data := blob.data()
				blob.digest = cas.SHA256.Sum(data)
				err := store.Put(t.Context(), blob.digest, bytes.NewReader(data))
				u.mu.Lock()
				if err == nil {
					u.acked = append(u.acked, blob.digest)
				} else {
					u.refused = append(u.refused, blob)
				}
				u.mu.Unlock()
			}
		})
	}
	return u
}

// counts returns the number of acknowledged and of refused blobs.
func (u *uploader) counts() (acked, refused int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.acked), len(u.refused)
}

// wantRefused checks that a server reports refused blobs as missing, unless the bucket has them after all.
func (s *served) wantRefused(t *testing.T, when string, blobs []upload) {
	t.Helper()
	var ds []cas.Digest
	for _, u := range blobs {
		ds = append(ds, u.digest)
	}
	missing := map[cas.Digest]bool{}
	for _, d := range must.Get(s.store.Missing(t.Context(), ds))(t) {
		missing[d] = true
	}
	for _, d := range ds {
		if _, err := os.Stat(s.bucket.file("serve", d)); err != nil && !missing[d] {
			t.Errorf("%s: refused blob %s is reported present: %v", when, d, err)
		}
	}
}

// TestKillsAndOutagesLoseNothing kills serve and the bucket while clients upload, again and again. With write-through,
// what was acknowledged is in the bucket, and what serve reports present afterwards is, too. A refused upload can be
// repeated.
func TestKillsAndOutagesLoseNothing(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b)
	var refused []upload // of all rounds
	for round := range 4 {
		u := startUploader(t, s.store, round, math.MaxInt)
		must.Hold(t, "uploads", func() bool { n, _ := u.counts(); return n > 10 })
		b.Kill()
		_, before := u.counts()
		must.Hold(t, "refused uploads", func() bool { _, n := u.counts(); return n > before+3 })
		if round%2 == 0 { // serve ends during the outage
			s.Kill()
		}
		b.start(t)
		if round%2 == 1 {
			before, _ := u.counts()
			must.Hold(t, "uploads after the outage", func() bool { n, _ := u.counts(); return n > before+10 })
			u.mu.Lock()
			during := slices.Clone(u.refused)
			u.mu.Unlock()
			s.wantRefused(t, fmt.Sprintf("round %d, after the outage", round), during)
			s.Kill()
		}
		close(u.stop)
		u.group.Wait()
		s.start(t)
		for _, d := range u.acked {
			b.wantObject(t, "serve", d)
		}
		missing, err := s.store.Missing(t.Context(), u.acked)
		expect.That(t, err == nil && len(missing) == 0,
			"round %d: %d of %d acknowledged blobs are missing, %v", round, len(missing), len(u.acked), err)
		refused = append(refused, u.refused...)
		s.wantRefused(t, fmt.Sprintf("round %d, after the restart", round), refused)
		for i := range u.refused {
			// Those in progress when the bucket ended come first, and few are large.
			if again := &u.refused[i]; i < 3 || again.worker == 2 && i < 300 {
				s.upload(t, again.data())
				b.wantObject(t, "serve", again.digest)
			}
		}
	}
	// What is reported present is in the bucket, whatever became of its upload.
	for _, data := range blobs() {
		s.upload(t, data)
		b.wantObject(t, "serve", cas.SHA256.Sum(data))
	}
}

// TestFrozenBucketLosesNothing freezes the bucket behind write-back. Queries, actions and uploads succeed, also after
// serve was killed. Once the bucket answers again, it gets all blobs and results.
func TestFrozenBucketLosesNothing(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b, "--cas-write=back")
	_, absent := castest.Blob(40, 1000)
	thaw := freeze(t, b)
	var acked, actions []cas.Digest
	for round := range 2 {
		wantMissing(t, s.store, absent, true)
		a := action(t, s.store, fmt.Sprintf("echo %d > out/copy", round), time.Minute)
		result := must.Get(execute(t.Context(), s.Addr, "", a))(t).GetResult()
		expect.Equal(t, len(result.GetOutputFiles()), 1, "outputs")
		actions = append(actions, must.Get(cas.FromProto(cas.SHA256, a))(t))
		u := startUploader(t, s.store, round, 10)
		must.Hold(t, "uploads", func() bool { n, _ := u.counts(); return n > 15 })
		_, refused := u.counts()
		expect.Equal(t, refused, 0, "refused uploads")
		if round == 0 {
			s.Kill()
		}
		close(u.stop)
		u.group.Wait()
		acked = append(acked, u.acked...)
		if round == 0 {
			s.start(t)
		}
	}
	thaw()
	bucket := b.store(t, "serve")
	// The sender pauses for up to 30 s before it notices that the bucket answers.
	sent := must.Poll(3*time.Minute, func() bool {
		for _, a := range actions {
			if _, err := bucket.Lookup(t.Context(), a); err != nil {
				return false
			}
		}
		missing, err := bucket.Missing(t.Context(), acked)
		return err == nil && len(missing) == 0
	})
	must.Be(t, sent, "timeout: all blobs and results are in the bucket")
	for _, d := range acked {
		b.wantObject(t, "serve", d)
	}
}

// TestLeftoversReachTheBucketWithWriteThrough changes the policy while blobs wait to be sent.
func TestLeftoversReachTheBucketWithWriteThrough(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	b.Kill()
	s := serveBucket(t, b, "--cas-write=back")
	for _, data := range blobs() {
		s.upload(t, data)
	}
	s.stop(t)
	b.start(t)
	s.flags = nil
	s.start(t)
	must.Hold(t, "all blobs are in the bucket", func() bool { return len(b.files(t, "serve")) == len(blobs()) })
	for _, data := range blobs() {
		b.wantObject(t, "serve", cas.SHA256.Sum(data))
		must.Hold(t, "the blob is present", func() bool {
			missing, err := s.store.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum(data)})
			return err == nil && len(missing) == 0
		})
	}
}

// TestFunctionsAndInstancesShareABucket checks that blobs of all digest functions and of two instances reach the
// bucket, and return from it to their own instance only.
func TestFunctionsAndInstancesShareABucket(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b, "--cas-write=back")
	want := map[string][]cas.Digest{}
	for i, name := range []string{"", "team/one"} {
		store := dialAt(t, s.Addr, name)
		for _, f := range cas.Functions() {
			data, _ := castest.Blob(byte(i), 2000)
			d := must.Get(cas.PutBytes(t.Context(), store, f, data))(t)
			want[name] = append(want[name], d)
		}
	}
	must.Hold(t, "all blobs are in the bucket", func() bool { return len(b.files(t, "serve")) == 2*len(cas.Functions()) })
	s.stop(t)
	s.dir = t.TempDir() // another machine
	s.start(t)
	for name, ds := range want {
		for other, theirs := range want {
			missing, err := dialAt(t, s.Addr, name).Missing(t.Context(), theirs)
			if other == name && len(missing) > 0 || other != name && !slices.Equal(missing, theirs) || err != nil {
				t.Errorf("instance %q: got %d of %d blobs of %q missing, %v", name, len(missing), len(theirs), other, err)
			}
		}
		for _, d := range ds {
			data, err := cas.ReadAll(t.Context(), dialAt(t, s.Addr, name), d, 1<<20)
			expect.That(t, err == nil && d.Function().Sum(data) == d,
				"instance %q: blob %s: got %d bytes, %v", name, d, len(data), err)
		}
	}
}
