// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Find returns an error if Bazel is not installed.
func Find() error {
	if _, err := exec.LookPath("bazel"); err != nil {
		return errors.New("bazel is not installed; fix: apt-get install bazel-bootstrap")
	}
	return nil
}

// A Bazel builds one workspace. The first call leaves a Bazel server running, which Shutdown stops.
type Bazel struct {
	// Workspace is the directory of the WORKSPACE file. No bazel- links are created in it.
	Workspace string
	// Root is the directory for all of Bazel's state.
	Root string
	// Endpoint is the HOST:PORT of the remote executor.
	Endpoint string
	// User runs it; nil means the current user.
	User *syscall.Credential
	// Log, if not nil, receives its output.
	Log io.Writer
}

// Run runs bazel with a verb, flags and targets, and executes all actions remotely. A failed build is a Build; an error
// means that Bazel did not run to its end. When ctx ends, Bazel is interrupted and the error contains the cause.
func (b *Bazel) Run(ctx context.Context, verb string, args ...string) (*Build, error) {
	flags := []string{
		verb, "--config=cloister", "--remote_executor=grpc://" + b.Endpoint,
		"--symlink_prefix=/", "--color=no", "--curses=no", "--show_progress_rate_limit=5",
	}
	return b.call(ctx, append(flags, args...))
}

// Clean removes everything that Bazel built, so that the next Run requests it again.
func (b *Bazel) Clean(ctx context.Context) error {
	build, err := b.call(ctx, []string{"clean", "--symlink_prefix=/", "--color=no", "--curses=no"})
	if err == nil && build.ExitCode != 0 {
		err = fmt.Errorf("bazel clean: exit %d\n%s", build.ExitCode, build.Output)
	}
	return err
}

// Outputs returns the directory with the last Run's outputs of a package, named by its directory in the workspace.
func (b *Bazel) Outputs(name string) (string, error) {
	found, err := filepath.Glob(filepath.Join(b.Root, "base", "execroot", "*", "bazel-out", "*", "bin", name))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("outputs of //%s: got directories %q, want one: %v", name, found, err)
	}
	return found[0], nil
}

// Shutdown stops the Bazel server and waits for its end, and kills it if it does not stop.
func (b *Bazel) Shutdown() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pid := b.serverPID()
	build, err := b.call(ctx, []string{"shutdown"})
	if err == nil && build.ExitCode != 0 {
		err = fmt.Errorf("bazel shutdown: exit %d\n%s", build.ExitCode, build.Output)
	}
	if err != nil && pid > 0 {
		err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL))
	}
	return err
}

// serverPID returns the process id of the Bazel server, or 0.
func (b *Bazel) serverPID() int {
	text, err := os.ReadFile(filepath.Join(b.Root, "base", "server", "server.pid.txt"))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0
	}
	// The number may have been reused.
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(cmdline, []byte(b.Root)) {
		return 0
	}
	return pid
}

// call runs bazel with the startup options of b.
func (b *Bazel) call(ctx context.Context, args []string) (*Build, error) {
	home := filepath.Join(b.Root, "home")
	if err := os.MkdirAll(home, 0o755); err != nil {
		return nil, err
	}
	if b.User != nil {
		if err := os.Chown(home, int(b.User.Uid), int(b.User.Gid)); err != nil {
			return nil, err
		}
	}
	// If this process is killed, the server stops by itself. A server lives for a few builds: optimizing its code for
	// longer takes more time than it saves.
	startup := []string{
		"--nohome_rc", "--max_idle_secs=60", "--host_jvm_args=-XX:TieredStopAtLevel=1", "--host_jvm_args=-XX:+UseSerialGC",
		"--output_user_root=" + filepath.Join(b.Root, "user"), "--output_base=" + filepath.Join(b.Root, "base"),
	}
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, "bazel", append(startup, args...)...)
	cmd.Dir = b.Workspace
	cmd.Env = environment(home)
	cmd.Stdout = &output
	if b.Log != nil {
		cmd.Stdout = io.MultiWriter(&output, b.Log)
	}
	cmd.Stderr = cmd.Stdout
	// A separate process group, so that Ctrl-C interrupts Bazel only once, through Cancel.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: b.User}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	start := time.Now()
	err := cmd.Run()
	build := &Build{Output: output.String(), Wall: time.Since(start)}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("bazel %s: %w", args[0], context.Cause(ctx))
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		build.ExitCode, err = exit.ExitCode(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("bazel %s: %w\n%s", args[0], err, build.Output)
	}
	return build, nil
}
