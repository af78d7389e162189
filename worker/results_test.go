// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/internal/results"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestResultsOfAnotherToolchainAreMisses: a result records the toolchain that made it, and is served only while the
// machine is known to have that one. Results that state none are served.
func TestResultsOfAnotherToolchainAreMisses(t *testing.T) {
	b := newBench(t, compiles)
	now := "gcc 14"
	b.cfg.Fingerprint = func() string { return now }
	instances := results.Filter(b.cfg.Instances, results.OtherToolchain(b.cfg.Fingerprint))
	in := must.Get(instances(""))(t)
	action := b.action(nil)
	out := b.do(&Task{Action: action})
	if meta, text := b.execution(out).Toolchain, b.manifest(out).Volatile.Fingerprint; meta != now || text != now {
		t.Errorf("got toolchain %q in the metadata and %q in the manifest, want %q", meta, text, now)
	}
	foreign := cas.SHA256.Sum([]byte("an action of another program"))
	must.Succeed(t, in.Actions.Record(t.Context(), foreign, &repb.ActionResult{StdoutRaw: []byte("x")}))
	for _, c := range []struct {
		toolchain string
		served    bool
	}{{"gcc 14", true}, {"gcc 15", false}, {"", false}, {"gcc 14", true}} {
		now = c.toolchain
		if _, err := in.Actions.Lookup(t.Context(), action); (err == nil) != c.served || err != nil && !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("toolchain %q: got %v, want the result served: %t", c.toolchain, err, c.served)
		}
		if c.toolchain == "" {
			expect.Message(t, expect.Err(in.Actions.Lookup(t.Context(), action)), "the toolchain of this machine is not known")
		}
		expect.Error(t, expect.Err(in.Actions.Lookup(t.Context(), foreign)), nil,
			"toolchain %q: a result that states no toolchain", c.toolchain)
	}
	now = "gcc 15"
	b.cfg.Instances = instances
	expect.That(t, !b.do(&Task{Action: action}).Cached,
		"the worker took the result of another toolchain from the action cache")
	expect.That(t, b.do(&Task{Action: action}).Cached,
		"the second run with the new toolchain was not answered from the action cache")
}

// TestToolchainChangesDuringARun: nobody knows which toolchain such a run saw, so its result is not cached.
func TestToolchainChangesDuringARun(t *testing.T) {
	var changes atomic.Int64
	b := newBench(t, func(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		changes.Add(1)
		return compiles(ctx, spec, std, out)
	})
	b.cfg.Fingerprint = func() string { return string(rune('a' + changes.Load())) }
	action := b.action(nil)
	out := b.do(&Task{Action: action})
	expect.That(t, out.Uncacheable && !b.recorded(action),
		"got uncacheable %t, recorded %t, want the result not cached", out.Uncacheable, b.recorded(action))
	expect.Equal(t, b.execution(out).Toolchain, "", "metadata: toolchain")
}

// TestUnreadableToolchain: a result is not cached if the toolchain that made it cannot be identified.
func TestUnreadableToolchain(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.Fingerprint = func() string { return "" }
	action := b.action(nil)
	if out := b.do(&Task{Action: action}); !out.Uncacheable || b.recorded(action) {
		t.Errorf("got uncacheable %t, recorded %t, want the result not cached", out.Uncacheable, b.recorded(action))
	}
}

// TestResultsOfAnotherImageAreMisses: a result whose image the action does not determine is a miss unless the operator
// permits it, and one of this machine if the default properties name an image.
func TestResultsOfAnotherImageAreMisses(t *testing.T) {
	for _, c := range []struct {
		name      string
		made      *cloisterpb.Execution
		permitted bool
		byDefault bool
		served    bool
	}{
		{"of this machine", &cloisterpb.Execution{Toolchain: "a"}, false, false, true},
		{"of this machine, with a default image", &cloisterpb.Execution{Toolchain: "a"}, true, true, false},
		{"of this machine, as the action says", &cloisterpb.Execution{Toolchain: "a", Image: results.NoImage}, false, true, true},
		{"pinned", &cloisterpb.Execution{Image: "x@sha256:1"}, false, true, true},
		{"for this architecture", &cloisterpb.Execution{Image: "x@sha256:1", ImageArchitecture: runtime.GOARCH}, false, false, true},
		{"for another architecture", &cloisterpb.Execution{Image: "x@sha256:1", ImageArchitecture: "z80"}, true, false, false},
		{"unpinned", &cloisterpb.Execution{Image: "x@sha256:1", Unpinned: true}, false, false, false},
		{"unpinned, permitted", &cloisterpb.Execution{Image: "x@sha256:1", Unpinned: true}, true, false, true},
	} {
		aux := must.Get(anypb.New(c.made))(t)
		r := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}}
		refuse := results.OtherImage(c.permitted, func(string) bool { return c.byDefault })
		if why := refuse(t.Context(), "", cas.Digest{}, r); (why == "") != c.served {
			t.Errorf("%s: got refusal %q, want it served: %t", c.name, why, c.served)
		}
	}
}

