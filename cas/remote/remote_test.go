// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unicode"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A server is a casserver on loopback with instances in memory and hooks for its calls.
type server struct {
	address   string
	instances cas.Instances

	mu     sync.Mutex
	calls  map[string]int                                        // by method name
	before func(ctx context.Context, method string, n int) error // set by intercept

	// refuse, if not nil, may fail a unary call.
	refuse func(req any) error
	// after, if not nil, may change an answer.
	after func(answer any)
	// breakAt is the message, counted from 1, at which the first breaks streams break.
	breakAt, breaks int
	// stallAt is the message at which the first stream stalls.
	stallAt int
}

// count counts a call of the method.
func (s *server) count(method string) (string, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	method = method[strings.LastIndexByte(method, '/')+1:]
	s.calls[method]++
	return method, s.calls[method]
}

// intercept makes f decide about each call: it may fail the nth call of a method, counted from 1.
func (s *server) intercept(f func(ctx context.Context, method string, n int) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = f
}

// admit returns the error of the function given to intercept.
func (s *server) admit(ctx context.Context, method string, n int) error {
	s.mu.Lock()
	f := s.before
	s.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(ctx, method, n)
}

func (s *server) called(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[method]
}

// breakStreams makes the next streams break at a message and resets the counts.
func (s *server) breakStreams(breakAt, breaks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakAt, s.breaks, s.stallAt = breakAt, breaks, 0
	clear(s.calls)
}

// broken returns the message at which the nth stream breaks.
func (s *server) broken(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > s.breaks {
		return 0
	}
	return s.breakAt
}

func (s *server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	method, n := s.count(info.FullMethod)
	if err := s.admit(ctx, method, n); err != nil {
		return nil, err
	}
	if s.refuse != nil {
		if err := s.refuse(req); err != nil {
			return nil, err
		}
	}
	answer, err := next(ctx, req)
	if s.after != nil && err == nil {
		s.after(answer)
	}
	return answer, err
}

func (s *server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	method, n := s.count(info.FullMethod)
	if err := s.admit(stream.Context(), method, n); err != nil {
		return err
	}
	sp := &breakingStream{ServerStream: stream, upload: method == "Write", breakAt: s.broken(n)}
	if n == 1 {
		sp.stallAt = s.stallAt
	}
	return next(srv, sp)
}

// A breakingStream breaks at a message with data.
type breakingStream struct {
	grpc.ServerStream
	upload           bool
	breakAt, stallAt int
	n                int
}

func (s *breakingStream) pass() error {
	if s.n++; s.n == s.stallAt {
		<-s.Context().Done()
	}
	if s.n == s.breakAt {
		return status.Error(codes.Unavailable, "the server disconnects")
	}
	return nil
}

func (s *breakingStream) SendMsg(m any) error {
	if !s.upload {
		if err := s.pass(); err != nil {
			return err
		}
	}
	return s.ServerStream.SendMsg(m)
}

func (s *breakingStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if !s.upload {
		return nil
	}
	return s.pass()
}

// A changed stream changes the messages that the client receives.
type changed struct {
	grpc.ClientStream
	after func(answer any)
}

func (c *changed) RecvMsg(m any) error {
	err := c.ClientStream.RecvMsg(m)
	if err == nil && c.after != nil {
		c.after(m)
	}
	return err
}

// serve starts a server.
func serve(t *testing.T, c casserver.Config, options ...grpc.ServerOption) *server {
	t.Helper()
	if c.Instances == nil {
		c.Instances = castest.Instances()
	}
	s := &server{instances: c.Instances, calls: map[string]int{}}
	listen(t, s, func(g *grpc.Server) { casserver.Register(g, c) }, options...)
	return s
}

func listen(t *testing.T, s *server, register func(*grpc.Server), options ...grpc.ServerOption) {
	t.Helper()
	options = append(options, casserver.ServerOptions(slog.New(slog.DiscardHandler))...)
	g := grpc.NewServer(append(options, grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream))...)
	register(g)
	s.address = "grpc://" + grpctest.Listen(t, g)
}

// dial connects to the server and returns an instance.
func (s *server) dial(t *testing.T, name string) *remote.Store {
	t.Helper()
	c, err := remote.Dial(t.Context(), s.address, grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc,
		cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		stream, err := streamer(ctx, desc, cc, method, opts...)
		return &changed{stream, s.after}, err
	}))
	must.Succeed(t, err)
	t.Cleanup(func() { c.Close() })
	return must.Get(c.Store(name))(t)
}

// memory returns the store of an instance.
func (s *server) memory(t *testing.T, name string) *castest.Memory {
	t.Helper()
	return must.Get(s.instances(name))(t).Store.(*castest.Memory)
}

// put stores a blob directly.
func (s *server) put(t *testing.T, seed byte, size int) ([]byte, cas.Digest) {
	t.Helper()
	b, d := castest.Blob(seed, size)
	must.Succeed(t, s.memory(t, "").Put(t.Context(), d, bytes.NewReader(b)))
	return b, d
}

