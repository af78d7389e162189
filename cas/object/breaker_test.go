// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/minio/minio-go/v7"
)

// A bubble is a bucket without a network, for tests with a fake clock.
type bubble struct {
	*server
	client  *object.Client
	store   *object.Store
	present cas.Digest // of a blob with a result

	mu     sync.Mutex
	sent   map[string]int // requests by kind
	answer func(kind string, r *http.Request) (*http.Response, error)
}

// inBubble calls test with a client created by New, and with a blob and a result in the bucket.
func inBubble(t *testing.T, test func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{server: newServer(t, "s3"), sent: map[string]int{}}
		b.address = "http://bucket.example.com"
		b.client = must.Get(object.NewOver(t.Context(), object.Config{URL: b.url("")}, b))(t)
		defer b.client.Close()
		b.store = named(t, b.client, "")
		data, _ := castest.Blob(1, 1000)
		b.present = put(t, b.store, data)
		must.Succeed(t, b.store.Record(t.Context(), b.present, &repb.ActionResult{}))
		test(t, b)
	})
}

// RoundTrip implements http.RoundTripper.
func (b *bubble) RoundTrip(r *http.Request) (*http.Response, error) {
	what := kind(r)
	b.mu.Lock()
	b.sent[what]++
	answer := b.answer
	b.mu.Unlock()
	if answer != nil {
		if resp, err := answer(what, r); resp != nil || err != nil {
			return resp, err
		}
	}
	return b.serve(r), nil
}

// serve passes a request to the server.
func (b *bubble) serve(r *http.Request) *http.Response {
	in := r.Clone(context.Background())
	in.Header.Set("Content-Length", strconv.FormatInt(r.ContentLength, 10))
	if r.Body == nil {
		in.Body = http.NoBody
	}
	w := httptest.NewRecorder()
	b.ServeHTTP(w, in)
	return w.Result()
}

// respond makes f answer those requests for which it returns a response, and resets the counters.
func (b *bubble) respond(f func(kind string, r *http.Request) (*http.Response, error)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answer = f
	clear(b.sent)
}

// requests returns the number of requests, without those of probes.
func (b *bubble) requests() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for kind, count := range b.sent {
		if kind != "probe" {
			n += count
		}
	}
	return n
}

// probes returns the number of probes.
func (b *bubble) probes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sent["probe"]
}

// frozen never answers.
func frozen(_ string, r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, context.Cause(r.Context())
}

// killed refuses connections.
func killed(string, *http.Request) (*http.Response, error) { return nil, syscall.ECONNREFUSED }

// denied refuses our credentials.
func denied(string, *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	refuse(w, 403, "AccessDenied", "")
	return w.Result(), nil
}

// noBucket is the answer of a server without the bucket. A response to HEAD has no body.
func noBucket(string, *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	w.Header().Set("X-Minio-Error-Code", "NoSuchBucket")
	refuse(w, 404, "NoSuchBucket", "")
	return w.Result(), nil
}

// wantDown checks that calls of every kind fail at once with an error that wraps kind, and send nothing, not even a
// probe.
func (b *bubble) wantDown(t *testing.T, kind error, why string) {
	t.Helper()
	before, start := b.requests()+b.probes(), time.Now()
	for call, f := range calls(b.store, b.present) {
		if err := f(t.Context()); !errors.Is(err, kind) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "since 20") {
			t.Errorf("%s: got %v, want %v since when and for %q", call, err, kind, why)
		}
	}
	if n := b.requests() + b.probes() - before; n != 0 || time.Since(start) != 0 {
		t.Errorf("got %d requests and %v, want none", n, time.Since(start))
	}
}

// wantUp checks that calls of every kind succeed.
func (b *bubble) wantUp(t *testing.T) {
	t.Helper()
	for call, f := range calls(b.store, b.present) {
		expect.Error(t, f(t.Context()), nil, "%s", call)
	}
}

