// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// function is an Executor whose actions pass the Fetch stage at once.
type function func(context.Context, *worker.Task) (*worker.Outcome, error)

func (f function) Execute(
	ctx context.Context, t *worker.Task, report func(worker.Stage),
) (*worker.Outcome, error) {
	report(worker.StageConfine)
	return f(ctx, t)
}

// site is a server with its queue and clients.
type site struct {
	repb.ExecutionClient
	ops   longrunningpb.OperationsClient
	queue *queue.Queue
	in    *cas.Instance
	log   *syncbuf.Buffer
	dial  func() *grpc.ClientConn
	wire  net.Conn      // of the connection made last
	left  chan struct{} // receives when a stream has ended
}

// serve starts a site; change may be nil.
func serve(t *testing.T, e function, change func(*queue.Config, *execserver.Config)) *site {
	t.Helper()
	s := &site{log: &syncbuf.Buffer{}}
	instances := castest.Instances()
	qc := queue.Config{Executor: e, Slots: 2, Offer: &queue.Offer{Worker: "anvil", Any: true}}
	c := execserver.Config{
		Instances: instances,
		Worker:    "smithy",
		Log:       slog.New(slog.NewTextHandler(s.log, nil)),
		Admit: func(ctx context.Context, task *worker.Task) (worker.Admission, error) {
			in, err := instances(task.Instance)
			if err != nil {
				return worker.Admission{}, err
			}
			var a repb.Action
			if err := cas.ReadProto(ctx, in.Store, task.Action, &a); err != nil {
				return worker.Admission{}, &worker.Fault{Kind: worker.FaultMissing, Err: err, Blobs: []cas.Digest{task.Action}}
			}
			return worker.Admission{DoNotMerge: a.DoNotCache, MergeKey: task.Mnemonic}, nil
		},
	}
	if change != nil {
		change(&qc, &c)
	}
	s.in = must.Get(c.Instances(""))(t)
	s.queue = must.Get(queue.New(qc))(t)
	t.Cleanup(s.queue.Close)
	c.Queue = s.queue

	listener := bufconn.Listen(1 << 20)
	s.left = make(chan struct{}, 1)
	server := grpc.NewServer(grpc.StreamInterceptor(func(srv any, to grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		defer func() {
			select {
			case s.left <- struct{}{}:
			default: // no test is waiting
			}
		}()
		return handle(srv, to)
	}))
	must.Succeed(t, execserver.Register(server, c))
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { server.Stop(); serving.Wait() })
	s.dial = func() *grpc.ClientConn {
		conn := must.Get(grpc.NewClient("passthrough:///site",
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				conn, err := listener.DialContext(ctx)
				s.wire = conn
				return conn, err
			})))(t)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	conn := s.dial()
	s.ExecutionClient = repb.NewExecutionClient(conn)
	s.ops = longrunningpb.NewOperationsClient(conn)
	return s
}

// put stores m.
func (s *site) put(t *testing.T, m proto.Message) cas.Digest {
	t.Helper()
	return must.Get(cas.PutProto(t.Context(), s.in.Store, cas.SHA256, m))(t)
}

// action stores an Action that its salt makes unique.
func (s *site) action(t *testing.T, salt string) cas.Digest {
	t.Helper()
	return s.put(t, &repb.Action{Salt: []byte(salt)})
}

// blob stores b.
func (s *site) blob(t *testing.T, b []byte) *repb.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), s.in.Store, cas.SHA256, b))(t).Proto()
}

// record puts a result into the action cache.
func (s *site) record(t *testing.T, action cas.Digest, r *repb.ActionResult) {
	t.Helper()
	must.Succeed(t, s.in.Actions.Record(t.Context(), action, r))
}

type stream = grpc.ServerStreamingClient[longrunningpb.Operation]

// execute starts to execute an action; change may be nil.
func (s *site) execute(
	ctx context.Context, t *testing.T, action cas.Digest, change func(*repb.ExecuteRequest),
) stream {
	t.Helper()
	req := &repb.ExecuteRequest{ActionDigest: action.Proto()}
	if change != nil {
		change(req)
	}
	return must.Get(s.Execute(ctx, req))(t)
}

func (s *site) wait(ctx context.Context, t *testing.T, name string) stream {
	t.Helper()
	return must.Get(s.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name}))(t)
}

func recv(t *testing.T, st stream) *longrunningpb.Operation {
	t.Helper()
	m, err := st.Recv()
	must.Be(t, err == nil, "Recv: %v", err)
	return m
}

func stageOf(t *testing.T, m *longrunningpb.Operation) repb.ExecutionStage_Value {
	t.Helper()
	var md repb.ExecuteOperationMetadata
	if err := m.Metadata.UnmarshalTo(&md); err != nil {
		t.Fatalf("metadata: %v", err)
	}
	return md.Stage
}

// all returns every message of st, which must succeed.
func all(t *testing.T, st stream) []*longrunningpb.Operation {
	t.Helper()
	var ms []*longrunningpb.Operation
	for {
		m, err := st.Recv()
		if err == io.EOF {
			return ms
		}
		must.Be(t, err == nil, "Recv: %v", err)
		ms = append(ms, m)
	}
}

// end returns the response at the end of st.
func end(t *testing.T, st stream) *repb.ExecuteResponse {
	t.Helper()
	ms := all(t, st)
	must.Be(t, len(ms) != 0, "the stream has no message")
	return responseOf(t, ms[len(ms)-1])
}

