// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"google.golang.org/protobuf/types/known/anypb"
)

// manifest returns the manifest of a run.
func (b *bench) manifest(out *Outcome) *manifest.Manifest {
	b.t.Helper()
	text := must.Get(cas.ReadAll(b.t.Context(), b.store, out.Manifest, manifest.MaxBytes))(b.t)
	m, err := manifest.Parse(text)
	must.Be(b.t, err == nil, "%v:\n%s", err, text)
	expect.Equal(b.t, m.StableHash(), out.StableHash)
	return m
}

// tooled gives the worker a toolchain at /usr with one program, whose path it returns.
func (b *bench) tooled() (cc string) {
	b.t.Helper()
	dir := b.t.TempDir()
	cc = filepath.Join(dir, "bin", "cc")
	must.Succeed(b.t, os.Mkdir(filepath.Dir(cc), 0o755))
	must.Succeed(b.t, os.WriteFile(cc, []byte("program"), 0o755))
	b.cfg.Toolchain = []sandbox.Input{{Target: "/usr", Content: "host", Source: dir}}
	b.cfg.Host = manifest.Host{OS: "debian", Version: "12", Architecture: "amd64", Kernel: "Linux", Release: "6.18.0"}
	return cc
}

// compiles is a run that creates o/x.
func compiles(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
	return executing("/usr/bin/cc")(ctx, spec, std, out)
}

// executing returns a run that creates o/x with programs of the toolchain.
func executing(programs ...string) runFunc {
	return func(_ context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		std.Stdout.Write([]byte("said"))
		if out.MkdirAll("o", 0o755) != nil || out.WriteFile("o/x", []byte("made"), 0o755) != nil {
			panic("no output")
		}
		executed := append([]string{ExecRoot + "/a"}, programs...)
		return &sandbox.Result{Start: time.Now(), Executed: executed, ExecutedAll: spec.Audit != sandbox.AuditOff}
	}
}

func TestManifestRecordsRun(t *testing.T) {
	b := newBench(t, compiles)
	b.tooled()
	action := b.action(nil)
	seed := uint64(7)
	out := b.do(&Task{Action: action, Seed: &seed, Revision: "abc", Queued: time.Unix(1, 0)})
	m := b.manifest(out)
	req := must.Get(b.resolve(t.Context(), &cas.Instance{Store: b.store, Actions: b.store}, action))(t)
	command, root, err := parts(action, req.Action)
	must.Succeed(t, err)
	if m.Action != action || m.Command != command || m.InputRoot != root || *m.Seed != 7 || m.Revision != "abc" || m.Status != "OK" {
		t.Errorf("got %+v", m)
	}
	want := manifest.Output{Kind: manifest.Executable, Path: "o/x", Digest: cas.SHA256.Sum([]byte("made"))}
	if len(m.Outputs) != 1 || m.Outputs[0] != want || m.Stdout != cas.SHA256.Sum([]byte("said")) || !m.Stderr.IsEmpty() {
		t.Errorf("got outputs %v, stdout %v, stderr %v", m.Outputs, m.Stdout, m.Stderr)
	}
	for _, line := range []string{"arg \"cc\"", `input "/usr" "host"`, `input "/build" "` + root.Hash(), `limit "memory"`} {
		expect.Text(t, m.Spec, line, "the spec")
	}
	// Programs in the input root are not listed.
	sum := cas.SHA256.Sum([]byte("program")).Hash()
	if p := m.Toolchain.Programs; len(p) != 1 || p[0] != (manifest.Program{Path: "/usr/bin/cc", Sum: sum}) || !m.Toolchain.Complete || m.Toolchain.Host != b.cfg.Host {
		t.Errorf("got toolchain %+v", m.Toolchain)
	}
	if v := m.Volatile; v.Worker != "w" || v.Tier != "full" || !v.Queued.Equal(time.Unix(1, 0)) || v.Started.IsZero() || v.Policy != b.cfg.Policy.Hash() {
		t.Errorf("got %+v", v)
	}
	// A cached result has the same manifest.
	found := b.do(&Task{Action: action})
	if d, hash := RecordedManifest(found.Result); !found.Cached || d != out.Manifest || hash != out.StableHash || found.Manifest != d || found.StableHash != hash {
		t.Errorf("cached result: got %v, %q, want %v, %q", d, hash, out.Manifest, out.StableHash)
	}
}