func TestStore(t *testing.T) {
	castest.TestStore(t, func(t *testing.T) cas.Store { return serve(t, casserver.Config{}).dial(t, "") })
}

// TestStoreOfSmallBatches is TestStore with nearly every blob too large for a batch.
func TestStoreOfSmallBatches(t *testing.T) {
	castest.TestStore(t, func(t *testing.T) cas.Store {
		s := serve(t, casserver.Config{})
		s.after = smallBatches
		return s.dial(t, "some/instance")
	})
}

// smallBatches advertises batches of at most 10 bytes.
func smallBatches(answer any) {
	if m, ok := answer.(*repb.ServerCapabilities); ok {
		m.CacheCapabilities.MaxBatchTotalSizeBytes = 10
	}
}

// bare is an ActionCache service that accepts every result, as the API permits and casserver does not.
type bare struct {
	repb.UnimplementedActionCacheServer
	results cas.ActionCache
}

func (b *bare) GetActionResult(ctx context.Context, req *repb.GetActionResultRequest) (*repb.ActionResult, error) {
	d, err := cas.FromProto(cas.SHA256, req.ActionDigest)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	r, err := b.results.Lookup(ctx, d)
	return r, casstatus.Error(err)
}

func (b *bare) UpdateActionResult(ctx context.Context, req *repb.UpdateActionResultRequest) (*repb.ActionResult, error) {
	d, err := cas.FromProto(cas.SHA256, req.ActionDigest)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	return req.ActionResult, casstatus.Error(b.results.Record(ctx, d, req.ActionResult))
}

// capable is a Capabilities service with these functions.
type capable struct {
	repb.UnimplementedCapabilitiesServer
	functions []repb.DigestFunction_Value
}

func (c *capable) GetCapabilities(context.Context, *repb.GetCapabilitiesRequest) (*repb.ServerCapabilities, error) {
	return &repb.ServerCapabilities{CacheCapabilities: &repb.CacheCapabilities{
		DigestFunctions: c.functions, ActionCacheUpdateCapabilities: &repb.ActionCacheUpdateCapabilities{UpdateEnabled: true},
	}}, nil
}

func TestActionCache(t *testing.T) {
	castest.TestActionCache(t, func(t *testing.T) cas.ActionCache {
		s := &server{calls: map[string]int{}}
		listen(t, s, func(g *grpc.Server) {
			repb.RegisterCapabilitiesServer(g, &capable{functions: []repb.DigestFunction_Value{repb.DigestFunction_SHA256}})
			repb.RegisterActionCacheServer(g, &bare{results: castest.NewMemory()})
		})
		return s.dial(t, "")
	})
}

func TestResultsThroughCasserver(t *testing.T) {
	s := serve(t, casserver.Config{})
	_, file := s.put(t, 1, 100)
	store, action := s.dial(t, ""), cas.SHA256.Sum([]byte("action"))
	if err := store.Record(t.Context(), action, &repb.ActionResult{ExitCode: 1}); status.Code(err) != codes.InvalidArgument ||
		!strings.Contains(err.Error(), "only successful actions") || !strings.Contains(err.Error(), s.address) {
		t.Errorf("a failure: got %v, want the server's reason and address", err)
	}
	want := &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "out", Digest: file.Proto()}}}
	must.Succeed(t, store.Record(t.Context(), action, want))
	if got, err := store.Lookup(t.Context(), action); err != nil || !proto.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestInstanceNamesCombine(t *testing.T) {
	s := serve(t, casserver.Config{})
	b, d := castest.Blob(1, 100)
	for _, c := range []struct{ path, name, want string }{
		{"", "", ""}, {"/", "", ""}, {"", "a/b", "a/b"}, {"/x/y", "", "x/y"}, {"/x", "y/z", "x/y/z"}, {"/with%20space", "", "with space"},
	} {
		client := must.Get(remote.Dial(t.Context(), s.address+c.path))(t)
		in := must.Get(client.Instance(c.name))(t)
		must.Succeed(t, in.Store.Put(t.Context(), d, bytes.NewReader(b)))
		expect.That(t, in.Name == c.want && s.memory(t, c.want).Len() == 1,
			"%s with %q is %q, and %q holds %d blobs", c.path, c.name, in.Name, c.want, s.memory(t, c.want).Len())
		expect.Error(t, expect.Err(client.Instance("blobs")), cas.ErrInvalid, "an instance named blobs")
		client.Close()
	}
}

