// SPDX-License-Identifier: Apache-2.0

package logstream_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/logstream"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A site is a server with its registry and gRPC clients.
type site struct {
	*logstream.Registry
	maker   logpb.LogStreamServiceClient
	bytes   bspb.ByteStreamClient
	store   *castest.Memory // of the instance "main"
	serving *atomic.Int32   // concurrent reads
}

// byteStream serves ByteStream for log streams only.
type byteStream struct {
	bspb.UnimplementedByteStreamServer
	*logstream.Registry
	reads atomic.Int32
}

func (b *byteStream) Read(req *bspb.ReadRequest, to bspb.ByteStream_ReadServer) error {
	b.reads.Add(1)
	defer b.reads.Add(-1)
	return b.Registry.Read(req, to)
}

func (b *byteStream) Write(from bspb.ByteStream_WriteServer) error {
	first, err := from.Recv()
	if err != nil {
		return err
	}
	return b.Registry.Write(first, from)
}

func (b *byteStream) QueryWriteStatus(ctx context.Context, req *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error) {
	return b.Registry.QueryWriteStatus(ctx, req)
}

// serve starts a site that ends with the test.
func serve(t *testing.T, c logstream.Config, options ...grpc.ServerOption) *site {
	t.Helper()
	c.Instances = castest.Instances()
	in := must.Get(c.Instances("main"))(t)
	b := &byteStream{Registry: must.Get(logstream.New(c))(t)}
	server := grpc.NewServer(options...)
	bspb.RegisterByteStreamServer(server, b)
	b.Register(server)
	conn := grpctest.Connect(t, server)
	t.Cleanup(b.Close)
	return &site{b.Registry, logpb.NewLogStreamServiceClient(conn), bspb.NewByteStreamClient(conn), in.Store.(*castest.Memory), &b.reads}
}

// bubble runs f with a site and a fake clock.
func bubble(t *testing.T, c logstream.Config, f func(t *testing.T, s *site)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, c)
		f(t, s)
	})
}

// begin begins a run in the instance "main".
func (s *site) begin() (*worker.Logs, func(*worker.Outcome)) {
	return s.Begin(&worker.Task{Instance: "main", Action: cas.SHA256.Sum([]byte("an action"))})
}

// outcome stores the output of a run, and returns its outcome.
func (s *site) outcome(t *testing.T, stdout, stderr string) *worker.Outcome {
	t.Helper()
	put := func(text string) *repb.Digest {
		return must.Get(cas.PutBytes(t.Context(), s.store, cas.SHA256, []byte(text)))(t).Proto()
	}
	return &worker.Outcome{Result: &repb.ActionResult{StdoutDigest: put(stdout), StderrDigest: put(stderr)}}
}

// follow begins to read a stream.
func (s *site) follow(t *testing.T, name string) bspb.ByteStream_ReadClient {
	t.Helper()
	return must.Get(s.bytes.Read(t.Context(), &bspb.ReadRequest{ResourceName: name}))(t)
}

// rest reads what is left of a stream, and how it ends.
func rest(r bspb.ByteStream_ReadClient) (string, codes.Code) {
	var b strings.Builder
	for {
		m, err := r.Recv()
		if err == io.EOF {
			return b.String(), codes.OK
		}
		if err != nil {
			return b.String(), status.Code(err)
		}
		b.Write(m.Data)
	}
}

// read reads a part of a stream to its end.
func (s *site) read(t *testing.T, req *bspb.ReadRequest) (string, codes.Code) {
	t.Helper()
	return rest(must.Get(s.bytes.Read(t.Context(), req))(t))
}

func want(t *testing.T, what string, text string, code codes.Code, wantText string, wantCode codes.Code) {
	t.Helper()
	expect.That(t, text == wantText && code == wantCode,
		"%s: got %.200q of %d bytes and %v, want %.200q and %v", what, text, len(text), code, wantText, wantCode)
}

// wantNext checks the data of the next message.
func wantNext(t *testing.T, r bspb.ByteStream_ReadClient, text string) {
	t.Helper()
	if m, err := r.Recv(); err != nil || string(m.Data) != text {
		t.Fatalf("got %v, %v, want %q", m, err, text)
	}
}

func TestRule127_ReadersSeeOutputWhileTheRunLasts(t *testing.T) {
	s := serve(t, logstream.Config{})
	logs, end := s.begin()
	out, errs := &logs.Stdout, &logs.Stderr
	if !strings.HasPrefix(out.Name, "main/logstreams/") || !strings.HasPrefix(errs.Name, "main/logstreams/") || out.Name == errs.Name {
		t.Fatalf("names are %q and %q, want two different ones below main/logstreams", out.Name, errs.Name)
	}
	early := []bspb.ByteStream_ReadClient{s.follow(t, out.Name), s.follow(t, out.Name)}
	io.WriteString(out, "first\n")
	io.WriteString(errs, "oh\n")
	for _, r := range early {
		wantNext(t, r, "first\n") // while the run continues
	}
	late := s.follow(t, out.Name)
	wantNext(t, late, "first\n")
	io.WriteString(out, "second\n")
	for _, r := range append(early, late) {
		wantNext(t, r, "second\n")
	}
	out.Close(nil)
	for _, r := range append(early, late) {
		text, code := rest(r) // before there is an outcome
		want(t, "end of the output", text, code, "", codes.OK)
	}
	errs.Close(nil)
	end(s.outcome(t, "first\nsecond\n", "oh\n"))
	for name, whole := range map[string]string{out.Name: "first\nsecond\n", errs.Name: "oh\n"} {
		text, code := s.read(t, &bspb.ReadRequest{ResourceName: name})
		want(t, "after the end", text, code, whole, codes.OK)
	}
}

