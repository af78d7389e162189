// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// A tool is remotetool and its server.
type tool struct {
	*testing.T
	program, addr, home string
}

// run runs an operation and returns its output, and whether it succeeded.
func (t *tool) run(operation string, args ...string) (string, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.program, append([]string{
		"-service", t.addr, "-service_no_security", "-instance", "main", "-alsologtostderr", "-operation", operation,
	}, args...)...)
	cmd.Env = []string{"HOME=" + t.home, "TMPDIR=" + t.home, "PATH=/usr/bin:/bin"}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	must.Be(t, ctx.Err() == nil, "remotetool %s %v did not end:\n%s", operation, args, &out)
	return out.String(), err == nil
}

// must runs an operation that must succeed and print texts.
func (t *tool) must(operation string, args []string, texts ...string) string {
	t.Helper()
	out, ok := t.run(operation, args...)
	for _, text := range texts {
		ok = ok && strings.Contains(out, text)
	}
	must.Be(t, ok, "remotetool %s %v failed or did not print %q:\n%s", operation, args, texts, out)
	return out
}

// write writes files below dir.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o644))
	}
}

// holds checks the content of a file.
func (t *tool) holds(path, want string) {
	t.Helper()
	expect.Equal(t, string(must.Get(os.ReadFile(path))(t)), want, "%s", path)
}

// action writes the files that execute_action reads: an action whose script makes out and dir/made.
func (t *tool) action(script string) (root string) {
	t.Helper()
	root = t.TempDir()
	write(t, root, map[string]string{
		"ac.textproto": "timeout { seconds: 20 }\n",
		"cmd.textproto": `arguments: "/bin/sh" arguments: "-c" arguments: "` + script + `" output_files: "out" output_directories: "dir"
			platform { properties { name: "container-image" value: "docker://any" } }`, // required by download_action
		"input/a.txt":         "an input\n",
		"input/sub/deep/more": strings.Repeat("more\n", 30_000),
	})
	return root
}

var digestLine = regexp.MustCompile(`Action digest: ([0-9a-f]{64}/[0-9]+)`)

func TestRemoteToolWorksWithServe(t *testing.T) {
	program, err := programs[peers.RemoteTool.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	r := &tool{t, program, listen(t, "--images=ignore"), t.TempDir()}

	root := r.action("cat a.txt sub/deep/more > out; mkdir -p dir; cp a.txt dir/made; echo text")
	input := must.Get(os.OpenRoot(filepath.Join(root, "input")))(t)
	defer input.Close()
	want := must.Get(tree.Ingest(t.Context(), castest.NewMemory(), cas.SHA256, input))(t)
	r.must("upload_dir", []string{"-path", filepath.Join(root, "input")}, want.String())
	down := filepath.Join(r.home, "down")
	r.must("download_dir", []string{"-digest", want.String(), "-path", down})
	r.holds(filepath.Join(down, "a.txt"), "an input\n")
	r.holds(filepath.Join(down, "sub/deep/more"), strings.Repeat("more\n", 30_000))

	out := r.must("execute_action", []string{"-action_root", root, "-path", filepath.Join(r.home, "made")}, "Number of Output Files: 1", "Number of Output Directories: 1", "text")
	r.holds(filepath.Join(r.home, "made/dir/made"), "an input\n")
	found := digestLine.FindStringSubmatch(out)
	must.Be(t, found != nil, "execute_action printed no action digest:\n%s", out)
	action := found[1]
	r.must("show_action", []string{"-digest", action}, "/bin/sh", "out", "dir")
	result := filepath.Join(r.home, "result")
	r.must("download_action_result", []string{"-digest", action, "-path", result})
	r.holds(filepath.Join(result, "out"), "an input\n"+strings.Repeat("more\n", 30_000))
	r.holds(filepath.Join(result, "dir/made"), "an input\n")
	again := filepath.Join(r.home, "again")
	r.must("download_action", []string{"-digest", action, "-path", again})
	r.holds(filepath.Join(again, "input/a.txt"), "an input\n")
	r.must("execute_action", []string{"-digest", action, "-path", filepath.Join(r.home, "made")}, action)

	blob := filepath.Join(r.home, "blob")
	write(t, r.home, map[string]string{"blob": strings.Repeat("a blob\n", 1_000_000)})
	r.must("upload_blob", []string{"-path", blob})
	name := cas.SHA256.Sum([]byte(strings.Repeat("a blob\n", 1_000_000))).String()
	r.must("download_blob", []string{"-digest", name, "-path", filepath.Join(r.home, "blob2")})
	r.holds(filepath.Join(r.home, "blob2"), strings.Repeat("a blob\n", 1_000_000))

	r.must("check_determinism", []string{"-action_root", root, "-exec_attempts", "3"})
	differs := r.action("date +%N > out; mkdir -p dir")
	if out, ok := r.run("check_determinism", "-action_root", differs, "-exec_attempts", "3"); ok || !strings.Contains(out, "not deterministic") {
		t.Errorf("check_determinism of an action that writes the time succeeded:\n%s", out)
	}
}
