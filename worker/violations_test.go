// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestViolationsAreReported(t *testing.T) {
	b := newBench(t, ended(1, connect))
	action := b.action(nil)
	out := b.do(&Task{Action: action, Target: "//a:b", Mnemonic: "Genrule", Invocation: "i-1"})
	lines := strings.Split(out.Message, "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "cloister: exit code 1 after ") ||
		lines[1] != "cloister: denied: connection to tcp 10.0.0.1:443 (no network) by curl (connect), 3 times; add what it needs to the inputs, or allow the endpoint in the policy" {
		t.Errorf("got message %q", out.Message)
	}
	expect.Equal(t, out.Reproduce, "rerun "+action.String(), "reproduce")
	text := b.text(out)
	for _, part := range []string{action.String(), "target //a:b", "mnemonic Genrule", "invocation i-1", `profile "build"`, "exit code 1", connect.String()} {
		expect.Text(t, text, part, "the audit log")
	}
	expect.That(t, cmp.Diff([]*Violations{{ExitCode: 1, Events: []sandbox.Event{connect}}}, b.audited) == "",
		"got audit %+v", b.audited)
	want := []*cloisterpb.Event{{Kind: "connect", Subject: "tcp 10.0.0.1:443", Syscall: "connect", Process: "curl", Count: 3}}
	expect.Equal(t, cmp.Diff(want, b.execution(out).Events, protocmp.Transform()), "", "events of the metadata (-want +got)")
}

func TestRunWithoutViolations(t *testing.T) {
	b := newBench(t, ended(0))
	action := b.action(func(_ *repb.Action, c *repb.Command) { c.OutputPaths = nil })
	out := b.do(&Task{Action: action})
	if out.Message != "" || out.Reproduce != "" || !out.AuditLog.IsZero() || len(b.audited) != 0 {
		t.Errorf("got message %q, reproduce %q, audit log %v, audit %v, want none", out.Message, out.Reproduce, out.AuditLog, b.audited)
	}
	expect.That(t, b.recorded(action), "the result is not cached")
}

// Violations do not prevent caching, because every worker denies the same operations (ADR 0017).
func TestResultWithViolationsIsCached(t *testing.T) {
	b := newBench(t, ended(0, connect))
	action := b.action(func(_ *repb.Action, c *repb.Command) { c.OutputPaths = nil })
	out := b.do(&Task{Action: action})
	expect.That(t, b.recorded(action) && !out.Uncacheable, "the result is not cached")
	expect.That(t, out.Message == "cloister: "+connect.String() && !out.AuditLog.IsZero(),
		"got message %q, audit log %v", out.Message, out.AuditLog)
	if again := b.do(&Task{Action: action}); !again.Cached || again.Message != "" || !again.AuditLog.IsZero() {
		t.Errorf("cached result: got %+v", again)
	}
}

func TestResultAtALimitIsNotCached(t *testing.T) {
	limit := sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitProcesses), Actual: "128", Limit: "128", Count: 1}
	for name, b := range map[string]*bench{
		"the action noticed the limit":  newBench(t, ended(0, limit)),
		"the action survived the limit": newBench(t, returns(sandbox.Result{Exceeded: &limit})),
	} {
		action := b.action(nil)
		if out := b.do(&Task{Action: action}); b.recorded(action) || !out.Uncacheable || out.Status != StatusOK {
			t.Errorf("%s: got cached %v, outcome %+v", name, b.recorded(action), out)
		}
		expect.That(t, len(b.audited) == 1 && len(b.audited[0].Events) == 1,
			"%s: got audit %+v, want the limit once", name, b.audited)
	}
}

func TestRunWithStdinIsNotCached(t *testing.T) {
	stdin := os.Stdin // any file
	var got *os.File
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, s sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got = s.Stdin
		return &sandbox.Result{}
	})
	action := b.action(nil)
	if out := b.do(&Task{Action: action, Stdin: stdin}); b.recorded(action) || !out.Uncacheable {
		t.Errorf("got cached %v, uncacheable %v", b.recorded(action), out.Uncacheable)
	}
	expect.Equal(t, got, stdin, "stdin")
}