func TestDialRejectsAddressesAndServers(t *testing.T) {
	s := serve(t, casserver.Config{})
	host := strings.TrimPrefix(s.address, "grpc://")
	for _, address := range []string{
		"", host, "http://" + host, "grpc://", "grpc://localhost", "grpc://u@" + host, s.address + "?a=b", s.address + "#a", "grpc://a b:1", "grpc://%zz:1",
	} {
		expect.Error(t, expect.Err(remote.Dial(t.Context(), address)), remote.ErrAddress, "%q", address)
	}
	expect.Error(t, expect.Err(remote.Dial(t.Context(), s.address+"/blobs")), cas.ErrInvalid, "an instance named blobs")

	const nobody = "grpc://127.0.0.1:1"
	if _, err := remote.Dial(t.Context(), nobody); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), nobody) {
		t.Errorf("no listener: got %v, want Unavailable and the address", err)
	}

	other := &server{calls: map[string]int{}}
	listen(t, other, func(g *grpc.Server) {
		repb.RegisterCapabilitiesServer(g, &capable{functions: []repb.DigestFunction_Value{repb.DigestFunction_VSO}})
	})
	expect.Message(t, expect.Err(remote.Dial(t.Context(), other.address)), "VSO",
		"a server without a supported function")
}

func TestTLS(t *testing.T) {
	// The certificate is valid for 127.0.0.1.
	web := httptest.NewTLSServer(nil)
	defer web.Close()
	trusted := filepath.Join(t.TempDir(), "trusted.pem")
	must.Succeed(t, os.WriteFile(trusted, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}), 0o600))
	// Go reads the certificates once; no other test in this package uses TLS.
	t.Setenv("SSL_CERT_FILE", trusted)
	plain := serve(t, casserver.Config{})
	secure := serve(t, casserver.Config{}, grpc.Creds(credentials.NewServerTLSFromCert(&web.TLS.Certificates[0])))
	if c, err := remote.Dial(t.Context(), strings.Replace(secure.address, "grpc:", "grpcs:", 1)); err != nil {
		t.Errorf("a trusted server: %v", err)
	} else {
		c.Close()
	}
	for name, address := range map[string]string{
		"grpcs to a server without TLS": strings.Replace(plain.address, "grpc:", "grpcs:", 1), "grpc to one with": secure.address,
		"a name that is not in the certificate": strings.Replace(secure.address, "grpc://127.0.0.1", "grpcs://localhost", 1),
	} {
		if c, err := remote.Dial(t.Context(), address); err == nil {
			c.Close()
			t.Errorf("%s: no error", name)
		}
	}
}

func TestReadsAreVerified(t *testing.T) {
	for name, damage := range map[string]func(b []byte) []byte{
		"one bit":       func(b []byte) []byte { b = bytes.Clone(b); b[len(b)/2] ^= 1; return b },
		"one byte less": func(b []byte) []byte { return b[:len(b)-1] },
		"one byte more": func(b []byte) []byte { return append(bytes.Clone(b), 0) },
	} {
		for _, size := range []int{100, 3_000_000} {
			s := serve(t, casserver.Config{})
			_, d := s.put(t, 1, size)
			s.after = func(answer any) {
				switch m := answer.(type) {
				case *repb.BatchReadBlobsResponse:
					m.Responses[0].Data = damage(m.Responses[0].Data)
				case *bspb.ReadResponse:
					m.Data = damage(m.Data)
				}
			}
			store, to := s.dial(t, ""), castest.NewMemory()
			expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, int64(size))), cas.ErrCorrupt,
				"%s of %d: read", name, size)
			// Only the length of a partial read can be checked.
			if r, err := store.Open(t.Context(), d, 1); name != "one bit" {
				var got []byte
				if err == nil {
					got, err = io.ReadAll(r)
				}
				expect.That(t, errors.Is(err, cas.ErrCorrupt) && len(got) <= size-1,
					"%s of %d from offset 1: got %d bytes and %v, want ErrCorrupt", name, size, len(got), err)
			}
			if _, err := store.Fetch(t.Context(), to, []cas.Digest{d}); err == nil || to.Len() != 0 {
				t.Errorf("%s of %d: Fetch: got %v and %d blobs, want an error and none", name, size, err, to.Len())
			}
		}
	}
}

func TestDataLossIsCorrupt(t *testing.T) {
	for _, size := range []int{100, 3_000_000} {
		s := serve(t, casserver.Config{})
		_, d := s.put(t, 1, size)
		store := s.dial(t, "")
		s.intercept(func(context.Context, string, int) error { return status.Error(codes.DataLoss, "damaged") })
		expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, int64(size))), cas.ErrCorrupt, "%d bytes", size)
	}
}

