// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestUpstreamStateFollowsTheBreaker checks that /ready, the metrics and the log do not wait for the next probe.
func TestUpstreamStateFollowsTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var state atomic.Pointer[error]
		var probes atomic.Int64
		u := &upstream{reason: errNotProbed, breaker: func() error {
			if err := state.Load(); err != nil {
				return *err
			}
			return nil
		}}
		u.check = func(context.Context) error { probes.Add(1); return u.breaker() }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			u.watch(ctx, slog.New(slog.DiscardHandler))
		}()
		failure := errors.New("connection refused")
		for _, down := range []bool{false, true, false} {
			state.Store(nil)
			if down {
				state.Store(&failure)
			}
			time.Sleep(2 * time.Second)
			expect.Equal(t, u.Down() != "", down, "down")
		}
		probes.Store(0)
		time.Sleep(time.Minute)
		if n := probes.Load(); n < 5 || n > 7 {
			t.Errorf("got %d probes in a minute without changes, want 6", n)
		}
		cancel()
		<-done
	})
}

// An upstreamServer is a server of blobs and results that refuses some calls.
type upstreamServer struct {
	address string
	refuse  atomic.Pointer[func(method, instance string) codes.Code]
}

func newUpstreamServer(t *testing.T) *upstreamServer {
	u := &upstreamServer{}
	options := casserver.ServerOptions(slog.New(slog.DiscardHandler))
	options = append(options, grpc.ChainUnaryInterceptor(func(
		ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler,
	) (any, error) {
		in, _ := req.(interface{ GetInstanceName() string })
		if refuse := u.refuse.Load(); refuse != nil && in != nil {
			if code := (*refuse)(path.Base(info.FullMethod), in.GetInstanceName()); code != codes.OK {
				return nil, status.Error(code, "caller ci may not")
			}
		}
		return next(ctx, req)
	}), grpc.ChainStreamInterceptor(func(
		srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler,
	) error {
		if refuse := u.refuse.Load(); refuse != nil {
			return status.Error((*refuse)(path.Base(info.FullMethod), ""), "caller ci may not")
		}
		return next(srv, stream)
	}))
	instances := castest.Instances()
	u.address = "grpc://" + grpctest.Serve(t, func(g *grpc.Server) {
		casserver.Register(g, casserver.Config{Instances: instances})
	}, options...)
	return u
}

// TestServerIsCheckedAtStart checks that a node does not start if the server refuses its credentials, in both modes, and
// names the remedy. It starts if rights in other instances may suffice, or if the server does not answer.
func TestServerIsCheckedAtStart(t *testing.T) {
	const fromFlags = "--cas-token-file, CLOISTER_CAS_TOKEN or --cas-tls-cert"
	always := func(code codes.Code) func(string, string) codes.Code {
		return func(string, string) codes.Code { return code }
	}
	readOnly := func(method, _ string) codes.Code {
		if method == "BatchUpdateBlobs" {
			return codes.PermissionDenied
		}
		return codes.OK
	}
	otherInstance := func(method, _ string) codes.Code {
		if method == "GetCapabilities" {
			return codes.OK
		}
		return codes.PermissionDenied
	}
	for name, c := range map[string]struct {
		refuse   func(method, instance string) codes.Code
		instance string // of the address
		want     string // in the error, "" if the node starts
		log      string
	}{
		"permitted":                {refuse: always(codes.OK)},
		"no credentials":           {always(codes.Unauthenticated), "", "correct " + fromFlags, "correct " + fromFlags},
		"no rights":                {always(codes.PermissionDenied), "", "grant the caller of " + fromFlags, ""},
		"read only":                {readOnly, "/main", "grant the caller of " + fromFlags, ""},
		"none in the instance":     {otherInstance, "/main", "grant the caller of " + fromFlags, ""},
		"read only, any instance":  {readOnly, "", "", "the upstream refuses blobs in the instance without a name"},
		"none in the nameless one": {otherInstance, "", "", "the upstream refuses blobs in the instance without a name"},
		"does not answer":          {always(codes.Unavailable), "/main", "", ""},
	} {
		for _, mode := range []string{"through", "back"} {
			t.Run(name+" "+mode, func(t *testing.T) {
				server := newUpstreamServer(t)
				server.refuse.Store(&c.refuse)
				var log syncBuffer
				f := UpstreamFlags{}
				f.Register(&cobra.Command{})
				f.Server, f.WriteMode = server.address+c.instance, mode
				u, err := f.open(t.Context(), slog.New(slog.NewTextHandler(&log, nil)), nil)
				if err == nil {
					defer u.close()
				}
				e, _ := errors.AsType[*exit.Error](err)
				if (err != nil) != (c.want != "") || c.want != "" && (e == nil || e.Code != exit.Environment || !errors.Is(err, cas.ErrDenied)) {
					t.Fatalf("got %v, want an error: %t", err, c.want != "")
				}
				if c.want != "" {
					expect.Message(t, err, c.want)
					expect.Message(t, err, "--cas: ")
				}
				expect.That(t, strings.Contains(log.String(), c.log), "got log %s, want %q", log.String(), c.log)
			})
		}
	}
}

// TestAbsentBucketEndsTheStart checks that a node does not start with an absent bucket, whether its own check or an
// earlier background probe reports that.
func TestAbsentBucketEndsTheStart(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, "<Error><Code>NoSuchBucket</Code></Error>")
	}))
	defer server.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "not a real secret")
	for _, mode := range []string{"through", "back"} {
		f := UpstreamFlags{}
		f.Register(&cobra.Command{})
		f.Bucket, f.WriteMode = "s3://cache?region=a&endpoint="+server.URL, mode
		_, err := f.open(t.Context(), slog.New(slog.DiscardHandler), nil)
		e, ok := errors.AsType[*exit.Error](err)
		must.Be(t, ok && e.Code == exit.Environment && errors.Is(err, object.ErrNoBucket),
			"%s: got %v, want ErrNoBucket and exit code %d", mode, err, exit.Environment)
		expect.Message(t, err, "--store: ")
		c := must.Get(object.New(t.Context(), object.Config{URL: f.Bucket}))(t)
		<-c.Probed()
		e, ok = errors.AsType[*exit.Error](f.started("--store", c.Check(t.Context()), mode == "back"))
		expect.That(t, ok && e.Code == exit.Environment, "%s: got %v after a probe, want exit code %d", mode, e, exit.Environment)
		must.Succeed(t, c.Close())
	}
}

// TestRefusalsAreExplained checks that clients see what the operator must correct, also for streams.
func TestRefusalsAreExplained(t *testing.T) {
	server := newUpstreamServer(t)
	f := UpstreamFlags{}
	f.Register(&cobra.Command{})
	f.Server, f.WriteMode = server.address+"/main", "through"
	u := must.Get(f.open(t.Context(), slog.New(slog.DiscardHandler), nil))(t)
	defer u.close()
	s := must.Get(u.instances(""))(t).Store
	_, d := castest.Blob(1, 3<<20)
	server.refuse.Store(new(func(string, string) codes.Code { return codes.PermissionDenied }))
	for call, err := range map[string]error{
		"unary":  expect.Err(s.Missing(t.Context(), []cas.Digest{d})),
		"stream": expect.Err(s.Open(t.Context(), d, 0)),
		"check":  u.check(t.Context()),
	} {
		expect.Error(t, err, cas.ErrDenied, "%s", call)
		expect.Message(t, err, "grant the caller of --cas-token-file")
		expect.Message(t, err, "the server responded caller ci may not")
	}
}

// A syncBuffer is a bytes.Buffer for concurrent use.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