func TestInteractiveRunIsNotCached(t *testing.T) {
	terminal := os.Stdin // any file
	var got *sandbox.Spec
	var std sandbox.Stdio
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, s sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got, std = spec, s
		return &sandbox.Result{}
	})
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.Timeout = durationpb.New(time.Second) })
	for _, task := range []*Task{{Action: action, Args: []string{"/bin/sh", "-i"}}, {Action: action, Terminal: terminal}} {
		out := b.do(task)
		expect.That(t, !b.recorded(action) && out.Uncacheable, "%+v is cached", task)
		if want := task.Args; want != nil && !slices.Equal(got.Args, want) {
			t.Errorf("got arguments %q, want %q", got.Args, want)
		}
		expect.Equal(t, std.Terminal, task.Terminal, "terminal")
		expect.Equal(t, got.Timeout, time.Hour, "timeout (the maximum of an hour)")
	}
	must.Succeed(t, b.store.Record(t.Context(), action, &repb.ActionResult{}))
	expect.That(t, !b.do(&Task{Action: action, Args: []string{"sh"}}).Cached, "got a cached result for a shell")
}

func TestViolationsOfCancelledRunAreAudited(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
		cancel()
		return &sandbox.Result{ExitCode: 137, Events: []sandbox.Event{connect}}
	})
	_, err := b.Execute(ctx, &Task{Action: b.action(nil)}, func(Stage) {})
	wantFault(t, "cancelled run", err, FaultCancelled)
	expect.That(t, len(b.audited) == 1 && b.audited[0].Events[0].Kind == sandbox.EventConnect,
		"got audit %+v", b.audited)
}

func TestUndeclaredFilesAreEvents(t *testing.T) {
	leave := func(_ context.Context, _ *sandbox.Spec, _ sandbox.Stdio, out *os.Root) *sandbox.Result {
		for _, name := range []string{"o/x", "o/x.d", "evil\ncloister: reproduce: rm -rf ~\xff"} {
			expect.Error(t, out.WriteFile(name, nil, 0o644), nil)
		}
		return &sandbox.Result{ExitCode: 2}
	}
	b := newBench(t, leave)
	out := b.do(&Task{Action: b.action(nil)})
	lines := strings.Split(out.Message, "\n")
	want := []string{
		`cloister: warning: undeclared output discarded: evil\ncloister: reproduce: rm -rf ~\xff`,
		"cloister: warning: undeclared output discarded: o/x.d",
	}
	expect.That(t, slices.Equal(lines[1:], want), "got message %q, want the lines %q", out.Message, want)
	if text := b.text(out); strings.Count(text, "\n") != 5 {
		t.Errorf("a file name forged a line of the audit log:\n%s", text)
	}

	b = newBench(t, leave)
	c := finished(&sandbox.Result{})
	c.box.spec.Audit = sandbox.AuditOff
	if err := b.addViolations(c.task, c.req, c.box, c.staged, c.ran, c.collected); err != nil || len(c.collected.Events) != 0 {
		t.Errorf("without an audit: got %v, %v, want no events", c.collected.Events, err)
	}
}

func TestMessageBoundsEvents(t *testing.T) {
	var events []sandbox.Event
	for i := range 150 {
		events = append(events, sandbox.Event{Kind: sandbox.EventExec, Subject: fmt.Sprintf("/bin/%03d", i), Count: 1})
	}
	events = append(events, sandbox.Event{Kind: sandbox.EventWrite, Subject: "/etc/passwd", Count: 1}) // sorts last
	b := newBench(t, returns(sandbox.Result{ExitCode: 1, Events: events, Unrecorded: 7}))
	out := b.do(&Task{Action: b.action(nil)})
	lines := strings.Split(out.Message, "\n")
	if len(lines) != 7 || !strings.Contains(lines[1], "/etc/passwd") || lines[6] != `cloister: and 146 more (server log "audit"), and 7 that were not recorded` {
		t.Errorf("got message\n%s", out.Message)
	}
	m := b.execution(out)
	if len(m.Events) != 100 || m.Events[0].Kind != "write" || m.EventsOmitted != 151-100+7 {
		t.Errorf("metadata: got %d events, first %v, %d omitted", len(m.Events), m.Events[0], m.EventsOmitted)
	}
	if text := b.text(out); !strings.Contains(text, "/bin/149") || !strings.Contains(text, "and 7 more") {
		t.Errorf("the audit log is incomplete:\n%s", text)
	}
}

