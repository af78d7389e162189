// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestRule077_CheckCommandReturnsCleanOutputs(t *testing.T) {
	for _, c := range []struct {
		name string
		cmd  *repb.Command
		want []string
		dirs []string
	}{
		{"relative to the working directory", &repb.Command{WorkingDirectory: "a/b", OutputPaths: []string{"x", "../y", "d/../z"}}, []string{"a/b/x", "a/b/z", "a/y"}, nil},
		{"output_paths win", &repb.Command{OutputPaths: []string{"p"}, OutputFiles: []string{"f"}}, []string{"p"}, nil},
		{"API 2.0", &repb.Command{OutputFiles: []string{"f"}, OutputDirectories: []string{"d"}}, []string{"d", "f"}, []string{"d"}},
		{"the working directory itself", &repb.Command{WorkingDirectory: "w", OutputPaths: []string{""}}, []string{"w"}, nil},
		{"the input root itself", &repb.Command{OutputPaths: []string{""}}, []string{"."}, nil},
	} {
		c.cmd.Arguments = []string{"true"}
		got, dirs, err := checkCommand(c.cmd)
		expect.Error(t, err, nil, "%s", c.name)
		expect.Equal(t, cmp.Diff(c.want, got), "", "%s (-want +got)", c.name)
		expect.Equal(t, cmp.Diff(c.dirs, dirs), "", "%s: directories (-want +got)", c.name)
	}
}

func TestCappedTruncatesOnce(t *testing.T) {
	var b strings.Builder
	w := &capped{log: &Log{}, left: 5, live: &b}
	for _, text := range []string{"abc", "defg", "hij"} {
		if n, err := w.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("Write(%q) = %d, %v", text, n, err)
		}
	}
	expect.Equal(t, b.String(), "abcdefghij", "live output")
	if got := string(w.log.bytes()); !strings.HasPrefix(got, "abcde\n") || strings.Count(got, "truncated") != 1 || strings.Contains(got, "f\n") {
		t.Errorf("got %q", got)
	}
}

func TestRule110_FaultKeepsItsKind(t *testing.T) {
	for _, c := range []struct {
		err  error
		want FaultKind
	}{
		{&tree.MissingError{Blobs: []cas.Digest{cas.SHA256.Sum(nil)}}, FaultMissing},
		{cas.ErrInvalid, FaultInvalid},
		{cas.ErrFull, FaultExhausted},
		{fmt.Errorf("write: %w", syscall.ENOSPC), FaultExhausted},
		{cas.ErrCorrupt, FaultUnavailable},
		{cas.ErrNotFound, FaultUnavailable},
		{cas.ErrUnavailable, FaultUnavailable},
		{sandbox.ErrUnsupported, FaultUnmet},
		{cas.ErrDenied, FaultUnmet},
		{policy.ErrRefused, FaultUnmet},
		{context.Canceled, FaultCancelled},
		{context.DeadlineExceeded, FaultUnavailable},
		{errors.New("x"), FaultInternal},
		{faultf(FaultUnmet, "x"), FaultUnmet},
	} {
		var f *Fault
		if err := fault(StageRun, c.err); !errors.As(err, &f) || f.Kind != c.want || !errors.Is(err, c.err) {
			t.Errorf("fault(%v) = %v of kind %v, want kind %v", c.err, err, f.Kind, c.want)
		}
	}
	expect.Error(t, fault(StageRun, nil), nil, "fault(nil)")
}

// TestRejectedWritesAreNoFaultOfTheRequest: an upstream that rejects an output, a result or a file of an image does not
// make the client's request invalid.
func TestRejectedWritesAreNoFaultOfTheRequest(t *testing.T) {
	address := grpctest.Serve(t, func(s *grpc.Server) {
		casserver.Register(s, casserver.Config{Instances: castest.Instances()})
	}, grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		switch req.(type) {
		case *repb.BatchUpdateBlobsRequest, *repb.UpdateActionResultRequest:
			return nil, status.Error(codes.InvalidArgument, "the server does not accept this")
		}
		return next(ctx, req)
	}))
	client := must.Get(remote.Dial(t.Context(), "grpc://"+address))(t)
	defer client.Close()
	store := must.Get(client.Store(""))(t)
	d, err := cas.PutBytes(t.Context(), store, cas.SHA256, []byte("output"))
	must.Be(t, errors.Is(err, cas.ErrInvalid), "got %v, want ErrInvalid", err)
	wantFault(t, "an output", fault(StageCollect, err), FaultInternal)
	wantFault(t, "a result", fault(StagePublish, store.Record(t.Context(), d, &repb.ActionResult{})), FaultInternal)
	wantFault(t, "an image", imageFault(fmt.Errorf("pull image a/b: %w", err)), FaultUnmet)
}

