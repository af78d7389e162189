// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

// valid is a spec that permits something.
func valid() *sandbox.Spec {
	return &sandbox.Spec{
		Args: []string{"cc"}, Dir: "/build", Env: []string{"A=1", "B="},
		Inputs:    []sandbox.Input{{Target: "/usr", Content: "host", Source: "/usr"}, {Target: "/build/a", Source: "in/0"}},
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 1}},
		Workspace: "/proc/self/fd/3",
	}
}

func TestValidateAccepts(t *testing.T) {
	if err := valid().Validate(); err != nil {
		t.Error(err)
	}
}

func TestValidateRefuses(t *testing.T) {
	for name, change := range map[string]func(*sandbox.Spec){
		"the zero spec":              func(s *sandbox.Spec) { *s = sandbox.Spec{} },
		"no program":                 func(s *sandbox.Spec) { s.Args = []string{""} },
		"NUL in an argument":         func(s *sandbox.Spec) { s.Args = []string{"a\x00"} },
		"text that is not UTF-8":     func(s *sandbox.Spec) { s.Args = []string{"\xff"} },
		"unsorted environment":       func(s *sandbox.Spec) { s.Env = []string{"B=", "A="} },
		"a variable twice":           func(s *sandbox.Spec) { s.Env = []string{"A=1", "A=2"} },
		"no equals sign":             func(s *sandbox.Spec) { s.Env = []string{"A"} },
		"relative directory":         func(s *sandbox.Spec) { s.Dir = "build" },
		"unclean directory":          func(s *sandbox.Spec) { s.Dir = "/build/../x" },
		"relative target":            func(s *sandbox.Spec) { s.Inputs[0].Target = "usr" },
		"the root as a target":       func(s *sandbox.Spec) { s.Inputs[0].Target = "/" },
		"unclean target":             func(s *sandbox.Spec) { s.Outputs[0].Target = "/build/" },
		"one target twice":           func(s *sandbox.Spec) { s.Temp[0].Target = "/usr" },
		"output outside":             func(s *sandbox.Spec) { s.Outputs[0].Source = "../out" },
		"output on the host":         func(s *sandbox.Spec) { s.Outputs[0].Source = "/out" },
		"the workspace as an output": func(s *sandbox.Spec) { s.Outputs[0].Source = "." },
		"input outside":              func(s *sandbox.Spec) { s.Inputs[1].Source = "../in" },
		"input in an output":         func(s *sandbox.Spec) { s.Inputs[1].Source = "out/x" },
		"output in an input":         func(s *sandbox.Spec) { s.Inputs[1].Source = "x"; s.Outputs[0].Source = "x/out" },
		"no workspace":               func(s *sandbox.Spec) { s.Workspace = "" },
		"temp without a size":        func(s *sandbox.Spec) { s.Temp[0].Bytes = 0 },
	} {
		s := valid()
		change(s)
		if err := s.Validate(); !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
}

// A Spec permits what it lists and nothing else; Validate says what contradicts itself in it.
func ExampleSpec_Validate() {
	s := &sandbox.Spec{
		Args:   []string{"/bin/true"},
		Dir:    "/",
		Inputs: []sandbox.Input{{Target: "/bin", Content: "host", Source: "bin"}},
	}
	fmt.Println(s.Validate())
	s.Inputs[0].Source = "/usr/bin"
	fmt.Println(s.Validate())
	// Output:
	// invalid sandbox spec: input /bin has the source "bin", which is neither a path of the host nor inside the workspace
	// <nil>
}