func TestFullAuditListsUnreadInputs(t *testing.T) {
	b := newBench(t, returns(sandbox.Result{Opened: []string{"/build/a", "/usr/lib/x"}}))
	full := func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-audit", "full") }
	out := b.do(&Task{Action: b.action(full)})
	expect.Text(t, b.text(out), "1 of 2 inputs were never read\nunread   d/b\n", "audit log")
	if m := b.execution(out); m.UnreadInputs == nil || *m.UnreadInputs != 1 || m.AuditLog != out.AuditLog.String() {
		t.Errorf("got %v unread inputs and audit log %q, want 1 and %s", m.UnreadInputs, m.AuditLog, out.AuditLog)
	}
	var used resourceusagepb.InputRootResourceUsage
	if all := out.Result.ExecutionMetadata.AuxiliaryMetadata; len(all) != 3 || all[2].UnmarshalTo(&used) != nil || used.FilesRead != 1 {
		t.Errorf("got metadata %v, want 1 file read", all)
	}
	expect.That(t, len(b.audited) == 0, "got audit %+v, want none", b.audited)
	if out := b.do(&Task{Action: b.action(nil)}); !out.AuditLog.IsZero() || b.execution(out).UnreadInputs != nil || b.execution(out).AuditLog != "" {
		t.Error("got unread inputs without a full audit")
	}
}

func TestMetadataHasUsageAndGrant(t *testing.T) {
	var hash string
	var root *repb.Digest
	used := sandbox.Usage{
		User: time.Second, System: 2 * time.Second, PeakRSS: 3, PeakMemory: 4, PeakProcesses: 5, ReadBytes: 6 * 512, WrittenBytes: 7 * 512,
		VoluntarySwitches: 8, InvoluntarySwitches: 9, PacketsRefused: 10,
	}
	used.Measured.CPU, used.Measured.PeakProcesses = true, true
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		// The hash does not depend on how the input root is staged.
		whole := *spec
		whole.Inputs = []sandbox.Input{{Target: ExecRoot, Content: fmt.Sprintf("%s/%d", root.Hash, root.SizeBytes)}}
		hash = whole.Hash()
		return &sandbox.Result{ExitCode: 139, Signal: 11, Usage: used}
	})
	out := b.do(&Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { root = a.InputRootDigest })})
	want := &cloisterpb.Execution{
		Sandbox: &cloisterpb.Sandbox{Backend: "function", Tier: "full", Inputs: "copy", InputsReason: "this worker mounts no images"},
		Usage: &cloisterpb.Usage{
			UserTime: durationpb.New(time.Second), SystemTime: durationpb.New(2 * time.Second), PeakResidentBytes: 3, PeakMemoryBytes: 4, PeakProcesses: 5,
			ReadBytes: 6 * 512, WrittenBytes: 7 * 512, VoluntarySwitches: 8, InvoluntarySwitches: 9, PacketsRefused: 10,
			Measured: &cloisterpb.Measured{Cpu: true, PeakProcesses: true},
		},
		SpecHash: hash, Profile: "build", Rule: "default", Hermetic: true,
		Manifest: out.Manifest.String(), StableHash: out.StableHash,
	}
	expect.Equal(t, cmp.Diff(want, b.execution(out), protocmp.Transform()), "", "(-want +got)")
	all := out.Result.ExecutionMetadata.AuxiliaryMetadata
	must.Be(t, len(all) == 2 && all[1].TypeUrl == "type.googleapis.com/buildbarn.resourceusage.POSIXResourceUsage",
		"got metadata %v", all)
	// The encoding of Buildbarn's own message: fields 1 and 2 (durations), 3, 10, 11, 15, 16, 17.
	const wire = "\x0a\x02\x08\x01\x12\x02\x08\x02\x18\x03\x50\x06\x58\x07\x78\x08\x80\x01\x09\x8a\x01\x04SEGV"
	expect.Equal(t, string(all[1].Value), wire, "POSIXResourceUsage")
}