// unable is a backend that cannot run anything.
type unable struct{ sandbox.Backend }

func (unable) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, sandbox.ErrUnsupported
}

// TestNewNamesTheMissingField: New refuses a Config without a required field, and Execute a Task without an action or a
// worker that only admits.
func TestNewNamesTheMissingField(t *testing.T) {
	whole := Config{Name: "w", Instances: castest.Instances(), Backend: unable{}, Features: able, Toolchain: []sandbox.Input{}}
	for want, change := range map[string]func(*Config){
		"Config.Name":      func(c *Config) { c.Name = "" },
		"Config.Instances": func(c *Config) { c.Instances = nil },
		"Config.Features":  func(c *Config) { c.Features = sandbox.Features{} },
		"Config.Toolchain": func(c *Config) { c.Toolchain = nil },
	} {
		c := whole
		change(&c)
		expect.Message(t, expect.Err(New(c)), want)
	}
	head := whole
	head.Backend, head.Features, head.Toolchain = nil, sandbox.Features{}, nil
	absent := cas.SHA256.Sum([]byte("absent"))
	for want, c := range map[string]struct {
		config Config
		action cas.Digest
	}{
		"Task.Action": {whole, cas.Digest{}}, "Config.Backend": {head, absent}, absent.String(): {whole, absent},
	} {
		l := must.Get(New(c.config))(t)
		expect.Message(t, expect.Err(l.Execute(t.Context(), &Task{Action: c.action}, nil)), want)
	}
}

// TestNilArgumentsAreFaults that name the missing argument; methods without an error do nothing.
func TestNilArgumentsAreFaults(t *testing.T) {
	l, err := New(Config{Name: "w", Instances: castest.Instances(), Backend: unable{}, Features: able, Toolchain: []sandbox.Input{}})
	must.Succeed(t, err)
	for name, call := range map[string]func() error{
		"Execute": func() error { _, err := l.Execute(t.Context(), nil, nil); return err },
		"Admit":   func() error { _, err := l.Admit(t.Context(), nil); return err },
	} {
		expect.Text(t, wantFault(t, name, call(), FaultInvalid).Error(), "the Task is missing", "%s", name)
	}
	expect.Message(t, expect.Err(l.Action(t.Context(), nil, cas.SHA256.Sum(nil))), "the Instance is missing", "Action")
	l.PrefetchInputs(t.Context(), nil, func(int64) bool { return true })
	l.RenewInputs(t.Context(), nil)
	new(Task).SetMetadata(nil)
	if d, hash := RecordedManifest(nil); !d.IsZero() || hash != "" {
		t.Errorf("RecordedManifest: got %s, %q", d, hash)
	}
	if s, why := NewStager(t.Context(), nil, tree.StagerConfig{}); s == nil || why == nil {
		t.Errorf("NewStager: got %v, %v, want a stager that copies, and why", s, why)
	}
}