// TestDownBucketIsNotCalled checks that the first failed call of each kind is bounded and starts a probe, that no other
// call sends a request, and that calls succeed when the bucket is back.
func TestDownBucketIsNotCalled(t *testing.T) {
	for name, c := range map[string]struct {
		answer   func(string, *http.Request) (*http.Response, error)
		want     error
		why      string
		requests int           // of the first call, at most
		time     time.Duration // that it takes, at most
	}{
		"frozen": {frozen, cas.ErrUnavailable, "no answer for", 2, 31 * time.Second},
		"killed": {killed, cas.ErrUnavailable, "connection refused", 5, 5 * time.Second},
		"denied": {denied, cas.ErrDenied, "AccessDenied", 1, time.Second},
		"absent": {noBucket, object.ErrNoBucket, "create it", 1, time.Second},
		"broken": {func(string, *http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			refuse(w, 503, "ServiceUnavailable", "")
			return w.Result(), nil
		}, cas.ErrUnavailable, "ServiceUnavailable", 5, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				for call, f := range calls(b.store, b.present) {
					b.respond(c.answer)
					start := time.Now()
					if err := f(t.Context()); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.why) {
						t.Errorf("%s: got %v, want %v with %q", call, err, c.want, c.why)
					}
					if n, d := b.requests(), time.Since(start); n > c.requests || d > c.time {
						t.Errorf("%s: took %d requests and %v, want at most %d and %v", call, n, d, c.requests, c.time)
					}
					time.Sleep(15 * time.Second) // for the probe
					b.wantDown(t, c.want, c.why)
					b.respond(nil)
					time.Sleep(15 * time.Second)
				}
				b.wantUp(t)
			})
		})
	}
}

// TestAbsentBucketIsUnavailable checks that a call that finds no bucket opens the breaker, and that later calls also
// fail with ErrUnavailable, on which clients retry.
func TestAbsentBucketIsUnavailable(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(noBucket)
		data, d := castest.Blob(2, 50)
		for _, want := range []error{nil, cas.ErrUnavailable} {
			err := b.store.Put(t.Context(), d, bytes.NewReader(data))
			expect.That(t, errors.Is(err, object.ErrNoBucket) && (want == nil || errors.Is(err, want)),
				"got %v, want ErrNoBucket and %v", err, want)
			b.wantDown(t, cas.ErrUnavailable, "create it")
		}
	})
}

// TestRecoveredBucketHasNoDamage checks that a read that fails without a request, because the bucket refused an earlier
// probe, does not mark its object as damaged, even if the bucket has recovered since.
func TestRecoveredBucketHasNoDamage(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(denied)
		expect.Error(t, b.client.Check(t.Context()), cas.ErrDenied, "the bucket")
		b.respond(nil)
		_, err := b.store.Open(t.Context(), b.present, 0)
		expect.Error(t, err, cas.ErrDenied, "the read")
		expect.Equal(t, b.client.Damaged(), 0, "damaged blobs")
		time.Sleep(3 * time.Second) // for the probe
		b.wantUp(t)
	})
}

// TestRefusingBucketDelaysWriteBack checks that with write-back, uploads and queries succeed while the bucket refuses
// all requests or only writes, which also renew objects, and while it does not exist. Afterwards the bucket gets
// everything.
func TestRefusingBucketDelaysWriteBack(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(string, *http.Request) (*http.Response, error)
		all    bool // requests, not only writes
	}{
		"denied":        {denied, true},
		"writes denied": {denied, false},
		"absent":        {noBucket, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				client := must.Get(object.NewOver(t.Context(), object.Config{URL: b.url("&expire_days=10")}, b))(t)
				defer client.Close()
				time.Sleep(6 * 24 * time.Hour)
				local := castest.NewMemory()
				o := must.Get(overlay.New(overlay.Config{
					Local: func(name string) (*cas.Instance, error) {
						return &cas.Instance{Name: name, Store: local, Actions: local}, nil
					},
					Upstream: client.Instance, Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "journal"),
				}))(t)
				in := must.Get(o.Instance(""))(t)
				b.respond(func(kind string, r *http.Request) (*http.Response, error) {
					if !c.all && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
						return nil, nil
					}
					return c.answer(kind, r)
				})
				data, _ := castest.Blob(3, 1000)
				d := put(t, in.Store, data)
				must.Succeed(t, in.Actions.Record(t.Context(), d, &repb.ActionResult{ExitCode: 3}))
				var want []cas.Digest // the blobs that are not local, if the bucket cannot be queried
				if c.all {
					want = []cas.Digest{b.present}
				}
				var before int
				for range 10 {
					missing, err := in.Store.Missing(t.Context(), []cas.Digest{b.present, d})
					expect.That(t, err == nil && slices.Equal(missing, want), "got missing %v, %v, want %v", missing, err, want)
					time.Sleep(time.Minute)
					if before == 0 {
						before = b.requests()
					}
				}
				expect.That(t, !c.all || b.requests() == before, "%d requests, want none while the bucket is down", b.requests()-before)
				b.respond(nil)
				must.Succeed(t, o.Close(t.Context()))
				missing, err := b.store.Missing(t.Context(), []cas.Digest{d})
				expect.That(t, err == nil && len(missing) == 0, "got missing %v, %v, want none", missing, err)
				expect.Equal(t, must.Get(b.store.Lookup(t.Context(), d))(t).ExitCode, 3, "exit code of the sent result")
			})
		})
	}
}