// everyCall makes one call of each kind concurrently, with small and large blobs.
func everyCall(t *testing.T, s *server, store *remote.Store) map[string]error {
	t.Helper()
	_, small := s.put(t, 1, 100)
	_, large := s.put(t, 2, 5<<20)
	newSmall, smallDigest := castest.Blob(3, 1<<20)
	newLarge, largeDigest := castest.Blob(4, 5<<20)
	known, unknown := cas.SHA256.Sum([]byte("known")), cas.SHA256.Sum([]byte("unknown"))
	must.Succeed(t, s.memory(t, "").Record(t.Context(), known, &repb.ActionResult{}))
	errs := map[string]error{}
	var mu sync.Mutex
	var group sync.WaitGroup
	for method, call := range map[string]func() error{
		"FindMissingBlobs": func() error { _, err := store.Missing(t.Context(), []cas.Digest{small}); return err },
		"BatchReadBlobs":   func() error { _, err := cas.ReadAll(t.Context(), store, small, 1<<30); return err },
		"Read":             func() error { _, err := cas.ReadAll(t.Context(), store, large, 1<<30); return err },
		// A plain reader cannot be read twice.
		"BatchUpdateBlobs":   func() error { return store.Put(t.Context(), smallDigest, io.MultiReader(bytes.NewReader(newSmall))) },
		"Write":              func() error { return store.Put(t.Context(), largeDigest, bytes.NewReader(newLarge)) },
		"UpdateActionResult": func() error { return store.Record(t.Context(), unknown, &repb.ActionResult{}) },
		"GetActionResult":    func() error { _, err := store.Lookup(t.Context(), known); return err },
	} {
		group.Go(func() {
			err := call()
			mu.Lock()
			defer mu.Unlock()
			errs[method] = err
		})
	}
	group.Wait()
	return errs
}

func TestBusyServerIsRetried(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	s.intercept(func(_ context.Context, _ string, n int) error {
		if n <= 2 {
			return status.Error(codes.Unavailable, "busy")
		}
		return nil
	})
	for method, err := range everyCall(t, s, store) {
		if n := s.called(method); err != nil || n != 3 {
			t.Errorf("%s: %v after %d calls, want success of the third", method, err, n)
		}
	}
}

func TestDeadServerIsUnavailable(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	s.intercept(func(context.Context, string, int) error { return status.Error(codes.Unavailable, "dead") })
	for method, err := range everyCall(t, s, store) {
		// Besides gRPC's retries, uploads restart.
		if n := s.called(method); !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), s.address) || n < 2 || n > 25 {
			t.Errorf("%s: %v after %d calls, want Unavailable and the address after a few", method, err, n)
		}
	}
}

func TestPermanentFailuresAreNotRetried(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	s.intercept(func(context.Context, string, int) error { return status.Error(codes.PermissionDenied, "not you") })
	for method, err := range everyCall(t, s, store) {
		if n := s.called(method); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "not you") || n != 1 {
			t.Errorf("%s: %v after %d calls, want ErrPermission after one", method, err, n)
		}
	}
}

// Errors about us must not reach our clients as if they were about them.
func TestErrorsAboutUsAreNotPassedOn(t *testing.T) {
	s := serve(t, casserver.Config{})
	for code, want := range map[codes.Code]struct {
		kind   error
		passed codes.Code
	}{
		codes.Unauthenticated:  {cas.ErrDenied, codes.FailedPrecondition},
		codes.Unimplemented:    {errors.ErrUnsupported, codes.Internal},
		codes.DeadlineExceeded: {cas.ErrUnavailable, codes.Unavailable}, // from a proxy
	} {
		s.intercept(nil)
		store := s.dial(t, "")
		s.intercept(func(context.Context, string, int) error { return status.Error(code, "the reason") })
		for method, err := range everyCall(t, s, store) {
			if !errors.Is(err, want.kind) || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "the reason") {
				t.Errorf("%v of %s: got %v, want %v", code, method, err, want.kind)
			}
			expect.Equal(t, status.Code(casstatus.Error(err)), want.passed, "%v of %s", code, method)
		}
	}
}

func TestRecordRequiresUpdateEnabled(t *testing.T) {
	s := serve(t, casserver.Config{Rights: func(context.Context, string) (execute, update bool) { return true, false }})
	err := s.dial(t, "").Record(t.Context(), cas.SHA256.Sum(nil), &repb.ActionResult{})
	if !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), s.address) || s.called("UpdateActionResult") != 0 {
		t.Errorf("got %v after %d calls, want ErrPermission after none", err, s.called("UpdateActionResult"))
	}
}

func TestPutRejectsBlobAboveServerLimit(t *testing.T) {
	s := serve(t, casserver.Config{})
	s.after = func(answer any) {
		if m, ok := answer.(*repb.ServerCapabilities); ok {
			m.CacheCapabilities.MaxCasBlobSizeBytes = 2 << 20
		}
	}
	store := s.dial(t, "")
	for size, want := range map[int]error{2 << 20: nil, 2<<20 + 1: cas.ErrUpstreamFull} {
		s.breakStreams(0, 0)
		b, d := castest.Blob(1, size)
		if err := store.Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, want) || (want == nil) != (s.called("Write") == 1) ||
			errors.Is(err, errors.ErrUnsupported) != (want != nil) {
			t.Errorf("%d bytes: got %v after %d calls, want %v", size, err, s.called("Write"), want)
		}
	}
}

