// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/runner"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// runnerConfig is what the flags of runner say.
type runnerConfig struct {
	socket       string
	mode         fileMode
	buildDir     string
	jobs         int
	drainTimeout time.Duration
	box          confinement
}

// A fileMode is a flag of permission bits, in octal.
type fileMode fs.FileMode

func (m *fileMode) String() string { return fmt.Sprintf("%04o", uint32(*m)) }
func (*fileMode) Type() string     { return "octal" }

func (m *fileMode) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("write it as 0600 or 0660")
	}
	*m = fileMode(n)
	return nil
}

func runnerCommand() *cobra.Command {
	c := runnerConfig{mode: 0o600}
	cmd := &cobra.Command{
		Use:   "runner --socket PATH --build-dir DIR",
		Short: "Runs the commands of a Buildbarn worker in the sandbox",
		Long: `Runner takes the place of bb_runner: it serves Buildbarn's protocol for runners on a unix socket, so that an
existing bb_worker has its commands run in this sandbox. --build-dir is the build directory of bb_worker's
configuration, by the same path or another one that leads to the same files.

A command finds its input root in /build and the host's toolchain where it always is. Its inputs are on
read-only mounts; what it makes is copied into bb_worker's directory once it has ended. docs/runner.md says what
this guarantees, and what only bb_worker can. Whoever can open the socket can execute commands in the sandbox:
if bb_worker is another user, let a group of both own the socket's directory and use --socket-mode 0660.

SIGTERM drains: no new commands, running ones finish; a second one, or the end of --drain-timeout, stops them.`,
		Example: `  cloister runner --socket /worker/runner --build-dir /worker/build
  cloister runner --socket /worker/runner --build-dir /worker/build --jobs 8 --policy policy.yaml

  # In the configuration of bb_worker:
  runners: [{ endpoint: { address: 'unix:///worker/runner' }, concurrency: 8, ... }]`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.jobs < 1 {
				return fmt.Errorf("--jobs %d: at least one command must be able to run", c.jobs)
			}
			return serveRunner(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.socket, "socket", "", "path of the unix socket, which bb_worker's configuration names as the runner's endpoint")
	f.Var(&c.mode, "socket-mode", "permissions of the socket")
	f.StringVar(&c.buildDir, "build-dir", "", "bb_worker's build directory")
	f.IntVar(&c.jobs, "jobs", runtime.GOMAXPROCS(0), "how many commands run at once; a command that waits uses up its timeout, so give it at least bb_worker's concurrency")
	f.DurationVar(&c.drainTimeout, "drain-timeout", 10*time.Minute, "how long running commands may take after SIGTERM")
	c.box.register(cmd)
	for _, name := range []string{"socket", "build-dir"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // there is no such flag
		}
	}
	return cmd
}

// serveRunner runs until a signal or ctx ends it.
func serveRunner(ctx context.Context, c *runnerConfig, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))

	rules, err := c.box.rules()
	if err != nil {
		return err
	}
	box, err := c.box.backend()
	if err != nil {
		return err
	}
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	dir, err := filepath.Abs(c.buildDir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return newExit(exitEnvironment, fmt.Errorf("--build-dir %s: %w; state the directory that bb_worker's buildDirectoryPath names", c.buildDir, err))
	}
	box.Hidden = []string{dir}
	backend := namespace.New(box)
	defer backend.Close()
	features, err := backend.Probe(ctx)
	if err != nil {
		return newExit(exitEnvironment, fmt.Errorf("commands cannot be sandboxed here, and are never run without: %w", err))
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		return newExit(exitEnvironment, fmt.Errorf("toolchain of this host: %w", err))
	}
	service, err := runner.New(runner.Config{
		BuildDir: dir, Backend: backend, Features: features, Toolchain: toolchain, Policy: rules, Jobs: c.jobs, Log: log,
	})
	if err != nil {
		return newExit(exitEnvironment, err)
	}

	listener, err := listenUnix(c.socket, fs.FileMode(c.mode))
	if err != nil {
		return newExit(exitEnvironment, fmt.Errorf("--socket %s: %w", c.socket, err))
	}
	// The backend is in use until the last call has returned.
	server := grpc.NewServer(append(casserver.ServerOptions(log), grpc.WaitForHandlers(true))...)
	service.Register(server)
	alive := health.NewServer()
	healthpb.RegisterHealthServer(server, alive)
	for name := range server.GetServiceInfo() {
		alive.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	runnerBanner(out, c, dir, features, rules)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err = <-failed:
		return fmt.Errorf("serve %s: %w", c.socket, err)
	case <-ctx.Done():
	case <-signals:
	}
	// Whoever comes from now on finds nobody, and asks again later.
	err = os.Remove(c.socket)
	alive.Shutdown()
	drainServer(out, server, c.drainTimeout, signals)
	<-failed
	return err
}

// drainServer lets calls end, until the time is up or another signal comes.
func drainServer(out io.Writer, server *grpc.Server, limit time.Duration, signals <-chan os.Signal) {
	ctx, cancel := patience(limit, signals)
	defer cancel()
	fmt.Fprintln(out, "draining running commands finish; another signal stops them")
	stopped := make(chan struct{})
	go func() {
		server.GracefulStop()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		server.Stop()
		<-stopped
		fmt.Fprintln(out, "stopped  running commands were cancelled; bb_worker's clients will retry")
	}
}

// listenUnix listens on a socket that has its permissions as soon as it has its name, in the place of one to which
// nobody listens any more. The caller removes it.
func listenUnix(name string, mode fs.FileMode) (net.Listener, error) {
	switch st, err := os.Lstat(name); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode().Type() != fs.ModeSocket:
		return nil, errors.New("there is a file that is no socket; remove it, or choose another path")
	default:
		if conn, err := net.Dial("unix", name); err == nil {
			conn.Close()
			return nil, errors.New("another process listens there; stop it, or choose another path")
		}
	}
	// Beside it, so that it can be renamed, and short, since an address has 108 bytes.
	private, err := os.MkdirTemp(filepath.Dir(name), ".")
	if err != nil {
		return nil, err
	}
	defer os.Remove(private)
	at := filepath.Join(private, "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: at, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false) // by then it has another name
	if err := errors.Join(os.Chmod(at, mode), os.Rename(at, name)); err != nil {
		return nil, errors.Join(err, listener.Close(), os.Remove(at))
	}
	return listener, nil
}

// runnerBanner prints what somebody wants to know who has just started it.
func runnerBanner(out io.Writer, c *runnerConfig, dir string, f sandbox.Features, rules *policy.Policy) {
	var b strings.Builder
	fmt.Fprintf(&b, "cloister %s  %s/%s  %d commands at once  build directory %s\n", version, runtime.GOOS, runtime.GOARCH, c.jobs, dir)
	c.box.banner(&b, f, rules)
	// Programs take the last line for a sign that all has been said.
	fmt.Fprintf(&b, "runner   unix://%s\n", c.socket)
	io.WriteString(out, b.String())
}