// The stable hash depends on what can influence the result, and not on who runs or requests the action, or how well it
// is confined and audited.
func TestStableHashDependsOnInfluences(t *testing.T) {
	hash := func(change func(b *bench, task *Task)) string {
		b := newBench(t, compiles)
		b.tooled()
		task := &Task{Action: b.action(nil)}
		if change != nil {
			change(b, task)
		}
		out := b.do(task)
		b.manifest(out)
		return out.StableHash
	}
	usual := hash(nil)
	for name, change := range map[string]func(b *bench, task *Task){
		"worker":      func(b *bench, _ *Task) { b.cfg.Name = "other" },
		"tier":        func(b *bench, _ *Task) { b.cfg.Features.Tier, b.cfg.Features.Layers = "weakened", []string{"x"} },
		"no limits":   func(b *bench, _ *Task) { b.cfg.Features.Limits = nil },
		"instance":    func(_ *bench, t *Task) { t.Instance = "main" },
		"target":      func(_ *bench, t *Task) { t.Target, t.Mnemonic, t.Invocation = "//a", "M", "i" },
		"time":        func(_ *bench, t *Task) { t.Queued = time.Unix(5, 0) },
		"less time":   func(_ *bench, t *Task) { t.Timeout = time.Second },
		"trace":       func(_ *bench, t *Task) { t.Trace = map[string]string{"traceparent": "x"} },
		"auxiliary":   func(_ *bench, t *Task) { t.Auxiliary = []*anypb.Any{{TypeUrl: "x"}} },
		"usage":       func(b *bench, _ *Task) { b.backend.run = using(compiles, sandbox.Usage{User: 5, PeakMemory: 6}) },
		"variation":   func(_ *bench, t *Task) { t.Variation = &Variation{} },
		"no lookup":   func(_ *bench, t *Task) { t.SkipCacheLookup = true },
		"watch":       func(b *bench, _ *Task) { b.ruled("profiles: {build: {audit: full}}") },
		"policy":      func(b *bench, _ *Task) { b.ruled("rules: [{name: r, when: {mnemonic: M}, profile: test}]") },
		"watchdog":    func(b *bench, _ *Task) { b.backend.run = executing("/usr/bin/cc", "/usr/bin/ps", "/usr/bin/sleep") },
		"cache bytes": func(b *bench, _ *Task) { b.cfg.CacheBytes, b.cfg.RenewInterval = 1, time.Minute },
	} {
		expect.Equal(t, hash(change), usual, "%s changes the stable hash", name)
	}
	seed := uint64(1)
	for name, change := range map[string]func(b *bench, task *Task){
		"kernel": func(b *bench, _ *Task) { b.cfg.Host.Release = "6.18.1" },
		"system": func(b *bench, _ *Task) { b.cfg.Host.Version = "13" },
		"program": func(b *bench, _ *Task) {
			os.WriteFile(filepath.Join(b.cfg.Toolchain[0].Source, "bin", "cc"), []byte("new"), 0o755)
		},
		"program more":       func(b *bench, _ *Task) { b.backend.run = executing("/usr/bin/cc", "/usr/bin/kill") },
		"sleep of another's": func(b *bench, _ *Task) { b.backend.run = executing("/usr/bin/cc", "/usr/local/bin/sleep") },
		"no watch":           func(b *bench, _ *Task) { b.cfg.Features.Audits = []sandbox.Audit{sandbox.AuditOff} },
		"seed":               func(_ *bench, t *Task) { t.Seed = &seed },
		"revision":           func(_ *bench, t *Task) { t.Revision = "r" },
		"order":              func(_ *bench, t *Task) { t.Variation = &Variation{Order: 1} },
		"condition": func(b *bench, t *Task) {
			b.cfg.Features.Conditions = sandbox.AllConditions
			t.Variation = &Variation{Conditions: sandbox.Conditions{Umask: 0o77}}
		},
		"variable":  func(_ *bench, t *Task) { t.Variation = &Variation{Env: []string{"TZ=UTC"}} },
		"root":      func(_ *bench, t *Task) { t.Variation = &Variation{Root: "/elsewhere"} },
		"limit":     func(b *bench, _ *Task) { b.ruled("profiles: {build: {open_files: 99}}") },
		"log bytes": func(b *bench, _ *Task) { b.cfg.LogBytes = 1000 },
		"exit code": func(b *bench, _ *Task) { b.backend.run = ended(1) },
	} {
		expect.That(t, hash(change) != usual, "%s does not change the stable hash", name)
	}
}

// ruled sets the worker's policy.
func (b *bench) ruled(text string) {
	b.t.Helper()
	b.cfg.Policy = must.Get(policy.Parse("policy.yaml", []byte("version: 1\n"+text+"\n")))(b.t)
}

func using(run runFunc, u sandbox.Usage) runFunc {
	return func(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		r := run(ctx, spec, std, out)
		r.Usage = u
		return r
	}
}

func TestEvictedManifestKeepsCachedResult(t *testing.T) {
	b := newBench(t, compiles)
	action := b.action(nil)
	out := b.do(&Task{Action: action})
	b.store.Delete(out.Manifest)
	expect.That(t, b.do(&Task{Action: action}).Cached, "got a new run, want the cached result")
}

func TestRunWithoutAuditNamesItsProgram(t *testing.T) {
	b := newBench(t, ended(0))
	cc := b.tooled()
	b.cfg.Features.Audits = []sandbox.Audit{sandbox.AuditOff}
	must.Succeed(t, os.Rename(cc, cc+"-1"))
	if err := os.Symlink("cc-1", cc); err != nil {
		t.Skipf("needs symbolic links: %v", err)
	}
	for command, want := range map[string]string{"cc": "/usr/bin/cc-1", "/usr/bin/cc": "/usr/bin/cc-1", "d/b": "", "absent": "", "/etc/passwd": ""} {
		out := b.do(&Task{Action: b.action(func(_ *repb.Action, c *repb.Command) { c.Arguments = []string{command} })})
		got := ""
		m := b.manifest(out)
		if p := m.Toolchain.Programs; len(p) > 0 {
			got = p[0].Path
		}
		expect.That(t, got == want && !m.Toolchain.Complete,
			"%s: got %+v, want %q, incomplete", command, m.Toolchain, want)
	}
}