// TestRule127_SlowReaderBlocksNothing neither the run nor the release of its memory, and misses nothing.
func TestRule127_SlowReaderBlocksNothing(t *testing.T) {
	s := serve(t, logstream.Config{})
	logs, end := s.begin()
	slow := s.follow(t, logs.Stdout.Name)
	name, held := logs.Stdout.Name, weak.Make(logs)
	io.WriteString(&logs.Stdout, "it is there\n")
	wantNext(t, slow, "it is there\n")
	var whole bytes.Buffer
	for i := range 300_000 { // much more than all buffers on the way hold
		fmt.Fprintf(&whole, "line %d of many\n", i)
	}
	logs.Stdout.Write(whole.Bytes())
	logs.Stdout.Close(nil)
	logs.Stderr.Close(nil)
	end(s.outcome(t, "it is there\n"+whole.String(), ""))
	logs = nil
	for i := 0; held.Value() != nil; i++ {
		if runtime.GC(); i == 1000 {
			t.Fatal("the output is still in memory although it is in the store")
		}
		time.Sleep(time.Millisecond)
	}
	text, code := rest(slow)
	want(t, "slow reader", text, code, whole.String(), codes.OK)
	text, code = s.read(t, &bspb.ReadRequest{ResourceName: name, ReadOffset: 12})
	want(t, "from the store", text, code, whole.String(), codes.OK)
}

func TestRule127_CancelledReadEndsAtOnce(t *testing.T) {
	bubble(t, logstream.Config{}, func(t *testing.T, s *site) {
		logs, end := s.begin()
		ctx, cancel := context.WithCancel(t.Context())
		must.Get(s.bytes.Read(ctx, &bspb.ReadRequest{ResourceName: logs.Stdout.Name}))(t)
		synctest.Wait()
		if n := s.serving.Load(); n != 1 {
			t.Fatalf("%d concurrent reads, want 1", n)
		}
		cancel()
		synctest.Wait()
		expect.Equal(t, s.serving.Load(), 0, "concurrent reads after the reader left")
		end(nil)
	})
}

func TestRule127_NamesAreForReadingOrForWriting(t *testing.T) {
	s := serve(t, logstream.Config{})
	logs, end := s.begin()
	io.WriteString(&logs.Stdout, "text")
	logs.Stdout.Close(nil)
	end(s.outcome(t, "text", ""))
	made := must.Get(s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{Parent: "main"}))(t)
	token := strings.TrimPrefix(made.WriteResourceName, made.Name+"/")
	for _, c := range []struct {
		name        string
		read, write codes.Code
	}{
		{made.WriteResourceName, codes.InvalidArgument, codes.OK},
		{made.Name, codes.OK, codes.InvalidArgument},
		{logs.Stdout.Name, codes.OK, codes.InvalidArgument},
		{logs.Stdout.Name + "/" + token, codes.InvalidArgument, codes.NotFound},
		{made.Name + "/" + token[1:] + "0", codes.InvalidArgument, codes.NotFound},
		{strings.TrimPrefix(made.Name, "main/"), codes.NotFound, codes.InvalidArgument},
		{"other/" + made.Name, codes.NotFound, codes.InvalidArgument},
		{strings.TrimPrefix(made.WriteResourceName, "main/"), codes.InvalidArgument, codes.NotFound},
		{"main/logstreams/0123", codes.NotFound, codes.InvalidArgument},
		{"main/logstreams/0123/4567", codes.InvalidArgument, codes.NotFound},
		{"main/logstreams/", codes.InvalidArgument, codes.InvalidArgument},
		{"main/logstreams", codes.InvalidArgument, codes.InvalidArgument},
		{"/" + made.Name, codes.InvalidArgument, codes.InvalidArgument},
		{made.WriteResourceName + "/more", codes.InvalidArgument, codes.InvalidArgument},
		// The Go SDK uses the full name as an ID.
		{"main/logstreams/" + logs.Stdout.Name, codes.OK, codes.InvalidArgument},
	} {
		if _, err := s.bytes.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: c.name}); status.Code(err) != c.write {
			t.Errorf("QueryWriteStatus of %s: %v, want %v", c.name, err, c.write)
		}
		expect.Code(t, s.write(t, &bspb.WriteRequest{ResourceName: c.name}), c.write, "Write of %s", c.name)
		if c.name == made.Name {
			continue // it is not finished
		}
		if _, code := s.read(t, &bspb.ReadRequest{ResourceName: c.name}); code != c.read {
			t.Errorf("Read of %s: %v, want %v", c.name, code, c.read)
		}
	}
}