func TestErrorsHideSecretsInAddresses(t *testing.T) {
	for address, want := range map[string]string{
		"grpc://SECRET:SECRET@localhost:1/in":  `"grpc://...@localhost:1/in"`,
		"grpc://SECRET?SECRET@localhost:1":     `"grpc://...@localhost:1"`,
		"SECRET:SECRET@localhost":              `"://...@localhost"`,
		"grpc://localhost:1?secret=SECRET":     `"grpc://localhost:1?..."`,
		"grpc://localhost:1#SECRET":            `"grpc://localhost:1#..."`,
		"grpc://%zz SECRET@localhost:1/blobs":  `"grpc://...@localhost:1/blobs"`,
		"grpc://localhost:1/in?a=SECRET@x:1#y": `"grpc://...@x:1#..."`,
	} {
		_, err := remote.New(address)
		expect.That(t, err != nil && !strings.Contains(err.Error(), "SECRET") && strings.Contains(err.Error(), want),
			"got %v, want %s", err, want)
	}
}

func TestServerMessagesArePrintable(t *testing.T) {
	const hostile = "\x1b[2J\x07\nINFO: done\r\u202e\u009b31m"
	const shown = `\x1b[2J\a\nINFO: done\r\u202e\u009b31m`
	long := hostile + strings.Repeat("\n", 5000)
	check := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), shown) || len(err.Error()) > 1500 || !strings.Contains(err.Error(), "...") {
			t.Errorf("%s: got %.2000q, want %q and dots", what, fmt.Sprint(err), shown)
		}
		if err != nil && strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%s: got %.2000q, want a printable line", what, err)
		}
	}
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	details := must.Get(status.New(codes.Aborted, long).WithDetails(&repb.Digest{Hash: "detail"}))(t)
	s.intercept(func(context.Context, string, int) error { return details.Err() })
	for method, err := range everyCall(t, s, store) {
		check(method, err)
		if st := status.Convert(err); st.Code() != codes.Aborted || len(st.Details()) != 1 {
			t.Errorf("%s: code %v, details %v", method, st.Code(), st.Details())
		}
	}
	_, err := remote.Dial(t.Context(), s.address)
	check("Dial", err)
	s.intercept(func(context.Context, string, int) error { return status.Error(codes.ResourceExhausted, long) })
	small, d := castest.Blob(1, 200)
	check("a full server", store.Put(t.Context(), d, bytes.NewReader(small)))
	s.intercept(nil)
	s.after = func(answer any) {
		switch m := answer.(type) {
		case *repb.BatchUpdateBlobsResponse:
			m.Responses[0].Status = status.New(codes.Internal, long).Proto()
		case *repb.ServerCapabilities:
			m.CacheCapabilities.DigestFunctions = make([]repb.DigestFunction_Value, 5000)
		}
	}
	check("the status of one blob", store.Put(t.Context(), d, bytes.NewReader(small)))
	if _, err := remote.Dial(t.Context(), s.address); err == nil || len(err.Error()) > 1500 {
		t.Errorf("5000 functions: got %.2000q", fmt.Sprint(err))
	}
	_, known := s.put(t, 2, 100)
	s.after = func(answer any) {
		if m, ok := answer.(*repb.BatchReadBlobsResponse); ok {
			m.Responses[0].Digest = &repb.Digest{Hash: strings.Repeat("\n", 5000)}
		}
	}
	if _, err := store.Open(t.Context(), known, 0); err == nil || strings.Contains(err.Error(), "\n") || len(err.Error()) > 1500 {
		t.Errorf("a digest that was not requested: got %.2000q", fmt.Sprint(err))
	}
}

// Downloads resume at their offset, uploads restart.
func TestBrokenStreamsAreRepeated(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	want, d := s.put(t, 1, 10<<20)
	for _, off := range []int64{0, 12345} {
		s.breakStreams(3, 3)
		r := must.Get(store.Open(t.Context(), d, off))(t)
		got, err := io.ReadAll(r)
		r.Close()
		expect.That(t, err == nil && bytes.Equal(got, want[off:]) && s.called("Read") == 4,
			"from %d: %d bytes, %v, after %d calls", off, len(got), err, s.called("Read"))
	}
	s.breakStreams(3, 3)
	b, d := castest.Blob(2, 5<<20)
	whole := io.NewSectionReader(bytes.NewReader(append([]byte("head"), b...)), 0, 1<<30)
	must.Get(whole.Seek(4, io.SeekStart))(t)
	if err := store.Put(t.Context(), d, whole); err != nil || s.called("Write") != 4 {
		t.Errorf("upload: %v after %d calls", err, s.called("Write"))
	}
	b, d = castest.Blob(3, 5<<20)
	s.breakStreams(3, 3)
	expect.Error(t, store.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b))), cas.ErrUnavailable,
		"upload that cannot be restarted")
	// A download continues as long as its streams make progress.
	s.breakStreams(3, 1000)
	_, d = s.put(t, 4, 30<<20)
	if _, err := cas.ReadAll(t.Context(), store, d, 1<<30); err != nil || s.called("Read") < 10 {
		t.Errorf("stream that breaks repeatedly: %v after %d calls", err, s.called("Read"))
	}
	s.breakStreams(1, 1000)
	expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, 1<<30)), cas.ErrUnavailable, "stream without data")
}

