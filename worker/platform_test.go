// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPropertiesOfAnotherPlatform: properties of another platform are refused before a slot is taken; those of this
// machine and those that ask for nothing are accepted; all others are reported to the client.
func TestPropertiesOfAnotherPlatform(t *testing.T) {
	own := map[string]string{"amd64": "x86-64", "arm64": "arm-a64"}[runtime.GOARCH]
	other := map[string]string{"amd64": "aarch64", "arm64": "x86_64"}[runtime.GOARCH]
	extension, otherExtension := "x86-avx2", "arm-sve"
	const refused, ignored, taken = "refused", "ignored", "taken"
	extended, android := ignored, refused
	switch {
	case runtime.GOARCH == "arm64":
		extension, otherExtension, android = otherExtension, extension, taken
	case own == "":
		own, other, extended = runtime.GOARCH, "x86-64", refused
	}
	for _, c := range []struct{ name, value, want string }{
		{"OSFamily", runtime.GOOS, taken},
		{"OSFamily", strings.ToUpper(runtime.GOOS), taken},
		{"OSFamily", "", taken},
		{"OSFamily", "windows", refused},
		{"osfamily", "aix", refused},
		{"os", "plan9", refused},
		{"ISA", own, taken},
		{"Arch", runtime.GOARCH, taken},
		{"cpu", own, taken},
		{"ISA", other, refused},
		{"Arch", other, refused},
		{"cpu", other, refused},
		{"arch", "sparc-v9", refused},
		{"ISA", "arm-t32-be", refused},
		{"ISA", "unheard", refused},
		{"ISA", extension, extended}, // it comes with an architecture, which is checked
		{"ISA", "x" + extension, refused},
		{"ISA", otherExtension, refused},
		{"Arch", extension, refused},
		{"cpu", "arm64-v8a", android}, // a dash does not make it an extension
		{"cpu", "armeabi-v7a", refused},
		{"Arch", "mips64-el", refused},
		{"cpu", "4", ignored},
		{"container-image", "", taken},
		{"Container-image", "none", taken},
		{"container-image", "docker://registry.example.com/a/b@sha256:" + strings.Repeat("0", 64), refused},
		{"Container-Image", "oci:x", refused},
		{"dockerPrivileged", "true", refused},
		{"dockerPrivileged", "false", ignored},
		{"dockerNetwork", "off", taken},
		{"dockerNetwork", "standard", ignored},
		{"Pool", "default", ignored},
	} {
		b := newBench(t, compiles)
		action := b.action(func(a *repb.Action, _ *repb.Command) {
			a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: c.name, Value: c.value}}}
		})
		property := c.name + "=" + c.value
		_, err := b.Admit(t.Context(), &Task{Action: action})
		if c.want == refused {
			f := wantFault(t, property, err, FaultUnmet)
			expect.Text(t, f.Error(), property)
			if strings.Contains("osfamily os isa arch cpu", strings.ToLower(c.name)) && !strings.Contains(f.Error(), host) {
				t.Errorf("%s: got %v, want %s in it", property, f, host)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: got %v, want no error", property, err)
			continue
		}
		out := b.do(&Task{Action: action})
		reported := strings.Contains(out.Message, "ignored platform properties: "+property)
		listed := slices.Equal(executionOf(t, out).IgnoredProperties, []string{property})
		if want := c.want == ignored; reported != want || listed != want {
			t.Errorf("%s: got message %q, metadata %q, want it reported: %t", property, out.Message, executionOf(t, out).IgnoredProperties, want)
		}
		b.cfg.StrictProperties = true
		if _, err := b.Admit(t.Context(), &Task{Action: action}); (err != nil) != (c.want == ignored) {
			t.Errorf("%s with StrictProperties: got %v, want an error only if it is ignored otherwise", property, err)
		}
	}
}

// TestArchitecturesAreNoExtensions: each architecture of the lexicon is refused on all others, although some names have
// the prefix of extensions.
func TestArchitecturesAreNoExtensions(t *testing.T) {
	for name, own := range map[string]string{
		"arm-a32": "arm", "arm-a32-be": "armbe", "arm-a64": "arm64", "arm-a64-be": "arm64be", "arm-t32": "arm", "arm-t32-be": "armbe",
		"la64v100": "loong64", "power-isa-be": "ppc64", "power-isa-le": "ppc64le", "rv32g": "riscv32", "rv64g": "riscv64",
		"sparc-v9": "sparc64", "x86-32": "386", "x86-64": "amd64",
	} {
		for _, goarch := range []string{"386", "amd64", "arm", "arm64", "loong64", "ppc64", "ppc64le", "riscv64"} {
			if _, differs := hostProperty(Property{Name: "ISA", Value: name}, goarch); differs != (goarch != own) {
				t.Errorf("ISA=%s on %s: got refused: %t", name, goarch, differs)
			}
		}
	}
}

