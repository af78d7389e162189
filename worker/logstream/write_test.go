// SPDX-License-Identifier: Apache-2.0

package logstream_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/logstream"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// create makes a stream.
func (s *site) create(t *testing.T) *logpb.LogStream {
	t.Helper()
	return must.Get(s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{Parent: "main"}))(t)
}

// write writes messages in one call.
func (s *site) write(t *testing.T, ms ...*bspb.WriteRequest) error {
	t.Helper()
	_, err := s.committed(t.Context(), ms...)
	return err
}

// committed is like write and returns the committed size.
func (s *site) committed(ctx context.Context, ms ...*bspb.WriteRequest) (int64, error) {
	w, err := s.bytes.Write(ctx)
	if err != nil {
		return 0, err
	}
	for _, m := range ms {
		if w.Send(m) != nil {
			break // CloseAndRecv returns the error
		}
	}
	r, err := w.CloseAndRecv()
	return r.GetCommittedSize(), err
}

func message(name string, off int64, data string, finish bool) *bspb.WriteRequest {
	return &bspb.WriteRequest{ResourceName: name, WriteOffset: off, Data: []byte(data), FinishWrite: finish}
}

// wantStatus checks the answer of QueryWriteStatus.
func (s *site) wantStatus(t *testing.T, l *logpb.LogStream, size int64, complete bool) {
	t.Helper()
	r, err := s.bytes.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: l.WriteResourceName})
	expect.That(t, err == nil && r.CommittedSize == size && r.Complete == complete,
		"status is %v, %v, want %d bytes, complete %v", r, err, size, complete)
}

func TestCreateLogStreamReturnsDistinctNames(t *testing.T) {
	s := serve(t, logstream.Config{})
	a, b := s.create(t), s.create(t)
	for _, l := range []*logpb.LogStream{a, b} {
		token, ok := strings.CutPrefix(l.WriteResourceName, l.Name+"/")
		if !ok || len(token) < 32 || strings.Contains(token, "/") || !strings.HasPrefix(l.Name, "main/logstreams/") {
			t.Errorf("names are %q and %q, want the second to add a token", l.Name, l.WriteResourceName)
		}
	}
	expect.That(t, a.Name != b.Name, "two streams have the same name")
	if l, err := s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{}); err != nil || !strings.HasPrefix(l.Name, "logstreams/") {
		t.Errorf("without a parent: %v, %v, want logstreams/ID", l, err)
	}
	for _, parent := range []string{"/", "a//b", "a/blobs", "logstreams", "a/logstreams", "logstreams/a"} {
		if l, err := s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{Parent: parent}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("parent %q: %v, %v, want INVALID_ARGUMENT", parent, l, err)
		}
	}
}

// TestWrittenStreamIsFollowedResumedAndFinished is the example from the API.
func TestWrittenStreamIsFollowedResumedAndFinished(t *testing.T) {
	s := serve(t, logstream.Config{})
	l := s.create(t)
	to := l.WriteResourceName
	r := s.follow(t, l.Name)

	w := must.Get(s.bytes.Write(t.Context()))(t)
	must.Succeed(t, w.Send(message(to, 0, "one ", false)))
	wantNext(t, r, "one ") // while the writer's call is open
	must.Succeed(t, w.Send(message("", 4, "two ", false)))
	wantNext(t, r, "two ")
	if res, err := w.CloseAndRecv(); err != nil || res.CommittedSize != 8 {
		t.Fatalf("a call without finish_write: %v, %v, want 8 bytes committed", res, err)
	}
	s.wantStatus(t, l, 8, false)

	for _, c := range []struct {
		name string
		m    *bspb.WriteRequest
		code codes.Code
	}{
		{"overwrites", message(to, 4, "TWO", false), codes.InvalidArgument},
		{"leaves a gap", message(to, 9, "x", true), codes.InvalidArgument},
		{"below 0", message(to, -1, "x", true), codes.InvalidArgument},
	} {
		if err := s.write(t, c.m); status.Code(err) != c.code || !strings.Contains(err.Error(), " 8 ") || strings.Contains(err.Error(), to) {
			t.Errorf("%s: %v, want %v with the size 8 and without the token", c.name, err, c.code)
		}
	}
	expect.Code(t, s.write(t, message(to, 8, "three", false), message(l.Name, 13, "x", false)), codes.InvalidArgument,
		"changed name")
	wantNext(t, r, "three")
	expect.Equal(t, must.Get(s.committed(t.Context(), message(to, 13, "", true)))(t), 13, "finish")
	text, code := rest(r)
	want(t, "the end", text, code, "", codes.OK)
	s.wantStatus(t, l, 13, true)

	expect.Equal(t, must.Get(s.committed(t.Context(), message(to, 13, "", true)))(t), 13, "finish again")
	for _, m := range []*bspb.WriteRequest{message(to, 13, "more", true), message(to, 13, "more", false), message(to, 13, "", false)} {
		expect.Code(t, s.write(t, m), codes.FailedPrecondition, "%v after the end", m)
	}
	text, code = s.read(t, &bspb.ReadRequest{ResourceName: l.Name, ReadOffset: 4})
	want(t, "finished", text, code, "two three", codes.OK)
}