func responseOf(t *testing.T, m *longrunningpb.Operation) *repb.ExecuteResponse {
	t.Helper()
	var r repb.ExecuteResponse
	must.Be(t, m.Done && m.GetResponse() != nil, "operation %v has no response", m)
	if err := m.GetResponse().UnmarshalTo(&r); err != nil {
		t.Fatalf("response: %v", err)
	}
	return &r
}

// codeOf returns the code of the failed call of st.
func codeOf(t *testing.T, st stream) codes.Code {
	t.Helper()
	m, err := st.Recv()
	must.Be(t, err != nil, "the call succeeded with %v", m)
	return status.Code(err)
}

func wantCode(t *testing.T, r *repb.ExecuteResponse, want codes.Code) *status.Status {
	t.Helper()
	st := status.FromProto(r.Status)
	must.Be(t, st.Code() == want, "status is %v, want %v", st, want)
	return st
}

func succeed(context.Context, *worker.Task) (*worker.Outcome, error) {
	return &worker.Outcome{Result: result()}, nil
}

// result returns a result as an Executor does.
func result() *repb.ActionResult {
	return &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{
		Worker:                     "anvil",
		QueuedTimestamp:            &timestamppb.Timestamp{Seconds: 1},
		ExecutionStartTimestamp:    &timestamppb.Timestamp{Seconds: 2},
		WorkerCompletedTimestamp:   &timestamppb.Timestamp{Seconds: 3, Nanos: 4},
		OutputUploadStartTimestamp: &timestamppb.Timestamp{Seconds: 2, Nanos: 9},
	}}
}

// blocking returns an Executor whose actions run until open is called, or they are cancelled, and the number of its
// runs.
func blocking() (e function, open func(), begun func() int) {
	var mu sync.Mutex
	n := 0
	opened := make(chan struct{})
	return func(ctx context.Context, t *worker.Task) (*worker.Outcome, error) {
			mu.Lock()
			n++
			mu.Unlock()
			select {
			case <-opened:
				return succeed(ctx, t)
			case <-ctx.Done():
				return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
			}
		}, func() { close(opened) }, func() int {
			mu.Lock()
			defer mu.Unlock()
			return n
		}
}

// reach reads st up to the first message of a stage, and returns it.
func reach(t *testing.T, st stream, want repb.ExecutionStage_Value) *longrunningpb.Operation {
	t.Helper()
	for {
		m := recv(t, st)
		if stageOf(t, m) == want {
			return m
		}
	}
}

func TestRule072_085_110_FaultsBecomeStatuses(t *testing.T) {
	blobs := []cas.Digest{cas.SHA256.Sum([]byte("a")), cas.SHA256.Sum([]byte("b")), cas.SHA256.Sum([]byte("c"))}
	type violation = errdetails.PreconditionFailure_Violation
	for _, c := range []struct {
		name    string
		kind    worker.FaultKind
		code    codes.Code
		details []string
	}{
		{"invalid", worker.FaultInvalid, codes.InvalidArgument, nil},
		{"missing", worker.FaultMissing, codes.FailedPrecondition, []string{"google.rpc.PreconditionFailure"}},
		{"unmet", worker.FaultUnmet, codes.FailedPrecondition, nil},
		{"exhausted", worker.FaultExhausted, codes.ResourceExhausted, []string{"google.rpc.RetryInfo"}},
		{"unavailable", worker.FaultUnavailable, codes.Unavailable, nil},
		{"internal", worker.FaultInternal, codes.Internal, nil},
		{"cancelled", worker.FaultCancelled, codes.Canceled, nil},
		{"unknown kind", 99, codes.Internal, nil},
	} {
		for _, where := range []string{"before a slot", "in a slot"} {
			t.Run(c.name+" "+where, func(t *testing.T) {
				f := &worker.Fault{Kind: c.kind, Err: errors.New("stage: the\nreason")}
				if c.kind == worker.FaultMissing {
					f.Blobs = blobs
				}
				s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
					return nil, f
				}, func(_ *queue.Config, ec *execserver.Config) {
					if where == "before a slot" {
						ec.Admit = func(context.Context, *worker.Task) (worker.Admission, error) { return worker.Admission{}, f }
					}
				})
				a := s.action(t, "x")
				ms := all(t, s.execute(t.Context(), t, a, nil))
				last := ms[len(ms)-1]
				r := responseOf(t, last)
				st := wantCode(t, r, c.code)
				expect.That(t, r.Result == nil, "a fault has the result %v, want none", r.Result)
				expect.Equal(t, st.Message(), "stage: the reason", "message of the status")
				// Rule 126: the worker, or the server if none had it, the operation and the action.
				executor := "(worker anvil, "
				if where == "before a slot" {
					executor = "(server smithy, "
				}
				expect.Texts(t, r.Message, []string{"stage: the reason", executor, last.Name, a.String()}, "message")
				expect.That(t, !strings.Contains(r.Message, "\n"), "message is %q, want one line", r.Message)
				var details []string
				for _, d := range r.Status.Details {
					details = append(details, string(d.MessageName()))
				}
				expect.Slices(t, details, c.details, "details")
				if c.kind != worker.FaultMissing || len(st.Details()) != 1 {
					return
				}
				var want []*violation
				for _, d := range blobs {
					want = append(want, &violation{Type: "MISSING", Subject: d.Resource()})
				}
				got := st.Details()[0].(*errdetails.PreconditionFailure).Violations
				expect.Equal(t, cmp.Diff(want, got, protocmp.Transform()), "", "violations (-want +got)")
			})
		}
	}
}

