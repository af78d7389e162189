// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// A bubble is a server without a network, for tests with a fake clock.
type bubble struct {
	server
	listener *bufconn.Listener
	away     atomic.Bool // the server does not listen
	client   *remote.Client
	store    *remote.Store
}

// inBubble calls test with a server and a client created by New.
func inBubble(t *testing.T, after func(answer any), away bool, test func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{
			server:   server{instances: castest.Instances(), calls: map[string]int{}, after: after},
			listener: bufconn.Listen(1 << 20),
		}
		b.away.Store(away)
		options := casserver.ServerOptions(slog.New(slog.DiscardHandler))
		g := grpc.NewServer(append(options, grpc.ChainUnaryInterceptor(plainly, b.unary), grpc.ChainStreamInterceptor(b.server.stream))...)
		casserver.Register(g, casserver.Config{Instances: b.instances, StreamIdle: 100 * time.Hour})
		go g.Serve(b.listener)
		defer g.Stop()
		var err error
		b.client, err = remote.New("grpc://127.0.0.1:1", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if b.away.Load() {
				return nil, errors.New("connection refused")
			}
			return b.listener.DialContext(ctx)
		}))
		must.Succeed(t, err)
		defer b.client.Close()
		b.store = must.Get(b.client.Store(""))(t)
		test(t, b)
	})
}

// plainly removes compression from the capabilities: decoders are pooled and have channels, which must not be shared
// between bubbles.
func plainly(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	if c, ok := resp.(*repb.ServerCapabilities); ok {
		c.CacheCapabilities.SupportedCompressors, c.CacheCapabilities.SupportedBatchUpdateCompressors = nil, nil
	}
	return resp, err
}

// butProbes answers probes, and everything else like f.
func butProbes(f func(ctx context.Context, method string, n int) error) func(context.Context, string, int) error {
	return func(ctx context.Context, method string, n int) error {
		if method == "GetCapabilities" {
			return nil
		}
		return f(ctx, method, n)
	}
}

// never does not answer. It returns after an hour to reveal a client that waits that long.
func never(ctx context.Context, _ string, _ int) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Hour):
		return nil
	}
}

func (b *bubble) ask(t *testing.T) error {
	_, err := b.store.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum([]byte("x"))})
	return err
}

// wantAway checks that calls of every kind fail without reaching the server.
func (b *bubble) wantAway(t *testing.T, why string) {
	t.Helper()
	b.breakStreams(0, 0)
	start := time.Now()
	for method, err := range everyCall(t, &b.server, b.store) {
		if !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), why) || b.called(method) != 0 {
			t.Errorf("%s: got %v after %d calls, want ErrUnavailable for %q after none", method, err, b.called(method), why)
		}
	}
	data, d := castest.Blob(9, 9)
	expect.Error(t, b.store.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: data}})[0], cas.ErrUnavailable, "PutAll")
	expect.Equal(t, time.Since(start), 0, "failing")
	if err := b.client.Err(); !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "since 20") {
		t.Errorf("Err: got %v, want ErrUnavailable since when and for %q", err, why)
	}
}

// wantBack checks that calls of every kind succeed.
func (b *bubble) wantBack(t *testing.T) {
	t.Helper()
	expect.Error(t, b.client.Err(), nil, "Err")
	for method, err := range everyCall(t, &b.server, b.store) {
		expect.Error(t, err, nil, "%s", method)
	}
}

func TestNewWaitsForServer(t *testing.T) {
	inBubble(t, nil, true, func(t *testing.T, b *bubble) {
		if err := b.ask(t); !errors.Is(err, cas.ErrUnavailable) { // waits only for the first probe
			t.Errorf("the first call: got %v", err)
		}
		b.wantAway(t, "connection refused")
		time.Sleep(time.Hour)
		b.wantAway(t, "connection refused")
		b.away.Store(false)
		time.Sleep(10 * time.Second)
		b.wantBack(t)
	})
}

func TestFirstCallWaits(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.wantBack(t)
	})
	// The caller's context ends the wait.
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		b.intercept(never)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		expect.Error(t, expect.Err(b.store.Missing(ctx, nil)), context.DeadlineExceeded)
	})
}

func TestUnansweredProbeFails(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		b.intercept(never)
		expect.Error(t, b.ask(t), cas.ErrUnavailable)
	})
}