// TestStandardNetworkIsARequest: an action with dockerNetwork=standard gets the endpoints that the policy allows, and the
// property is not ignored.
func TestStandardNetworkIsARequest(t *testing.T) {
	var got []sandbox.Endpoint
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got = spec.Network.Allow
		return &sandbox.Result{}
	})
	b.cfg.StrictProperties = true
	b.cfg.Policy = must.Get(policy.Parse("p.yaml", []byte(
		"version: 1\nprofiles: {build: {network: {allow: [\"example.org:443\"]}}}\n")))(t)
	action := b.action(func(a *repb.Action, _ *repb.Command) {
		a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: "dockerNetwork", Value: "standard"}}}
	})
	out := b.do(&Task{Action: action})
	expect.Equal(t, fmt.Sprint(got), "[example.org:443]", "endpoints of the action")
	expect.That(t, out.Uncacheable && len(executionOf(t, out).IgnoredProperties) == 0, "got %+v, want no cached result and nothing ignored", out)
	if _, err := b.Admit(t.Context(), &Task{Action: action}); err != nil {
		t.Errorf("with StrictProperties: got %v, want no error", err)
	}
}

// executionOf returns Cloister's metadata of a result.
func executionOf(t *testing.T, out *Outcome) *cloisterpb.Execution {
	t.Helper()
	for _, a := range out.Result.GetExecutionMetadata().GetAuxiliaryMetadata() {
		var e cloisterpb.Execution
		if a.MessageIs(&e) {
			must.Succeed(t, a.UnmarshalTo(&e))
			return &e
		}
	}
	t.Fatal("the result has no Execution metadata")
	return nil
}

// TestIgnoredImagesAreReported: every result and one message for each mnemonic name the image, also with
// StrictProperties.
func TestIgnoredImagesAreReported(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.IgnoreImages, b.cfg.StrictProperties = true, true
	action := b.action(func(a *repb.Action, _ *repb.Command) {
		a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: "container-image", Value: "docker://a/b:1"}}}
	})
	const want = "ignored platform properties: container-image=docker://a/b:1; the action ran with the toolchain of this machine"
	for _, c := range []struct {
		mnemonic string
		told     bool
	}{{"CppCompile", true}, {"CppCompile", false}, {"CppLink", true}} {
		out := b.do(&Task{Action: action, Mnemonic: c.mnemonic, SkipCacheLookup: true})
		expect.That(t, strings.Contains(out.Message, want) == c.told,
			"%s: got message %q, want the image in it: %t", c.mnemonic, out.Message, c.told)
		expect.Slices(t, executionOf(t, out).IgnoredProperties, []string{"container-image=docker://a/b:1"}, "%s",
			c.mnemonic)
	}
}

// TestIgnoredImageIsListed: a result lists an ignored image even if more properties are ignored than it can list.
func TestIgnoredImageIsListed(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.IgnoreImages = true
	var pairs []string
	for i := range maxIgnoredProperties {
		pairs = append(pairs, fmt.Sprintf("Pool%d", i), "x")
	}
	pairs = append(pairs, "container-image", "docker://a", "container-image", "docker://b")
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform(pairs...) })
	listed := executionOf(t, b.do(&Task{Action: action})).IgnoredProperties
	expect.Equal(t, len(listed), maxIgnoredProperties, "number of listed properties")
	expect.That(t, slices.ContainsFunc(listed, func(p string) bool { return strings.HasPrefix(p, "container-image=") }),
		"got %q, want the image among them", listed)
}

// TestDefaultPropertiesAreChecked: default properties are checked like those of the action.
func TestDefaultPropertiesAreChecked(t *testing.T) {
	b := newBench(t, compiles)
	var err error
	b.cfg.Policy, err = policy.Parse("p.yaml", []byte("version: 1\ndefault_properties:\n  \"\": {container-image: docker://a}\n"))
	must.Succeed(t, err)
	_, err = b.Admit(t.Context(), &Task{Action: b.action(nil)})
	wantFault(t, "an image by default", err, FaultUnmet)
}

// TestDefaultImageIsNotIgnored: a worker of a fleet that runs no images refuses an action whose image the policy names,
// since no property of the worker vouches for its toolchain. The head cannot know that and admits the action.
func TestDefaultImageIsNotIgnored(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.Fleet = true
	b.cfg.Policy = must.Get(policy.Parse("p.yaml", []byte(
		"version: 1\ndefault_properties:\n  main: {container-image: \"docker://a/b:1\"}\n  none: {container-image: none}\n")))(t)
	own := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("Container-Image", "docker://c") })
	task := &Task{Action: b.action(nil), Instance: "main"}
	must.Get(b.Admit(t.Context(), task))(t)
	_, err := b.Execute(t.Context(), task, nil)
	expect.Text(t, wantFault(t, "a default image", err, FaultUnmet).Error(), "container-image=docker://a/b:1, and this worker runs no images: start it with --images")
	expect.Error(t, err, sandbox.ErrUnsupported, "another worker may run images")
	b.do(&Task{Action: own, Instance: "main"})
	b.do(&Task{Action: b.action(nil), Instance: "none"})
	b.do(&Task{Action: b.action(nil)})
}

// TestFleetMatchesProperties: a worker among others gets what its operator offers, so it refuses nothing for them.
func TestFleetMatchesProperties(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.Fleet = true
	action := b.action(func(a *repb.Action, _ *repb.Command) {
		a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{
			{Name: "container-image", Value: "docker://a"},
			{Name: "ISA", Value: "x"},
			{Name: "InputRootAbsolutePath", Value: "/w"},
		}}
	})
	expect.Equal(t, len(must.Get(b.Admit(t.Context(), &Task{Action: action}))(t).Demands), 3)
}
