// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// An uploader uploads distinct blobs until it is stopped, and records the acknowledged ones.
type uploader struct {
	mu      sync.Mutex
	acked   []cas.Digest // guarded by mu
	refused int          // guarded by mu
	stop    chan struct{}
	group   sync.WaitGroup
}

// upload starts an uploader of small and large blobs, which differ between rounds.
func upload(t *testing.T, store *remote.Store, round int) *uploader {
	u := &uploader{stop: make(chan struct{})}
	for worker, size := range []int{1000, 100_000, 3 << 20} {
		u.group.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-u.stop:
					return
				default:
				}
				data, _ := castest.Blob(byte(worker), size)
				copy(data, fmt.Sprint(round, worker, n, " "))
				d, err := cas.PutBytes(t.Context(), store, cas.SHA256, data)
				u.mu.Lock()
				if err == nil {
					u.acked = append(u.acked, d)
				} else {
					u.refused++
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
	return len(u.acked), u.refused
}

// TestKillsAndOutagesLoseNothing kills serve and the bucket while clients upload, again and again. With write-through,
// what was acknowledged is in the bucket, and what serve reports present afterwards is, too.
func TestKillsAndOutagesLoseNothing(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b)
	for round := range 4 {
		u := upload(t, s.store, round)
		must.Hold(t, "uploads", func() bool { n, _ := u.counts(); return n > 10 })
		b.Kill()
		_, refused := u.counts()
		must.Hold(t, "refused uploads", func() bool { _, n := u.counts(); return n > refused+3 })
		if round%2 == 0 { // serve ends during the outage
			s.Kill()
		}
		b.start(t)
		if round%2 == 1 {
			before, _ := u.counts()
			must.Hold(t, "uploads after the outage", func() bool { n, _ := u.counts(); return n > before+10 })
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
	}
	// What is reported present is in the bucket, whatever became of its upload.
	for _, data := range blobs() {
		s.upload(t, data)
		b.wantObject(t, "serve", cas.SHA256.Sum(data))
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
