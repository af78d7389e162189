// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
)

// served is a cloister serve in front of a bucket, which can be restarted.
type served struct {
	*bazelrun.Server
	bucket *bucket
	dir    string
	flags  []string
	store  *remote.Store
}

// serveBucket starts cloister serve in front of the prefix serve of a bucket.
func serveBucket(t *testing.T, b *bucket, flags ...string) *served {
	t.Helper()
	s := &served{bucket: b, dir: t.TempDir(), flags: flags}
	s.start(t)
	t.Cleanup(func() {
		if s.Server != nil {
			s.stop(t)
		}
	})
	return s
}

// start starts it, again with the same store.
func (s *served) start(t *testing.T) {
	t.Helper()
	program := confiner(t)
	s.Server = must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: program, Dir: s.dir, Home: t.TempDir(), Listen: "127.0.0.1:0", MaxSize: "1GiB",
		Args: append([]string{"--store", s.bucket.url("serve"), "--drain-timeout=1s"}, s.flags...),
		Env:  []string{"AWS_ACCESS_KEY_ID=" + peers.AccessKey, "AWS_SECRET_ACCESS_KEY=" + peers.SecretKey},
	}))(t)
	s.store = dialAt(t, s.Addr, "")
}

// stop stops it in order.
func (s *served) stop(t *testing.T) {
	t.Helper()
	server := s.Server
	s.Server = nil
	must.Succeed(t, server.Stop())
}

// put uploads a blob.
func (s *served) put(t *testing.T, data []byte) error {
	_, err := cas.PutBytes(t.Context(), s.store, cas.SHA256, data)
	return err
}

// upload does what a client does: it uploads a blob if it is missing.
func (s *served) upload(t *testing.T, data []byte) {
	t.Helper()
	missing := must.Get(s.store.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum(data)}))(t)
	if len(missing) > 0 {
		must.Succeed(t, s.put(t, data))
	}
}

// blobs returns blobs that serve treats differently: in its segments, in a file, and in parts.
func blobs() [][]byte {
	var blobs [][]byte
	for i, size := range []int{1000, 100_000, 3 << 20, 20 << 20} {
		data, _ := castest.Blob(byte(20+i), size)
		blobs = append(blobs, data)
	}
	return blobs
}

// TestRefusedUploadReachesTheBucketLater checks that a blob that the bucket did not get is not taken for present, even
// after restarts of both.
func TestRefusedUploadReachesTheBucketLater(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b)
	b.Kill()
	for _, data := range blobs() {
		if err := s.put(t, data); casstatus.Code(err) != codes.Unavailable {
			t.Errorf("%d bytes without the bucket: got %v, want UNAVAILABLE", len(data), err)
		}
	}
	s.stop(t)
	b.start(t)
	s.start(t)
	for _, data := range blobs() {
		s.upload(t, data)
		b.wantObject(t, "serve", cas.SHA256.Sum(data))
	}
}

// TestKilledUploadReachesTheBucketLater kills serve in the middle of a large upload, and checks that the next upload is
// not answered by what the first left behind.
func TestKilledUploadReachesTheBucketLater(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	s := serveBucket(t, b)
	data, d := castest.Blob(1, 64<<20)
	for _, sent := range []int{16 << 20, len(data)} {
		source := &pausing{r: bytes.NewReader(data[:sent]), paused: make(chan struct{}), release: make(chan struct{})}
		done := make(chan error, 1)
		go func() { done <- s.store.Put(t.Context(), d, io.MultiReader(source, bytes.NewReader(data[sent:]))) }()
		<-source.paused
		if sent == len(data) {
			close(source.release) // kill it between the last byte and the answer
			must.Hold(t, "parts in the bucket", func() bool { return len(b.files(t, "")) > 0 })
		}
		s.Kill()
		if sent < len(data) {
			close(source.release)
		}
		if err := <-done; err == nil {
			t.Log("the upload was acknowledged before the kill")
		}
		s.start(t)
		s.upload(t, data)
		b.wantObject(t, "serve", d)
		must.Succeed(t, os.Remove(b.file("serve", d))) // for the second round
		s.stop(t)
		s.dir = t.TempDir()
		s.start(t)
	}
}

// A pausing reader reports that r has ended, and then waits.
type pausing struct {
	r               io.Reader
	paused, release chan struct{}
}

func (p *pausing) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	if err == io.EOF {
		close(p.paused)
		<-p.release
	}
	return n, err
}

// TestDamagedObjectIsReplacedThroughServe checks that an upload replaces an object that a read has found damaged, here
// by a server whose store is empty.
func TestDamagedObjectIsReplacedThroughServe(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	first := serveBucket(t, b)
	for _, data := range blobs() {
		first.upload(t, data)
		d := cas.SHA256.Sum(data)
		damaged := slices.Clone(data)
		damaged[len(data)/2] ^= 1
		must.Succeed(t, os.WriteFile(b.file("serve", d), damaged, 0o644))
	}
	second := serveBucket(t, b)
	for _, data := range blobs() {
		d := cas.SHA256.Sum(data)
		expect.That(t, expect.Err(cas.ReadAll(t.Context(), second.store, d, d.Size())) != nil,
			"%d bytes: damaged object was served", len(data))
		wantMissing(t, second.store, d, true)
		second.upload(t, data)
		b.wantObject(t, "serve", d)
	}
}

// TestEmptiedBucketIsRefilled checks that blobs deleted from the bucket return to it when clients use them again,
// although serve has them. It notices at the first use after a start, or by a sample of later ones.
func TestEmptiedBucketIsRefilled(t *testing.T) {
	for _, mode := range []string{"through", "back"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := newBucket(t, "plain")
			s := serveBucket(t, b, "--cas-write="+mode)
			for _, data := range blobs() {
				s.upload(t, data)
			}
			full := func() bool { return len(b.files(t, "serve")) == len(blobs()) }
			must.Hold(t, "all blobs are in the bucket", full)
			for _, file := range b.files(t, "serve") {
				must.Succeed(t, os.Remove(file))
			}
			s.stop(t)
			s.start(t)
			must.Hold(t, "the blobs are in the bucket again", func() bool {
				for _, data := range blobs() {
					s.upload(t, data)
				}
				return full()
			})
			for _, data := range blobs() {
				b.wantObject(t, "serve", cas.SHA256.Sum(data))
			}
		})
	}
}

// TestServeStartsWithoutTheBucket checks that write-back queues what it gets while the bucket is down, and that the
// metrics tell.
func TestServeStartsWithoutTheBucket(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	b.Kill()
	metrics := must.Get(loopback.Address())(t)
	s := serveBucket(t, b, "--cas-write=back", "--metrics="+metrics)
	for _, data := range blobs() {
		s.upload(t, data)
	}
	scrape := func() string {
		resp := must.Get(http.Get("http://" + metrics + "/metrics"))(t)
		defer resp.Body.Close()
		return string(must.Get(io.ReadAll(resp.Body))(t))
	}
	expect.Text(t, scrape(), `cloister_cas_upstream_requests_total{kind="probe",outcome="unavailable"}`)
	b.start(t)
	must.Hold(t, "all blobs are in the bucket", func() bool { return len(b.files(t, "serve")) == len(blobs()) })
	for _, data := range blobs() {
		b.wantObject(t, "serve", cas.SHA256.Sum(data))
	}
	for _, line := range []string{`kind="put",outcome="ok"} 3`, `kind="complete",outcome="ok"} 1`, `direction="sent"`} {
		must.Hold(t, "metrics with "+line, func() bool { return strings.Contains(scrape(), line) })
	}
}