func TestExecuteWithoutSandboxIsRefused(t *testing.T) {
	m := castest.NewMemory()
	root := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, &repb.Directory{}))(t)
	cmd := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, &repb.Command{Arguments: []string{"true"}}))(t)
	put := func(a *repb.Action) cas.Digest {
		a.CommandDigest, a.InputRootDigest = cmd.Proto(), root.Proto()
		return must.Get(cas.PutProto(t.Context(), m, cas.SHA256, a))(t)
	}
	in := &cas.Instance{Store: m, Actions: m}
	l := newLocal(Config{Name: "w", Instances: func(string) (*cas.Instance, error) { return in, nil }, Backend: unable{}, Features: able, MaxTimeout: time.Hour})
	var stages []Stage
	action := put(&repb.Action{})
	_, err := l.Execute(t.Context(), &Task{Action: action}, func(s Stage) { stages = append(stages, s) })
	wantFault(t, "no sandbox", err, FaultUnmet)
	expect.Equal(t, cmp.Diff([]Stage{StageFetch, StageConfine, StageInputs}, stages), "", "stages (-want +got)")

	// A cached result needs no sandbox.
	want := &repb.ActionResult{StdoutRaw: []byte("cached")}
	must.Succeed(t, m.Record(t.Context(), action, want))
	out, err := l.Execute(t.Context(), &Task{Action: action}, func(Stage) {})
	expect.That(t, err == nil && out.Cached && string(out.Result.StdoutRaw) == "cached",
		"got %v, %v, want the cached result", out, err)
	expect.That(t, expect.Err(l.Execute(t.Context(), &Task{Action: action, SkipCacheLookup: true}, func(Stage) {})) != nil,
		"got a cached result despite skip_cache_lookup")

	// The maximum timeout is checked before staging.
	_, err = l.Execute(t.Context(), &Task{Action: put(&repb.Action{Timeout: durationpb.New(2 * time.Hour)})}, func(Stage) {})
	wantFault(t, "timeout above the maximum", err, FaultInvalid)
}

func TestRule121_TimestampsNeverDecrease(t *testing.T) {
	now := time.Now()
	c := finished(&sandbox.Result{Start: now, End: now.Add(-time.Minute)})
	c.task.Queued, c.began, c.staged = now, now.Add(-time.Hour), &staged{began: now, ended: now}
	m := newLocal(Config{Name: "w"}).metadata(c)
	if m.WorkerStartTimestamp.AsTime().Before(m.QueuedTimestamp.AsTime()) ||
		m.ExecutionCompletedTimestamp.AsTime().Before(m.ExecutionStartTimestamp.AsTime()) || m.VirtualExecutionDuration.AsDuration() < 0 {
		t.Errorf("got decreasing timestamps: %v", m)
	}
}

// finished returns the execution of an action with this result, under the default policy.
func finished(r *sandbox.Result) *execution {
	granted, err := policy.Default().Compile(policy.Request{}, nil)
	if err != nil {
		panic(err) // it requests nothing
	}
	a := NewViolations(r, ExecRoot)
	m := castest.NewMemory()
	empty := cas.SHA256.Sum(nil)
	return &execution{
		task: &Task{}, staged: &staged{},
		req: &request{
			Digest: empty, Instance: &cas.Instance{Store: m, Actions: m},
			Action: &repb.Action{Timeout: durationpb.New(3 * time.Second), CommandDigest: empty.Proto(), InputRootDigest: empty.Proto()},
		},
		box: &confined{
			spec:  &sandbox.Spec{Args: []string{"true"}, Timeout: 3 * time.Second, Limits: sandbox.Limits{Memory: 4 << 30, CPU: time.Hour, Processes: 128, OutputBytes: sandbox.Unlimited, OutputFiles: 10}},
			grant: granted,
		},
		ran:       &ran{Result: r, timedOut: r.Stopped},
		collected: &collected{result: &repb.ActionResult{}, Violations: a, batch: cas.NewBatch(m)},
	}
}

