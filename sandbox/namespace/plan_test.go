// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestPlan compares a plan with testdata/plan.txt.
func TestPlan(t *testing.T) {
	spec := &sandbox.Spec{
		Args: []string{"cc", "-c", "a.c"}, Dir: "/build", Env: []string{"PATH=/usr/bin"},
		Inputs: []sandbox.Input{
			{Target: "/build/src/big.a", Content: "x", Source: "/store/big"},
			{Target: "/usr", Content: "host", Source: "/usr"},
			{Target: "/bin", Content: "host", Source: "/usr/bin"},
			{Target: "/build/src", Content: "x", Source: "in/0"},
		},
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}},
		Workspace: "/proc/self/fd/9",
		Limits:    sandbox.DefaultLimits(),
		Network: sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{
			{Host: "10.0.0.1", Port: 80}, {Host: "example.org", Port: 443}, {Host: "example.org", Port: 80},
		}},
	}
	must.Succeed(t, spec.Validate())
	var b strings.Builder
	p, _ := plan(spec, &planOptions{landlock: 7})
	for _, op := range p.Ops {
		fmt.Fprintf(&b, "%s %s %q %d %d\n", op.Kind, op.Target, op.Source, op.Bytes, op.Attrs)
	}
	p.Ops = nil
	rest := must.Get(json.MarshalIndent(p, "", "\t"))(t)
	fmt.Fprintf(&b, "%s\n", rest)
	const golden = "testdata/plan.txt"
	if *update {
		must.Succeed(t, os.MkdirAll("testdata", 0o755))
		must.Succeed(t, os.WriteFile(golden, []byte(b.String()), 0o644))
	}
	want := must.Get(os.ReadFile(golden))(t)
	if d := cmp.Diff(string(want), b.String()); d != "" {
		t.Errorf("the plan differs from %s (-want +got):\n%s", golden, d)
	}
}