func TestRule072_ManyMissingBlobsFitIntoOneMessage(t *testing.T) {
	for _, c := range []struct {
		fn   cas.Function
		size int64
		want int // at least
	}{{cas.SHA256, 10_000, 39_000}, {cas.SHA256, math.MaxInt64, 38_000}, {cas.SHA512, math.MaxInt64, 20_000}} {
		f := &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("absent"), Blobs: make([]cas.Digest, 100_000)}
		for i := range f.Blobs {
			d := must.Get(cas.NewDigest(c.fn, fmt.Sprintf("%0*x", 2*c.fn.Size(), i), c.size))(t)
			f.Blobs[i] = d
		}
		s := serve(t, succeed, func(_ *queue.Config, c *execserver.Config) {
			c.Admit = func(context.Context, *worker.Task) (worker.Admission, error) { return worker.Admission{}, f }
		})
		// The client itself refuses a message above 4 MiB.
		st := wantCode(t, end(t, s.execute(t.Context(), t, s.action(t, "x"), nil)), codes.FailedPrecondition)
		n := len(st.Details()[0].(*errdetails.PreconditionFailure).Violations)
		expect.That(t, n >= c.want, "%v: %d blobs are listed, want at least %d", c.fn, n, c.want)
		for _, words := range []string{"100000 blobs are absent", fmt.Sprintf("the first %d are listed", n)} {
			expect.Text(t, st.Message(), words, "%v: message", c.fn)
		}
	}
}

func TestRule126_FaultWithoutTextHasAMessage(t *testing.T) {
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		return nil, &worker.Fault{Kind: worker.FaultUnavailable}
	}, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	if st := wantCode(t, r, codes.Unavailable); st.Message() == "" || r.Message == "" {
		t.Errorf("messages are %q and %q, want non-empty ones", st.Message(), r.Message)
	}
}

func TestRule110_PanicIsInternalAndLogged(t *testing.T) {
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) { panic("defect in executor") }, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	expect.Text(t, wantCode(t, r, codes.Internal).Message(), "defect in executor", "status")
	if log := s.log.String(); !strings.Contains(log, "defect in executor") || !strings.Contains(log, "execserver_test.go") {
		t.Errorf("log is %q, want the panic and its stack", log)
	}
}

func TestRule086_087_BadRequestsFailAtOnce(t *testing.T) {
	s := serve(t, succeed, nil)
	a := s.action(t, "x")
	for _, c := range []struct {
		name   string
		change func(*repb.ExecuteRequest)
	}{
		{"no digest", func(r *repb.ExecuteRequest) { r.ActionDigest = nil }},
		{"short hash", func(r *repb.ExecuteRequest) { r.ActionDigest.Hash = "abc" }},
		{"upper case", func(r *repb.ExecuteRequest) { r.ActionDigest.Hash = strings.ToUpper(r.ActionDigest.Hash) }},
		{"negative size", func(r *repb.ExecuteRequest) { r.ActionDigest.SizeBytes = -1 }},
		{"function not served", func(r *repb.ExecuteRequest) { r.DigestFunction = repb.DigestFunction_SHA512 }},
		{"hash of another length", func(r *repb.ExecuteRequest) {
			r.DigestFunction = repb.DigestFunction_SHA256
			r.ActionDigest.Hash = r.ActionDigest.Hash[:40]
		}},
		{"hash longer than the function", func(r *repb.ExecuteRequest) { r.DigestFunction = repb.DigestFunction_SHA1 }},
		{"unknown function", func(r *repb.ExecuteRequest) { r.DigestFunction = repb.DigestFunction_VSO }},
		{"instance with a reserved word", func(r *repb.ExecuteRequest) { r.InstanceName = "a/blobs/b" }},
		{"instance with an empty part", func(r *repb.ExecuteRequest) { r.InstanceName = "a//b" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			expect.Equal(t, codeOf(t, s.execute(t.Context(), t, a, c.change)), codes.InvalidArgument,
				"the call ended with")
		})
	}
	if got := s.queue.Stats(); got != (queue.Stats{Slots: got.Slots, Working: got.Working}) {
		t.Errorf("Stats = %+v, want only slots", got)
	}
}

func TestRule087_InvocationsTakeTurns(t *testing.T) {
	var mu sync.Mutex
	var order []string
	holding, hold := make(chan struct{}), make(chan struct{})
	s := serve(t, func(ctx context.Context, task *worker.Task) (*worker.Outcome, error) {
		mu.Lock()
		order = append(order, task.Invocation)
		first := len(order) == 1
		mu.Unlock()
		if first {
			close(holding)
			<-hold
		}
		return succeed(ctx, task)
	}, func(c *queue.Config, _ *execserver.Config) { c.Slots = 1 })
	streams := []stream{s.execute(t.Context(), t, s.action(t, "holds the slot"), nil)}
	<-holding
	for i, b := range []string{"large", "large", "large", "small"} {
		st := s.execute(withMetadata(t, &repb.RequestMetadata{ToolInvocationId: b}), t, s.action(t, fmt.Sprint(i)), nil)
		reach(t, st, repb.ExecutionStage_QUEUED)
		streams = append(streams, st)
	}
	close(hold)
	for _, st := range streams {
		wantCode(t, end(t, st), codes.OK)
	}
	expect.Slices(t, order, []string{"", "large", "small", "large", "large"}, "runs")
}