// TestResultsOfAMovedImageAreMisses: a result whose image the action does not determine is a miss once the action names
// another image, or none, or one that it no longer gets, and a hit while the registry does not answer.
func TestResultsOfAMovedImageAreMisses(t *testing.T) {
	b := newBench(t, compiles)
	tagged := func(image string) cas.Digest {
		return b.action(command(func(c *repb.Command) { c.Platform = platform("container-image", image) }))
	}
	byDefault := must.Get(policy.Parse("p.yaml", []byte("version: 1\ndefault_properties:\n  \"\": {container-image: \"docker://x:default\"}\n")))(t)
	for _, c := range []struct {
		name   string
		policy *policy.Policy
		action cas.Digest
		made   *cloisterpb.Execution
		served bool
	}{
		{"a tag", policy.Default(), tagged("docker://x:one"), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, true},
		{"a tag that moved", policy.Default(), tagged("docker://x:one"), &cloisterpb.Execution{Image: "x@two", Unpinned: true}, false},
		{"a pinned image", policy.Default(), tagged("docker://x:one"), &cloisterpb.Execution{Image: "x@two"}, true},
		{"the default", byDefault, b.action(nil), &cloisterpb.Execution{Image: "x@default", Unpinned: true}, true},
		{"another default", byDefault, b.action(nil), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, false},
		{"no default any more", policy.Default(), b.action(nil), &cloisterpb.Execution{Image: "x@default", Unpinned: true}, false},
		{"a registry that fails", policy.Default(), tagged("docker://x:down"), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, true},
		{"a registry that is not allowed any more", policy.Default(), tagged("docker://x:forbidden"), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, false},
		{"a tag that is gone", policy.Default(), tagged("docker://x:unknown"), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, false},
		{"an image that was removed", policy.Default(), tagged("oci:x:unloaded"), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, false},
		{"an action that is gone", policy.Default(), cas.SHA256.Sum([]byte("gone")), &cloisterpb.Execution{Image: "x@one", Unpinned: true}, false},
	} {
		aux := must.Get(anypb.New(c.made))(t)
		r := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}}
		refuse := results.MovedImage(b.cfg.Instances, c.policy, func(_ context.Context, _, value string) (string, error) {
			switch value {
			case "docker://x:down":
				return "", fmt.Errorf("resolve: %w", temporaryError{errors.New("connection refused")})
			case "docker://x:forbidden":
				return "", errors.New("registry is not allowed")
			case "docker://x:unknown":
				return "", errors.New("MANIFEST_UNKNOWN: manifest unknown")
			case "oci:x:unloaded":
				return "", fmt.Errorf("no image was loaded: %w", cas.ErrNotFound)
			}
			return strings.Replace(strings.TrimPrefix(value, "docker://"), ":", "@", 1), nil
		})
		if why := refuse(t.Context(), "", c.action, r); (why == "") != c.served {
			t.Errorf("%s: got refusal %q, want it served: %t", c.name, why, c.served)
		}
	}
}

// A temporaryError is an error of Images.Pin that refuses nothing.
type temporaryError struct{ error }

func (temporaryError) Temporary() bool { return true }

// TestResultsOfIgnoredImagesAreRefused: a result whose image was ignored is refused, however the property is written.
func TestResultsOfIgnoredImagesAreRefused(t *testing.T) {
	for _, c := range []struct {
		ignored []string
		served  bool
	}{
		{nil, true},
		{[]string{"Pool=container-image"}, true},
		{[]string{"Pool=x", "Container-Image=docker://x@sha256:1"}, false},
		{[]string{Property{Name: results.ImageProperty, Value: "a b"}.String()}, false}, // it is quoted
	} {
		aux := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: "a", IgnoredProperties: c.ignored}))(t)
		r := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}}
		if why := results.IgnoredImage(t.Context(), "", cas.Digest{}, r); (why == "") != c.served {
			t.Errorf("%q ignored: got refusal %q, want it served: %t", c.ignored, why, c.served)
		}
	}
}