// TestWritersDoNotOverwriteEachOther checks that one of several concurrent writes at the same offset succeeds.
func TestWritersDoNotOverwriteEachOther(t *testing.T) {
	s := serve(t, logstream.Config{})
	l := s.create(t)
	const writers, size = 8, 100_000
	for off := int64(0); off < 5*size; off += size {
		var won atomic.Int32
		var all sync.WaitGroup
		for i := range writers {
			all.Go(func() {
				switch err := s.write(t, message(l.WriteResourceName, off, strings.Repeat(fmt.Sprint(i), size), false)); status.Code(err) {
				case codes.OK:
					won.Add(1)
				case codes.InvalidArgument:
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		must.Be(t, won.Load() == 1, "%d writers wrote at %d, want 1", won.Load(), off)
	}
	s.wantStatus(t, l, 5*size, false)
	text, code := s.read(t, &bspb.ReadRequest{ResourceName: l.Name, ReadLimit: 5 * size})
	for i := 0; i < len(text); i += size {
		if part := text[i : i+size]; strings.Trim(part, part[:1]) != "" || code != codes.OK {
			t.Errorf("data at %d is mixed", i)
		}
	}
}

// A singleMessage is a write call with one message.
type singleMessage struct{ bspb.ByteStream_WriteServer }

func (singleMessage) Recv() (*bspb.WriteRequest, error)      { return nil, io.EOF }
func (singleMessage) SendAndClose(*bspb.WriteResponse) error { return nil }

// TestWritersAppendAtTheCommittedSize checks that concurrent writers that query the size first never overlap.
func TestWritersAppendAtTheCommittedSize(t *testing.T) {
	s := serve(t, logstream.Config{})
	l := s.create(t)
	const size, whole = 16, 16 * 20_000
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				r, err := s.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: l.WriteResourceName})
				if err != nil {
					t.Error(err)
					return
				}
				if r.CommittedSize >= whole {
					return
				}
				err = s.Write(message(l.WriteResourceName, r.CommittedSize, fmt.Sprintf("%016d", r.CommittedSize), false), singleMessage{})
				if c := status.Code(err); c != codes.OK && c != codes.InvalidArgument {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	text, _ := s.read(t, &bspb.ReadRequest{ResourceName: l.Name, ReadLimit: whole})
	for i := 0; i < len(text); i += size {
		if want := fmt.Sprintf("%016d", i); text[i:i+size] != want {
			t.Fatalf("at %d is %s, want %s", i, text[i:i+size], want)
		}
	}
}

// fill writes n bytes to a stream.
func (s *site) fill(t *testing.T, l *logpb.LogStream, off int64, n int, finish bool, want codes.Code) {
	t.Helper()
	expect.Code(t, s.write(t, message(l.WriteResourceName, off, strings.Repeat("x", n), finish)), want, "%d bytes", n)
}

// callers returns the options of a server that takes the name of every caller from caller.
func callers() (options []grpc.ServerOption, caller *atomic.Value) {
	caller = &atomic.Value{}
	caller.Store("")
	return quota.New(quota.Config{Name: func(context.Context) string { return caller.Load().(string) }}).Options(), caller
}

func TestStreamsOfClientsAreBounded(t *testing.T) {
	options, caller := callers()
	s := serve(t, logstream.Config{MaxStreams: 3, MaxBytes: 120, MaxStreamBytes: 60}, options...)
	a := s.create(t)
	caller.Store("b")
	b, c := s.create(t), s.create(t)
	if l, err := s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("fourth stream: %v, %v, want RESOURCE_EXHAUSTED", l, err)
	}
	s.fill(t, a, 0, 61, false, codes.ResourceExhausted)
	s.wantStatus(t, a, 0, false)
	s.fill(t, a, 0, 60, false, codes.OK)
	s.fill(t, a, 60, 1, false, codes.ResourceExhausted)
	s.fill(t, b, 0, 40, false, codes.OK)
	s.fill(t, c, 0, 21, false, codes.ResourceExhausted)
	s.wantStatus(t, c, 0, false)
	s.fill(t, c, 0, 20, false, codes.OK)
	caller.Store("d")
	s.fill(t, a, 60, 0, true, codes.OK)
	d := s.create(t) // drops a, which is finished
	if _, code := s.read(t, &bspb.ReadRequest{ResourceName: a.Name}); code != codes.NotFound {
		t.Errorf("a: %v, want NOT_FOUND", code)
	}
	s.fill(t, d, 0, 60, true, codes.OK)
	caller.Store("e")
	e := s.create(t) // drops d
	s.fill(t, e, 0, 60, true, codes.OK)
	s.wantStatus(t, b, 40, false)
}

// TestCallersHaveLogsOfTheirOwn: a caller that reaches its limits neither prevents others from writing logs nor
// displaces their finished logs.
func TestCallersHaveLogsOfTheirOwn(t *testing.T) {
	options, caller := callers()
	s := serve(t, logstream.Config{MaxStreams: 10, MaxBytes: 100, MaxStreamBytes: 40}, options...)
	caller.Store("modest")
	log := s.create(t)
	s.fill(t, log, 0, 10, true, codes.OK)
	caller.Store("greedy")
	for range 20 {
		s.fill(t, s.create(t), 0, 5, true, codes.OK)
	}
	a, b := s.create(t), s.create(t)
	s.fill(t, a, 0, 40, false, codes.OK)
	s.fill(t, b, 0, 10, false, codes.OK)
	err := s.write(t, message(b.WriteResourceName, 10, "x", false))
	code := status.Convert(err)
	expect.That(t, code.Code() == codes.ResourceExhausted && len(code.Details()) == 1, "got %v, want RESOURCE_EXHAUSTED with RetryInfo", err)
	for range 20 {
		s.fill(t, s.create(t), 0, 0, true, codes.OK)
	}
	text, end := s.read(t, &bspb.ReadRequest{ResourceName: log.Name})
	want(t, "the finished log of the other caller", text, end, strings.Repeat("x", 10), codes.OK)
	caller.Store("modest")
	s.fill(t, s.create(t), 0, 40, true, codes.OK)
	text, end = s.read(t, &bspb.ReadRequest{ResourceName: log.Name})
	want(t, "a log of a caller with few", text, end, strings.Repeat("x", 10), codes.OK)
}

// Streams that are finished or dropped do not count towards the limit of a caller.
func TestUnfinishedStreamsOfOneCallerAreBounded(t *testing.T) {
	limits := quota.Limits{}
	must.Succeed(t, limits.Set("log-streams=2"))
	s := serve(t, logstream.Config{MaxStreams: 3}, quota.New(quota.Config{Callers: limits}).Options()...)
	wantRefused := func() {
		t.Helper()
		l, err := s.maker.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{})
		if code := status.Convert(err); code.Code() != codes.ResourceExhausted || len(code.Details()) != 1 {
			t.Errorf("got %v, %v, want RESOURCE_EXHAUSTED with RetryInfo", l, err)
		}
	}
	a := s.create(t)
	s.create(t)
	wantRefused()
	must.Succeed(t, s.write(t, message(a.WriteResourceName, 0, "x", true)))
	must.Succeed(t, s.write(t, message(a.WriteResourceName, 1, "", true))) // a retry
	s.create(t)
	wantRefused()
}

func TestIdleStreamEnds(t *testing.T) {
	bubble(t, logstream.Config{Keep: time.Minute, Idle: 10 * time.Minute}, func(t *testing.T, s *site) {
		idle, busy, done := s.create(t), s.create(t), s.create(t)
		r := s.follow(t, idle.Name)
		must.Succeed(t, s.write(t, message(done.WriteResourceName, 0, "done", true)))
		for i := range int64(30) {
			must.Succeed(t, s.write(t, message(busy.WriteResourceName, i, "x", false)))
			time.Sleep(30 * time.Second)
		}
		text, code := rest(r)
		want(t, "idle", text, code, "", codes.Aborted)
		for _, l := range []*logpb.LogStream{idle, done} {
			expect.Code(t, s.write(t, message(l.WriteResourceName, 0, "x", false)), codes.NotFound,
				"write to an ended stream")
			_, code = s.read(t, &bspb.ReadRequest{ResourceName: l.Name})
			want(t, "ended", "", code, "", codes.NotFound)
		}
		s.wantStatus(t, busy, 30, false)
	})
}

func TestCloseEndsReadersAndWriters(t *testing.T) {
	bubble(t, logstream.Config{}, func(t *testing.T, s *site) {
		l := s.create(t)
		r := s.follow(t, l.Name)
		w := must.Get(s.bytes.Write(t.Context()))(t)
		must.Succeed(t, w.Send(message(l.WriteResourceName, 0, "text", false)))
		wantNext(t, r, "text")
		s.Registry.Close()
		text, code := rest(r)
		want(t, "reader", text, code, "", codes.Unavailable)
		synctest.Wait()
		expect.Equal(t, s.serving.Load(), 0, "concurrent reads")
		_ = w.Send(message("", 4, "more", true)) // CloseAndRecv returns the error
		if _, err := w.CloseAndRecv(); status.Code(err) != codes.Unavailable || err == io.EOF {
			t.Errorf("writer: %v, want UNAVAILABLE", err)
		}
	})
}
