// SPDX-License-Identifier: Apache-2.0

package runner_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/runner"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A house is a build directory with a runner, and the actions that a worker has laid out in it.
type house struct {
	dir     string
	backend *namespace.Backend
	runner  *runner.Runner
	n       int
}

// newHouse returns a house under a policy, or the default one.
func newHouse(t testing.TB, rules string) *house {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
	t.Cleanup(func() { backend.Close() })
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		t.Fatal(err)
	}
	c := runner.Config{BuildDir: dir, Backend: backend, Features: features, Toolchain: toolchain, Jobs: 4, Log: slog.New(slog.DiscardHandler)}
	if rules != "" {
		if c.Policy, err = policy.Parse("policy.yaml", []byte(rules)); err != nil {
			t.Fatal(err)
		}
	}
	r, err := runner.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return &house{dir: dir, backend: backend, runner: r}
}

// action lays out an action as bb_worker does, and returns its directory and the request to run a script in it. Files are
// written with their names; a name that ends in "/" is a directory, a text that begins with "->" a link.
func (h *house) action(t testing.TB, files map[string]string, script string) (string, *runnerpb.RunRequest) {
	t.Helper()
	h.n++
	name := fmt.Sprintf("a%d", h.n)
	dir := filepath.Join(h.dir, name)
	for _, d := range []string{"root", "tmp", "logs"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for f, text := range files {
		p := filepath.Join(dir, "root", f)
		if strings.HasSuffix(f, "/") {
			if err := os.MkdirAll(p, 0o777); err != nil {
				t.Fatal(err)
			}
			continue
		}
		err := os.MkdirAll(filepath.Dir(p), 0o777)
		if to, ok := strings.CutPrefix(text, "->"); ok {
			err = errors.Join(err, os.Symlink(to, p))
		} else {
			err = errors.Join(err, os.WriteFile(p, []byte(text), 0o444))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir, &runnerpb.RunRequest{
		Arguments:            []string{"/bin/sh", "-c", script},
		EnvironmentVariables: map[string]string{"PATH": "/usr/bin:/bin"},
		StdoutPath:           name + "/stdout", StderrPath: name + "/stderr",
		InputRootDirectory: name + "/root", TemporaryDirectory: name + "/tmp", ServerLogsDirectory: name + "/logs",
	}
}

// read returns all that is below a directory, in the words of action; a file that can be executed has "*" before its text.
func read(t testing.TB, dir string) map[string]string {
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
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func text(t testing.TB, p string) string {
	t.Helper()
	b, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestRun(t *testing.T) {
	h := newHouse(t, "")
	for _, c := range []struct {
		name, script string
		files        map[string]string
		change       func(*runnerpb.RunRequest)
		code         int32
		signal       string
		stdout       string
		stderr       string // its beginning
		want         map[string]string
	}{
		{name: "ended well", script: "cat in; echo err >&2", files: map[string]string{"in": "x\n"}, stdout: "x\n", stderr: "err\n", want: map[string]string{"in": "x\n"}},
		{name: "exit code", script: "exit 7", code: 7},
		{name: "signal", script: "kill -SEGV $$", code: -1, signal: "SEGV"},
		{name: "program that is absent", change: func(r *runnerpb.RunRequest) { r.Arguments = []string{"no-such-program"} }, code: 127, stderr: "cloister: "},
		{name: "program of the input root", files: map[string]string{"d/": ""}, script: "", change: func(r *runnerpb.RunRequest) {
			r.Arguments = []string{"/usr/bin/env", "-0"}
			r.EnvironmentVariables = map[string]string{"B": "2", "A": "1 = 1"}
		}, stdout: "A=1 = 1\x00B=2\x00", want: map[string]string{"d/": ""}},
		{name: "working directory", files: map[string]string{"d/e/in": "x"}, script: "pwd; cat in; echo y >../out",
			change: func(r *runnerpb.RunRequest) { r.WorkingDirectory = "d/e" }, stdout: "/build/d/e\nx",
			want: map[string]string{"d/": "", "d/e/": "", "d/e/in": "x", "d/out": "y\n"}},
		{name: "outputs", files: map[string]string{"in": "x", "out/": ""},
			script: "mkdir out/d && echo y >out/d/f && chmod +x out/d/f && ln -s ../in out/l && ln out/d/f out/g && mkdir empty && printf '' >none",
			want:   map[string]string{"in": "x", "out/": "", "out/d/": "", "out/d/f": "*y\n", "out/l": "->../in", "out/g": "*y\n", "empty/": "", "none": ""}},
		{name: "outputs that nobody may read", script: "umask 777; mkdir d; echo y >f",
			want: map[string]string{"d/": "", "f": "y\n"}},
		{name: "what was there and is removed", files: map[string]string{"d/e/": "", "l": "->d", "keep": "->d"}, script: "rm l && rmdir d/e && rmdir d",
			want: map[string]string{"keep": "->d"}},
		{name: "what was there and is replaced", files: map[string]string{"d/e/": "", "l": "->d", "m": "->d", "n": "->d"},
			script: "rm l m n && mkdir l && echo x >l/f && ln -s e m && echo y >n && rmdir d/e && echo z >d/e",
			want:   map[string]string{"d/": "", "d/e": "z\n", "l/": "", "l/f": "x\n", "m": "->e", "n": "y\n"}},
		{name: "a directory gives way to a link to another one", files: map[string]string{"d/e/": "", "d/l": "->e", "k/e": "in", "k/l": "->e"},
			script: "rm d/l && rmdir d/e d && ln -s k d",
			want:   map[string]string{"d": "->k", "k/": "", "k/e": "in", "k/l": "->e"}},
		{name: "a directory gives way to a link that leads out", files: map[string]string{"d/e/": ""},
			script: "rmdir d/e d && ln -s /tmp d", want: map[string]string{"d": "->/tmp"}},
		{name: "a directory gives way to a file", files: map[string]string{"d/e/": ""},
			script: "rmdir d/e d && echo x >d", want: map[string]string{"d": "x\n"}},
		{name: "inputs cannot be changed", files: map[string]string{"in": "x", "d/in": "y"},
			script: "echo z >in; echo z >>d/in; rm -f in; mv d/in e; chmod +x in; rm -rf d; cat in d/in",
			stdout: "xy", want: map[string]string{"in": "x", "d/": "", "d/in": "y"}, stderr: "/bin/sh"},
		{name: "links that lead out", files: map[string]string{"l": "->/etc/shadow", "m": "->../../../../../../../../../etc"},
			script: "cat l m/shadow; ls m | grep -c shadow", code: 1, stdout: "0\n", want: map[string]string{"l": "->/etc/shadow", "m": "->../../../../../../../../../etc"}},
		{name: "link to a directory outside that is written to", files: map[string]string{"l": "->/tmp"},
			script: "echo x >l/f && cat /tmp/f", stdout: "x\n", want: map[string]string{"l": "->/tmp"}},
		{name: "special files stay", script: "mkfifo p && echo x >f", want: map[string]string{"f": "x\n"}},
		{name: "temporary directory", script: "echo x >/tmp/f && mv /tmp/f out", want: map[string]string{"out": "x\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := h.action(t, c.files, c.script)
			if c.change != nil {
				c.change(req)
			}
			resp, err := h.runner.Run(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			var usage resourceusagepb.POSIXResourceUsage
			if len(resp.ResourceUsage) != 1 || resp.ResourceUsage[0].UnmarshalTo(&usage) != nil || usage.MaximumResidentSetSize == 0 && c.code != 127 {
				t.Errorf("resource usage %v", resp.ResourceUsage)
			}
			if resp.ExitCode != c.code || usage.TerminationSignal != c.signal {
				t.Errorf("exit code %d, signal %q, want %d, %q; stderr %q", resp.ExitCode, usage.TerminationSignal, c.code, c.signal, text(t, dir+"/stderr"))
			}
			if got := text(t, dir+"/stdout"); got != c.stdout {
				t.Errorf("stdout %q, want %q", got, c.stdout)
			}
			if got := text(t, dir+"/stderr"); !strings.HasPrefix(got, c.stderr) || c.stderr == "" && c.code == 0 && got != "" {
				t.Errorf("stderr %q, want %q", got, c.stderr)
			}
			if got := read(t, filepath.Join(dir, "root")); !maps.Equal(got, c.want) {
				t.Errorf("the input root holds %q, want %q", got, c.want)
			}
			if got := read(t, filepath.Join(dir, "tmp")); len(got) > 0 {
				t.Errorf("the worker's temporary directory holds %q", got)
			}
		})
	}
}

// TestInputsAreThoseOfTheCache: bb_worker links inputs from its cache, and one file of it is in many input roots.
func TestInputsAreThoseOfTheCache(t *testing.T) {
	h := newHouse(t, "")
	dir, req := h.action(t, nil, "echo changed >in; rm -f in; echo new >out; chmod 777 in")
	cached := filepath.Join(h.dir, "cached")
	// As careless as can be: only the mount protects it.
	err := errors.Join(os.WriteFile(cached, []byte("original"), 0o666), os.Chmod(cached, 0o666), os.Link(cached, dir+"/root/in"))
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(cached)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.runner.Run(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(dir + "/root/in")
	if err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() || after.ModTime() != before.ModTime() || text(t, cached) != "original" {
		t.Errorf("the cache's file was %v, is %v (%v), and holds %q", before, after, err, text(t, cached))
	}
	if got := text(t, dir+"/root/out"); got != "new\n" {
		t.Errorf("the output holds %q", got)
	}
}

// TestRefused: none of these runs anything or leaves a log.
func TestRefused(t *testing.T) {
	h := newHouse(t, "")
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
		{"input root that climbs", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory += "/../../.." }, "input_root_directory: "},
		{"input root that is all", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory = "./." }, "input_root_directory: "},
		{"input root that is absent", func(_ string, r *runnerpb.RunRequest) { r.InputRootDirectory += "/none" }, "input_root_directory: "},
		{"input root by a link", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink("root", dir+"/link")
			r.InputRootDirectory = filepath.Base(dir) + "/link"
		}, "input_root_directory: "},
		{"input root by a link that leads out", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink(outside, dir+"/away")
			r.InputRootDirectory = filepath.Base(dir) + "/away"
		}, "input_root_directory: "},
		{"no stdout", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = "" }, "stdout_path: "},
		{"stdout that climbs", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = "../out" }, "stdout_path: "},
		{"stdout with a backslash", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = `..\out` }, "stdout_path: "},
		{"stdout by a link that leads out", func(dir string, r *runnerpb.RunRequest) {
			os.Symlink(outside, dir+"/away")
			r.StdoutPath = filepath.Base(dir) + "/away/stdout"
		}, "stdout_path: "},
		{"stdout that is a link", func(dir string, r *runnerpb.RunRequest) { os.Symlink(outside+"/x", dir+"/stdout") }, "stdout_path: "},
		{"stdout that is there", func(dir string, r *runnerpb.RunRequest) { os.WriteFile(dir+"/stdout", nil, 0o666) }, "stdout_path: "},
		{"stdout in the input root", func(_ string, r *runnerpb.RunRequest) { r.StdoutPath = r.InputRootDirectory + "/out" }, "stdout_path: "},
		{"stderr in no directory", func(_ string, r *runnerpb.RunRequest) { r.StderrPath = "none/stderr" }, "stderr_path: "},
		{"stderr that is stdout", func(_ string, r *runnerpb.RunRequest) { r.StderrPath = r.StdoutPath }, "stderr_path: "},
		{"temporary directory that climbs", func(_ string, r *runnerpb.RunRequest) { r.TemporaryDirectory = ".." }, "temporary_directory: "},
		{"logs that climb", func(_ string, r *runnerpb.RunRequest) { r.ServerLogsDirectory = "a/../../b" }, "server_logs_directory: "},
		{"logs in the input root", func(_ string, r *runnerpb.RunRequest) { r.ServerLogsDirectory = r.InputRootDirectory }, "server_logs_directory: "},
		{"working directory that climbs", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "../tmp" }, "working_directory: "},
		{"absolute working directory", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "/" }, "working_directory: "},
		{"working directory that is absent", func(_ string, r *runnerpb.RunRequest) { r.WorkingDirectory = "none" }, "working_directory: "},
		{"working directory that is a file", func(dir string, r *runnerpb.RunRequest) {
			os.WriteFile(dir+"/root/f", nil, 0o666)
			r.WorkingDirectory = "f"
		}, "working_directory: "},
		{"special file among inputs", func(dir string, _ *runnerpb.RunRequest) { syscall.Mkfifo(dir+"/root/p", 0o666) }, "input_root_directory: "},
		{"name that is no text", func(dir string, _ *runnerpb.RunRequest) { os.WriteFile(dir+"/root/\xff", nil, 0o666) }, "input_root_directory: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := h.action(t, nil, "echo ran")
			c.change(dir, req)
			resp, err := h.runner.Run(t.Context(), req)
			if status.Code(err) != codes.InvalidArgument || !strings.HasPrefix(status.Convert(err).Message(), c.want) {
				t.Errorf("got %v, %v, want INVALID_ARGUMENT that begins with %q", resp, err, c.want)
			}
			if b, err := os.ReadFile(dir + "/stdout"); err == nil && len(b) > 0 {
				t.Errorf("it ran: %q", b)
			}
			if got := read(t, outside); len(got) > 0 {
				t.Errorf("outside there is %q", got)
			}
		})
	}
}