// TestServerIsDownAfterOneFailureAndAProbe checks that only the first call to a killed server waits for all its
// attempts.
func TestServerIsDownAfterOneFailureAndAProbe(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		b.wantBack(t)
		b.intercept(func(context.Context, string, int) error { return status.Error(codes.Unavailable, "out of order") })
		expect.Error(t, b.ask(t), cas.ErrUnavailable)
		synctest.Wait()
		b.wantAway(t, "out of order")
		b.intercept(nil)
		time.Sleep(3 * time.Second)
		b.wantBack(t)
	})
}

// TestRefusedProbeIsDenied checks that calls of every kind fail at once with cas.ErrDenied, which clients see as
// FAILED_PRECONDITION, while the server refuses our credentials from the start, and succeed after the correction.
func TestRefusedProbeIsDenied(t *testing.T) {
	for _, code := range []codes.Code{codes.Unauthenticated, codes.PermissionDenied} {
		inBubble(t, nil, true, func(t *testing.T, b *bubble) {
			b.intercept(func(context.Context, string, int) error { return status.Error(code, "who are you") })
			b.away.Store(false)
			time.Sleep(10 * time.Second)
			start := time.Now()
			for method, err := range everyCall(t, &b.server, b.store) {
				if !errors.Is(err, cas.ErrDenied) || !strings.Contains(err.Error(), "who are you") || b.called(method) != 0 ||
					status.Code(casstatus.Error(err)) != codes.FailedPrecondition {
					t.Errorf("%v of %s: got %v after %d calls, want ErrDenied after none", code, method, err, b.called(method))
				}
			}
			expect.Equal(t, time.Since(start), 0, "failing")
			b.intercept(nil)
			time.Sleep(3 * time.Second)
			b.wantBack(t)
		})
	}
}

// TestFrozenServer checks that calls to a server that stops answering, even those that wait for the limit of concurrent
// calls, end when it does not answer a probe either, and that later ones fail at once.
func TestFrozenServer(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.intercept(never)
		start := time.Now()
		var group sync.WaitGroup
		for range 200 {
			group.Go(func() { expect.Error(t, b.ask(t), cas.ErrUnavailable) })
		}
		for method, err := range everyCall(t, &b.server, b.store) {
			expect.Error(t, err, cas.ErrUnavailable, "%s", method)
		}
		group.Wait()
		expect.That(t, time.Since(start) <= 15*time.Second, "the calls took %v, want at most 15s", time.Since(start))
		b.wantAway(t, "deadline exceeded")
	})
}

// TestSlowCallsContinue checks that calls end neither early nor before a minute while the server answers probes.
func TestSlowCallsContinue(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.intercept(butProbes(func(context.Context, string, int) error {
			time.Sleep(55 * time.Second)
			return nil
		}))
		b.wantBack(t)
		b.intercept(butProbes(never))
		start := time.Now()
		expect.Error(t, b.ask(t), cas.ErrUnavailable)
		expect.Equal(t, time.Since(start), time.Minute)
	})
}

// A slowConn is read with 100 kB per second.
type slowConn struct{ net.Conn }

func (c slowConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p[:min(len(p), 16<<10)])
	time.Sleep(time.Duration(n) * 10 * time.Microsecond)
	return n, err
}

// A slowListener accepts slowConns.
type slowListener struct{ net.Listener }

func (l slowListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return slowConn{c}, err
}

// TestSlowConnection checks that a server is not taken for frozen while its probe waits behind half a MiB of an upload.
func TestSlowConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bufconn.Listen(512 << 10)
		g := grpc.NewServer(append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), grpc.ChainUnaryInterceptor(plainly),
			grpc.InitialWindowSize(1<<26), grpc.InitialConnWindowSize(1<<26))...)
		casserver.Register(g, casserver.Config{Instances: castest.Instances(), StreamIdle: 100 * time.Hour})
		go g.Serve(slowListener{l})
		defer g.Stop()
		client := must.Get(remote.New("grpc://127.0.0.1:1", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return l.DialContext(ctx)
		})))(t)
		defer client.Close()
		<-client.Probed()
		b, d := castest.Blob(1, 6<<20)
		must.Succeed(t, must.Get(client.Store(""))(t).Put(t.Context(), d, bytes.NewReader(b)))
		must.Succeed(t, client.Err())
	})
}