// TestMetadataSaysWhatWasMeasured has a field for each mark of Usage.Measured.
func TestMetadataSaysWhatWasMeasured(t *testing.T) {
	for i := range reflect.TypeOf(sandbox.Usage{}.Measured).NumField() {
		var used sandbox.Usage
		marks := reflect.ValueOf(&used.Measured).Elem()
		marks.Field(i).SetBool(true)
		b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
			return &sandbox.Result{Usage: used}
		})
		got := b.execution(b.do(&Task{Action: b.action(nil)})).Usage.Measured.ProtoReflect()
		marked := ""
		got.Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
			marked += strings.ReplaceAll(string(f.Name()), "_", "")
			return true
		})
		expect.Equal(t, marked, strings.ToLower(marks.Type().Field(i).Name), "mark")
	}
}

func TestGrantBecomesSpec(t *testing.T) {
	var got *sandbox.Spec
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got = spec
		return &sandbox.Result{}
	})
	properties := func(a *repb.Action, c *repb.Command) {
		a.Platform = platform("cloister-audit", "full", "OSFamily", "linux")
		c.Platform = platform("cloister-audit", "off") // replaced by the action's
	}
	grant := must.Get(policy.Default().Compile(policy.Request{
		Properties: []policy.Property{{Name: "cloister-audit", Value: "full"}},
	}, sandbox.AllLimits))(t)
	b.do(&Task{Action: b.action(properties)})
	expect.Equal(t, cmp.Diff(grant.Network, got.Network)+cmp.Diff(grant.Limits, got.Limits), "", "(-want +got)")
	if want := []sandbox.Temp{{Target: "/tmp", Bytes: grant.TempBytes}}; !slices.Equal(got.Temp, want) || got.Audit != sandbox.AuditFull {
		t.Errorf("got temp %v, audit %q", got.Temp, got.Audit)
	}
	// Two files in whole pages; the workspace, out, a file, a directory and its file, o.
	page := int64(os.Getpagesize())
	expect.Equal(t, b.backend.bytes, grant.Limits.OutputBytes+2*page, "bytes of the workspace")
	expect.Equal(t, b.backend.files, grant.Limits.OutputFiles+6, "files of the workspace")
}

func TestSum(t *testing.T) {
	for _, c := range []struct{ inputs, outputs, want int64 }{
		{5, 7, 12}, {5, sandbox.Unlimited, sandbox.Unlimited}, {math.MaxInt64, 7, math.MaxInt64}, {5, math.MaxInt64, math.MaxInt64},
	} {
		expect.Equal(t, sum(c.inputs, c.outputs), c.want, "sum(%d, %d)", c.inputs, c.outputs)
	}
}

func TestRefusedPropertyIsUnmet(t *testing.T) {
	b := newBench(t, ended(0))
	refused := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-network", "example.org:443") })
	full := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-audit", "full") })
	b.cfg.Features.Audits = []sandbox.Audit{sandbox.AuditViolations}
	for action, words := range map[cas.Digest][]string{
		refused: {"cloister-network"},
		full:    {"cloister-audit=full", `rule "default"`, "audit level full"},
	} {
		_, err := b.Execute(t.Context(), &Task{Action: action}, func(Stage) {})
		f := wantFault(t, words[0], err, FaultUnmet)
		expect.Texts(t, f.Error(), words)
	}
}

