// SPDX-License-Identifier: Apache-2.0

package runner_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/runner"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A fixture is a runner with its build directory.
type fixture struct {
	dir     string
	backend *namespace.Backend
	config  runner.Config
	runner  *runner.Runner
	n       int
}

// newFixture returns a runner with a policy, or the default one for "".
func newFixture(t testing.TB, rules string) *fixture {
	t.Helper()
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
	t.Cleanup(func() { backend.Close() })
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	toolchain := must.Get(sandbox.HostToolchain())(t)
	c := runner.Config{BuildDir: dir, Backend: backend, Features: features, Toolchain: toolchain, Jobs: 4, Log: slog.New(slog.DiscardHandler)}
	if rules != "" {
		c.Policy = must.Get(policy.Parse("policy.yaml", []byte(rules)))(t)
	}
	return &fixture{dir: dir, backend: backend, config: c, runner: must.Get(runner.New(c))(t)}
}

// action creates the directory of an action as bb_worker does, and returns it with the request to run a script. A file
// name that ends in "/" is a directory, and content that begins with "->" a symlink.
func (f *fixture) action(t testing.TB, files map[string]string, script string) (string, *runnerpb.RunRequest) {
	t.Helper()
	f.n++
	name := fmt.Sprintf("a%d", f.n)
	dir := filepath.Join(f.dir, name)
	for _, d := range []string{"root", "tmp", "logs"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(dir, d), 0o777))
	}
	for file, text := range files {
		p := filepath.Join(dir, "root", file)
		if strings.HasSuffix(file, "/") {
			must.Succeed(t, os.MkdirAll(p, 0o777))
			continue
		}
		err := os.MkdirAll(filepath.Dir(p), 0o777)
		if to, ok := strings.CutPrefix(text, "->"); ok {
			err = errors.Join(err, os.Symlink(to, p))
		} else {
			err = errors.Join(err, os.WriteFile(p, []byte(text), 0o444))
		}
		must.Succeed(t, err)
	}
	return dir, &runnerpb.RunRequest{
		Arguments:            []string{"/bin/sh", "-c", script},
		EnvironmentVariables: map[string]string{"PATH": "/usr/bin:/bin"},
		StdoutPath:           name + "/stdout", StderrPath: name + "/stderr",
		InputRootDirectory: name + "/root", TemporaryDirectory: name + "/tmp", ServerLogsDirectory: name + "/logs",
	}
}

// tree returns everything below a directory in the notation of action. "*" precedes the content of an executable file.
func tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, p)
		switch {
		case err != nil || rel == ".":
			return err
		case d.IsDir():
			got[rel+"/"] = ""
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(p)
			got[rel] = "->" + to
			return err
		default:
			b, err := os.ReadFile(p)
			if st, err := d.Info(); err == nil && st.Mode()&0o100 != 0 {
				b = append([]byte("*"), b...)
			}
			got[rel] = string(b)
			return err
		}
		return nil
	})
	must.Succeed(t, err)
	return got
}

func text(t testing.TB, p string) string {
	t.Helper()
	return string(must.Get(os.ReadFile(p))(t))
}

