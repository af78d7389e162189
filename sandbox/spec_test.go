// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
)

// valid returns a valid Spec.
func valid() *sandbox.Spec {
	return &sandbox.Spec{
		Args: []string{"cc"}, Dir: "/build", Env: []string{"A=1", "B="},
		Inputs:    []sandbox.Input{{Target: "/usr", Content: "host", Source: "/usr"}, {Target: "/build/a", Source: "in/0"}},
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 1}},
		Workspace: "/proc/self/fd/3",
		Network:   sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{{Host: "example.org", Port: 443}}},
		Limits:    sandbox.DefaultLimits(),
	}
}

func TestValidateAccepts(t *testing.T) {
	expect.Error(t, valid().Validate(), nil)
}

func TestValidateRefuses(t *testing.T) {
	for name, change := range map[string]func(*sandbox.Spec){
		"the zero spec":                 func(s *sandbox.Spec) { *s = sandbox.Spec{} },
		"no program":                    func(s *sandbox.Spec) { s.Args = []string{""} },
		"NUL in an argument":            func(s *sandbox.Spec) { s.Args = []string{"a\x00"} },
		"text that is not UTF-8":        func(s *sandbox.Spec) { s.Args = []string{"\xff"} },
		"unsorted environment":          func(s *sandbox.Spec) { s.Env = []string{"B=", "A="} },
		"a variable twice":              func(s *sandbox.Spec) { s.Env = []string{"A=1", "A=2"} },
		"no equals sign":                func(s *sandbox.Spec) { s.Env = []string{"A"} },
		"relative directory":            func(s *sandbox.Spec) { s.Dir = "build" },
		"unclean directory":             func(s *sandbox.Spec) { s.Dir = "/build/../x" },
		"relative target":               func(s *sandbox.Spec) { s.Inputs[0].Target = "usr" },
		"the root as a target":          func(s *sandbox.Spec) { s.Inputs[0].Target = "/" },
		"unclean target":                func(s *sandbox.Spec) { s.Outputs[0].Target = "/build/" },
		"one target twice":              func(s *sandbox.Spec) { s.Temp[0].Target = "/usr" },
		"output outside":                func(s *sandbox.Spec) { s.Outputs[0].Source = "../out" },
		"output on the host":            func(s *sandbox.Spec) { s.Outputs[0].Source = "/out" },
		"the workspace as an output":    func(s *sandbox.Spec) { s.Outputs[0].Source = "." },
		"input outside":                 func(s *sandbox.Spec) { s.Inputs[1].Source = "../in" },
		"input in an output":            func(s *sandbox.Spec) { s.Inputs[1].Source = "out/x" },
		"output in an input":            func(s *sandbox.Spec) { s.Inputs[1].Source = "x"; s.Outputs[0].Source = "x/out" },
		"socket beside all directories": func(s *sandbox.Spec) { s.Sockets = []sandbox.Input{{Target: "/run/s", Source: "s"}} },
		"socket of the host":            func(s *sandbox.Spec) { s.Sockets = []sandbox.Input{{Target: "/tmp/s", Source: "/run/s"}} },
		"socket in an output":           func(s *sandbox.Spec) { s.Sockets = []sandbox.Input{{Target: "/tmp/s", Source: "out/s"}} },
		"socket at another target":      func(s *sandbox.Spec) { s.Sockets = []sandbox.Input{{Target: "/build/a", Source: "s"}} },
		"no workspace":                  func(s *sandbox.Spec) { s.Workspace = "" },
		"temp without a size":           func(s *sandbox.Spec) { s.Temp[0].Bytes = 0 },
		"a limit by omission":           func(s *sandbox.Spec) { s.Limits.Processes = 0 },
		"a negative limit":              func(s *sandbox.Spec) { s.Limits.CPU = -2 },
		"listening on nothing":          func(s *sandbox.Spec) { s.Network = sandbox.Network{Listen: true} },
		"an endpoint without a way":     func(s *sandbox.Spec) { s.Network.Loopback = false },
		"an endpoint without a port":    func(s *sandbox.Spec) { s.Network.Allow[0].Port = 0 },
		"an endpoint that is a URL":     func(s *sandbox.Spec) { s.Network.Allow[0].Host = "https://example.org" },
		"an endpoint on loopback":       func(s *sandbox.Spec) { s.Network.Allow[0].Host = "127.0.0.1" },
		"an endpoint without a router":  func(s *sandbox.Spec) { s.Network.Allow[0].Host = "169.254.169.254" },
		"an endpoint twice":             func(s *sandbox.Spec) { s.Network.Allow = append(s.Network.Allow, s.Network.Allow[0]) },
		"a kill without a monitor":      func(s *sandbox.Spec) { s.Audit, s.Kill = sandbox.AuditOff, []sandbox.EventKind{sandbox.EventWrite} },
		"a kill for what is permitted":  func(s *sandbox.Spec) { s.Kill = []sandbox.EventKind{sandbox.EventAllowed} },
		"an unknown audit":              func(s *sandbox.Spec) { s.Audit = "some" },
	} {
		s := valid()
		change(s)
		expect.Error(t, s.Validate(), sandbox.ErrSpec, "%s", name)
	}
}