// TestDeniedCopiesShareAProbe checks that a query for many objects that the bucket refuses to copy probes uploads once,
// that queries in the next minute do not, and that a caller that gives up does not end the probe of others.
func TestDeniedCopiesShareAProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		client := must.Get(object.NewOver(t.Context(), object.Config{URL: b.url("&expire_days=10")}, b))(t)
		defer client.Close()
		store := named(t, client, "")
		var ds []cas.Digest
		for i := range 100 {
			data, _ := castest.Blob(byte(i), 1000)
			ds = append(ds, put(t, store, data))
		}
		time.Sleep(6 * 24 * time.Hour)
		var probes atomic.Int64 // of uploads
		b.respond(func(kind string, r *http.Request) (*http.Response, error) {
			if kind == "copy" {
				return denied(kind, r)
			}
			if kind == "probe" && r.Method == http.MethodPost {
				probes.Add(1)
				time.Sleep(time.Second) // longer than the first copies take
			}
			return nil, nil
		})
		query := func(want int64, what string) {
			t.Helper()
			missing := must.Get(store.Missing(t.Context(), ds))(t)
			expect.Equal(t, len(missing), len(ds), "missing blobs, %s", what)
			expect.Equal(t, probes.Load(), want, "probes, %s", what)
		}
		query(1, "at first")
		query(1, "in the next minute")
		time.Sleep(time.Minute)
		query(2, "after a minute")
		time.Sleep(time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		gaveUp := make(chan error)
		go func() { gaveUp <- expect.Err(store.Missing(ctx, ds[:1])) }()
		synctest.Wait() // it has begun a probe
		time.AfterFunc(time.Millisecond, cancel)
		query(3, "which another caller began")
		expect.Error(t, <-gaveUp, context.Canceled, "the other caller")
	})
}

// TestNewWaitsForTheBucket checks a bucket that is down at the start.
func TestNewWaitsForTheBucket(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(killed)
		c := must.Get(object.NewOver(t.Context(), object.Config{URL: b.url("")}, b))(t)
		defer c.Close()
		<-c.Probed()
		b.client, b.store = c, named(t, c, "")
		b.wantDown(t, cas.ErrUnavailable, "connection refused")
		b.respond(nil)
		time.Sleep(3 * time.Second)
		b.wantUp(t)
	})
}

// TestUnreadableObjectDoesNotOpenTheBreaker checks a bucket that fails for one object only.
func TestUnreadableObjectDoesNotOpenTheBreaker(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(func(kind string, _ *http.Request) (*http.Response, error) {
			if kind == "probe" {
				time.Sleep(5 * time.Second) // longer than the failed reads
			}
			if kind != http.MethodGet {
				return nil, nil
			}
			w := httptest.NewRecorder()
			refuse(w, 503, "InternalError", "")
			return w.Result(), nil
		})
		var group sync.WaitGroup
		for range 20 {
			group.Go(func() {
				if _, err := cas.ReadAll(t.Context(), b.store, b.present, 1000); !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), "InternalError") {
					t.Errorf("got %v, want ErrUnavailable of the object", err)
				}
			})
		}
		group.Wait()
		for range 10 {
			if err := b.client.Err(); err != nil {
				t.Fatalf("the bucket is up, but: %v", err)
			}
			time.Sleep(time.Second)
		}
	})
}

// A slowBody delivers a byte every nine seconds, and nothing after the first left bytes if it is positive.
type slowBody struct {
	io.ReadCloser
	ctx  context.Context
	left int
}

func (s *slowBody) Read(p []byte) (int, error) {
	if s.left--; s.left == 0 {
		<-s.ctx.Done()
		return 0, s.ctx.Err()
	}
	time.Sleep(9 * time.Second)
	return s.ReadCloser.Read(p[:1])
}

