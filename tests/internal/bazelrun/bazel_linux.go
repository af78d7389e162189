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

// Find returns nil if there is a Bazel, and otherwise an error that says what is missing.
func Find() error {
	if _, err := exec.LookPath("bazel"); err != nil {
		return errors.New("bazel is not installed; fix: apt-get install bazel-bootstrap")
	}
	return nil
}

// A Bazel builds one workspace. Its first call leaves a Bazel server running, which Shutdown ends.
type Bazel struct {
	// Workspace is the directory of the WORKSPACE. It gets no bazel- links.
	Workspace string
	// Root is a directory for everything that Bazel keeps.
	Root string
	// Endpoint is the HOST:PORT of the remote executor.
	Endpoint string
	// User is who runs it; nil is whoever runs this process.
	User *syscall.Credential
	// Log sees what it prints, if not nil.
	Log io.Writer
}

// Run builds or tests, as verb says; args are flags and targets. All actions are executed remotely.
// A build that fails is a Build; an error means that there was none. When ctx ends, Bazel is
// interrupted, and the error says why.
func (b *Bazel) Run(ctx context.Context, verb string, args ...string) (*Build, error) {
	flags := []string{verb, "--config=cloister", "--remote_executor=grpc://" + b.Endpoint,
		"--symlink_prefix=/", "--color=no", "--curses=no", "--show_progress_rate_limit=5"}
	return b.call(ctx, append(flags, args...))
}

// Clean makes Bazel forget all that it built, so that the next Run asks for everything again.
func (b *Bazel) Clean(ctx context.Context) error {
	build, err := b.call(ctx, []string{"clean", "--symlink_prefix=/", "--color=no", "--curses=no"})
	if err == nil && build.ExitCode != 0 {
		err = fmt.Errorf("bazel clean: exit %d\n%s", build.ExitCode, build.Output)
	}
	return err
}

// Outputs returns the directory of what the last Run has built of a package, whose name is that of its directory
// in the workspace.
func (b *Bazel) Outputs(name string) (string, error) {
	found, err := filepath.Glob(filepath.Join(b.Root, "base", "execroot", "*", "bazel-out", "*", "bin", name))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("outputs of //%s are in %q, want one directory: %v", name, found, err)
	}
	return found[0], nil
}

// Shutdown ends the Bazel server and waits until it has ended. It kills it if it does not.
func (b *Bazel) Shutdown() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
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

// serverPID returns the process of the Bazel server, or 0 if there is none.
func (b *Bazel) serverPID() int {
	text, err := os.ReadFile(filepath.Join(b.Root, "base", "server", "server.pid.txt"))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0
	}
	// A number that outlived its process may by now be somebody else's.
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
	// The server ends by itself soon after a parent that was killed could not end it.
	startup := []string{"--nohome_rc", "--max_idle_secs=60",
		"--output_user_root=" + filepath.Join(b.Root, "user"), "--output_base=" + filepath.Join(b.Root, "base")}
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, "bazel", append(startup, args...)...)
	cmd.Dir = b.Workspace
	cmd.Env = environment(home)
	cmd.Stdout = &output
	if b.Log != nil {
		cmd.Stdout = io.MultiWriter(&output, b.Log)
	}
	cmd.Stderr = cmd.Stdout
	// A group of its own, so that Ctrl-C at a terminal interrupts Bazel once, by Cancel.
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