// TestNotToBeRecorded: bb_worker records what ends with exit code 0, so that this must not.
func TestNotToBeRecorded(t *testing.T) {
	h := newHouse(t, "version: 1\nprofiles:\n  build: {output_bytes: 1MiB, output_files: 100}\n")
	for _, c := range []struct {
		name, script string
		files        map[string]string
		want         string
	}{
		{"limit that was met", "head -c 4000000 /dev/zero >big; exit 0", nil, "output bytes"},
		{"file that claims more than it holds", "truncate -s 1T f", nil, "claim to hold 1.0 TiB"},
		{"file of many names", "head -c 500000 /dev/zero >f; ln f g; ln f h", nil, "claim to hold"},
		{"input that was moved", "mv d e", map[string]string{"d/in": "x"}, `"d/in"`},
		{"input that was moved to where another thing was", "mv d e; ln -s e d", map[string]string{"d/in": "x"}, `"d/in"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, req := h.action(t, c.files, c.script)
			resp, err := h.runner.Run(t.Context(), req)
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, %v, want FAILED_PRECONDITION that says %q; stderr %q", resp, err, c.want, text(t, dir+"/stderr"))
			}
		})
	}
	t.Run("log without end", func(t *testing.T) {
		dir, req := h.action(t, nil, "head -c 4000000 /dev/zero; echo end >&2")
		resp, err := h.runner.Run(t.Context(), req)
		got := text(t, dir+"/stdout")
		if err != nil || resp.ExitCode != 0 || len(got) > 2<<20 || !strings.Contains(got, "\x00\ncloister: output cut off here") || text(t, dir+"/stderr") != "end\n" {
			t.Errorf("got %v, %v, %d bytes that end %q", resp, err, len(got), got[max(0, len(got)-80):])
		}
	})
	t.Run("limit that was met by a command that failed", func(t *testing.T) {
		dir, req := h.action(t, nil, "head -c 4000000 /dev/zero >big")
		resp, err := h.runner.Run(t.Context(), req)
		if err != nil || resp.ExitCode != 1 || !strings.Contains(text(t, dir+"/stderr"), "\ncloister: limit    output bytes") {
			t.Errorf("got %v, %v, stderr %q", resp, err, text(t, dir+"/stderr"))
		}
	})
}

// TestAttemptsAreTold: in the directory for logs always, in stderr where the command failed.
func TestAttemptsAreTold(t *testing.T) {
	h := newHouse(t, "")
	const attempt = "echo x >/usr/new"
	for name, script := range map[string]string{"ended well": attempt + "; exit 0", "failed": attempt + "; exit 3"} {
		t.Run(name, func(t *testing.T) {
			dir, req := h.action(t, nil, script)
			if _, err := h.runner.Run(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(dir + "/logs/cloister.txt")
			if errors.Is(err, fs.ErrNotExist) {
				sandboxtest.Unavailable(t, "monitor", err)
			}
			if err != nil || !strings.Contains(string(b), "write    tried to write /usr/new") {
				t.Errorf("the log says %q, %v", b, err)
			}
			told := strings.Contains(text(t, dir+"/stderr"), "cloister: write    tried to write /usr/new")
			if want := name == "failed"; told != want {
				t.Errorf("told in stderr: %v, want %v", told, want)
			}
		})
	}
	dir, req := h.action(t, nil, "exit 0")
	if _, err := h.runner.Run(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if got := read(t, dir+"/logs"); len(got) > 0 {
		t.Errorf("a command that tried nothing left %q", got)
	}
}

// TestCancel: what a command that was cancelled made is nobody's, and it is not alive any more.
func TestCancel(t *testing.T) {
	h := newHouse(t, "")
	dir, req := h.action(t, nil, "trap '' TERM; echo x >out; echo ready; while :; do sleep 1; done")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := h.runner.Run(ctx, req)
		done <- err
	}()
	for {
		b, _ := os.ReadFile(dir + "/stdout") // while it runs
		if string(b) == "ready\n" {
			break
		}
		select {
		case err := <-done:
			t.Fatalf("it ended: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Errorf("got %v, want CANCELLED", err)
	}
	if got := read(t, dir+"/root"); len(got) > 0 {
		t.Errorf("the input root holds %q", got)
	}
}

func TestDeadline(t *testing.T) {
	h := newHouse(t, "version: 1\nprofiles:\n  build: {max_timeout: 1s}\n")
	_, req := h.action(t, nil, "sleep 60")
	if _, err := h.runner.Run(t.Context(), req); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "policy") {
		t.Errorf("got %v, want DEADLINE_EXCEEDED by the policy", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, req = h.action(t, nil, "sleep 60")
	if _, err := h.runner.Run(ctx, req); status.Code(err) != codes.DeadlineExceeded || strings.Contains(err.Error(), "policy") {
		t.Errorf("got %v, want the caller's DEADLINE_EXCEEDED", err)
	}
}

// TestJobs: no more run at once than was said, and who waits can go away.
func TestJobs(t *testing.T) {
	h := newHouse(t, "")
	var calls []chan error
	var dirs []string
	for range 4 {
		dir, req := h.action(t, nil, "echo ready; sleep 60")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := h.runner.Run(ctx, req)
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
	dir, req := h.action(t, nil, "echo ran")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := h.runner.Run(ctx, req); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("the fifth of four: %v", err)
	}
	if _, err := os.Stat(dir + "/stdout"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what waits has a log: %v", err)
	}
}

func TestCheckReadiness(t *testing.T) {
	h := newHouse(t, "")
	for path, want := range map[string]codes.Code{"": codes.OK, "there": codes.OK, "none": codes.Unavailable, "../x": codes.InvalidArgument, "/": codes.InvalidArgument} {
		if err := os.MkdirAll(h.dir+"/there", 0o777); err != nil {
			t.Fatal(err)
		}
		if _, err := h.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{Path: path}); status.Code(err) != want {
			t.Errorf("%q: %v, want %v", path, err, want)
		}
	}
}

// TestBuildDirectoryMayComeLater: a worker may mount or make it after the runner has started.
func TestBuildDirectoryMayComeLater(t *testing.T) {
	h := newHouse(t, "")
	if err := os.Rename(h.dir, h.dir+".gone"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("without it: %v, want UNAVAILABLE", err)
	}
	dir, req := h.action(t, map[string]string{"in": "x"}, "cat in >out")
	if _, err := h.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}); err != nil {
		t.Error(err)
	}
	if resp, err := h.runner.Run(t.Context(), req); err != nil || resp.ExitCode != 0 || text(t, dir+"/root/out") != "x" {
		t.Errorf("in another one of the name: %v, %v", resp, err)
	}
}

// TestCheckReadinessOfABrokenSandbox: a worker must not take actions that nobody can run.
func TestCheckReadinessOfABrokenSandbox(t *testing.T) {
	h := newHouse(t, "")
	h.backend.Close()
	if _, err := h.runner.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want UNAVAILABLE", err)
	}
}

// TestNewRefusesWhatCannotBeEnforced: a policy is kept whole or not at all.
func TestNewRefusesWhatCannotBeEnforced(t *testing.T) {
	backend := namespace.New(namespace.Config{Without: namespace.NamespacesOnly})
	defer backend.Close()
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	rules, err := policy.Parse("policy.yaml", []byte("version: 1\nprofiles:\n  build: {audit: full}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := runner.New(runner.Config{BuildDir: t.TempDir(), Backend: backend, Features: features, Policy: rules, Jobs: 1}); err == nil {
		t.Error("a runner that cannot watch in full took a policy that says so")
	}
}

// BenchmarkRun is what a run costs by how many inputs it has.
func BenchmarkRun(b *testing.B) {
	h := newHouse(b, "")
	for _, n := range []int{10, 100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			files := map[string]string{}
			for i := range n {
				files[fmt.Sprintf("d%d/e%d/f%d", i/1000, i/10%100, i)] = "x"
			}
			dir, req := h.action(b, files, "exit 0")
			for b.Loop() {
				for _, f := range []string{"stdout", "stderr"} {
					if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
						b.Fatal(err)
					}
				}
				if resp, err := h.runner.Run(b.Context(), req); err != nil || resp.ExitCode != 0 {
					b.Fatal(resp, err)
				}
			}
			if got := len(slices.Collect(maps.Keys(read(b, dir+"/root")))); got < n {
				b.Errorf("%d are left of %d", got, n)
			}
		})
	}
}

// BenchmarkCheckReadiness is what a worker waits for before each action that it takes.
func BenchmarkCheckReadiness(b *testing.B) {
	h := newHouse(b, "")
	for b.Loop() {
		if _, err := h.runner.CheckReadiness(b.Context(), &runnerpb.CheckReadinessRequest{}); err != nil {
			b.Fatal(err)
		}
	}
}