// TestSlowTransfersContinue checks that transfers may take any time as long as they make progress, and that a download
// without any is resumed.
func TestSlowTransfersContinue(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		for _, left := range []int{0, 300} {
			b.respond(func(kind string, r *http.Request) (*http.Response, error) {
				if kind != http.MethodGet {
					return nil, nil
				}
				resp := b.serve(r)
				resp.Body = &slowBody{resp.Body, r.Context(), left}
				return resp, nil
			})
			got, err := cas.ReadAll(t.Context(), b.store, b.present, 1000)
			if err != nil || cas.SHA256.Sum(got) != b.present || b.requests() > 1 && left == 0 {
				t.Errorf("download: got %d bytes, %v after %d requests", len(got), err, b.requests())
			}
		}
		b.respond(func(kind string, r *http.Request) (*http.Response, error) {
			if kind == http.MethodPut {
				body, err := io.ReadAll(&slowBody{r.Body, r.Context(), 0})
				if err = errors.Join(err, r.Context().Err()); err != nil {
					return nil, err
				}
				r.Body = io.NopCloser(bytes.NewReader(body))
			}
			return nil, nil
		})
		data, d := castest.Blob(2, 50)
		if err := b.store.Put(t.Context(), d, bytes.NewReader(data)); err != nil || b.requests() != 1 {
			t.Errorf("upload: got %v after %d requests", err, b.requests())
		}
	})
}

// TestKilledBucketIsKnownSoon checks that the first attempt without a response starts a probe, so that running calls
// end before all their attempts.
func TestKilledBucketIsKnownSoon(t *testing.T) {
	defer func(unit, limit time.Duration) { minio.DefaultRetryUnit, minio.DefaultRetryCap = unit, limit }(minio.DefaultRetryUnit, minio.DefaultRetryCap)
	minio.DefaultRetryUnit, minio.DefaultRetryCap = 200*time.Millisecond, time.Second
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(killed)
		done := make(chan error)
		go func() {
			_, err := b.store.Missing(t.Context(), []cas.Digest{b.present})
			done <- err
		}()
		time.Sleep(201 * time.Millisecond) // the longest pause before the second attempt
		b.wantDown(t, cas.ErrUnavailable, "connection refused")
		if err := <-done; !errors.Is(err, cas.ErrUnavailable) || b.requests() > 3 {
			t.Errorf("got %v after %d requests, want ErrUnavailable after at most 3", err, b.requests())
		}
	})
}

// TestCancelledSlowUploadsDoNotOpenTheBreaker checks that callers who give up on uploads that make progress say nothing
// about the bucket.
func TestCancelledSlowUploadsDoNotOpenTheBreaker(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(func(kind string, r *http.Request) (*http.Response, error) {
			for kind == http.MethodPut && r.Context().Err() == nil {
				r.Body.Read(make([]byte, 1))
				time.Sleep(time.Second)
			}
			return nil, r.Context().Err()
		})
		data, d := castest.Blob(2, 50)
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			expect.Error(t, b.store.Put(ctx, d, bytes.NewReader(data)), context.DeadlineExceeded)
			cancel()
		}
		expect.Error(t, b.client.Err(), nil, "the bucket")
	})
}

// TestCompletingMayTakeTime checks a server that copies the parts of an object before it answers.
func TestCompletingMayTakeTime(t *testing.T) {
	large, d := castest.Blob(8, 17<<20)
	inBubble(t, func(t *testing.T, b *bubble) {
		b.respond(func(kind string, r *http.Request) (*http.Response, error) {
			if kind != "complete" {
				return nil, nil
			}
			resp := b.serve(r)
			time.Sleep(63 * time.Second)
			return resp, r.Context().Err()
		})
		must.Succeed(t, b.store.Put(t.Context(), d, bytes.NewReader(large)))
	})
}

// TestUploadsShareMemory checks that small blobs do not wait for large ones, and that an upload in parts holds memory
// only while it sends a part.
func TestUploadsShareMemory(t *testing.T) {
	large, l := castest.Blob(1, 16<<20+1)
	medium, m := castest.Blob(2, 16<<20)
	small, s := castest.Blob(3, 1<<20)
	inBubble(t, func(t *testing.T, b *bubble) {
		put := func(d cas.Digest, data []byte) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return b.store.Put(ctx, d, bytes.NewReader(data))
		}
		gates := map[string]chan struct{}{"1": make(chan struct{}), "2": make(chan struct{})}
		b.respond(func(kind string, r *http.Request) (*http.Response, error) {
			if kind == "part" {
				<-gates[r.URL.Query().Get("partNumber")]
			}
			return nil, nil
		})
		var group sync.WaitGroup
		for range 9 {
			group.Go(func() {
				expect.Error(t, b.store.Put(t.Context(), l, bytes.NewReader(large)), nil)
			})
		}
		synctest.Wait()
		parts := func() int {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.sent["part"]
		}
		expect.Equal(t, parts(), 8, "parts that are sent")
		expect.Error(t, put(s, small), nil, "small, while large ones hold the memory")
		expect.Error(t, put(m, medium), context.DeadlineExceeded, "medium, while large ones hold the memory")
		close(gates["1"])
		synctest.Wait()
		expect.Equal(t, parts(), 18, "parts that are sent")
		expect.Error(t, put(m, medium), nil, "medium, between the parts of large ones")
		close(gates["2"])
		group.Wait()
	})
}

