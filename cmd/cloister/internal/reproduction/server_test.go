// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"
)

// A liar is a server with a fixed answer to Execute, which records its callers.
type liar struct {
	repb.UnimplementedExecutionServer
	answer *repb.ExecuteResponse

	mu    sync.Mutex
	heard []string               // tokens
	asked []*repb.ExecuteRequest // in which instances of
	in    cas.Instances
}

func (l *liar) Execute(req *repb.ExecuteRequest, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	l.mu.Lock()
	l.asked = append(l.asked, req)
	l.mu.Unlock()
	b, err := anypb.New(l.answer)
	if err != nil {
		return err
	}
	return to.Send(&longrunningpb.Operation{Done: true, Result: &longrunningpb.Operation_Response{Response: b}})
}

// hear remembers the token of a call.
func (l *liar) hear(ctx context.Context) {
	md, _ := metadata.FromIncomingContext(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard = append(l.heard, md.Get("authorization")...)
}

// lying serves a liar.
func lying(t *testing.T, answer *repb.ExecuteResponse) (*liar, string) {
	l := &liar{answer: answer, in: castest.Instances()}
	at := grpctest.Serve(t, func(g *grpc.Server) {
		casserver.Register(g, casserver.Config{Instances: l.in, MaxBlobBytes: 1 << 20})
		repb.RegisterExecutionServer(g, l)
	}, grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		l.hear(ctx)
		return next(ctx, req)
	}), grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		l.hear(s.Context())
		return next(srv, s)
	}))
	return l, "grpc://" + at
}

// elsewhere runs an action at an address of --on.
func elsewhere(t *testing.T, c *Config, on string) (*repro.Verdict, []repro.Executor, error) {
	t.Helper()
	c.On = []string{on}
	all, err := c.dial(t.Context())
	defer func() { t.Cleanup(all.close) }()
	must.Succeed(t, err)
	here := castest.NewMemory()
	put := func(text string) *repb.Digest {
		return must.Get(cas.PutBytes(t.Context(), here, cas.SHA256, []byte(text)))(t).Proto()
	}
	action, err := cas.PutProto(t.Context(), here, cas.SHA256, &repb.Action{CommandDigest: put("\n\x04true"), InputRootDigest: put("")})
	must.Succeed(t, err)
	executors := []repro.Executor{*must.Get(all[on].executor(t.Context(), on, here, action))(t)}
	v, err := repro.Check(t.Context(), &worker.Task{Action: action}, repro.Options{Runs: 2, Executors: executors})
	return v, executors, err
}

// TestTokenGoesToOneServer: only the server of --cas receives the token.
func TestTokenGoesToOneServer(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	must.Succeed(t, os.WriteFile(token, []byte("secret"), 0o600))
	answer := &repb.ExecuteResponse{Result: &repb.ActionResult{}}
	mine, at := lying(t, answer)
	other, there := lying(t, answer)
	c := &Config{From: client.Server{Address: at, Identity: identity.Flags{Token: token}}}
	for _, on := range []string{"remote", there} {
		if v, _, err := elsewhere(t, c, on); err != nil || v.Result != repro.Unvaried {
			t.Fatalf("%s: %+v, %v", on, v, err)
		}
	}
	if len(mine.heard) == 0 || len(other.heard) != 0 {
		t.Errorf("the server of --cas heard %d tokens, another %d", len(mine.heard), len(other.heard))
	}
}

// TestServersRecordNothing: every remote run is of an uncacheable action and skips the cache.
func TestServersRecordNothing(t *testing.T) {
	l, at := lying(t, &repb.ExecuteResponse{Result: &repb.ActionResult{}})
	v, _, err := elsewhere(t, &Config{}, at)
	if err != nil || len(l.asked) != 2 {
		t.Fatalf("asked %d times, %v", len(l.asked), err)
	}
	in := must.Get(l.in(""))(t)
	for i, req := range l.asked {
		d := must.Get(cas.FromProto(cas.SHA256, req.ActionDigest))(t)
		var a repb.Action
		if err := cas.ReadProto(t.Context(), in.Store, d, &a); err != nil || !a.DoNotCache || !req.SkipCacheLookup || v.Runs[i].Action != d.String() {
			t.Errorf("asked for %v, which is %v, and told %q: %v", req, &a, v.Runs[i].Action, err)
		}
	}
}

// TestHostileServers: outputs of a server are written only below --keep, and cannot exhaust memory.
func TestHostileServers(t *testing.T) {
	huge := cas.SHA256.Sum([]byte("10 GB")).Proto()
	huge.SizeBytes = 10 << 30
	v, executors, err := elsewhere(t, &Config{}, second(lying(t, &repb.ExecuteResponse{Result: &repb.ActionResult{
		OutputFiles:    []*repb.OutputFile{{Path: "\x1b[2J", Digest: huge}, {Path: "none"}, {Path: "../out", Digest: huge}},
		OutputSymlinks: []*repb.OutputSymlink{{Path: "../../link", Target: "/etc"}}, StdoutDigest: huge,
	}})))
	must.Succeed(t, err)
	var b strings.Builder
	if err := v.Text(&b, repro.TextOptions{Verbose: true}); err != nil || strings.Contains(b.String(), "\x1b") {
		t.Errorf("printed %q, %v", b.String(), err)
	}
	dir := t.TempDir()
	c := &Config{KeepIn: filepath.Join(dir, "a", "b")}
	expect.That(t, c.keepRuns(t.Context(), v, executors) != nil, "outputs outside of the directory were kept")
	for _, name := range []string{"out", "link", "a/out", "a/link", "a/b/out", "a/b/link"} {
		expect.That(t, expect.Err(os.Lstat(filepath.Join(dir, name))) != nil, "%s was written", name)
	}
	if _, _, err := elsewhere(t, &Config{}, second(lying(t, &repb.ExecuteResponse{Result: &repb.ActionResult{}, CachedResult: true}))); err == nil {
		t.Error("what a server had cached counts as a run")
	}
	if _, _, err := elsewhere(t, &Config{}, second(lying(t, &repb.ExecuteResponse{}))); err == nil {
		t.Error("no result counts as a run")
	}
}

func second[A, B any](_ A, b B) B { return b }