func TestProbeIgnoresCallLimit(t *testing.T) {
	inBubble(t, smallBatches, false, func(t *testing.T, b *bubble) {
		_, d := b.put(t, 1, 100)
		var sick atomic.Bool
		sick.Store(true)
		b.intercept(func(ctx context.Context, method string, n int) error {
			switch {
			case method == "FindMissingBlobs":
				return never(ctx, method, n)
			case method == "Read" && sick.Load():
				return status.Error(codes.Unavailable, "out of order")
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		for range 100 {
			group.Go(func() { b.store.Missing(ctx, []cas.Digest{d}) })
		}
		synctest.Wait()
		for range 5 {
			expect.Error(t, expect.Err(b.store.Open(t.Context(), d, 0)), cas.ErrUnavailable)
		}
		expect.That(t, b.client.Err() != nil, "got no error from Err")
		sick.Store(false)
		time.Sleep(3 * time.Second)
		must.Succeed(t, b.client.Err())
		cancel()
		group.Wait()
	})
}

func TestUploadIsNotRepeatedToDownServer(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.intercept(butProbes(func(context.Context, string, int) error {
			return status.Error(codes.Unavailable, "out of order")
		}))
		for range 3 {
			b.ask(t)
		}
		data, d := castest.Blob(1, 3<<20)
		err := b.store.Put(t.Context(), d, bytes.NewReader(data))
		// gRPC tries each upload five times, and the second one makes five consecutive failures.
		expect.That(t, errors.Is(err, cas.ErrUnavailable) && b.called("Write") == 10,
			"got %v after %d calls, want ErrUnavailable after 10", err, b.called("Write"))
	})
}

// A late context ends after its deadline, as on a machine with a slow timer.
type late struct {
	context.Context
	deadline time.Time
}

func (l late) Deadline() (time.Time, bool) { return l.deadline, true }

// Calls that their callers cancel say nothing about the server, even if the server reports the deadline first.
func TestCancelledCallsDoNotCount(t *testing.T) {
	for name, delay := range map[string]time.Duration{"in time": 0, "late": time.Millisecond} {
		t.Run(name, func(t *testing.T) { testCancelledCalls(t, delay) })
	}
}

func testCancelledCalls(t *testing.T, delay time.Duration) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		var sick atomic.Bool
		b.intercept(butProbes(func(ctx context.Context, method string, n int) error {
			if sick.Load() {
				return status.Error(codes.Unavailable, "out of order")
			}
			return never(ctx, method, n)
		}))
		giveUp := func() {
			t.Helper()
			sick.Store(false)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second+delay)
			defer cancel()
			own := late{ctx, time.Now().Add(time.Second)}
			expect.Error(t, expect.Err(b.store.Missing(own, []cas.Digest{cas.SHA256.Sum([]byte("x"))})),
				context.DeadlineExceeded)
		}
		for range 10 {
			giveUp()
		}
		for range 5 {
			expect.Error(t, b.client.Err(), nil, "too early")
			giveUp()
			sick.Store(true)
			b.ask(t)
		}
		expect.That(t, b.client.Err() != nil, "got no error from Err after five failed calls")
	})
}

func TestUnansweredCallsCount(t *testing.T) {
	for name, end := range map[string]func(ctx context.Context) (context.Context, context.CancelFunc){
		"deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 15*time.Second)
		},
		"cancelled": func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(15*time.Second, cancel)
			return ctx, cancel
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, false, func(t *testing.T, b *bubble) {
				_, d := b.put(t, 1, 5<<20)
				must.Succeed(t, b.ask(t))
				var hung atomic.Bool
				hung.Store(true)
				b.intercept(butProbes(func(ctx context.Context, method string, n int) error {
					if hung.Load() {
						return never(ctx, method, n)
					}
					return nil
				}))
				for i := range 5 {
					expect.Error(t, b.client.Err(), nil, "too early")
					ctx, cancel := end(t.Context())
					if i%2 == 0 {
						b.store.Missing(ctx, []cas.Digest{d})
					} else {
						b.store.Open(ctx, d, 0)
					}
					cancel()
				}
				expect.That(t, b.client.Err() != nil, "got no error from Err after five unanswered calls")
				hung.Store(false)
				time.Sleep(time.Minute)
				b.wantBack(t)
			})
		})
	}
}

func TestDeadlineOfServerCounts(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.intercept(func(context.Context, string, int) error { return status.Error(codes.DeadlineExceeded, "of a proxy") })
		for range 5 {
			expect.Error(t, b.ask(t), cas.ErrUnavailable)
		}
		b.wantAway(t, "of a proxy")
	})
}

func TestCallsTimeOut(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		b.intercept(never)
		start := time.Now()
		for method, err := range everyCall(t, &b.server, b.store) {
			expect.Error(t, err, cas.ErrUnavailable, "%s", method)
		}
		if n := time.Since(start); n > 10*time.Minute {
			t.Errorf("they gave up after %v", n)
		}
	})
}