func TestSealExplainsFailure(t *testing.T) {
	memory := &sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitMemory), Actual: "4.0 GiB", Limit: "4.0 GiB", Count: 1}
	files := &sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitOutputFiles), Actual: "10", Limit: "10", Count: 1}
	cpu := &sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitCPU), Actual: "1h0m1s", Limit: "1h0m0s", Count: 1}
	// The name that package namespace gives a full Temp, and a workspace that is smaller than an unlimited run.
	temp := &sandbox.Event{Kind: sandbox.EventLimit, Subject: "room in /tmp", Actual: "16.0 MiB", Limit: "16.0 MiB", LimitValue: 16 << 20, Unit: "bytes", Count: 1}
	full := &sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitOutputBytes), Actual: "16.0 MiB", Limit: "16.0 MiB", LimitValue: 16 << 20, Unit: "bytes", Count: 1}
	forks := sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitProcesses), Actual: "128", Limit: "128", Count: 1}
	for _, c := range []struct {
		name   string
		ran    *sandbox.Result
		bad    error
		code   Status
		oneOff bool
		says   string
	}{
		{"success", &sandbox.Result{}, nil, StatusOK, false, ""},
		{"exit code", &sandbox.Result{ExitCode: 4}, nil, StatusOK, false, "exit code 4"},
		{"signal", &sandbox.Result{ExitCode: 139, Signal: 11}, nil, StatusOK, false, "signal 11"},
		{"timeout", &sandbox.Result{ExitCode: 143, Stopped: true}, nil, StatusTimedOut, false, "timeout of 3s"},
		{"output", &sandbox.Result{}, tree.ErrOutput, StatusBadOutput, false, "output"},
		{"output of a failure", &sandbox.Result{ExitCode: 4}, tree.ErrOutput, StatusOK, false, "exit code 4"},
		{
			"memory", &sandbox.Result{ExitCode: 137, Signal: 9, Exceeded: memory, Usage: sandbox.Usage{PeakMemory: 4 << 30}}, nil,
			StatusOK, true, `cloister: killed: exceeded the 4 GiB memory limit (profile build); ` +
				`raise it with exec_properties = {"cloister-memory": "8GiB"}`,
		},
		{
			"memory of a child", &sandbox.Result{ExitCode: 1, Exceeded: memory, Events: []sandbox.Event{*memory}}, nil,
			StatusOK, true, `cloister: killed: exceeded the 4 GiB memory limit (profile build); ` +
				`raise it with exec_properties = {"cloister-memory": "8GiB"}`,
		},
		{
			"output files", &sandbox.Result{ExitCode: 1, Exceeded: files}, nil,
			StatusOK, true, `cloister: exit code 1: reached the limit of 10 output files (profile build); ` +
				`raise it with exec_properties = {"cloister-output-files": "20"}`,
		},
		{
			"CPU time", &sandbox.Result{ExitCode: 137, Signal: 9, Exceeded: cpu}, nil,
			StatusOK, true, `cloister: killed: exceeded the 1h0m0s CPU time limit (profile build); ` +
				`raise it with exec_properties = {"cloister-cpu": "2h"}`,
		},
		{
			"survived limit", &sandbox.Result{Exceeded: memory}, nil,
			StatusOK, true, `cloister: succeeded, but reached the 4 GiB memory limit (profile build), so its result is not cached; ` +
				`raise it with exec_properties = {"cloister-memory": "8GiB"}`,
		},
		{
			"noticed limit", &sandbox.Result{Events: []sandbox.Event{forks}}, nil,
			StatusOK, true, `cloister: succeeded, but reached the limit of 128 processes (profile build), so its result is not cached; ` +
				`raise it with exec_properties = {"cloister-processes": "256"}`,
		},
		{
			"full /tmp", &sandbox.Result{ExitCode: 1, Exceeded: temp}, nil,
			StatusOK, true, `cloister: exit code 1: reached the limit of 16 MiB room in /tmp (profile build); ` +
				`raise it with exec_properties = {"cloister-tmp": "32MiB"}`,
		},
		{
			"full workspace", &sandbox.Result{ExitCode: 1, Exceeded: full}, nil,
			StatusOK, true, `cloister: exit code 1: reached the 16 MiB output bytes limit (profile build); ` +
				`raise it with exec_properties = {"cloister-output-bytes": "32MiB"}`,
		},
		{
			"limit and timeout", &sandbox.Result{ExitCode: 137, Stopped: true, Exceeded: memory}, nil,
			StatusTimedOut, true, "cloister: killed: exceeded its timeout of 3s; raise it; for a Bazel test, set timeout = \"long\" in BUILD or pass --test_timeout\n" +
				"cloister: reached the limit of memory: 4.0 GiB of 4.0 GiB",
		},
	} {
		e := finished(c.ran)
		e.collected.bad = c.bad
		out := must.Get(newLocal(Config{Name: "w", Reproduce: rerun}).seal(t.Context(), e))(t)
		if out.Status != c.code || out.Uncacheable != c.oneOff || !strings.Contains(out.Message, c.says) || (c.says == "") != (out.Message == "") {
			t.Errorf("%s: got status %v, uncacheable %v, message %q", c.name, out.Status, out.Uncacheable, out.Message)
		}
		if strings.Contains(c.says, "cloister:") && out.Message != c.says {
			t.Errorf("%s: got message %q, want %q", c.name, out.Message, c.says)
		}
		expect.Equal(t, c.code != StatusOK || c.ran.ExitCode != 0, out.Reproduce != "",
			"%s: got command %q, want one", c.name, out.Reproduce)
	}
}