// A mute server sends the first byte of a blob, and then messages without data.
type mute struct {
	bspb.UnimplementedByteStreamServer
	streams atomic.Int64
}

func (m *mute) Read(_ *bspb.ReadRequest, stream bspb.ByteStream_ReadServer) error {
	if m.streams.Add(1) > 50 {
		return status.Error(codes.NotFound, "enough")
	}
	err := stream.Send(&bspb.ReadResponse{Data: []byte("x")})
	for range 10_000 {
		if err != nil {
			break
		}
		err = stream.Send(&bspb.ReadResponse{})
	}
	return err
}

// Neither empty messages nor an occasional byte count as progress.
func TestEmptyMessagesAreNotProgress(t *testing.T) {
	s := &server{calls: map[string]int{}}
	listen(t, s, func(g *grpc.Server) {
		repb.RegisterCapabilitiesServer(g, &capable{functions: []repb.DigestFunction_Value{repb.DigestFunction_SHA256}})
		bspb.RegisterByteStreamServer(g, &mute{})
	})
	_, d := castest.Blob(1, 5<<20)
	expect.Error(t, expect.Err(cas.ReadAll(t.Context(), s.dial(t, ""), d, d.Size())), cas.ErrUnavailable)
}

func TestDeadlineEndsEveryCall(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	s.intercept(func(ctx context.Context, _ string, _ int) error { <-ctx.Done(); return ctx.Err() })
	_, small := s.put(t, 1, 100)
	large, largeDigest := castest.Blob(2, 20<<20)
	for name, call := range map[string]func(ctx context.Context) error{
		"Missing": func(ctx context.Context) error { _, err := store.Missing(ctx, []cas.Digest{small}); return err },
		"Open":    func(ctx context.Context) error { _, err := store.Open(ctx, small, 0); return err },
		"stream":  func(ctx context.Context) error { _, err := store.Open(ctx, largeDigest, 0); return err },
		"Put":     func(ctx context.Context) error { return store.Put(ctx, largeDigest, bytes.NewReader(large)) },
		"Lookup":  func(ctx context.Context) error { _, err := store.Lookup(ctx, small); return err },
		"Record":  func(ctx context.Context) error { return store.Record(ctx, small, &repb.ActionResult{}) },
		"Fetch": func(ctx context.Context) error {
			_, err := store.Fetch(ctx, castest.NewMemory(), []cas.Digest{small})
			return err
		},
		"Dial": func(ctx context.Context) error { _, err := remote.Dial(ctx, s.address); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 1)
		err := call(ctx)
		cancel()
		expect.Error(t, err, context.DeadlineExceeded, "%s", name)
	}
}

func TestMissingSplitsLongLists(t *testing.T) {
	s := serve(t, casserver.Config{})
	s.after = func(answer any) {
		if m, ok := answer.(*repb.FindMissingBlobsResponse); ok {
			slices.Reverse(m.MissingBlobDigests)
		}
	}
	store := s.dial(t, "")
	var ds, want []cas.Digest
	for i := range 40_000 {
		d := cas.SHA256.Sum(fmt.Append(nil, i))
		if ds = append(ds, d); i%1000 == 0 {
			must.Get(cas.PutBytes(t.Context(), s.memory(t, ""), cas.SHA256, fmt.Append(nil, i)))(t)
		} else {
			want = append(want, d)
		}
	}
	got, err := store.Missing(t.Context(), ds)
	if err != nil || !slices.Equal(got, want) || s.called("FindMissingBlobs") != 3 {
		t.Errorf("%d of %d are missing, %v, after %d calls, want %d after 3", len(got), len(ds), err, s.called("FindMissingBlobs"), len(want))
	}
}