func TestReadOffsetsAndLimits(t *testing.T) {
	s := serve(t, logstream.Config{})
	logs, end := s.begin()
	io.WriteString(&logs.Stdout, "0123456789")
	check := func(when string) {
		for _, c := range []struct {
			off, limit int64
			text       string
			code       codes.Code
		}{
			{0, 10, "0123456789", codes.OK},
			{3, 4, "3456", codes.OK},
			{9, 1, "9", codes.OK},
			{-1, 0, "", codes.OutOfRange},
			{0, -1, "", codes.InvalidArgument},
		} {
			text, code := s.read(t, &bspb.ReadRequest{ResourceName: logs.Stdout.Name, ReadOffset: c.off, ReadLimit: c.limit})
			want(t, fmt.Sprintf("%s, offset %d, limit %d", when, c.off, c.limit), text, code, c.text, c.code)
		}
	}
	check("running")
	ahead := must.Get(s.bytes.Read(t.Context(), &bspb.ReadRequest{ResourceName: logs.Stdout.Name, ReadOffset: 12}))(t)
	beyond := must.Get(s.bytes.Read(t.Context(), &bspb.ReadRequest{ResourceName: logs.Stdout.Name, ReadOffset: 15}))(t)
	io.WriteString(&logs.Stdout, "abcd")
	wantNext(t, ahead, "cd")
	logs.Stdout.Close(nil)
	_, code := rest(beyond)
	want(t, "beyond the end", "", code, "", codes.OutOfRange)
	end(s.outcome(t, "0123456789abcd", ""))
	check("ended")
	for off, c := range map[int64]codes.Code{14: codes.OK, 15: codes.OutOfRange} {
		text, code := s.read(t, &bspb.ReadRequest{ResourceName: logs.Stdout.Name, ReadOffset: off})
		want(t, fmt.Sprintf("ended, offset %d", off), text, code, "", c)
	}
}

// TestReadAfterARunWithoutOwnOutput returns the output of a cached result; lost output never looks complete.
func TestReadAfterARunWithoutOwnOutput(t *testing.T) {
	s := serve(t, logstream.Config{})
	cached := s.outcome(t, "recorded", "")
	for _, c := range []struct {
		name string
		out  *worker.Outcome
		sent string
		text string
		code codes.Code
	}{
		{"cached", &worker.Outcome{Result: cached.Result, Cached: true}, "", "recorded", codes.OK},
		{"cached, without output", &worker.Outcome{Result: &repb.ActionResult{}, Cached: true}, "", "", codes.OK},
		{"cached, not as a blob", &worker.Outcome{Result: &repb.ActionResult{StdoutRaw: []byte("x")}, Cached: true}, "", "", codes.Aborted},
		{"cancelled", nil, "", "", codes.Aborted},
		{"cancelled later", nil, "text", "text", codes.Aborted},
	} {
		logs, end := s.begin()
		r := s.follow(t, logs.Stdout.Name)
		if c.sent != "" {
			io.WriteString(&logs.Stdout, c.sent)
			wantNext(t, r, c.sent)
		}
		end(c.out)
		text, code := rest(r)
		want(t, c.name, c.sent+text, code, c.text, c.code)
		text, code = s.read(t, &bspb.ReadRequest{ResourceName: logs.Stdout.Name})
		want(t, c.name+", read later", c.sent+text, code, c.text, c.code)
	}
}

func TestRunsAreKeptForAWhile(t *testing.T) {
	bubble(t, logstream.Config{Keep: time.Minute, MaxRuns: 2}, func(t *testing.T, s *site) {
		var names []string
		run := func() {
			logs, end := s.begin()
			names = append(names, logs.Stdout.Name)
			end(s.outcome(t, "text", ""))
		}
		running, end := s.begin()
		check := func(want ...codes.Code) {
			t.Helper()
			for i, c := range want {
				if _, code := s.read(t, &bspb.ReadRequest{ResourceName: names[i]}); code != c {
					t.Errorf("run %d: %v, want %v", i, code, c)
				}
			}
		}
		run()
		time.Sleep(50 * time.Second)
		run()
		check(codes.OK, codes.OK)
		time.Sleep(30 * time.Second)
		check(codes.NotFound, codes.OK)
		run()
		run()
		check(codes.NotFound, codes.NotFound, codes.OK, codes.OK)
		time.Sleep(time.Hour)
		check(codes.NotFound, codes.NotFound, codes.NotFound, codes.NotFound)
		end(s.outcome(t, "long", "")) // it was kept while it ran
		text, code := s.read(t, &bspb.ReadRequest{ResourceName: running.Stdout.Name})
		want(t, "long run", text, code, "long", codes.OK)
	})
}

func TestNewWithoutInstances(t *testing.T) {
	expect.Message(t, expect.Err(logstream.New(logstream.Config{})), "Config.Instances")
}