func TestRun(t *testing.T) {
	f := newFixture(t, "")
	for _, c := range []struct {
		name, script string
		files        map[string]string
		change       func(*runnerpb.RunRequest)
		code         int32
		signal       string
		stdout       string
		stderr       string // prefix
		want         map[string]string
	}{
		{name: "success", script: "cat in; echo err >&2", files: map[string]string{"in": "x\n"}, stdout: "x\n", stderr: "err\n", want: map[string]string{"in": "x\n"}},
		{name: "exit code", script: "exit 7", code: 7},
		{name: "signal", script: "kill -SEGV $$", code: -1, signal: "SEGV"},
		{name: "missing program", change: func(r *runnerpb.RunRequest) { r.Arguments = []string{"no-such-program"} }, code: 127, stderr: "cloister: "},
		{name: "environment", files: map[string]string{"d/": ""}, script: "", change: func(r *runnerpb.RunRequest) {
			r.Arguments = []string{"/usr/bin/env", "-0"}
			r.EnvironmentVariables = map[string]string{"B": "2", "A": "1 = 1"}
		}, stdout: "A=1 = 1\x00B=2\x00", want: map[string]string{"d/": ""}},
		{
			name: "working directory", files: map[string]string{"d/e/in": "x"}, script: "pwd; cat in; echo y >../out",
			change: func(r *runnerpb.RunRequest) { r.WorkingDirectory = "d/e" }, stdout: "/build/d/e\nx",
			want: map[string]string{"d/": "", "d/e/": "", "d/e/in": "x", "d/out": "y\n"},
		},
		{
			name: "outputs", files: map[string]string{"in": "x", "out/": ""},
			script: "mkdir out/d && echo y >out/d/f && chmod +x out/d/f && ln -s ../in out/l && ln out/d/f out/g && mkdir empty && printf '' >none",
			want:   map[string]string{"in": "x", "out/": "", "out/d/": "", "out/d/f": "*y\n", "out/l": "->../in", "out/g": "*y\n", "empty/": "", "none": ""},
		},
		{
			name: "unreadable outputs", script: "umask 777; mkdir d; echo y >f",
			want: map[string]string{"d/": "", "f": "y\n"},
		},
		{
			name: "removed entries", files: map[string]string{"d/e/": "", "l": "->d", "keep": "->d"}, script: "rm l && rmdir d/e && rmdir d",
			want: map[string]string{"keep": "->d"},
		},
		{
			name: "replaced entries", files: map[string]string{"d/e/": "", "l": "->d", "m": "->d", "n": "->d"},
			script: "rm l m n && mkdir l && echo x >l/f && ln -s e m && echo y >n && rmdir d/e && echo z >d/e",
			want:   map[string]string{"d/": "", "d/e": "z\n", "l/": "", "l/f": "x\n", "m": "->e", "n": "y\n"},
		},
		{
			name: "directory replaced by a link to another", files: map[string]string{"d/e/": "", "d/l": "->e", "k/e": "in", "k/l": "->e"},
			script: "rm d/l && rmdir d/e d && ln -s k d",
			want:   map[string]string{"d": "->k", "k/": "", "k/e": "in", "k/l": "->e"},
		},
		{
			name: "directory replaced by a link out of the root", files: map[string]string{"d/e/": ""},
			script: "rmdir d/e d && ln -s /tmp d", want: map[string]string{"d": "->/tmp"},
		},
		{
			name: "directory replaced by a file", files: map[string]string{"d/e/": ""},
			script: "rmdir d/e d && echo x >d", want: map[string]string{"d": "x\n"},
		},
		{
			name: "inputs cannot be modified", files: map[string]string{"in": "x", "d/in": "y"},
			script: "echo z >in; echo z >>d/in; rm -f in; mv d/in e; chmod +x in; rm -rf d; cat in d/in",
			stdout: "xy", want: map[string]string{"in": "x", "d/": "", "d/in": "y"}, stderr: "/bin/sh",
		},
		{
			name: "links out of the root", files: map[string]string{"l": "->/etc/shadow", "m": "->../../../../../../../../../etc"},
			script: "cat l m/shadow; ls m | grep -c shadow", code: 1, stdout: "0\n", want: map[string]string{"l": "->/etc/shadow", "m": "->../../../../../../../../../etc"},
		},
		{
			name: "writing through a link out of the root", files: map[string]string{"l": "->/tmp"},
			script: "echo x >l/f && cat /tmp/f", stdout: "x\n", want: map[string]string{"l": "->/tmp"},
		},
		{name: "special files are not copied", script: "mkfifo p && echo x >f", want: map[string]string{"f": "x\n"}},
		{name: "temporary directory", script: "echo x >/tmp/f && mv /tmp/f out", want: map[string]string{"out": "x\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := f.action(t, c.files, c.script)
			if c.change != nil {
				c.change(req)
			}
			resp := must.Get(f.runner.Run(t.Context(), req))(t)
			var usage resourceusagepb.POSIXResourceUsage
			if len(resp.ResourceUsage) != 1 || resp.ResourceUsage[0].UnmarshalTo(&usage) != nil || usage.MaximumResidentSetSize == 0 && c.code != 127 {
				t.Errorf("resource usage %v", resp.ResourceUsage)
			}
			if resp.ExitCode != c.code || usage.TerminationSignal != c.signal {
				t.Errorf("exit code %d, signal %q, want %d, %q; stderr %q", resp.ExitCode, usage.TerminationSignal, c.code, c.signal, text(t, dir+"/stderr"))
			}
			expect.Equal(t, text(t, dir+"/stdout"), c.stdout, "stdout")
			if got := text(t, dir+"/stderr"); !strings.HasPrefix(got, c.stderr) || c.stderr == "" && c.code == 0 && got != "" {
				t.Errorf("stderr %q, want %q", got, c.stderr)
			}
			if got := tree(t, filepath.Join(dir, "root")); !maps.Equal(got, c.want) {
				t.Errorf("input root: got %q, want %q", got, c.want)
			}
			if got := tree(t, filepath.Join(dir, "tmp")); len(got) > 0 {
				t.Errorf("the worker's temporary directory contains %q, want nothing", got)
			}
		})
	}
}