func TestRule088_FirstMessageDoesNotWaitForInputs(t *testing.T) {
	resolving := make(chan struct{})
	s := serve(t, succeed, func(_ *queue.Config, c *execserver.Config) {
		c.Admit = func(context.Context, *worker.Task) (worker.Admission, error) {
			<-resolving
			return worker.Admission{}, nil
		}
	})
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	if m := recv(t, st); m.Name == "" || stageOf(t, m) != repb.ExecutionStage_CACHE_CHECK {
		t.Errorf("first message is %v, want a name and CACHE_CHECK", m)
	}
	close(resolving)
	wantCode(t, end(t, st), codes.OK)
}

// TestPullHoldsUpNoOtherAction: while the pull of an image hangs, its action waits, and another one runs in the only
// slot.
func TestPullHoldsUpNoOtherAction(t *testing.T) {
	pulled := make(chan struct{})
	s := serve(t, succeed, func(q *queue.Config, c *execserver.Config) {
		q.Slots = 1
		admit := c.Admit
		c.Admit = func(ctx context.Context, task *worker.Task) (worker.Admission, error) {
			a, err := admit(ctx, task)
			if task.SkipCacheLookup {
				a.Pull = func(context.Context) error { <-pulled; return nil }
			}
			return a, err
		}
	})
	pulling := s.execute(t.Context(), t, s.action(t, "in an image"), func(r *repb.ExecuteRequest) { r.SkipCacheLookup = true })
	reach(t, pulling, repb.ExecutionStage_QUEUED)
	wantCode(t, end(t, s.execute(t.Context(), t, s.action(t, "other"), nil)), codes.OK)
	close(pulled)
	wantCode(t, end(t, pulling), codes.OK)
}

// direct registers a service and calls it without gRPC.
type direct struct{ repb.ExecutionServer }

func (d *direct) RegisterService(_ *grpc.ServiceDesc, impl any) {
	if e, ok := impl.(repb.ExecutionServer); ok {
		d.ExecutionServer = e
	}
}

// slow is a stream whose server can only Send until all other goroutines of its bubble block.
type slow struct {
	grpc.ServerStream
	ctx  context.Context
	sent []*longrunningpb.Operation
}

func (s *slow) Context() context.Context {
	synctest.Wait()
	return s.ctx
}

func (s *slow) Send(m *longrunningpb.Operation) error {
	s.sent = append(s.sent, m)
	return nil
}

func TestRegisterNamesTheMissingField(t *testing.T) {
	q := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer q.Close()
	whole := execserver.Config{
		Queue: q, Instances: castest.Instances(),
		Admit: func(context.Context, *worker.Task) (worker.Admission, error) { return worker.Admission{}, nil },
	}
	for want, change := range map[string]func(*execserver.Config){
		"Config.Queue":     func(c *execserver.Config) { c.Queue = nil },
		"Config.Instances": func(c *execserver.Config) { c.Instances = nil },
		"Config.Admit":     func(c *execserver.Config) { c.Admit = nil },
	} {
		c := whole
		change(&c)
		expect.Message(t, execserver.Register(grpc.NewServer(), c), want)
	}
}

func TestRule088_FirstMessageOfABriefActionIsCacheCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := must.Get(queue.New(queue.Config{Executor: function(succeed)}))(t)
		defer q.Close()
		var d direct
		err := execserver.Register(&d, execserver.Config{
			Queue: q, Instances: castest.Instances(),
			Admit: func(context.Context, *worker.Task) (worker.Admission, error) { return worker.Admission{}, nil },
		})
		must.Succeed(t, err)
		st := &slow{ctx: t.Context()}
		req := &repb.ExecuteRequest{ActionDigest: cas.SHA256.Sum([]byte("x")).Proto()}
		must.Succeed(t, d.Execute(req, st))
		var stages []repb.ExecutionStage_Value
		for _, m := range st.sent {
			stages = append(stages, stageOf(t, m))
		}
		want := []repb.ExecutionStage_Value{repb.ExecutionStage_CACHE_CHECK, repb.ExecutionStage_COMPLETED}
		expect.Slices(t, stages, want, "stages")
	})
}

func TestRule091_StateIsRepeatedAfterSilence(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, func(_ *queue.Config, c *execserver.Config) { c.KeepaliveInterval = time.Millisecond })
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	reach(t, st, repb.ExecutionStage_EXECUTING)
	for range 5 {
		if m := recv(t, st); stageOf(t, m) != repb.ExecutionStage_EXECUTING || m.Done {
			t.Fatalf("repeated message is %v, want EXECUTING", m)
		}
	}
	open()
	wantCode(t, end(t, st), codes.OK)
}

