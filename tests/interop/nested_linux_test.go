// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRemoteToolInAnAction: an action executes another with remotetool, on the server that executes it, which has one
// slot.
func TestRemoteToolInAnAction(t *testing.T) {
	program, err := programs[peers.RemoteTool.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	rules := filepath.Join(t.TempDir(), "policy.yaml")
	must.Succeed(t, os.WriteFile(rules, []byte("version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n"), 0o644))
	r := &tool{t, program, listen(t, "--jobs=1", "--policy", rules), t.TempDir()}
	root := t.TempDir()
	write(t, root, map[string]string{
		"ac.textproto": "timeout { seconds: 60 }\n",
		"cmd.textproto": `arguments: "/bin/sh" arguments: "inner.sh" output_files: "out"
			environment_variables { name: "PATH" value: "/usr/bin:/bin" }
			platform { properties { name: "remoteApisSocketPath" value: "apis.sock" } }`,
		"input/inner.sh": `export HOME=/tmp
			./remotetool -service unix:apis.sock -service_no_security -instance main -operation execute_action \
				-action_root inner -path /tmp/made > log 2>&1 || { cat log; exit 1; }
			cat /tmp/made/made > out`,
		"input/inner/ac.textproto":  "timeout { seconds: 20 }\n",
		"input/inner/cmd.textproto": `arguments: "/bin/cp" arguments: "a.txt" arguments: "made" output_files: "made"`,
		"input/inner/input/a.txt":   "from the inner action\n",
	})
	copied := must.Get(os.ReadFile(program))(t)
	must.Succeed(t, os.WriteFile(filepath.Join(root, "input/remotetool"), copied, 0o755))
	r.must("execute_action", []string{"-action_root", root, "-path", filepath.Join(r.home, "made")}, "Number of Output Files: 1")
	r.holds(filepath.Join(r.home, "made/out"), "from the inner action\n")
}
