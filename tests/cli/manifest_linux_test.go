// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// TestForeignResults checks that action show --manifest refuses the manifest of another action, and reports that
// results of foreign workers have none.
func TestForeignResults(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	s := must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", Toolchain: declaredToolchain,
	}))(t)
	defer s.Stop()
	g := plain(t, s.Addr)
	action := orPanic(g.put("", &repb.Action{
		CommandDigest:   orPanic(g.put("", &repb.Command{Arguments: []string{"/bin/true"}})),
		InputRootDigest: orPanic(g.put("", &repb.Directory{})),
	}))
	got := g.execute(&repb.ExecuteRequest{ActionDigest: action}, nil)
	must.Succeed(t, got.err)
	result := got.response.Result
	aux := result.ExecutionMetadata.AuxiliaryMetadata[0]
	var e cloisterpb.Execution
	must.Succeed(t, aux.UnmarshalTo(&e))
	e.StableHash = strings.Repeat("0", 64)
	must.Succeed(t, aux.MarshalFrom(&e))
	for _, c := range []struct {
		change func()
		code   int
		says   string
	}{
		{func() {}, 1, "stable hash"},
		{func() { result.ExecutionMetadata.AuxiliaryMetadata = nil }, 4, "names no manifest"},
	} {
		c.change()
		must.Get(repb.NewActionCacheClient(g).UpdateActionResult(g.ctx,
			&repb.UpdateActionResultRequest{ActionDigest: action, ActionResult: result}))(t)
		cmd := exec.CommandContext(t.Context(), built.Path(t),
			"action", "show", named(action), "--manifest", "--cas", "grpc://"+s.Addr)
		out, _ := cmd.CombinedOutput() // the exit code is checked below
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.says) {
			t.Errorf("got exit code %d and\n%s\nwant %d and %q", code, out, c.code, c.says)
		}
	}
}