func TestText(t *testing.T) {
	s := valid()
	s.Audit, s.Kill = sandbox.AuditFull, []sandbox.EventKind{sandbox.EventWrite}
	const want = `cloister spec 1
arg "cc"
dir "/build"
env "A=1"
env "B="
input "/usr" "host"
input "/build/a" ""
output "/build"
temp "/tmp" 1
loopback
allow example.org:443
limit "memory" 4294967296
limit "CPU time" 3600000000000
limit "processes" 128
limit "open files" 4096
limit "output bytes" 17179869184
limit "output files" 1000000
audit full
kill write
timeout 0
grace 0
`
	expect.Equal(t, s.Text(), want)
	// Later limits have a line only if they are set, so that other texts and hashes are those of earlier versions.
	slow := valid()
	slow.Limits.MilliCPUs, slow.Limits.DiskRate = 1500, 4096
	if got := slow.Text(); !strings.Contains(got, " 1000000\nlimit \"processors\" 1500\nlimit \"disk rate\" 4096\n") {
		t.Errorf("got:\n%s", got)
	}
	// Text escapes control sequences and everything beyond ASCII.
	odd := valid()
	odd.Args = []string{"cc", "\x1b[2J \u00e9 \u202e"}
	if got := odd.Text(); !strings.Contains(got, `arg "\x1b[2J \u00e9 \u202e"`) {
		t.Errorf("got:\n%s", got)
	}
	other := valid()
	other.Audit, other.Kill = s.Audit, s.Kill
	other.Workspace, other.Inputs[0].Source, other.Inputs[1].Source = "/proc/self/fd/9", "/other/usr", "in/7"
	expect.That(t, s.Hash() == other.Hash(), "two hosts with the same permissions have different hashes")
	other.Network.Listen = true
	expect.That(t, s.Hash() != other.Hash(), "an additional permission does not change the hash")
}

func TestNilSpecIsInvalid(t *testing.T) {
	expect.Error(t, (*sandbox.Spec)(nil).Validate(), sandbox.ErrSpec)
}

func TestCovers(t *testing.T) {
	s := valid()
	s.Kill = []sandbox.EventKind{sandbox.EventConnect}
	s.Lower = []sandbox.Lower{{Target: "/build"}}
	s.Sockets = []sandbox.Input{{Target: "/run/socket"}}
	s.Root, s.Superuser = &sandbox.Root{}, true
	full := sandbox.Features{
		Limits: sandbox.AllLimits, Audits: []sandbox.Audit{sandbox.AuditViolations}, Endpoints: true, ListenControl: true, Kill: true,
		Lower: true, Sockets: true, Root: true, Superuser: true,
	}
	expect.Error(t, full.Covers(s), nil)
	weaknesses := map[string]func(*sandbox.Features){
		"network":          func(f *sandbox.Features) { f.Endpoints = false },
		"audit level":      func(f *sandbox.Features) { f.Audits = []sandbox.Audit{sandbox.AuditOff} },
		"overlay":          func(f *sandbox.Features) { f.Lower = false },
		"/run/socket":      func(f *sandbox.Features) { f.Sockets = false },
		"root file system": func(f *sandbox.Features) { f.Root = false },
		"user 0":           func(f *sandbox.Features) { f.Superuser = false },
		// Zero Features do not mean that the host lacks something.
		"Backend.Probe": func(f *sandbox.Features) { *f = sandbox.Features{} },
		"connect":       func(f *sandbox.Features) { f.Kill = false },
		"/home; ports":  func(f *sandbox.Features) { f.Backend, f.Gaps = "other", []string{"/home", "ports"} },
		"listening":     func(f *sandbox.Features) { f.ListenControl = false },
	}
	for i, l := range sandbox.AllLimits {
		s.Limits.Set(l, 1)
		weaknesses[string(l)] = func(f *sandbox.Features) { f.Limits = slices.Delete(slices.Clone(f.Limits), i, i+1) }
	}
	for name, weaken := range weaknesses {
		f := full
		weaken(&f)
		if err := f.Covers(s); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: got %v, want ErrUnsupported that names it", name, err)
		}
	}
	accepted, gaps := valid(), full
	accepted.Accept, gaps.Backend, gaps.Gaps = "other", "other", []string{"/home"}
	if err := gaps.Covers(accepted); err != nil || accepted.Text() == valid().Text() {
		t.Errorf("an accepted gap: got %v and the text\n%s", err, accepted.Text())
	}
	output, root := valid(), full
	output.Outputs[0].Target, root.Root = "/", false
	if err := root.Covers(output); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "root file system") {
		t.Errorf("an output as the root: got %v, want ErrUnsupported", err)
	}
	s.Limits.Memory = sandbox.Unlimited
	few := full
	few.Limits = few.Limits[1:]
	expect.Error(t, few.Covers(s), nil, "an unlimited limit needs no enforcement")
}

// A Spec permits what it lists and nothing else. Validate finds contradictions.
func ExampleSpec_Validate() {
	s := &sandbox.Spec{
		Args:   []string{"/bin/true"},
		Dir:    "/",
		Limits: sandbox.DefaultLimits(),
		Inputs: []sandbox.Input{{Target: "/bin", Content: "host", Source: "bin"}},
	}
	fmt.Println(s.Validate())
	s.Inputs[0].Source = "/usr/bin"
	fmt.Println(s.Validate())
	// Output:
	// invalid sandbox spec: source "bin" of input /bin is neither a path of the host nor inside the workspace
	// <nil>
}