// TestResultsOfAnotherSandboxAreMisses: where the policy requires a sandbox, a result of another one, or of an unknown
// one, is a miss, also for a worker that looks it up itself.
func TestResultsOfAnotherSandboxAreMisses(t *testing.T) {
	b := newBench(t, compiles)
	p := must.Get(policy.Parse("p.yaml", []byte(`version: 1
sandboxes:
  - {require: gvisor, when: {target: "//third_party/..."}}
  - {require: gvisor, when: {instance: guests}}
default_properties:
  main: {cloister-sandbox: gvisor}
`)))(t)
	stored := b.cfg.Instances
	b.cfg.Policy, b.cfg.Instances = p, results.Filter(stored, results.OtherSandbox(stored, p,
		func(context.Context) (string, string) { return "//third_party/z:z", "" }))
	action := b.action(nil)
	asks := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform(PropertySandbox, "qemu") })
	absent := cas.SHA256.Sum([]byte("evicted"))
	for _, c := range []struct {
		instance, target string
		action           cas.Digest
		made             string
		served           bool
	}{
		{"", "//app:a", action, "namespace", true},
		{"", "//third_party/z:z", action, "namespace", false},
		{"", "//third_party/z:z", action, "", false},
		{"", "//third_party/z:z", action, "qemu", false},
		{"", "//third_party/z:z", action, "gvisor", true},
		{"guests", "//app:a", action, "namespace", false},
		{"guests", "//app:a", absent, "gvisor", true},
		{"main", "//app:a", action, "namespace", false},
		{"main", "//app:a", action, "gvisor", true},
		{"main", "//app:a", asks, "qemu", true},
		{"main", "//app:a", asks, "namespace", false},
		{"main", "//app:a", absent, "namespace", false}, // nobody knows what it asks for
	} {
		aux := must.Get(anypb.New(&cloisterpb.Execution{Sandbox: &cloisterpb.Sandbox{Backend: c.made}}))(t)
		must.Succeed(t, b.store.Record(t.Context(), c.action, &repb.ActionResult{
			ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}},
		}))
		in := must.Get(b.cfg.Instances(c.instance))(t)
		_, err := in.Actions.Lookup(results.State(t.Context(), c.target, ""), c.action)
		if (err == nil) != c.served || err != nil && !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("%q %s, made in %q: got %v, want it served: %t", c.instance, c.target, c.made, err, c.served)
		}
	}
	// A call states the target itself.
	made := func(backend string) {
		b.cfg.Features.Backend = backend
		b.do(&Task{Action: action, Target: map[string]string{"gvisor": "//third_party/z:z"}[backend], SkipCacheLookup: true})
	}
	lookup := func() error {
		return expect.Err(must.Get(b.cfg.Instances(""))(t).Actions.Lookup(t.Context(), action))
	}
	made("namespace")
	expect.Error(t, lookup(), cas.ErrNotFound, "a result made in namespaces")
	made("gvisor")
	expect.Error(t, lookup(), nil, "a result made in gVisor")
	made("namespace")
	b.cfg.Features.Backend = "gvisor"
	for _, c := range []struct {
		target string
		cached bool
	}{{"//app:a", true}, {"//third_party/z:z", false}, {"//third_party/z:z", true}} {
		expect.Equal(t, b.do(&Task{Action: action, Target: c.target}).Cached, c.cached,
			"execution for %s: cached", c.target)
	}
}

// TestRequiredSandboxIsRefusedByOthers: a worker refuses what must run in another sandbox, and a head demands the sandbox
// of its workers. Requests with other demands do not share a run.
func TestRequiredSandboxIsRefusedByOthers(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.Policy = must.Get(policy.Parse("p.yaml", []byte(`version: 1
sandboxes:
  - {require: gvisor, when: {mnemonic: Genrule}}
default_properties:
  main: {cloister-sandbox: qemu, pool: large}
`)))(t)
	action := b.action(nil)
	genrule, byDefault, other := &Task{Action: action, Mnemonic: "Genrule"}, &Task{Action: action, Instance: "main"}, &Task{Action: action}
	for _, task := range []*Task{genrule, byDefault} {
		expect.Error(t, expect.Err(b.Admit(t.Context(), task)), sandbox.ErrUnsupported, "admission of %+v", task)
		expect.Error(t, expect.Err(b.Execute(t.Context(), task, nil)), sandbox.ErrUnsupported, "execution of %+v", task)
	}
	b.do(other)
	b.cfg.Backend = nil
	keys := map[string]bool{}
	for _, c := range []struct {
		task *Task
		want []Property
	}{
		{genrule, []Property{{Name: PropertySandbox, Value: "gvisor"}}},
		{byDefault, []Property{{Name: PropertySandbox, Value: "qemu"}}},
		{other, nil},
	} {
		a := must.Get(b.Admit(t.Context(), c.task))(t)
		expect.Slices(t, a.Demands, c.want, "demands of %+v", c.task)
		key := c.task.Instance + " " + a.MergeKey
		expect.That(t, !keys[key], "requests with different demands have the merge key %q", key)
		keys[key] = true
	}
}