// A client that cancels its call frees the slot soon. One whose connection breaks, or whose deadline passes, may
// return.
func TestRule093_CancelledCallEndsTheActionSoon(t *testing.T) {
	for _, test := range []struct {
		name  string
		leave func(s *site, cancel func())
		soon  bool
	}{
		{"the call is cancelled", func(_ *site, cancel func()) { cancel() }, true},
		{"the connection breaks", func(s *site, _ func()) { s.wire.Close() }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, open, _ := blocking()
			s := serve(t, e, func(c *queue.Config, _ *execserver.Config) {
				c.Grace, c.CancelGrace = time.Hour, time.Millisecond
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			st, err := repb.NewExecutionClient(s.dial()).Execute(ctx, &repb.ExecuteRequest{ActionDigest: s.action(t, "x").Proto()})
			must.Succeed(t, err)
			o, ok := s.queue.Operation(reach(t, st, repb.ExecutionStage_EXECUTING).Name)
			must.Be(t, ok, "the operation is unknown")
			test.leave(s, cancel)
			<-s.left
			if test.soon {
				for o.State().Stage != repb.ExecutionStage_COMPLETED {
					time.Sleep(time.Millisecond)
				}
				return
			}
			time.Sleep(100 * time.Millisecond) // of an hour
			expect.Equal(t, o.State().Stage, repb.ExecutionStage_EXECUTING, "stage")
			open()
			wantCode(t, end(t, s.wait(t.Context(), t, o.Name())), codes.OK)
		})
	}
}

// A deadline that passes says nothing about the client's wishes.
func TestRule093_DeadlineIsNoCancellation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, open, _ := blocking()
		s := serve(t, e, func(c *queue.Config, _ *execserver.Config) { c.Grace, c.CancelGrace = time.Hour, time.Millisecond })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		st := s.execute(ctx, t, s.action(t, "x"), nil)
		o, ok := s.queue.Operation(recv(t, st).Name)
		must.Be(t, ok, "the operation is unknown")
		<-s.left
		time.Sleep(time.Minute) // of an hour
		expect.That(t, o.State().Stage != repb.ExecutionStage_COMPLETED, "the operation has ended with the deadline")
		open()
		wantCode(t, end(t, s.wait(t.Context(), t, o.Name())), codes.OK)
	})
}

// A build fails and its client disconnects while 60 of its actions wait or run, which would take forever. The next
// build gets the slots, and a client that returns gets its action.
func TestRule093_AbandonedBuildYieldsToTheNext(t *testing.T) {
	old := map[cas.Digest]bool{}
	var yielded atomic.Int32
	release := make(chan struct{})
	s := serve(t, func(ctx context.Context, task *worker.Task) (*worker.Outcome, error) {
		if old[task.Action] {
			select {
			case <-release:
			case <-ctx.Done():
				yielded.Add(1)
				return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
			}
		}
		return succeed(ctx, task)
	}, func(c *queue.Config, _ *execserver.Config) { c.Grace, c.CancelGrace = time.Hour, time.Millisecond })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var actions []cas.Digest
	for i := range 60 {
		a := s.action(t, fmt.Sprint("old", i))
		actions, old[a] = append(actions, a), true
	}
	conn := s.dial()
	var first string
	for i, a := range actions {
		st, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{ActionDigest: a.Proto()})
		must.Succeed(t, err)
		if m := recv(t, st); i == 0 {
			first = m.Name
			reach(t, st, repb.ExecutionStage_EXECUTING)
		}
	}
	s.wire.Close()
	for i := range 10 {
		wantCode(t, end(t, s.execute(ctx, t, s.action(t, fmt.Sprint("new", i)), nil)), codes.OK)
	}
	expect.That(t, yielded.Load() != 0, "no abandoned action has yielded its slot")
	close(release)
	wantCode(t, end(t, s.wait(ctx, t, first)), codes.OK)
}

func TestRule094_ActionCacheHitIsServed(t *testing.T) {
	e, open, begun := blocking()
	s := serve(t, e, func(c *queue.Config, _ *execserver.Config) { c.Slots = 1 })
	holder := s.execute(t.Context(), t, s.action(t, "holds the slot"), nil)
	reach(t, holder, repb.ExecutionStage_EXECUTING)

	a := s.action(t, "x")
	want := result()
	want.OutputFiles = []*repb.OutputFile{{Path: "out", Digest: s.blob(t, []byte("contents"))}}
	s.record(t, a, want)
	st := s.execute(t.Context(), t, a, nil)
	if m := recv(t, st); stageOf(t, m) != repb.ExecutionStage_CACHE_CHECK {
		t.Errorf("first message is %v, want CACHE_CHECK", m)
	}
	r := end(t, st)
	wantCode(t, r, codes.OK)
	expect.That(t, r.CachedResult, "cached_result is false")
	// Rule 122: the metadata are those of the original run.
	expect.Equal(t, cmp.Diff(want, r.Result, protocmp.Transform()), "", "result (-recorded +served)")
	expect.Equal(t, begun(), 1, "actions ran (only the one that holds the slot)")
	open()
	wantCode(t, end(t, holder), codes.OK)
}