// bb_worker hard-links inputs from its cache, so one file is in many input roots.
func TestRunCannotModifyCachedInputs(t *testing.T) {
	f := newFixture(t, "")
	dir, req := f.action(t, nil, "echo changed >in; rm -f in; echo new >out; chmod 777 in")
	cached := filepath.Join(f.dir, "cached")
	// Its permissions allow everything: only the mount protects it.
	err := errors.Join(os.WriteFile(cached, []byte("original"), 0o666), os.Chmod(cached, 0o666), os.Link(cached, dir+"/root/in"))
	must.Succeed(t, err)
	before := must.Get(os.Stat(cached))(t)
	must.Get(f.runner.Run(t.Context(), req))(t)
	after, err := os.Stat(dir + "/root/in")
	if err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() || after.ModTime() != before.ModTime() || text(t, cached) != "original" {
		t.Errorf("the cached file was %v, is %v (%v), and contains %q", before, after, err, text(t, cached))
	}
	expect.Equal(t, text(t, dir+"/root/out"), "new\n", "output")
}

func TestRunRefusesMalformedRequests(t *testing.T) {
	f := newFixture(t, "")
	outside := t.TempDir()
	for _, c := range []struct {
		name   string
		change func(dir string, r *runnerpb.RunRequest)
		want   string
	}{
		{"no arguments", func(_ string, r *runnerpb.RunRequest) { r.Arguments = nil }, "arguments: "},
		{"no program", func(_ string, r *runnerpb.RunRequest) { r.Arguments = []string{"", "x"} }, "arguments: "},
		{"NUL in an argument", func(_ string, r *runnerpb.RunRequest) { r.Arguments = []string{"/bin/true", "a\x00b"} }, "arguments: number 1"},
		{"variable without a name", func(_ string, r *runnerpb.RunRequest) { r.EnvironmentVariables[""] = "x" }, "environment_variables: "},
		{"variable with =", func(_ string, r *runnerpb.RunRequest) { r.EnvironmentVariables["A=B"] = "x" }, "environment_variables: "},
		{"NUL in a variable", func(_ string, r *runnerpb.RunRequest) { r.EnvironmentVariables["A"] = "x\x00" }, "environment_variables: "},
		{"no input root", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory = "" }, "input_root_directory: "},
		{"absolute input root", func(dir string, r *runnerpb.RunRequest) { r.InputRootDirectory = dir + "/root" }, "input_root_directory: "},
		{"input root with ..", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory += "/../../.." }, "input_root_directory: "},
		{"input root is the build directory", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory = "./." }, "input_root_directory: "},
		{"missing input root", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory += "/none" }, "input_root_directory: "},
		{"input root by a link", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink("root", dir+"/link")
			r.InputRootDirectory = filepath.Base(dir) + "/link"
		}, "input_root_directory: "},
		{"input root by a link out of the build directory", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink(outside, dir+"/away")
			r.InputRootDirectory = filepath.Base(dir) + "/away"
		}, "input_root_directory: "},
		{"no stdout", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = "" }, "stdout_path: "},
		{"stdout with ..", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = "../out" }, "stdout_path: "},
		{"stdout with a backslash", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = `..\out` }, "stdout_path: "},
		{"stdout by a link out of the build directory", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink(outside, dir+"/away")
			r.StdoutPath = filepath.Base(dir) + "/away/stdout"
		}, "stdout_path: "},
		{"stdout is a link", func(dir string, r *runnerpb.RunRequest) { os.Symlink(outside+"/x", dir+"/stdout") }, "stdout_path: "},
		{"stdout exists", func(dir string, r *runnerpb.RunRequest) { os.WriteFile(dir+"/stdout", nil, 0o666) }, "stdout_path: "},
		{"stdout in the input root", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = r.InputRootDirectory + "/out" }, "stdout_path: "},
		{"stderr in a missing directory", func(_ string, r *runnerpb.RunRequest) { r.StderrPath = "none/stderr" }, "stderr_path: "},
		{"stderr is stdout", func(_ string, r *runnerpb.RunRequest) { r.StderrPath = r.StdoutPath }, "stderr_path: "},
		{"temporary directory with ..", func(_ string, r *runnerpb.RunRequest) { r.TemporaryDirectory = ".." }, "temporary_directory: "},
		{"logs with ..", func(_ string, r *runnerpb.RunRequest) { r.ServerLogsDirectory = "a/../../b" }, "server_logs_directory: "},
		{"logs in the input root", func(_ string, r *runnerpb.RunRequest) { r.ServerLogsDirectory = r.InputRootDirectory }, "server_logs_directory: "},
		{"working directory with ..", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "../tmp" }, "working_directory: "},
		{"absolute working directory", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "/" }, "working_directory: "},
		{"missing working directory", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "none" }, "working_directory: "},
		{"working directory is a file", func(dir string, r *runnerpb.RunRequest) {
			os.WriteFile(dir+"/root/f", nil, 0o666)
			r.WorkingDirectory = "f"
		}, "working_directory: "},
		{"special file among inputs", func(dir string, _ *runnerpb.RunRequest) { syscall.Mkfifo(dir+"/root/p", 0o666) }, "input_root_directory: "},
		{"name is not UTF-8", func(dir string, _ *runnerpb.RunRequest) { os.WriteFile(dir+"/root/\xff", nil, 0o666) }, "input_root_directory: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := f.action(t, nil, "echo ran")
			c.change(dir, req)
			resp, err := f.runner.Run(t.Context(), req)
			if status.Code(err) != codes.InvalidArgument || !strings.HasPrefix(status.Convert(err).Message(), c.want) {
				t.Errorf("got %v, %v, want INVALID_ARGUMENT with prefix %q", resp, err, c.want)
			}
			if b, err := os.ReadFile(dir + "/stdout"); err == nil && len(b) > 0 {
				t.Errorf("the command ran: %q", b)
			}
			if got := tree(t, outside); len(got) > 0 {
				t.Errorf("outside the build directory: got %q, want nothing", got)
			}
		})
	}
}

