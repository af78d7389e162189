// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// A counter is a backend that runs nothing and counts the runs.
type counter struct {
	sandbox.Backend
	t    *testing.T
	runs atomic.Int64
}

func (c *counter) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	root, err := os.OpenRoot(c.t.TempDir())
	return workspace{root}, err
}

func (c *counter) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	c.runs.Add(1)
	return &sandbox.Result{Released: true}, nil
}

type workspace struct{ root *os.Root }

func (w workspace) Root() *os.Root { return w.root }
func (w workspace) Name() string   { return w.root.Name() }
func (w workspace) Close() error   { return w.root.Close() }

// A farm is a head with a policy, and its workers, which have none and share its store.
type farm struct {
	t         *testing.T
	instances cas.Instances
	clients   *grpc.ClientConn
	workers   *grpc.ClientConn
}

// newFarm starts a head. It waits for matching workers to join until settle has passed; 0 is the default, a minute.
func newFarm(t *testing.T, settle time.Duration, text string) *farm {
	f := &farm{t: t, instances: castest.Instances()}
	server := must.Get(service.NewServer(t.Context(), service.Config{
		Worker: worker.Config{Name: "head", Instances: f.instances, Policy: must.Get(policy.Parse("policy.yaml", []byte(text)))(t)},
		Queue:  queue.Config{Settle: settle},
	}))(t)
	t.Cleanup(func() { server.Close() })
	connect := func(register func(grpc.ServiceRegistrar) error) *grpc.ClientConn {
		s := grpc.NewServer(casserver.ServerOptions(nil)...)
		must.Succeed(t, register(s))
		return grpctest.Connect(t, s)
	}
	f.clients, f.workers = connect(server.Register), connect(server.RegisterWorkers)
	return f
}

// join adds a worker with one slot whose sandbox is a fake of this name, until the test ends. changes apply to its
// configuration.
func (f *farm) join(name string, changes ...func(*service.Config)) *counter {
	f.t.Helper()
	b := &counter{t: f.t}
	c := service.Config{Slots: 1, Worker: worker.Config{
		Name: name, Instances: f.instances, Backend: b, Toolchain: []sandbox.Input{}, Fingerprint: func() string { return "none" },
		Features: sandbox.Features{
			Backend: name, Tier: "full", Limits: sandbox.AllLimits, ListenControl: true, Audits: []sandbox.Audit{sandbox.AuditViolations},
		},
	}}
	if name != "namespace" {
		c.Join.Properties = []worker.Property{{Name: worker.PropertySandbox, Value: name}}
	}
	for _, change := range changes {
		change(&c)
	}
	w := must.Get(service.NewWorker(f.t.Context(), f.workers, c))(f.t)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); w.Run(ctx) }()
	f.t.Cleanup(func() { stop(); <-ended; w.Close() })
	return b
}

// action stores an action in an instance.
func (f *farm) action(instance, text string, properties ...*repb.Platform_Property) *repb.Digest {
	f.t.Helper()
	in := must.Get(f.instances(instance))(f.t)
	put := func(m proto.Message) *repb.Digest {
		return must.Get(cas.PutProto(f.t.Context(), in.Store, cas.SHA256, m))(f.t).Proto()
	}
	return put(&repb.Action{
		CommandDigest:   put(&repb.Command{Arguments: []string{text}, Platform: &repb.Platform{Properties: properties}}),
		InputRootDigest: put(&repb.Directory{}),
	})
}