func TestFetch(t *testing.T) {
	s := serve(t, casserver.Config{})
	store, to := s.dial(t, ""), castest.NewMemory()
	var ds []cas.Digest
	for i := range 40_000 { // more than fit into one call by number
		d := must.Get(cas.PutBytes(t.Context(), s.memory(t, ""), cas.SHA256, fmt.Append(nil, i)))(t)
		ds = append(ds, d)
	}
	for i := range 10 { // more than fit into one call by size
		_, d := s.put(t, byte(i), 900_000)
		ds = append(ds, d)
	}
	for i := range 3 {
		_, d := s.put(t, byte(i), 5<<20)
		ds = append(ds, d)
	}
	have, mine := castest.Blob(9, 100)
	must.Succeed(t, to.Put(t.Context(), mine, bytes.NewReader(have)))
	ds = append(ds, mine, cas.SHA256.Sum(nil), ds[0])

	_, lost := castest.Blob(10, 100)
	_, alsoLost := castest.Blob(11, 5<<20)
	absent, err := store.Fetch(t.Context(), to, append([]cas.Digest{lost, alsoLost, lost}, ds...))
	must.Be(t, err == nil && slices.Equal(absent, []cas.Digest{lost, alsoLost}),
		"got %v, %v, want the 2 that are absent", absent, err)
	expect.Equal(t, len(must.Get(to.Missing(t.Context(), ds))(t)), 0)
	if absent, err = store.Fetch(t.Context(), to, ds); err != nil || len(absent) > 0 || s.called("Read") != 3 {
		t.Errorf("again: got %v, %v and %d streams, want nothing more", absent, err, s.called("Read"))
	}
	if n, streams := s.called("BatchReadBlobs"), s.called("Read"); n > 15 || streams != 3 {
		t.Errorf("%d batches and %d streams for 40,010 small blobs and 3 large ones", n, streams)
	}
}

func TestFetchReadsBlobsLeftOutOfBatch(t *testing.T) {
	s := serve(t, casserver.Config{})
	s.after = func(answer any) {
		if m, ok := answer.(*repb.BatchReadBlobsResponse); ok && len(m.Responses) > 1 {
			m.Responses[0].Data, m.Responses[0].Status = nil, status.New(codes.ResourceExhausted, "full").Proto()
			m.Responses = m.Responses[:len(m.Responses)-1]
		}
	}
	var ds []cas.Digest
	for i := range 5 {
		_, d := s.put(t, byte(i), 1000)
		ds = append(ds, d)
	}
	to := castest.NewMemory()
	if absent, err := s.dial(t, "").Fetch(t.Context(), to, ds); err != nil || len(absent) > 0 || to.Len() != 5 {
		t.Errorf("got %v, %v and %d blobs, want 5", absent, err, to.Len())
	}
}

func TestFullServerIsErrUpstreamFull(t *testing.T) {
	s := serve(t, casserver.Config{Instances: func(name string) (*cas.Instance, error) {
		f := faulty.New(castest.NewMemory(), nil)
		f.Fail(cas.ErrFull, faulty.Put, faulty.PutAll)
		return &cas.Instance{Name: name, Store: f}, nil
	}})
	for _, size := range []int{100, 3_000_000} {
		b, d := castest.Blob(1, size)
		if err := s.dial(t, "").Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, cas.ErrUpstreamFull) || errors.Is(err, cas.ErrFull) || !strings.Contains(err.Error(), "upload again later") {
			t.Errorf("%d bytes: got %v, want ErrUpstreamFull with the server's advice", size, err)
		}
	}
}

// TestExhaustedServer checks that a server that has exhausted its resources is full for writes, and throttles reads.
func TestExhaustedServer(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	data, d := s.put(t, 1, 100)
	s.intercept(func(context.Context, string, int) error {
		return status.Error(codes.ResourceExhausted, "too many calls")
	})
	_, read := store.Open(t.Context(), d, 0)
	_, find := store.Missing(t.Context(), []cas.Digest{d})
	for what, err := range map[string]error{"Open": read, "Missing": find} {
		if !errors.Is(err, cas.ErrThrottled) || casstatus.Code(err) != codes.Unavailable || status.Code(casstatus.Error(err)) != codes.ResourceExhausted {
			t.Errorf("%s: got %v, want ErrThrottled with the server's status", what, err)
		}
	}
	put, record := store.Put(t.Context(), d, bytes.NewReader(data)), store.Record(t.Context(), d, &repb.ActionResult{})
	for what, err := range map[string]error{"Put": put, "Record": record} {
		expect.That(t, errors.Is(err, cas.ErrUpstreamFull) && !errors.Is(err, cas.ErrUnavailable),
			"%s: got %v, want ErrUpstreamFull", what, err)
	}
}

// TestRejectedWritesAreInvalid checks that a write that the server rejects as invalid fails with ErrInvalid, unlike one
// that it may accept later, and that a rejected read does not.
func TestRejectedWritesAreInvalid(t *testing.T) {
	s := serve(t, casserver.Config{})
	store := s.dial(t, "")
	s.intercept(func(context.Context, string, int) error {
		return status.Error(codes.InvalidArgument, "this server takes no such\n blob")
	})
	small, d := castest.Blob(1, 100)
	large, e := castest.Blob(2, 3<<20)
	for what, err := range map[string]error{
		"BatchUpdateBlobs":   store.Put(t.Context(), d, bytes.NewReader(small)),
		"Write":              store.Put(t.Context(), e, bytes.NewReader(large)),
		"UpdateActionResult": store.Record(t.Context(), d, &repb.ActionResult{}),
	} {
		expect.That(t, errors.Is(err, cas.ErrInvalid) && status.Code(err) == codes.InvalidArgument,
			"%s: got %v, want ErrInvalid with the server's status", what, err)
		expect.Message(t, err, `no such\n blob`)
	}
	_, err := store.Open(t.Context(), e, 0)
	expect.That(t, status.Code(err) == codes.InvalidArgument && !errors.Is(err, cas.ErrInvalid),
		"read: got %v, want the server's status only", err)
}