// Programs of watchdogs are volatile, unless the command is one of them.
func TestWatchdogProgramsAreVolatile(t *testing.T) {
	b := newBench(t, executing("/usr/bin/cc", "/usr/bin/pgrep", "/usr/bin/ps", "/usr/bin/sleep"))
	cc := b.tooled()
	must.Succeed(t, os.Link(cc, filepath.Join(filepath.Dir(cc), "sleep")))
	for command, want := range map[string][2]string{
		"cc":    {"/usr/bin/cc", "/usr/bin/pgrep /usr/bin/ps /usr/bin/sleep"},
		"sleep": {"/usr/bin/cc /usr/bin/sleep", "/usr/bin/pgrep /usr/bin/ps"},
	} {
		m := b.manifest(b.do(&Task{Action: b.action(func(_ *repb.Action, c *repb.Command) { c.Arguments = []string{command} })}))
		expect.Equal(t, [2]string{paths(m.Toolchain.Programs), paths(m.Volatile.Programs)}, want, "%s", command)
	}
}

func paths(programs []manifest.Program) string {
	var all []string
	for _, p := range programs {
		all = append(all, p.Path)
	}
	return strings.Join(all, " ")
}

// Programs are read once, and again after a change that preserves size and mtime.
func TestSumsAreCached(t *testing.T) {
	name := filepath.Join(t.TempDir(), "program")
	stamp := time.Unix(1_000_000_000, 0)
	write := func(text string) {
		must.Succeed(t, os.WriteFile(name, []byte(text), 0o755))
		must.Succeed(t, os.Chtimes(name, stamp, stamp))
	}
	s := newSums()
	write("one")
	first := s.of(name)
	expect.That(t, first == cas.SHA256.Sum([]byte("one")).Hash() && s.of(name) == first && len(s.known) <= 1,
		"got %s, cache %v", first, s.known)
	for id := range s.known {
		s.known[id] = "remembered"
		expect.Equal(t, s.of(name), "remembered", "the cached sum")
	}
	write("two")
	expect.Equal(t, s.of(name), cas.SHA256.Sum([]byte("two")).Hash(), "after a change")
	for _, p := range []string{name + "-absent", filepath.Dir(name)} {
		expect.Equal(t, s.of(p), manifest.Unreadable, "%s", p)
	}
}

func TestOSRelease(t *testing.T) {
	for text, want := range map[string][2]string{
		"NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12\"\nID=debian\n": {"debian", "12"},
		"ID='alpine'\nVERSION_ID=3.20.1":                            {"alpine", "3.20.1"},
		"# ID=x\nID_LIKE=y\n":                                       {"", ""},
	} {
		if id, version := osRelease(text); id != want[0] || version != want[1] {
			t.Errorf("%q: got %q, %q", text, id, version)
		}
	}
}

// TestGapsOfTheSandboxAreAccepted: a sandbox that protects less runs only what asks for it by name, or its owner's
// actions, and the record names it.
func TestGapsOfTheSandboxAreAccepted(t *testing.T) {
	b := newBench(t, returns(sandbox.Result{Released: true}))
	b.cfg.Features.Gaps = []string{"the files of this host"}
	named := func(value string) *Task {
		return &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) {
			a.DoNotCache = true
			if value != "" {
				a.Platform = platform(PropertySandbox, value)
			}
		})}
	}
	for _, value := range []string{"", "namespace", "jobobject"} {
		err := expect.Err(b.Execute(t.Context(), named(value), func(Stage) {}))
		expect.Error(t, err, sandbox.ErrUnsupported, "cloister-sandbox=%s", value)
	}
	expect.Message(t, expect.Err(b.Admit(t.Context(), named(""))), "does not protect from the files of this host")
	b.cfg.Features.Backend = "jobobject"
	expect.Equal(t, b.manifest(b.do(named("jobobject"))).Sandbox, "jobobject", "with the name")
	builtIn := b.cfg.Policy
	b.cfg.Policy = must.Get(policy.Parse("p.yaml", []byte("version: 1\ndefault_properties:\n  \"\": {cloister-sandbox: jobobject}\n")))(t)
	expect.Error(t, expect.Err(b.Execute(t.Context(), named(""), func(Stage) {})), sandbox.ErrUnsupported, "a default property")
	b.cfg.Policy = builtIn
	b.cfg.AcceptGaps = true
	expect.Equal(t, b.manifest(b.do(named(""))).Sandbox, "jobobject", "if the caller accepts it")
	expect.Error(t, expect.Err(b.Execute(t.Context(), named("gvisor"), func(Stage) {})), sandbox.ErrUnsupported, "another name")
}