func TestRule119_PublishRefusesMissingBlobs(t *testing.T) {
	m := castest.NewMemory()
	d := must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte("an output")))(t)
	req := &request{Instance: &cas.Instance{Store: m, Actions: m}, Action: &repb.Action{}}
	task := &Task{Action: cas.SHA256.Sum([]byte("action"))}
	out := &Outcome{Result: &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "o", Digest: d.Proto()}}}}
	l := newLocal(Config{Name: "w"})
	must.Succeed(t, l.publish(t.Context(), task, req, out, []cas.Digest{d}))
	m.Delete(d)
	other := &Task{Action: cas.SHA256.Sum([]byte("another action"))}
	wantFault(t, "missing output", l.publish(t.Context(), other, req, out, []cas.Digest{d}), FaultExhausted)
	expect.Error(t, expect.Err(m.Lookup(t.Context(), other.Action)), cas.ErrNotFound, "no cached result")
}

func TestSealRefusesTooLargeResult(t *testing.T) {
	got := &collected{result: &repb.ActionResult{}}
	for i := range 60000 {
		got.result.OutputFiles = append(got.result.OutputFiles, &repb.OutputFile{Path: fmt.Sprint("a/file/", i), Digest: cas.SHA256.Sum(nil).Proto()})
	}
	c := finished(&sandbox.Result{})
	got.Violations, got.batch = c.collected.Violations, c.collected.batch
	c.collected = got
	out := must.Get(newLocal(Config{Name: "w"}).seal(t.Context(), c))(t)
	expect.That(t, out.Status == StatusBadOutput && strings.Contains(out.Message, "60000 output files"),
		"got status %v, message %q", out.Status, out.Message)
}

func TestRule084_UnknownPropertiesWarnOnce(t *testing.T) {
	var log strings.Builder
	l := newLocal(Config{Name: "w", Log: slog.New(slog.NewTextHandler(&log, nil))})
	property := func(name string) *repb.Platform {
		return &repb.Platform{Properties: []*repb.Platform_Property{{Name: name, Value: "x"}}}
	}
	host := &repb.Platform{Properties: []*repb.Platform_Property{
		{Name: "ISA", Value: runtime.GOARCH}, {Name: "os", Value: runtime.GOOS}, // what this worker is
	}}
	for range 3 {
		for _, r := range []request{
			{Action: &repb.Action{Platform: host}, Command: &repb.Command{}},
			{Action: &repb.Action{Platform: property("Pool")}, Command: &repb.Command{Platform: property("hidden")}},
			{Action: &repb.Action{}, Command: &repb.Command{Platform: property("recycle")}},
			{Action: &repb.Action{}, Command: &repb.Command{Platform: property("cloister-memory")}},
		} {
			r.Instance = &cas.Instance{}
			must.Succeed(t, l.checkPlatform(&r))
		}
	}
	if got := log.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, "Pool") || !strings.Contains(got, "recycle") {
		t.Errorf("got %q, want a line for Pool and one for recycle", got)
	}
}

// TestRemainingWorkspaceIsLogged: it may be a directory on disk. The result counts nevertheless.
func TestRemainingWorkspaceIsLogged(t *testing.T) {
	b := newBench(t, ended(0))
	var log strings.Builder
	b.cfg.Log, b.backend.closing = slog.New(slog.NewTextHandler(&log, nil)), errors.New("directory not empty")
	b.do(&Task{Action: b.action(nil)})
	expect.Text(t, log.String(), "directory not empty")
}
