// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// A project is a directory in which a client builds.
type project struct {
	*testing.T
	dir string
	env []string
	// program is the client.
	program string
}

// installing is held while a client is installed, which tests may share.
var installing sync.Mutex

// newProject installs a client and makes a project with these files, a git repository.
func newProject(t *testing.T, c peers.Client, files map[string]string) *project {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	installing.Lock()
	program, err := c.Install(ctx)
	installing.Unlock()
	if err != nil {
		sandboxtest.Unavailable(t, "clients", err)
	}
	sandboxtest.Tool(t, "git")
	home := t.TempDir()
	p := &project{T: t, dir: t.TempDir(), program: program}
	p.env = []string{"HOME=" + home, "PATH=" + filepath.Dir(program) + ":" + os.Getenv("PATH"), "LANG=C.UTF-8"}
	write(t, p.dir, files)
	p.must("git", "init", "--quiet")
	p.must("git", "add", ".")
	p.must("git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--allow-empty", "-m", "files")
	return p
}

// must runs a command in the project that must succeed and print texts, and returns its output.
func (p *project) must(program string, args ...string) string {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = p.dir, p.env
	out, err := cmd.CombinedOutput()
	must.Be(p, err == nil, "%s %v: %v\n%s", filepath.Base(program), args, err, out)
	return string(out)
}

// want checks that output contains a text.
func (p *project) want(output, text string) {
	p.Helper()
	expect.Text(p, output, text)
}

// executions returns the number of actions of an instance that a server has executed.
func executions(t *testing.T, addr, instance string) int {
	t.Helper()
	program := must.Get(cloister())(t)
	out, err := exec.Command(program, "action", "ls", "--server", "grpc://"+addr, "--instance", instance, "--json").Output()
	must.Be(t, err == nil, "cloister action ls: %v", err)
	var actions []json.RawMessage
	if err := json.Unmarshal(out, &actions); err != nil {
		t.Fatalf("cloister action ls: %v in %s", err, out)
	}
	return len(actions)
}

// TestPants generates files with an action that makes its own output directory and writes beside its inputs, and runs a
// test that does the same, remotely and then from the cache.
func TestPants(t *testing.T) {
	t.Parallel()
	addr := listen(t)
	p := newProject(t, peers.Pants, map[string]string{
		"pants.toml": fmt.Sprintf(`[GLOBAL]
pants_version = "2.17.1"
backend_packages = ["pants.backend.shell", "pants.backend.experimental.adhoc"]
pantsd = false
local_cache = false
remote_execution = true
remote_cache_read = true
remote_cache_write = true
remote_execution_address = "grpc://%[1]s"
remote_store_address = "grpc://%[1]s"
remote_instance_name = "main"

[anonymous-telemetry]
enabled = false
`, addr),
		"src/BUILD": `files(name="data", sources=["*.txt"])

shell_command(
    name="gen",
    command="/usr/bin/mkdir out && /usr/bin/cat in.txt > out/copy.txt && /usr/bin/touch beside.txt",
    tools=[],
    execution_dependencies=[":data"],
    output_directories=["out"],
    workdir=".",
)

experimental_test_shell_command(
    name="test",
    command="/usr/bin/touch scratch.txt && /usr/bin/test -s in.txt",
    tools=[],
    execution_dependencies=[":data"],
    workdir=".",
)
`,
		"src/in.txt": "an input\n",
	})
	p.must(p.program, "export-codegen", "src:gen")
	expect.Equal(t, string(must.Get(os.ReadFile(filepath.Join(p.dir, "dist/codegen/src/out/copy.txt")))(t)),
		"an input\n", "generated file")
	p.want(p.must(p.program, "test", "src:test"), "src:test succeeded in")
	p.want(p.must(p.program, "test", "src:test"), "(cached remotely)")
}