// bb_worker caches every result with exit code 0, so these must be errors.
func TestRunRefusesUncacheableSuccess(t *testing.T) {
	f := newFixture(t, "version: 1\nprofiles:\n  build: {output_bytes: 1MiB, output_files: 100}\n")
	for _, c := range []struct {
		name, script string
		files        map[string]string
		want         string
	}{
		{"limit hit", "head -c 4000000 /dev/zero >big; exit 0", nil, "output bytes"},
		{"sparse file", "truncate -s 1T f", nil, "claim 1.0 TiB"},
		{"hard links", "head -c 500000 /dev/zero >f; ln f g; ln f h", nil, "claim "},
		{"moved input", "mv d e", map[string]string{"d/in": "x"}, `"d/in"`},
		{"moved input, name reused", "mv d e; ln -s e d", map[string]string{"d/in": "x"}, `"d/in"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := f.action(t, c.files, c.script)
			resp, err := f.runner.Run(t.Context(), req)
			expect.That(t, status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), c.want),
				"got %v, %v, want FAILED_PRECONDITION with %q; stderr %q", resp, err, c.want, text(t, dir+"/stderr"))
		})
	}
	t.Run("endless log", func(t *testing.T) {
		dir, req := f.action(t, nil, "head -c 4000000 /dev/zero; echo end >&2")
		resp, err := f.runner.Run(t.Context(), req)
		got := text(t, dir+"/stdout")
		if err != nil || resp.ExitCode != 0 || len(got) > 2<<20 || !strings.Contains(got, "\x00\ncloister: output truncated here") || text(t, dir+"/stderr") != "end\n" {
			t.Errorf("got %v, %v, %d bytes ending in %q", resp, err, len(got), got[max(0, len(got)-80):])
		}
	})
	t.Run("failure after a limit", func(t *testing.T) {
		dir, req := f.action(t, nil, "head -c 4000000 /dev/zero >big")
		resp, err := f.runner.Run(t.Context(), req)
		if err != nil || resp.ExitCode != 1 || !strings.Contains(text(t, dir+"/stderr"), "\ncloister: limit    reached the limit of output bytes") {
			t.Errorf("got %v, %v, stderr %q", resp, err, text(t, dir+"/stderr"))
		}
	})
}

// Violations are always in the server logs, and in stderr if the command failed.
func TestRunReportsViolations(t *testing.T) {
	f := newFixture(t, "")
	const attempt = "echo x >/usr/new"
	for name, script := range map[string]string{"success": attempt + "; exit 0", "failure": attempt + "; exit 3"} {
		t.Run(name, func(t *testing.T) {
			dir, req := f.action(t, nil, script)
			must.Get(f.runner.Run(t.Context(), req))(t)
			b, err := os.ReadFile(dir + "/logs/cloister.txt")
			if errors.Is(err, fs.ErrNotExist) {
				sandboxtest.Unavailable(t, "monitor", err)
			}
			expect.That(t, err == nil && strings.Contains(string(b), "write    denied: write to /usr/new (read-only)"),
				"server log: got %q, %v", b, err)
			reported := strings.Contains(text(t, dir+"/stderr"), "cloister: write    denied: write to /usr/new (read-only)")
			expect.Equal(t, reported, name == "failure", "reported in stderr")
		})
	}
	dir, req := f.action(t, nil, "exit 0")
	must.Get(f.runner.Run(t.Context(), req))(t)
	if got := tree(t, dir+"/logs"); len(got) > 0 {
		t.Errorf("without violations: got server logs %q, want none", got)
	}
}

// A leaking backend is one whose workspaces remain after Close.
type leaking struct{ sandbox.Backend }

func (l leaking) Workspace(ctx context.Context, bytes, files int64) (sandbox.Workspace, error) {
	ws, err := l.Backend.Workspace(ctx, bytes, files)
	return leakingWorkspace{ws}, err
}

type leakingWorkspace struct{ sandbox.Workspace }

func (w leakingWorkspace) Close() error {
	return errors.Join(w.Workspace.Close(), errors.New("directory not empty"))
}

// TestRemainingWorkspaceIsLogged: it may be a directory on disk. The result counts nevertheless.
func TestRemainingWorkspaceIsLogged(t *testing.T) {
	f := newFixture(t, "")
	var log strings.Builder
	c := f.config
	c.Backend, c.Log = leaking{f.backend}, slog.New(slog.NewTextHandler(&log, nil))
	_, req := f.action(t, nil, "exit 0")
	must.Get(must.Get(runner.New(c))(t).Run(t.Context(), req))(t)
	expect.Text(t, log.String(), "directory not empty")
}

// bb_worker caches every result with exit code 0, so violations that count must change it.
func TestRunFailsForViolations(t *testing.T) {
	f := newFixture(t, "version: 1\nprofiles:\n  build: {on_violation: {write: fail, syscall: kill}}\n")
	for _, c := range []struct {
		name, script string
		code         int32
		log          string
	}{
		{"fail", "echo x >/usr/new; exit 0", 4, "exit code 4\non violation fail\nwrite    denied: write to /usr/new"},
		{"a failure", "echo x >/usr/new; exit 3", 3, "exit code 3\non violation fail\nwrite    denied: write to /usr/new"},
		{"kill", "unshare -U true; exit 0", -1, "exit code 137\non violation kill\nsyscall  denied: system call unshare"},
		{"another kind", "/no/such/program; exit 0", 0, "exit code 0\nexec     failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := f.action(t, nil, c.script)
			resp, err := f.runner.Run(t.Context(), req)
			must.Be(t, err == nil && resp.ExitCode == c.code, "got %v, %v, want exit code %d", resp, err, c.code)
			expect.Text(t, text(t, dir+"/logs/cloister.txt"), c.log, "server log")
			counts := strings.Contains(text(t, dir+"/stderr"), `cloister: its violations count, by on_violation of profile "build"`+"\n")
			expect.That(t, counts == (c.code != 0), "got stderr %q", text(t, dir+"/stderr"))
		})
	}
	expect.Error(t, expect.Err(f.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{})), nil,
		"not ready")
}

// TestViolationsNeedTheirMonitor: a runner that cannot notice violations that count does not start.
func TestViolationsNeedTheirMonitor(t *testing.T) {
	for rules, ok := range map[string]bool{"write: fail": false, "network: kill": false, "limit: fail": true, "read: report": true} {
		p, err := policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: {on_violation: {"+rules+"}}}\n"))
		must.Succeed(t, err)
		backend := namespace.New(namespace.Config{})
		defer backend.Close()
		_, err = runner.New(runner.Config{
			BuildDir: t.TempDir(), Backend: backend, Toolchain: []sandbox.Input{}, Jobs: 1, Policy: p, Features: sandbox.Features{
				Limits: sandbox.AllLimits, Audits: []sandbox.Audit{sandbox.AuditOff}, Endpoints: true, ListenControl: true, Kill: true,
			},
		})
		if (err == nil) != ok || !ok && !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%s: got %v, want an error: %t", rules, err, !ok)
		}
	}
}

// A logCloser closes an output after each run, so that it cannot be closed again, as if a network file system had failed
// to write it.
type logCloser struct {
	sandbox.Backend
	output func(sandbox.Stdio) io.Writer
}

func (b logCloser) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	res, err := b.Backend.Run(ctx, spec, std)
	return res, errors.Join(err, runner.CloseLog(b.output(std)))
}

// TestRunReportsLostOutput: bb_worker must not cache a result whose output was not written.
func TestRunReportsLostOutput(t *testing.T) {
	f := newFixture(t, "")
	for name, output := range map[string]func(sandbox.Stdio) io.Writer{
		"stdout": func(std sandbox.Stdio) io.Writer { return std.Stdout },
		"stderr": func(std sandbox.Stdio) io.Writer { return std.Stderr },
	} {
		c := f.config
		c.Backend = logCloser{f.backend, output}
		_, req := f.action(t, nil, "exit 0")
		_, err := must.Get(runner.New(c))(t).Run(t.Context(), req)
		expect.That(t, status.Code(err) == codes.Internal && strings.Contains(err.Error(), "/"+name+": "),
			"%s: got %v, want an internal error that names the file", name, err)
	}
}

func TestCancelledRunCopiesNothing(t *testing.T) {
	f := newFixture(t, "")
	dir, req := f.action(t, nil, "trap '' TERM; echo x >out; echo ready; while :; do sleep 1; done")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := f.runner.Run(ctx, req)
		done <- err
	}()
	for {
		b, _ := os.ReadFile(dir + "/stdout") // while it runs
		if string(b) == "ready\n" {
			break
		}
		select {
		case err := <-done:
			t.Fatalf("the run ended before it was cancelled: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	cancel()
	expect.Code(t, <-done, codes.Canceled)
	if got := tree(t, dir+"/root"); len(got) > 0 {
		t.Errorf("input root: got %q, want nothing", got)
	}
}

func TestRunDeadlines(t *testing.T) {
	f := newFixture(t, "version: 1\nprofiles:\n  build: {max_timeout: 1s}\n")
	_, req := f.action(t, nil, "sleep 60")
	if _, err := f.runner.Run(t.Context(), req); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "policy") {
		t.Errorf("got %v, want DEADLINE_EXCEEDED by the policy", err)
	}
	f = newFixture(t, "") // a limit of its own could pass before the caller's is noticed
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, req = f.action(t, nil, "sleep 60")
	if _, err := f.runner.Run(ctx, req); status.Code(err) != codes.DeadlineExceeded || strings.Contains(err.Error(), "policy") {
		t.Errorf("got %v, want the caller's DEADLINE_EXCEEDED", err)
	}
}

func TestRunWaitsForAJob(t *testing.T) {
	f := newFixture(t, "")
	var calls []chan error
	var dirs []string
	for range 4 {
		dir, req := f.action(t, nil, "echo ready; sleep 600")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := f.runner.Run(ctx, req)
			done <- err
		}()
		calls, dirs = append(calls, done), append(dirs, dir)
		defer func() { cancel(); <-done }()
	}
	for i, dir := range dirs {
		for b := []byte(nil); string(b) != "ready\n"; b, _ = os.ReadFile(dir + "/stdout") {
			select {
			case err := <-calls[i]:
				t.Fatal(err)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	dir, req := f.action(t, nil, "echo ran")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	expect.Code(t, expect.Err(f.runner.Run(ctx, req)), codes.DeadlineExceeded, "fifth run with four jobs")
	expect.Error(t, expect.Err(os.Stat(dir+"/stdout")), fs.ErrNotExist, "a waiting run has a log")
}

func TestCheckReadiness(t *testing.T) {
	f := newFixture(t, "")
	for path, want := range map[string]codes.Code{"": codes.OK, "there": codes.OK, "none": codes.Unavailable, "../x": codes.InvalidArgument, "/": codes.InvalidArgument} {
		must.Succeed(t, os.MkdirAll(f.dir+"/there", 0o777))
		expect.Code(t, expect.Err(f.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{Path: path})),
			want, "%q", path)
	}
}

// A worker may create or mount it after the runner has started.
func TestBuildDirectoryMayAppearLater(t *testing.T) {
	f := newFixture(t, "")
	must.Succeed(t, os.Rename(f.dir, f.dir+".gone"))
	expect.Code(t, expect.Err(f.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{})),
		codes.Unavailable, "without the directory")
	dir, req := f.action(t, map[string]string{"in": "x"}, "cat in >out")
	must.Get(f.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}))(t)
	if resp, err := f.runner.Run(t.Context(), req); err != nil || resp.ExitCode != 0 || text(t, dir+"/root/out") != "x" {
		t.Errorf("after it was replaced: %v, %v", resp, err)
	}
}

func TestCheckReadinessOfBrokenSandbox(t *testing.T) {
	f := newFixture(t, "")
	f.backend.Close()
	expect.Code(t, expect.Err(f.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{})),
		codes.Unavailable)
}

func TestNewNamesTheMissingField(t *testing.T) {
	whole := runner.Config{BuildDir: t.TempDir(), Backend: namespace.New(namespace.Config{}), Toolchain: []sandbox.Input{}, Jobs: 1}
	defer whole.Backend.Close()
	for want, change := range map[string]func(*runner.Config){
		"BuildDir":  func(c *runner.Config) { c.BuildDir = "" },
		"Backend":   func(c *runner.Config) { c.Backend = nil },
		"Jobs":      func(c *runner.Config) { c.Jobs = 0 },
		"Features":  func(c *runner.Config) { c.Features = sandbox.Features{} },
		"Toolchain": func(c *runner.Config) { c.Toolchain = nil },
	} {
		c := whole
		change(&c)
		expect.Message(t, expect.Err(runner.New(c)), want)
	}
}

func TestNewRefusesUnenforceablePolicy(t *testing.T) {
	backend := namespace.New(namespace.Config{Without: namespace.NamespacesOnly})
	defer backend.Close()
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	rules := must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles:\n  build: {audit: full}\n")))(t)
	if _, err := runner.New(runner.Config{BuildDir: t.TempDir(), Backend: backend, Features: features, Toolchain: []sandbox.Input{}, Policy: rules, Jobs: 1}); err == nil {
		t.Error("New accepted a policy with a full audit, which the backend does not support")
	}
}

// BenchmarkRun measures a run by the number of its inputs.
func BenchmarkRun(b *testing.B) {
	f := newFixture(b, "")
	for _, n := range []int{10, 100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			files := map[string]string{}
			for i := range n {
				files[fmt.Sprintf("d%d/e%d/f%d", i/1000, i/10%100, i)] = "x"
			}
			dir, req := f.action(b, files, "exit 0")
			for b.Loop() {
				for _, f := range []string{"stdout", "stderr"} {
					if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
						b.Fatal(err)
					}
				}
				if resp, err := f.runner.Run(b.Context(), req); err != nil || resp.ExitCode != 0 {
					b.Fatal(resp, err)
				}
			}
			if got := len(slices.Collect(maps.Keys(tree(b, dir+"/root")))); got < n {
				b.Errorf("got %d entries, want at least %d", got, n)
			}
		})
	}
}

// BenchmarkCheckReadiness measures the delay before each action of a worker.
func BenchmarkCheckReadiness(b *testing.B) {
	f := newFixture(b, "")
	for b.Loop() {
		must.Get(f.runner.CheckReadiness(b.Context(), &runnerpb.CheckReadinessRequest{}))(b)
	}
}