// TestRejectedBatchIsSplit checks that if the server rejects a batch because of one blob, only that blob fails and the
// server receives the others.
func TestRejectedBatchIsSplit(t *testing.T) {
	s := serve(t, casserver.Config{})
	var blobs []cas.Blob
	var ds []cas.Digest
	for i := range 200 {
		b, d := castest.Blob(byte(i), 100)
		blobs, ds = append(blobs, cas.Blob{Digest: d, Data: b}), append(ds, d)
	}
	const bad = 7
	s.refuse = func(req any) error {
		batch, _ := req.(*repb.BatchUpdateBlobsRequest)
		for _, r := range batch.GetRequests() {
			if r.Digest.Hash == ds[bad].Hash() {
				return status.Error(codes.InvalidArgument, "this server does not accept the blob")
			}
		}
		return nil
	}
	for i, err := range s.dial(t, "").PutAll(t.Context(), blobs) {
		if i == bad {
			expect.Error(t, err, cas.ErrInvalid, "the rejected blob")
		} else {
			expect.Error(t, err, nil, "blob %d", i)
		}
	}
	missing := must.Get(s.memory(t, "").Missing(t.Context(), ds))(t)
	expect.Slices(t, missing, ds[bad:bad+1], "blobs that the server lacks")
	n := s.called("BatchUpdateBlobs") // one, and two for each halving
	expect.That(t, n <= 17, "got %d calls, want at most 17", n)
}

// TestRejectingServerGetsFewCalls: a batch is not split down to its blobs if the server accepts none of its parts. A
// single invalid blob is found in the largest batch.
func TestRejectingServerGetsFewCalls(t *testing.T) {
	s := serve(t, casserver.Config{})
	var blobs []cas.Blob
	for i := range 4000 {
		b := fmt.Append(nil, i)
		blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
	}
	reject := status.Error(codes.InvalidArgument, "this server accepts no blobs")
	s.refuse = func(req any) error {
		if _, ok := req.(*repb.BatchUpdateBlobsRequest); ok {
			return reject
		}
		return nil
	}
	for i, err := range s.dial(t, "").PutAll(t.Context(), blobs) {
		expect.Error(t, err, cas.ErrInvalid, "blob %d", i)
	}
	n := s.called("BatchUpdateBlobs") // 16, and 9 for the parts that are left
	expect.That(t, n <= 25, "got %d calls, want at most 25", n)

	for _, bad := range []int{0, len(blobs) - 1} {
		s := serve(t, casserver.Config{})
		s.refuse = func(req any) error {
			batch, _ := req.(*repb.BatchUpdateBlobsRequest)
			for _, r := range batch.GetRequests() {
				if r.Digest.Hash == blobs[bad].Digest.Hash() {
					return reject
				}
			}
			return nil
		}
		for i, err := range s.dial(t, "").PutAll(t.Context(), blobs) {
			if (err != nil) != (i == bad) {
				t.Errorf("blob %d is invalid: blob %d: got %v", bad, i, err)
			}
		}
	}
}

func TestMismatchedUploadIsNotFinished(t *testing.T) {
	var finished atomic.Int64
	s := &server{calls: map[string]int{}}
	listen(t, s, func(g *grpc.Server) {
		repb.RegisterCapabilitiesServer(g, &capable{functions: []repb.DigestFunction_Value{repb.DigestFunction_SHA256}})
		bspb.RegisterByteStreamServer(g, &credulous{finished: &finished})
	})
	store := s.dial(t, "")
	b, d := castest.Blob(1, 3<<20)
	other := bytes.Clone(b)
	other[0] ^= 1
	for _, data := range [][]byte{other, b[1:], append(bytes.Clone(b), 0)} {
		expect.Error(t, store.Put(t.Context(), d, bytes.NewReader(data)), cas.ErrMismatch)
	}
	expect.Equal(t, finished.Load(), 0, "uploads were finished")
	expect.Message(t, store.Put(t.Context(), d, bytes.NewReader(b)), "committed 1 bytes", "a server that reports less")
}

// credulous is a ByteStream service that accepts everything and reports one committed byte.
type credulous struct {
	bspb.UnimplementedByteStreamServer
	finished *atomic.Int64
}

func (c *credulous) Write(stream bspb.ByteStream_WriteServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.FinishWrite {
			c.finished.Add(1)
			return stream.SendAndClose(&bspb.WriteResponse{CommittedSize: 1})
		}
	}
}