// as returns the context of calls about a target.
func (f *farm) as(target string) context.Context {
	md := must.Get(proto.Marshal(&repb.RequestMetadata{TargetId: target}))(f.t)
	return metadata.AppendToOutgoingContext(f.t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", string(md))
}

// begin starts to execute an action, and returns a function that waits for its end.
func (f *farm) begin(ctx context.Context, instance string, action *repb.Digest) func() *repb.ExecuteResponse {
	f.t.Helper()
	stream := must.Get(repb.NewExecutionClient(f.clients).Execute(ctx, &repb.ExecuteRequest{InstanceName: instance, ActionDigest: action}))(f.t)
	return func() *repb.ExecuteResponse {
		f.t.Helper()
		for {
			o := must.Get(stream.Recv())(f.t)
			if !o.Done {
				continue
			}
			r := &repb.ExecuteResponse{}
			must.Succeed(f.t, o.GetResponse().UnmarshalTo(r))
			return r
		}
	}
}

// want checks that an action has succeeded in a sandbox.
func (f *farm) want(r *repb.ExecuteResponse, backend string, cached bool, what string) {
	f.t.Helper()
	got := results.Recorded(r.Result).GetSandbox().GetBackend()
	if codes.Code(r.Status.GetCode()) != codes.OK || got != backend || r.CachedResult != cached {
		f.t.Errorf("%s: got status %v, sandbox %q, cached %t; want OK, %q, %t", what, r.Status, got, r.CachedResult, backend, cached)
	}
}

// lookup returns the sandbox of the cached result of an action, or "" if there is none.
func (f *farm) lookup(ctx context.Context, instance string, action *repb.Digest) string {
	f.t.Helper()
	r, err := repb.NewActionCacheClient(f.clients).GetActionResult(ctx, &repb.GetActionResultRequest{InstanceName: instance, ActionDigest: action})
	if status.Code(err) == codes.NotFound {
		return ""
	}
	must.Succeed(f.t, err)
	return results.Recorded(r).GetSandbox().GetBackend()
}

// TestRequiredSandboxIsADemand: an action for which the head's policy requires a sandbox, by instance, target or default
// property, waits for a worker that offers it, and has no cached result of another one.
func TestRequiredSandboxIsADemand(t *testing.T) {
	f := newFarm(t, 0, `version: 1
sandboxes:
  - {require: gvisor, when: {target: "//third_party/..."}}
  - {require: gvisor, when: {instance: guests}}
default_properties:
  main: {cloister-sandbox: gvisor}
`)
	plain := f.join("namespace")
	cases := []struct{ instance, target string }{{"", "//third_party/zlib:z"}, {"guests", "//app:a"}, {"main", "//app:a"}}
	var actions []*repb.Digest
	var waiting []func() *repb.ExecuteResponse
	for _, c := range cases {
		a := f.action(c.instance, "cc")
		actions = append(actions, a)
		if c.instance == "" { // the same action is in the cache, of a target for which nothing is required
			f.want(f.begin(f.as("//app:a"), "", a)(), "namespace", false, "without a requirement")
			expect.Equal(t, f.lookup(f.as("//app:a"), "", a), "namespace", "sandbox of the cached result")
		} else { // as if the policy had been introduced later
			in := must.Get(f.instances(c.instance))(t)
			aux := must.Get(anypb.New(&cloisterpb.Execution{Sandbox: &cloisterpb.Sandbox{Backend: "namespace"}}))(t)
			must.Succeed(t, in.Actions.Record(t.Context(), must.Get(cas.FromProto(cas.SHA256, a))(t), &repb.ActionResult{
				ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}},
			}))
		}
		expect.Equal(t, f.lookup(f.as(c.target), c.instance, a), "", "instance %q, target %s: sandbox of the result served", c.instance, c.target)
		waiting = append(waiting, f.begin(f.as(c.target), c.instance, a))
	}
	// Everything else runs meanwhile.
	f.want(f.begin(t.Context(), "", f.action("", "ld"))(), "namespace", false, "another action")
	expect.Equal(t, plain.runs.Load(), 2, "runs in namespaces")

	kernel := f.join("gvisor")
	for i, c := range cases {
		f.want(waiting[i](), "gvisor", false, "instance "+c.instance)
		expect.Equal(t, f.lookup(f.as(c.target), c.instance, actions[i]), "gvisor", "instance %q: the new result", c.instance)
		f.want(f.begin(f.as(c.target), c.instance, actions[i])(), "gvisor", true, "again, instance "+c.instance)
	}
	if n, k := plain.runs.Load(), kernel.runs.Load(); n != 2 || k != 3 {
		t.Errorf("got %d runs in namespaces and %d in gVisor, want 2 and 3", n, k)
	}
}

// TestRequiredSandboxHasNoException checks that an action is refused without a worker that offers the required sandbox,
// whatever sandbox it requests, while an action's own property replaces a default.
func TestRequiredSandboxHasNoException(t *testing.T) {
	f := newFarm(t, time.Nanosecond, `version: 1
sandboxes: [{require: gvisor, when: {instance: guests}}]
default_properties:
  main: {cloister-sandbox: gvisor}
`)
	plain := f.join("namespace")
	own := &repb.Platform_Property{Name: worker.PropertySandbox, Value: "namespace"}
	action := f.action("main", "cc", own)
	f.want(f.begin(t.Context(), "main", action)(), "namespace", false, "instance main, own property")
	f.want(f.begin(t.Context(), "main", action)(), "namespace", true, "again, instance main, own property")
	for _, c := range []struct {
		instance string
		action   *repb.Digest
	}{
		{"main", f.action("main", "cc")}, {"guests", f.action("guests", "cc")}, {"guests", f.action("guests", "cc", own)},
	} {
		r := f.begin(t.Context(), c.instance, c.action)()
		expect.Equal(t, codes.Code(r.Status.GetCode()), codes.FailedPrecondition, "instance %q: status", c.instance)
		expect.Text(t, r.Status.GetMessage(), "no worker offers cloister-sandbox=gvisor", "instance %q", c.instance)
	}
	expect.Equal(t, plain.runs.Load(), 1, "runs in namespaces")
}