func TestRule068_094_096_UnusableCacheEntryIsNotServed(t *testing.T) {
	lost := cas.SHA256.Sum([]byte("evicted")).Proto()
	for _, c := range []struct {
		name    string
		action  *repb.Action
		result  *repb.ActionResult
		change  func(*repb.ExecuteRequest)
		skipped bool
	}{
		{name: "output absent", result: &repb.ActionResult{StdoutDigest: lost}},
		{name: "failed", result: &repb.ActionResult{ExitCode: 1}},
		{
			name: "too large to send", skipped: true,
			result: &repb.ActionResult{StdoutRaw: make([]byte, worker.MaxResult)},
		},
		{name: "do_not_cache", action: &repb.Action{DoNotCache: true}, result: result()},
		{
			name: "skip_cache_lookup", result: result(), skipped: true,
			change: func(r *repb.ExecuteRequest) { r.SkipCacheLookup = true },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex
			var task worker.Task
			s := serve(t, func(ctx context.Context, got *worker.Task) (*worker.Outcome, error) {
				mu.Lock()
				defer mu.Unlock()
				task = *got
				return &worker.Outcome{Result: &repb.ActionResult{StdoutRaw: []byte("new")}}, nil
			}, nil)
			if c.action == nil {
				c.action = &repb.Action{}
			}
			a := s.put(t, c.action)
			s.record(t, a, c.result)
			r := end(t, s.execute(t.Context(), t, a, c.change))
			wantCode(t, r, codes.OK)
			expect.That(t, !r.CachedResult && string(r.Result.GetStdoutRaw()) == "new",
				"response is %v, want a new result", r)
			mu.Lock()
			defer mu.Unlock()
			expect.Equal(t, task.SkipCacheLookup, c.skipped, "SkipCacheLookup of the task")
			expect.That(t, !task.Queued.IsZero(), "Queued of the task is zero")
		})
	}
}

func TestRule094_BrokenCacheIsUnavailable(t *testing.T) {
	s := serve(t, succeed, func(_ *queue.Config, c *execserver.Config) {
		inner := c.Instances
		c.Instances = func(name string) (*cas.Instance, error) {
			in, err := inner(name)
			if err != nil {
				return nil, err
			}
			return &cas.Instance{Name: name, Store: in.Store, Actions: unreachable{}}, nil
		}
	})
	wantCode(t, end(t, s.execute(t.Context(), t, s.action(t, "x"), nil)), codes.Unavailable)
}

// unreachable is an ActionCache that fails.
type unreachable struct{}

func (unreachable) Lookup(context.Context, cas.Digest) (*repb.ActionResult, error) {
	return nil, errors.New("connection refused")
}

func (unreachable) Record(context.Context, cas.Digest, *repb.ActionResult) error {
	return errors.New("connection refused")
}

func TestRule127_LogStreamsAreNamedSinceExecuting(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, func(c *queue.Config, _ *execserver.Config) {
		c.Logs = func(*worker.Task) (*worker.Logs, func(*worker.Outcome)) {
			logs := &worker.Logs{}
			logs.Stdout.Name, logs.Stderr.Name = "logstreams/out", "logstreams/err"
			return logs, func(*worker.Outcome) {}
		}
	})
	a := s.action(t, "x")
	first := s.execute(t.Context(), t, a, nil)
	ms := []*longrunningpb.Operation{reach(t, first, repb.ExecutionStage_EXECUTING)}
	ms = append(ms, reach(t, s.execute(t.Context(), t, a, nil), repb.ExecutionStage_EXECUTING))
	ms = append(ms, recv(t, s.wait(t.Context(), t, ms[0].Name)))
	open()
	ms = append(ms, all(t, first)...)
	for _, m := range ms {
		var md repb.ExecuteOperationMetadata
		must.Succeed(t, m.Metadata.UnmarshalTo(&md))
		expect.That(t, md.StdoutStreamName == "logstreams/out" && md.StderrStreamName == "logstreams/err",
			"at %v the streams are %q and %q, want out and err", md.Stage, md.StdoutStreamName, md.StderrStreamName)
	}
	hit := s.action(t, "known")
	s.record(t, hit, result())
	for _, m := range all(t, s.execute(t.Context(), t, hit, nil)) {
		var md repb.ExecuteOperationMetadata
		if err := m.Metadata.UnmarshalTo(&md); err != nil || md.StdoutStreamName+md.StderrStreamName != "" {
			t.Errorf("streams of a cache hit are %q and %q, %v, want none", md.StdoutStreamName, md.StderrStreamName, err)
		}
	}
}

func TestRule108_FailedActionsHaveAResult(t *testing.T) {
	for _, c := range []struct {
		name   string
		status worker.Status
		code   codes.Code
		text   string
	}{
		{"timeout", worker.StatusTimedOut, codes.DeadlineExceeded, "the action ran for 60 s, which is its limit"},
		{"wrong output", worker.StatusBadOutput, codes.FailedPrecondition, "output out is a directory"},
		{"exit code", worker.StatusOK, codes.OK, "exit code 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := result()
			want.ExitCode = 3
			s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
				return &worker.Outcome{Result: want, Status: c.status, Message: c.text}, nil
			}, nil)
			r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
			st := wantCode(t, r, c.code)
			expect.Equal(t, cmp.Diff(want, r.Result, protocmp.Transform()), "", "result (-want +got)")
			if r.Message != c.text || c.code != codes.OK && st.Message() != c.text {
				t.Errorf("messages are %q and %q, want %q", r.Message, st.Message(), c.text)
			}
			expect.That(t, len(st.Details()) == 0, "details are %v, want none", st.Details())
		})
	}
}

// Other clients may share the outcome.
func TestRule124_InliningLeavesTheOutcomeAsItIs(t *testing.T) {
	shared := result()
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		return &worker.Outcome{Result: shared}, nil
	}, nil)
	shared.StdoutDigest = s.blob(t, []byte("out"))
	shared.OutputFiles = []*repb.OutputFile{{Path: "f", Digest: s.blob(t, []byte("file"))}}
	plain := proto.CloneOf(shared)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), func(r *repb.ExecuteRequest) {
		r.InlineStdout, r.InlineOutputFiles = true, []string{"f", "no such"}
	}))
	wantCode(t, r, codes.OK)
	if got := r.Result; string(got.StdoutRaw) != "out" || string(got.OutputFiles[0].Contents) != "file" {
		t.Errorf("got %v, want its stdout and file inlined", got)
	}
	expect.Equal(t, cmp.Diff(plain, shared, protocmp.Transform()), "",
		"the shared outcome was modified (-before +after)")
}