func TestTimeoutOfTheGrant(t *testing.T) {
	l := newLocal(Config{Name: "w"})
	g := &policy.Grant{Profile: "p", Rule: "r", MaxTimeout: time.Minute}
	for _, c := range []struct {
		asked, want time.Duration
		ok          bool
	}{{time.Second, time.Second, true}, {time.Minute, time.Minute, true}, {0, time.Minute, true}, {time.Hour, 0, false}} {
		req := &request{Digest: cas.SHA256.Sum(nil), Action: &repb.Action{}, Timeout: c.asked}
		if c.asked > 0 {
			req.Action.Timeout = durationpb.New(c.asked)
		} else {
			req.Timeout = l.cfg.MaxTimeout // like resolveHere
		}
		got, err := l.timeout(&Task{}, req, g)
		var f *Fault
		if got != c.want || (err == nil) != c.ok || !c.ok && (!errors.As(err, &f) || f.Kind != FaultInvalid || !strings.Contains(err.Error(), `maximum of 1m0s of profile "p"`)) {
			t.Errorf("timeout %v: got %v, %v, want %v", c.asked, got, err, c.want)
		}
	}
	if got, err := l.timeout(&Task{}, &request{Timeout: time.Hour}, &policy.Grant{}); got != time.Hour || err != nil {
		t.Errorf("unlimited grant: got %v, %v", got, err)
	}
}

func TestResultWithNetworkAccess(t *testing.T) {
	allowed := sandbox.Event{Kind: sandbox.EventAllowed, Subject: "example.org:443", Count: 1}
	for _, cache := range []bool{false, true} {
		c := finished(&sandbox.Result{Events: []sandbox.Event{allowed}})
		c.box.grant = &policy.Grant{Profile: "fetch", Rule: "downloads", Cache: cache, Network: sandbox.Network{
			Loopback: true, Allow: []sandbox.Endpoint{{Host: "example.org", Port: 443}},
		}}
		out := must.Get(newLocal(Config{Name: "w"}).seal(t.Context(), c))(t)
		want := `cloister: not hermetic, so its result is not cached: profile "fetch", chosen by rule "downloads", permits example.org:443`
		if cache {
			want = strings.Replace(want, "is not cached", "is cached anyway", 1)
		}
		expect.That(t, out.Message == want && out.Uncacheable != cache,
			"cache %v: got uncacheable %v, message %q", cache, out.Uncacheable, out.Message)
		if m := (&bench{t: t}).execution(out); m.Hermetic || len(m.Events) != 1 {
			t.Errorf("got metadata %v", m)
		}
	}
}

// Instance, target, mnemonic and properties select the policy rule.
func TestMetadataSelectsPolicyRule(t *testing.T) {
	p := must.Get(policy.Parse("policy.yaml", []byte(`version: 1
profiles:
  fetch: {inherits: build, network: {allow: ["example.org:443"]}}
rules:
  - name: downloads
    when: {instance: main, target: "//third_party/...", mnemonic: Fetch}
    profile: fetch
`)))(t)
	b := newBench(t, ended(0))
	b.cfg.Policy = p
	action := b.action(func(_ *repb.Action, c *repb.Command) { c.Platform = platform("cloister-network", "example.org:443") })
	out := b.do(&Task{Action: action, Instance: "main", Target: "//third_party/x:y", Mnemonic: "Fetch"})
	if m := b.execution(out); m.Rule != "downloads" || m.Hermetic || b.recorded(action) {
		t.Errorf("got metadata %v, cached %v", m, b.recorded(action))
	}
	for _, other := range []*Task{
		{Action: action, Instance: "other", Target: "//third_party/x:y", Mnemonic: "Fetch"},
		{Action: action, Instance: "main", Target: "//x:y", Mnemonic: "Fetch"},
		{Action: action, Instance: "main", Target: "//third_party/x:y"},
	} {
		expect.Error(t, expect.Err(b.Execute(t.Context(), other, func(Stage) {})), policy.ErrRefused, "%+v", other)
	}
}