// newBuildStream returns a project of BuildStream with these files and a server for its instance bst. It executes
// remotely with user.conf, and also uses the server's artifact and source caches with caches.conf. The program that would
// sandbox its commands locally always fails.
func newBuildStream(t *testing.T, files map[string]string) (p *project, addr string) {
	t.Helper()
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, filepath.Dir(policy), map[string]string{"policy.yaml": `version: 1
profiles:
  elements: {superuser: true}
rules:
  - {name: elements, when: {instance: bst}, profile: elements}
default_properties:
  bst: {chroot-path: /, dockerRunAsRoot: "true"}
`})
	addr = listen(t, "--policy", policy)
	service := fmt.Sprintf("{url: 'grpc://%s', instance-name: bst}", addr)
	execution := fmt.Sprintf(`remote-execution:
  execution-service: %[1]s
  storage-service: %[1]s
  action-cache-service: %[1]s
`, service)
	maps.Copy(files, map[string]string{
		"project.conf":      "name: demo\nmin-version: 2.0\nelement-path: elements\n",
		"elements/base.bst": "kind: import\nsources:\n- {kind: local, path: files/root}\n",
		"bin/bwrap":         "#!/bin/sh\nexit 1\n",
		"user.conf":         execution,
		"caches.conf": execution + fmt.Sprintf(`artifacts: {servers: [%[1]s]}
source-caches: {servers: [%[1]s]}
`, strings.Replace(service, "}", ", push: true}", 1)),
	})
	p = newProject(t, peers.BuildStream, files)
	p.must("chmod", "+x", "bin/bwrap")
	p.env[1] = strings.Replace(p.env[1], "PATH=", "PATH="+filepath.Join(p.dir, "bin")+":", 1)
	return p, addr
}

// TestBuildStream builds an element on a root file system, remotely and then from the action cache, and checks out its
// artifact. It then pushes artifacts and sources to the same server, and pulls them.
func TestBuildStream(t *testing.T) {
	t.Parallel()
	p, addr := newBuildStream(t, map[string]string{
		"elements/hello.bst": `kind: manual
depends:
- {filename: base.bst, type: build}
sources:
- {kind: local, path: files/src}
variables: {strip-binaries: ""}
config:
  build-commands:
  - mkdir out && cat in.txt > out/copy.txt && touch beside.txt /beside.txt
  install-commands:
  - mkdir -p "%{install-root}/share" && cp out/copy.txt "%{install-root}/share/copy.txt"
`,
		"files/src/in.txt":   "an input\n",
		"files/root/etc/own": "",
	})
	root := must.Get(os.OpenRoot(filepath.Join(p.dir, "files/root")))(t)
	defer root.Close()
	sandboxtest.CopyPrograms(t, root, "sh", "mkdir", "cat", "touch", "cp")

	for _, state := range []string{"empty", "filled by the first build"} {
		p.must(p.program, "--config", "user.conf", "--no-colors", "build", "hello.bst")
		expect.Equal(t, executions(t, addr, "bst"), 1, "with an action cache that is %s: executions in total", state)
		p.must(p.program, "--config", "user.conf", "artifact", "checkout", "hello.bst", "--directory", "out")
		if b, err := os.ReadFile(filepath.Join(p.dir, "out/share/copy.txt")); err != nil || string(b) != "an input\n" {
			t.Errorf("with an action cache that is %s: got artifact %q, %v", state, b, err)
		}
		p.must("sh", "-c", `rm -r out "$HOME"`)
	}
	bst := func(args ...string) string {
		t.Helper()
		out := p.must(p.program, append([]string{"--config", "caches.conf", "--no-colors"}, args...)...)
		p.must("sh", "-c", `rm -r "$HOME"`)
		return out
	}
	out := bst("build", "hello.bst")
	p.want(out, "Pushed artifact")
	p.want(out, "Pushed source")
	p.want(bst("artifact", "pull", "--deps", "all", "hello.bst"), "Pulled artifact")
	p.want(bst("source", "fetch", "--deps", "all", "hello.bst"), "Pulled source")
}

// debian lists packages that, with their dependencies, form a root file system with a compiler.
var debian = []string{"dash", "coreutils", "gcc", "libc6-dev", "perl", "python3", "tzdata"}