func TestRule124_AbsentBlobToInlineIsNoFailure(t *testing.T) {
	want := result()
	want.StdoutDigest = cas.SHA256.Sum([]byte("evicted")).Proto()
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		return &worker.Outcome{Result: want}, nil
	}, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), func(r *repb.ExecuteRequest) {
		r.InlineStdout = true
	}))
	wantCode(t, r, codes.OK)
	expect.Equal(t, cmp.Diff(want, r.Result, protocmp.Transform()), "", "result (-want +got)")
}

func TestRule124_TooLargeResultIsRefused(t *testing.T) {
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		r := result()
		for i := range 50_000 {
			d := cas.SHA256.Sum([]byte(fmt.Sprint(i)))
			r.OutputFiles = append(r.OutputFiles, &repb.OutputFile{
				Path: fmt.Sprintf("out/%032d", i), Digest: d.Proto(),
			})
		}
		return &worker.Outcome{Result: r}, nil
	}, nil)
	// The client would retry forever if its own limit refused the message.
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	expect.Text(t, wantCode(t, r, codes.FailedPrecondition).Message(), "directories", "status")
}

func TestRule126_MessageIsOneReadableLine(t *testing.T) {
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		long := "mount:\n\tbad \xff name" + strings.Repeat("\u00e9 ", 50_000)
		return nil, &worker.Fault{Kind: worker.FaultInternal, Err: errors.New(long)}
	}, nil)
	a := s.action(t, "x")
	r := end(t, s.execute(t.Context(), t, a, nil))
	st := wantCode(t, r, codes.Internal)
	expect.Text(t, r.Message, a.String(), "message")
	for _, text := range []string{r.Message, st.Message()} {
		if !strings.Contains(text, `mount: bad \xff name\u00e9 \u00e9 `) || !strings.Contains(text, `\u00e9 ...`) {
			t.Errorf("message is %q, want one line, truncated between characters", text)
		}
		wantReadable(t, text)
	}
	expect.Text(t, s.log.String(), "mount: bad", "log (the defect)")
}

// wantReadable checks that text is one short line of ASCII. Bazel 4 garbles anything else.
func wantReadable(t *testing.T, text string) {
	t.Helper()
	expect.That(t, text != "" && len(text) <= 3000, "message has %d bytes, want between 1 and 3000", len(text))
	for _, c := range []byte(text) {
		must.Be(t, c >= ' ' && c <= '~', "message has byte %#x, want printable ASCII: %q", c, text)
	}
}

func TestRule126_MessageOfAnOutcomeIsReadable(t *testing.T) {
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
		return &worker.Outcome{
			Result:  result(),
			Status:  worker.StatusBadOutput,
			Message: "output \x1b[31m" + strings.Repeat("\u00e9\r", 1<<20),
		}, nil
	}, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	wantReadable(t, r.Message)
	wantReadable(t, wantCode(t, r, codes.FailedPrecondition).Message())
}

// TestRule126_MessageKeepsItsLines up to a limit, each of them readable, and the last for reproducing the action.
func TestRule126_MessageKeepsItsLines(t *testing.T) {
	outcome := &worker.Outcome{
		Result: result(), Status: worker.StatusTimedOut,
		Message:   "cloister: one\n\n\tcloister: \x1b[31mtwo \u00e9\n",
		Reproduce: "cloister run --action x/1",
	}
	s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) { return outcome, nil }, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	const want = "cloister: one\ncloister: \\x1b[31mtwo \\u00e9\ncloister: reproduce: cloister run --action x/1"
	if st := wantCode(t, r, codes.DeadlineExceeded); r.Message != want || st.Message() != want {
		t.Errorf("messages are %q and %q, want %q", r.Message, st.Message(), want)
	}
	outcome.Message = strings.Repeat("cloister: again\n", 1000)
	r = end(t, s.execute(t.Context(), t, s.action(t, "y"), nil))
	expect.Equal(t, strings.Count(r.Message, "\n")+1, worker.MaxMessageLines+2, "message has N lines")
	outcome.Message = strings.Repeat("cloister: again\n", worker.MaxMessageLines)
	r = end(t, s.execute(t.Context(), t, s.action(t, "z"), nil))
	expect.That(t, strings.HasSuffix(r.Message, "\ncloister: reproduce: cloister run --action x/1"),
		"message is %q, want it to end with the command to reproduce it", r.Message)
}

// TestRemarkIsInEachMessage of its action, as one line, for new and cached results.
func TestRemarkIsInEachMessage(t *testing.T) {
	for _, cached := range []bool{false, true} {
		var odd cas.Digest
		s := serve(t, func(context.Context, *worker.Task) (*worker.Outcome, error) {
			return &worker.Outcome{Result: result(), Cached: cached}, nil
		}, func(_ *queue.Config, c *execserver.Config) {
			c.Remark = func(_ string, action cas.Digest) string {
				return map[bool]string{true: "it\nis\x1b odd"}[action == odd]
			}
		})
		odd = s.action(t, "x")
		r := end(t, s.execute(t.Context(), t, odd, nil))
		expect.That(t, r.Message == `cloister: it is\x1b odd` && r.CachedResult == cached,
			"cached %v: message is %q, want the remark", cached, r.Message)
		expect.Equal(t, end(t, s.execute(t.Context(), t, s.action(t, "y"), nil)).Message,
			"", "message of another action")
	}
}