func TestAdmit(t *testing.T) {
	b := newBench(t, nil)
	admit := func(mnemonic string, properties ...string) (Admission, error) {
		action := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform(properties...) })
		return b.Admit(t.Context(), &Task{Action: action, Mnemonic: mnemonic})
	}
	build, err := admit("CppCompile")
	must.Be(t, err == nil && !build.DoNotMerge, "got %+v, %v", build, err)
	if again, err := admit("Genrule"); err != nil || !reflect.DeepEqual(again, build) {
		t.Errorf("same grant: got %+v, %v, want %+v", again, err, build)
	}
	if test, err := admit("TestRunner"); err != nil || test.MergeKey == build.MergeKey {
		t.Errorf("another profile: got the same key %q, %v", test.MergeKey, err)
	}
	demanding, err := admit("CppCompile", "pool", "b", "OSFamily", "linux", "cloister-memory", "1GiB", "pool", "a", "pool", "b")
	want := []Property{{Name: "OSFamily", Value: "linux"}, {Name: "pool", Value: "a"}, {Name: "pool", Value: "b"}}
	expect.That(t, err == nil && slices.Equal(demanding.Demands, want) && demanding.MergeKey == build.MergeKey,
		"got %+v, %v, want key %q and demands %v", demanding, err, build.MergeKey, want)
	expect.That(t, len(b.audited) == 0, "got audit %+v, want none", b.audited)
	expect.Error(t, expect.Err(admit("CppCompile", "cloister-memory", "1TiB")), policy.ErrRefused)
}

func TestRefusalsAreAudited(t *testing.T) {
	b := newBench(t, nil)
	task := &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-memory", "1TiB") }), Mnemonic: "CppCompile"}
	_, admitErr := b.Admit(t.Context(), task)
	_, executeErr := b.Execute(t.Context(), task, func(Stage) {})
	must.Be(t, errors.Is(admitErr, policy.ErrRefused) && errors.Is(executeErr, policy.ErrRefused),
		"got %v and %v, want ErrRefused", admitErr, executeErr)
	must.Be(t, len(b.audited) == 2, "got %d audits, want one per refusal", len(b.audited))
	const want = `refused  denied: property cloister-memory=1TiB; rule "default" grants at most `
	for _, a := range b.audited {
		if lines := a.Lines(); len(lines) != 1 || !strings.HasPrefix(lines[0], want) || a.ExitCode != sandbox.NeverRan {
			t.Errorf("got exit code %d and %q, want %d and %q", a.ExitCode, lines, sandbox.NeverRan, want)
		}
	}
	// A client cannot forge a line.
	task.Action = b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-memory", "1\x1b[2J\n2") })
	if _, err := b.Admit(t.Context(), task); !errors.Is(err, policy.ErrRefused) {
		t.Fatalf("got %v, want ErrRefused", err)
	}
	for _, line := range b.audited[2].Lines() {
		expect.That(t, !strings.ContainsAny(line, "\x1b\n"), "got %q", line)
	}
}

// In a fleet, the merge key covers everything on which another policy may depend. A worker without a backend refuses
// only malformed actions, and one with a backend does not refuse what another backend may support.
func TestAdmitInFleet(t *testing.T) {
	b := newBench(t, nil)
	b.cfg.Fleet = true
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-memory", "1TiB") })
	expect.Error(t, expect.Err(b.Admit(t.Context(), &Task{Action: action})), policy.ErrRefused, "with a backend")
	var elsewhere *Task
	for _, backend := range []string{"gvisor", "microvm", "qemu", "qemu-tcg"} {
		elsewhere = &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-sandbox", backend) })}
		if got, err := b.Admit(t.Context(), elsewhere); err != nil || len(got.Demands) != 1 {
			t.Errorf("%s, which another worker may support: got %+v, %v, want one demand", backend, got, err)
		}
	}
	b.cfg.Fleet = false
	expect.Error(t, expect.Err(b.Admit(t.Context(), elsewhere)), sandbox.ErrUnsupported, "without other workers")
	// Workers without remote APIs are those of join, run and repro. Another worker may have them, but none at more depth.
	b.cfg.Policy = must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n")))(t)
	calls := &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("remoteApisSocketPath", "s") })}
	err := expect.Err(b.Admit(t.Context(), calls))
	expect.Error(t, err, sandbox.ErrUnsupported, "remote APIs without other workers")
	expect.Message(t, err, "which only cloister serve supports")
	b.cfg.Fleet = true
	must.Get(b.Admit(t.Context(), calls))(t)
	b.cfg.RemoteAPIs, calls.Caller = struct{ actionapi.Endpoint }{}, &actionapi.Caller{Depth: actionapi.MaxDepth}
	err = expect.Err(b.Admit(t.Context(), calls))
	expect.Message(t, err, "actions nest at most 2 deep")
	expect.That(t, !errors.Is(err, sandbox.ErrUnsupported), "remote APIs at the maximum depth: got %v, want a refusal by every worker", err)
	b.cfg.Backend = nil
	keys := map[string]bool{}
	for _, task := range []*Task{{}, {Target: "//a"}, {Target: "//b"}, {Target: "//a", Mnemonic: "M"}} {
		task.Action = action
		a, err := b.Admit(t.Context(), task)
		expect.That(t, err == nil && !keys[a.MergeKey] && !a.DoNotMerge,
			"%q %q: got %+v, %v", task.Target, task.Mnemonic, a, err)
		keys[a.MergeKey] = true
	}
	if a, err := b.Admit(t.Context(), &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { a.DoNotCache = true })}); err != nil || !a.DoNotMerge {
		t.Errorf("do_not_cache: got %+v, %v", a, err)
	}
	expect.That(t, expect.Err(b.Admit(t.Context(), &Task{Action: cas.SHA256.Sum([]byte("absent"))})) != nil,
		"Admit accepted a missing action")
}