// TestBuildStreamOnDebian compiles a program on a root of 15,000 files, remotely and then from the action cache. The
// files come from packages of this host and include copies of headers.
func TestBuildStreamOnDebian(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"apt-cache", "dpkg-query", "gcc"} {
		sandboxtest.Tool(t, program)
	}
	p, addr := newBuildStream(t, map[string]string{
		"elements/hello.bst": `kind: manual
depends:
- {filename: base.bst, type: build}
sources:
- {kind: local, path: files/src}
variables: {strip-binaries: ""}
config:
  build-commands: [gcc -o hello hello.c]
  install-commands: ['mkdir -p "%{install-root}/bin" && cp hello "%{install-root}/bin/"']
`,
		"files/src/hello.c":  "#include <stdio.h>\nint main(void) { return puts(\"hello\") < 0; }\n",
		"files/root/etc/own": "",
	})
	p.must("sh", append([]string{"-ec", `
		for d in bin sbin lib lib64; do mkdir -p files/root/usr/$d; ln -s usr/$d files/root/$d; done
		apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
			--no-enhances "$@" | grep '^[a-z]' | sort -u | xargs dpkg-query -L 2> /dev/null | sort -u |
			while read -r f; do if [ -f "$f" ]; then echo "$f"; fi; done > list
		tar -c -h -T list 2> /dev/null | tar -x -C files/root
		for i in 1 2 3 4 5 6; do cp -r files/root/usr/include files/root/usr/share/include$i; done
		n=$(find files/root -type f | wc -l); test $n -ge 15000 || { echo "only $n files"; exit 1; }`, "sh"}, debian...)...)
	for _, state := range []string{"empty", "filled by the first build"} {
		p.must(p.program, "--config", "user.conf", "--no-colors", "build", "hello.bst")
		expect.Equal(t, executions(t, addr, "bst"), 1, "with an action cache that is %s: executions in total", state)
		p.must(p.program, "--config", "user.conf", "artifact", "checkout", "hello.bst", "--directory", "out")
		expect.Equal(t, p.must(filepath.Join(p.dir, "out/bin/hello")), "hello\n",
			"with an action cache that is %s: output of the program", state)
		p.must("sh", "-c", `rm -r out "$HOME"`)
	}
}

// TestMoon stores the outputs of a task in the cache, and restores them in a clean checkout.
func TestMoon(t *testing.T) {
	t.Parallel()
	addr := listen(t)
	p := newProject(t, peers.Moon, map[string]string{
		".moon/workspace.yml": "projects: ['app']\nremote:\n  host: 'grpc://" + addr + "'\n",
		"app/moon.yml": `tasks:
  build:
    command: 'sh -c "mkdir out && date +%s%N > out/made"'
    inputs: ['in.txt']
    outputs: ['out']
`,
		"app/in.txt": "an input\n",
	})
	p.env = append(p.env, "MOON_TOOLCHAIN_FORCE_GLOBALS=true")
	made := func() string {
		b, err := os.ReadFile(filepath.Join(p.dir, "app/out/made"))
		expect.Error(t, err, nil)
		return string(b)
	}
	p.must(p.program, "run", "app:build")
	first := made()
	p.must("rm", "-r", "app/out", ".moon/cache")
	p.want(p.must(p.program, "run", "app:build"), "cached from remote")
	expect.Equal(t, made(), first, "restored output")
}

// TestOldBazel tests a part of the examples with the oldest version that is published in a package.
func TestOldBazel(t *testing.T) {
	t.Parallel()
	addr := listen(t)
	p := newProject(t, peers.OldBazel, nil)
	top := must.Get(filepath.Abs("../.."))(t)
	output := "--output_user_root=" + filepath.Join(p.dir, "output")
	p.dir = top
	t.Cleanup(func() {
		cmd := exec.Command(p.program, output, "shutdown")
		cmd.Dir, cmd.Env = p.dir, p.env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("bazel shutdown: %v\n%s", err, out)
		}
	})
	out := p.must(p.program, output, "test", "--symlink_prefix=/", "--remote_executor=grpc://"+addr, "--remote_instance_name=main",
		"//examples/geometry/...")
	p.want(out, "5 out of 5 tests: 5 tests pass")
	if n := executions(t, addr, "main"); n < 20 {
		t.Errorf("got %d executed actions, want at least 20", n)
	}
}
