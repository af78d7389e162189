// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// relay forwards a port of an action's loopback interface to its socket: Debian's Bazel has no library for Unix
// sockets.
const relay = `import socket, sys, threading

def copy(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_WR)

l = socket.create_server(("127.0.0.1", 8980))
print("listening", flush=True)
while True:
    c, _ = l.accept()
    s = socket.socket(socket.AF_UNIX)
    s.connect(sys.argv[1])
    for a, b in ((c, s), (s, c)):
        threading.Thread(target=copy, args=(a, b), daemon=True).start()
`

// inner is a script that builds a workspace with Bazel in an action. Its arguments are the host's bazelrc and the
// output.
const inner = `set -e
export HOME=/tmp/home
mkdir -p $HOME /tmp/inner
python3 nested/relay.py apis.sock > /tmp/listening &
until grep -q listening /tmp/listening; do sleep 0.05; done
rc=$PWD/$1 out=$PWD/$2
cd /tmp/inner
touch WORKSPACE
echo 'genrule(name = "hello", outs = ["hello.txt"], cmd = "echo built by $$PPID in an action of an action > $@")' > BUILD
bazel --bazelrc=$rc --nosystem_rc --nohome_rc --host_jvm_args=-XX:TieredStopAtLevel=1 --host_jvm_args=-XX:+UseSerialGC \
	--output_user_root=/tmp/user --output_base=/tmp/base build --remote_executor=grpc://127.0.0.1:8980 \
	--spawn_strategy=remote --remote_local_fallback=false --symlink_prefix=/ --color=no --curses=no //:hello > /tmp/log 2>&1 || { cat /tmp/log; exit 1; }
grep -h " remote" /tmp/log > $out
cat /tmp/base/execroot/*/bazel-out/*/bin/hello.txt >> $out
`

// TestBazelInAnAction: an action builds with Bazel on the server that executes it, which has one slot.
func TestBazelInAnAction(t *testing.T) {
	r := newRig(t, nil)
	must.Succeed(t, r.server.Stop())
	rules := filepath.Join(filepath.Dir(r.Workspace), "policy.yaml")
	must.Succeed(t, os.WriteFile(rules, []byte("version: 1\nprofiles: {build: {processes: 1000, remote_apis: {allow: true}}}\n"), 0o644))
	r.config.Args = append(r.config.Args, "--jobs=1", "--policy="+rules)
	r.serve(t)
	rc, err := os.ReadFile("/etc/bazel/bazelrc") // Debian's, without which its Bazel does not find its own files
	if !errors.Is(err, fs.ErrNotExist) {
		must.Succeed(t, err)
	}
	dir := filepath.Join(r.Workspace, "nested")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	for name, text := range map[string]string{
		"relay.py": relay, "inner.sh": inner, "bazelrc": string(rc),
		"BUILD": `genrule(
    name = "nested",
    srcs = ["bazelrc", "inner.sh", "relay.py"],
    outs = ["out"],
    cmd = "bash nested/inner.sh nested/bazelrc $@",
    exec_properties = {"remoteApisSocketPath": "apis.sock"},
)
`,
	} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	build := r.bazel(t, "build", "//nested")
	must.Be(t, build.ExitCode == 0, "bazel: exit %d, want 0", build.ExitCode)
	made := must.Get(filepath.Glob(filepath.Join(r.Root, "base/execroot/*/bazel-out/*/bin/nested/out")))(t)
	must.Be(t, len(made) == 1, "got the outputs %q, want one", made)
	text := string(must.Get(os.ReadFile(made[0]))(t))
	expect.That(t, strings.Contains(text, "1 remote") && strings.Contains(text, "in an action of an action"), "got %q, want an action that ran remotely", text)
}