// TestPythonCachesFollowOtherEvents: Python tries to write them for each module, whatever made the action fail.
func TestPythonCachesFollowOtherEvents(t *testing.T) {
	cache := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/lib/python3/__pycache__/json.pyc"}
	left := sandbox.Event{Kind: sandbox.EventOutput, Subject: "tmp.txt"}
	read := sandbox.Event{Kind: sandbox.EventRead, Subject: "/etc/passwd"}
	v := NewViolations(&sandbox.Result{Events: []sandbox.Event{cache, left, read}}, ExecRoot)
	expect.Slices(t, v.byImportance(), []sandbox.Event{read, left, cache})
}

// TestHarmlessViolations: warnings are for those that explain a failure or that somebody should look at.
func TestHarmlessViolations(t *testing.T) {
	left := sandbox.Event{Kind: sandbox.EventOutput, Subject: "tmp.txt"}
	cache := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/build/__pycache__/a.pyc"}
	allowed := sandbox.Event{Kind: sandbox.EventAllowed, Subject: "example.org:443"}
	write := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/build/in"}
	unreachable := sandbox.Event{Kind: sandbox.EventUnreachable, Subject: "example.org:443"}
	empty := sandbox.Event{Kind: sandbox.EventUnreachable, Subject: "127.0.0.1:5432", Syscall: "connect"}
	for _, c := range []struct {
		name   string
		exit   int
		events []sandbox.Event
		more   int
		want   bool
	}{
		{"a passing test with temporary files", 0, []sandbox.Event{left, cache, allowed}, 0, true},
		{"a passing test with Python caches", 0, []sandbox.Event{cache}, 0, true},
		{"a failing test with temporary files", 1, []sandbox.Event{left}, 0, false},
		{"a permitted connection of a failing test", 1, []sandbox.Event{allowed}, 0, true},
		{"an empty loopback of a passing test", 0, []sandbox.Event{empty}, 0, true},
		{"an empty loopback of a failing test", 1, []sandbox.Event{empty}, 0, false},
		{"a failed connection", 0, []sandbox.Event{unreachable}, 0, false},
		{"a write to an input", 0, []sandbox.Event{left, write}, 0, false},
		{"more than is recorded", 0, []sandbox.Event{left}, 1, false},
	} {
		v := NewViolations(&sandbox.Result{ExitCode: c.exit, Events: c.events, Unrecorded: c.more}, ExecRoot)
		expect.Equal(t, v.Harmless(), c.want, "%s: harmless", c.name)
	}
}