func TestRule125_AuditLogIsAServerLog(t *testing.T) {
	log := cas.SHA256.Sum([]byte("what it tried"))
	s := serve(t, func(_ context.Context, task *worker.Task) (*worker.Outcome, error) {
		out := &worker.Outcome{Result: result()}
		if task.Target != "quiet" {
			out.AuditLog = log
		}
		return out, nil
	}, nil)
	r := end(t, s.execute(t.Context(), t, s.action(t, "x"), nil))
	want := map[string]*repb.LogFile{"audit": {Digest: log.Proto(), HumanReadable: true}}
	expect.Equal(t, cmp.Diff(want, r.ServerLogs, protocmp.Transform()), "", "server logs (-want +got)")
	ctx := withMetadata(t, &repb.RequestMetadata{TargetId: "quiet"})
	if r := end(t, s.execute(ctx, t, s.action(t, "y"), nil)); len(r.ServerLogs) != 0 {
		t.Errorf("server logs are %v, want none", r.ServerLogs)
	}
}

// withMetadata returns a context with request metadata.
func withMetadata(t *testing.T, m *repb.RequestMetadata) context.Context {
	t.Helper()
	return header(t, string(must.Get(proto.Marshal(m))(t)))
}

// header returns a context with the given value of the request metadata header.
func header(t *testing.T, value string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", value)
}

// TestRule128_RequestMetadataReachesTheTask as far as it is valid; it is optional.
func TestRule128_RequestMetadataReachesTheTask(t *testing.T) {
	tasks := make(chan *worker.Task, 1)
	s := serve(t, func(_ context.Context, task *worker.Task) (*worker.Outcome, error) {
		tasks <- task
		return &worker.Outcome{Result: result()}, nil
	}, nil)
	type labels struct{ Target, Mnemonic, Invocation string }
	for i, c := range []struct {
		name string
		ctx  context.Context
		want labels
	}{
		{"complete", withMetadata(t, &repb.RequestMetadata{TargetId: "//a:b\u00e9", ActionMnemonic: "CppCompile", ToolInvocationId: "i-1"}), labels{"//a:b\u00e9", "CppCompile", "i-1"}},
		{"no header", t.Context(), labels{}},
		{"malformed", header(t, "\xff\xff\xff"), labels{}},
		{"control characters", withMetadata(t, &repb.RequestMetadata{TargetId: "//a:b\nx", ActionMnemonic: "\x1b[31m", ToolInvocationId: "i"}), labels{"", "", "i"}},
		{"too long", withMetadata(t, &repb.RequestMetadata{TargetId: strings.Repeat("x", 513), ActionMnemonic: strings.Repeat("x", 512)}), labels{"", strings.Repeat("x", 512), ""}},
		{"far too long", withMetadata(t, &repb.RequestMetadata{TargetId: "x", CorrelatedInvocationsId: strings.Repeat("x", 100_000)}), labels{}},
	} {
		end(t, s.execute(c.ctx, t, s.action(t, fmt.Sprint(i)), nil))
		task := <-tasks
		expect.Equal(t, (labels{task.Target, task.Mnemonic, task.Invocation}), c.want, "%s", c.name)
	}
}

func TestValidTraceReachesTheTask(t *testing.T) {
	tasks := make(chan *worker.Task, 1)
	s := serve(t, func(_ context.Context, task *worker.Task) (*worker.Outcome, error) {
		tasks <- task
		return &worker.Outcome{Result: result()}, nil
	}, nil)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for i, c := range []struct {
		name    string
		headers []string
		want    map[string]string
	}{
		{"none", nil, nil},
		{"both", []string{"traceparent", parent, "tracestate", "a=b", "tracestate", "c=d"}, map[string]string{"traceparent": parent, "tracestate": "a=b,c=d"}},
		{"two parents", []string{"traceparent", parent, "traceparent", parent}, nil},
		{"malformed", []string{"traceparent", "00-x", "tracestate", "a=b"}, nil},
	} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), c.headers...)
		end(t, s.execute(ctx, t, s.action(t, fmt.Sprint(i)), nil))
		if task := <-tasks; !maps.Equal(task.Trace, c.want) {
			t.Errorf("%s: got %q, want %q", c.name, task.Trace, c.want)
		}
	}
}

func TestMessageOfARefusedCallIsReadable(t *testing.T) {
	s := serve(t, succeed, nil)
	a := s.action(t, "x")
	odd := strings.Repeat("\u00e9", 100_000)
	for _, c := range []struct {
		name string
		st   stream
	}{
		{"instance", s.execute(t.Context(), t, a, func(r *repb.ExecuteRequest) { r.InstanceName = odd + "/blobs" })},
		{"hash", s.execute(t.Context(), t, a, func(r *repb.ExecuteRequest) {
			r.DigestFunction = repb.DigestFunction_SHA256
			r.ActionDigest.Hash = odd
		})},
		{"operation", s.wait(t.Context(), t, odd)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.st.Recv()
			wantReadable(t, status.Convert(err).Message())
		})
	}
}
