// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// A runFunc replaces a run in the sandbox. out is the directory that becomes ExecRoot.
type runFunc = func(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result

// returns returns a runFunc that only returns a copy of r.
func returns(r sandbox.Result) runFunc {
	return func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result { return &r }
}

// wantFault checks that err is a Fault of this kind and returns it.
func wantFault(t *testing.T, what string, err error, kind FaultKind) *Fault {
	t.Helper()
	f, ok := errors.AsType[*Fault](err)
	if !ok || f.Kind != kind {
		t.Errorf("%s: got %v, want a fault of kind %d", what, err, kind)
		return &Fault{Err: errors.New("")}
	}
	return f
}

// able are the features of a backend that enforces everything.
var able = sandbox.Features{
	Backend: "function", Tier: "full", Limits: sandbox.AllLimits, Endpoints: true, ListenControl: true, Kill: true,
	Audits: []sandbox.Audit{sandbox.AuditViolations, sandbox.AuditFull, sandbox.AuditOff},
}

// A function is a backend that calls a function instead of running a command.
type function struct {
	sandbox.Backend
	t   *testing.T
	run runFunc

	bytes, files int64 // of the last workspace
	root         *os.Root
	closing      error // error of closing a workspace
}

func (f *function) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	f.bytes, f.files = bytes, files
	var err error
	f.root, err = os.OpenRoot(f.t.TempDir())
	return space{f.root, f.closing}, err
}

func (f *function) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	out, err := f.root.OpenRoot("out")
	if err != nil {
		return nil, err
	}
	defer out.Close()
	return f.run(ctx, spec, std, out), nil
}

type space struct {
	root    *os.Root
	closing error
}

func (s space) Root() *os.Root { return s.root }
func (s space) Name() string   { return s.root.Name() }
func (s space) Close() error   { return errors.Join(s.root.Close(), s.closing) }

// A bench is a worker with an in-memory store.
type bench struct {
	*Local
	t       *testing.T
	store   *castest.Memory
	backend *function
	audited []*Violations
}

// rerun is a Config.Reproduce.
func rerun(t *Task) string { return "rerun " + t.Action.String() }

func newBench(t *testing.T, run runFunc) *bench {
	b := &bench{t: t, store: castest.NewMemory(), backend: &function{t: t, run: run}}
	in := &cas.Instance{Store: b.store, Actions: b.store}
	b.Local = newLocal(Config{
		Name: "w", Reproduce: rerun, Instances: func(string) (*cas.Instance, error) { return in, nil },
		Backend: b.backend, Features: able, MaxTimeout: time.Hour,
		Audit: func(_ *Task, a *Violations) { b.audited = append(b.audited, a) },
	})
	return b
}

// put stores m.
func (b *bench) put(m proto.Message) *repb.Digest {
	b.t.Helper()
	return must.Get(cas.PutProto(b.t.Context(), b.store, cas.SHA256, m))(b.t).Proto()
}

// action stores an action with the inputs a and d/b and the output o/x; change may be nil.
func (b *bench) action(change func(*repb.Action, *repb.Command)) cas.Digest {
	b.t.Helper()
	blob := must.Get(cas.PutBytes(b.t.Context(), b.store, cas.SHA256, []byte("12345")))(b.t)
	sub := b.put(&repb.Directory{Files: []*repb.FileNode{{Name: "b", Digest: blob.Proto()}}})
	action := &repb.Action{InputRootDigest: b.put(&repb.Directory{
		Files:       []*repb.FileNode{{Name: "a", Digest: blob.Proto()}},
		Directories: []*repb.DirectoryNode{{Name: "d", Digest: sub}},
	})}
	command := &repb.Command{Arguments: []string{"cc", "-c"}, OutputPaths: []string{"o/x"}}
	if change != nil {
		change(action, command)
	}
	action.CommandDigest = b.put(command)
	return must.Get(cas.FromProto(cas.SHA256, b.put(action)))(b.t)
}

// do executes a task.
func (b *bench) do(task *Task) *Outcome {
	b.t.Helper()
	return must.Get(b.Execute(b.t.Context(), task, func(Stage) {}))(b.t)
}

// recorded reports whether the action cache has a result.
func (b *bench) recorded(action cas.Digest) bool {
	_, err := b.store.Lookup(b.t.Context(), action)
	return err == nil
}

// execution returns the Execution message of the metadata.
func (b *bench) execution(out *Outcome) *cloisterpb.Execution {
	b.t.Helper()
	var m cloisterpb.Execution
	must.Succeed(b.t, out.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m))
	return &m
}

// text returns the content of the audit log.
func (b *bench) text(out *Outcome) string {
	b.t.Helper()
	return string(must.Get(cas.ReadAll(b.t.Context(), b.store, out.AuditLog, 1<<20))(b.t))
}

func platform(pairs ...string) *repb.Platform {
	p := &repb.Platform{}
	for i := 0; i < len(pairs); i += 2 {
		p.Properties = append(p.Properties, &repb.Platform_Property{Name: pairs[i], Value: pairs[i+1]})
	}
	return p
}

var connect = sandbox.Event{Kind: sandbox.EventConnect, Subject: "tcp 10.0.0.1:443", Syscall: "connect", Process: "curl", Count: 3}

// ended returns a run with this exit code and these events.
func ended(exit int, events ...sandbox.Event) runFunc {
	return returns(sandbox.Result{ExitCode: exit, Events: events})
}

// raw stores bytes.
func (b *bench) raw(text string) *repb.Digest {
	b.t.Helper()
	return must.Get(cas.PutBytes(b.t.Context(), b.store, cas.SHA256, []byte(text)))(b.t).Proto()
}

// garbage cannot be decoded as a message.
const garbage = "\xff\xff\xff"

// want checks that Admit refuses the action and that the reason contains these words.
func (b *bench) want(what string, action cas.Digest, kind FaultKind, words ...string) *Fault {
	b.t.Helper()
	_, err := b.Admit(b.t.Context(), &Task{Action: action})
	f := wantFault(b.t, what, err, kind)
	expect.Texts(b.t, f.Error(), words, "%s", what)
	return f
}

// command returns a change of the command for bench.action.
func command(change func(*repb.Command)) func(*repb.Action, *repb.Command) {
	return func(_ *repb.Action, c *repb.Command) { change(c) }
}