// TestLostAnswerToCompletion checks that an upload in parts succeeds if, and only if, the bucket has its object,
// whatever it answers.
func TestLostAnswerToCompletion(t *testing.T) {
	large, d := castest.Blob(8, 17<<20)
	const completed, pending = true, false
	for _, c := range []struct {
		name      string
		completed bool // by the first call
		lost      int  // number of lost answers
		status    int  // of the refusals, with code, or 0 for none
		code      string
		want      bool
	}{
		{"one lost", completed, 1, 0, "", true},
		{"all lost", completed, math.MaxInt, 0, "", true},
		{"errors", completed, 0, 500, "InternalError", true},
		{"no upload", completed, 0, 404, "NoSuchUpload", true},
		{"denied", completed, 0, 403, "AccessDenied", false},
		{"not completed, one lost", pending, 1, 0, "", true},
		{"not completed, all lost", pending, math.MaxInt, 0, "", false},
		{"not completed, errors", pending, 0, 500, "InternalError", false},
		{"not completed, no upload", pending, 0, 404, "NoSuchUpload", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				// An earlier object of the same size, for example a damaged one, does not belong to this upload.
				must.Succeed(t, b.store.Put(t.Context(), d, bytes.NewReader(large)))
				n := 0
				b.respond(func(kind string, r *http.Request) (*http.Response, error) {
					if kind != "complete" {
						return nil, nil
					}
					n++
					var resp *http.Response
					if n == 1 && c.completed || n > c.lost && c.status == 0 {
						resp = b.serve(r)
					}
					switch {
					case n <= c.lost:
						return nil, syscall.ECONNRESET
					case c.status > 0:
						w := httptest.NewRecorder()
						refuse(w, c.status, c.code, "")
						return w.Result(), nil
					}
					return resp, nil
				})
				if err := b.store.Put(t.Context(), d, bytes.NewReader(large)); (err == nil) != c.want {
					t.Errorf("got %v after %d calls, want success: %v", err, n, c.want)
				}
			})
		})
	}
}

// TestShortOutageDoesNotEndUpload checks that an upload in parts survives a bucket that is down for a few seconds, and
// that it ends when that takes long.
func TestShortOutageDoesNotEndUpload(t *testing.T) {
	large, d := castest.Blob(8, 33<<20)
	for name, c := range map[string]struct {
		during string
		outage time.Duration
		wanted error
	}{
		"second part":         {"part", 10 * time.Second, nil},
		"completion":          {"complete", 10 * time.Second, nil},
		"second part, long":   {"part", time.Hour, cas.ErrUnavailable},
		"completion, at last": {"complete", time.Hour, cas.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				seen := 0
				var until time.Time // end of the outage
				b.respond(func(kind string, _ *http.Request) (*http.Response, error) {
					if kind == c.during {
						if seen++; until.IsZero() && (seen == 2 || kind == "complete") {
							until = time.Now().Add(c.outage)
							// A probe finds the outage.
							go b.client.Check(t.Context())
							time.Sleep(time.Millisecond)
						}
					}
					if time.Now().Before(until) {
						return killed(kind, nil)
					}
					return nil, nil
				})
				start := time.Now()
				err := b.store.Put(t.Context(), d, bytes.NewReader(large))
				expect.That(t, errors.Is(err, c.wanted) && time.Since(start) <= time.Minute,
					"got %v after %v, want %v within a minute", err, time.Since(start), c.wanted)
				if missing, err := b.store.Missing(t.Context(), []cas.Digest{d}); c.wanted == nil && (err != nil || len(missing) > 0) {
					t.Errorf("got %v, %v, want the blob", missing, err)
				}
			})
		})
	}
}