func TestStalledDownloadResumes(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		want, d := b.put(t, 1, 5<<20)
		b.stallAt = 3
		got, err := cas.ReadAll(t.Context(), b.store, d, d.Size())
		expect.That(t, err == nil && bytes.Equal(got, want) && b.called("Read") == 2,
			"stalled: got %d bytes, %v after %d calls", len(got), err, b.called("Read"))
		b.breakStreams(0, 0)
		r := must.Get(b.store.Open(t.Context(), d, 0))(t)
		defer r.Close()
		for n := 0; n < len(want); {
			m, err := r.Read(make([]byte, 1<<20))
			must.Be(t, err == nil, "after %d bytes: %v", n, err)
			n += m
			time.Sleep(time.Hour)
		}
		if _, err := r.Read(make([]byte, 1)); err != io.EOF || b.called("Read") != 1 {
			t.Errorf("a slow reader: %v after %d calls", err, b.called("Read"))
		}
	})
}

func TestConcurrentCallsAreLimited(t *testing.T) {
	inBubble(t, smallBatches, false, func(t *testing.T, b *bubble) {
		must.Succeed(t, b.ask(t))
		_, d := b.put(t, 1, 100)
		other, e := castest.Blob(2, 100)
		for method, call := range map[string]func(ctx context.Context) error{
			"FindMissingBlobs": func(ctx context.Context) error { _, err := b.store.Missing(ctx, []cas.Digest{d}); return err },
			"Read":             func(ctx context.Context) error { _, err := cas.ReadAll(ctx, b.store, d, 100); return err },
			"Write":            func(ctx context.Context) error { return b.store.Put(ctx, e, bytes.NewReader(other)) },
		} {
			var now, most atomic.Int64
			release := make(chan struct{})
			b.intercept(func(context.Context, string, int) error {
				n := now.Add(1)
				defer now.Add(-1)
				for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
				<-release
				return nil
			})
			var group sync.WaitGroup
			for range 200 {
				group.Go(func() {
					expect.Error(t, call(t.Context()), nil, "%s", method)
				})
			}
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			expect.Error(t, call(ctx), context.DeadlineExceeded, "%s: one who waits no longer", method)
			cancel()
			close(release)
			group.Wait()
			expect.Equal(t, most.Load(), 64, "%s: calls at once", method)
		}
	})
}

// Readers that are closed early release the limit, and uploads may read from downloads of the same server.
func TestClosedReadersReleaseLimit(t *testing.T) {
	inBubble(t, smallBatches, false, func(t *testing.T, b *bubble) {
		_, d := b.put(t, 1, 100)
		for range 200 {
			r := must.Get(b.store.Open(t.Context(), d, 0))(t)
			r.Close()
			expect.That(t, expect.Err(r.Read(make([]byte, 1))) != nil, "a closed reader returned data")
		}
		to := must.Get(b.client.Store("elsewhere"))(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var group sync.WaitGroup
		for i := range 150 {
			_, d := b.put(t, byte(i), 200)
			group.Go(func() {
				r, err := b.store.Open(ctx, d, 0)
				if err != nil {
					t.Error(err)
					return
				}
				defer r.Close()
				expect.Error(t, to.Put(ctx, d, r), nil)
			})
		}
		group.Wait()
	})
}

func TestCloseEndsWaitingCalls(t *testing.T) {
	inBubble(t, nil, false, func(t *testing.T, b *bubble) {
		b.intercept(never)
		done := make(chan error, 1)
		go func() { done <- b.ask(t) }()
		synctest.Wait()
		b.client.Close()
		expect.Error(t, <-done, cas.ErrUnavailable)
	})
}

func TestStalledUploadsCount(t *testing.T) {
	for name, limit := range map[string]time.Duration{"caller": 15 * time.Second, "client": time.Hour} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, false, func(t *testing.T, b *bubble) {
				must.Succeed(t, b.ask(t))
				// more than the connection buffers
				data, d := castest.Blob(1, 8<<20)
				put := func(limit time.Duration) {
					t.Helper()
					// not a deadline, which the server would see
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					time.AfterFunc(limit, cancel)
					// not an io.Seeker, so that each Put is one call
					expect.That(t, b.store.Put(ctx, d, io.MultiReader(bytes.NewReader(data))) != nil, "got no error")
				}
				b.intercept(butProbes(never))
				for range 10 {
					put(time.Second)
				}
				for range 5 {
					expect.Error(t, b.client.Err(), nil, "too early")
					put(limit)
				}
				expect.That(t, b.client.Err() != nil, "got no error from Err after five stalled uploads")
			})
		})
	}
}
