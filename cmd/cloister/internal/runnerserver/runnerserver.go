// SPDX-License-Identifier: Apache-2.0

// Package runnerserver runs cloister runner: Buildbarn's runner protocol on a unix socket.
package runnerserver

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
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// Config is the flags of runner.
type Config struct {
	Socket       string
	Mode         flags.FileMode
	BuildDir     string
	Jobs         int
	DrainTimeout time.Duration
	Sandbox      confinement.Flags
}

// Run serves until a signal or ctx ends it.
func Run(ctx context.Context, c *Config, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.Default()

	rules, err := c.Sandbox.LoadPolicy()
	if err != nil {
		return err
	}
	box, err := c.Sandbox.NamespaceConfig()
	if err != nil {
		return err
	}
	// Inputs are mounted by path, and mounts refuse symlinks.
	dir, err := filepath.Abs(c.BuildDir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("--build-dir %s: %w; pass the buildDirectoryPath of bb_worker", c.BuildDir, err))
	}
	box.Hidden = []string{dir}
	backend := namespace.New(box)
	defer backend.Close()
	features, err := backend.Probe(ctx)
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("this host cannot sandbox commands: %w", err))
	}
	toolchain, err := sandbox.HostToolchain()
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("toolchain of this host: %w", err))
	}
	violations, flush := node.LimitRepeats(log)
	defer flush()
	service, err := runner.New(runner.Config{
		BuildDir: dir, Backend: backend, Features: features, Toolchain: toolchain, Policy: rules, Jobs: c.Jobs, Log: violations,
	})
	if err != nil {
		return exit.New(exit.Environment, err)
	}

	listener, err := listenUnix(ctx, c.Socket, fs.FileMode(c.Mode))
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("--socket %s: %w", c.Socket, err))
	}
	// Stop waits for handlers, because they use the backend until they return.
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
		return fmt.Errorf("serve %s: %w", c.Socket, err)
	case <-ctx.Done():
	case <-signals:
	}
	// New callers find no socket, and retry later.
	err = os.Remove(c.Socket)
	alive.Shutdown()
	drainServer(out, server, c.DrainTimeout, signals)
	<-failed //nolint:errcheck // it was stopped
	return err
}

// drainServer waits for running calls until limit or the next signal.
func drainServer(out io.Writer, server *grpc.Server, limit time.Duration, signals <-chan os.Signal) {
	ctx, cancel := node.DrainContext(limit, signals)
	defer cancel()
	fmt.Fprintln(out, "draining running commands finish; another signal stops them")
	if node.DrainServer(ctx, server) {
		fmt.Fprintln(out, "stopped  running commands were cancelled; bb_worker's clients will retry")
	}
}

// listenUnix listens on a socket that has its permissions from the start, and replaces one that nobody serves. The
// caller removes it.
func listenUnix(ctx context.Context, name string, mode fs.FileMode) (net.Listener, error) {
	switch st, err := os.Lstat(name); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode().Type() != fs.ModeSocket:
		return nil, errors.New("not a socket; remove it, or choose another path")
	default:
		if conn, err := new(net.Dialer).DialContext(ctx, "unix", name); err == nil {
			conn.Close()
			return nil, errors.New("another process listens there; stop it, or choose another path")
		}
	}
	// In the same directory, for the rename, and with a short name, because a socket address has 108 bytes.
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
	listener.SetUnlinkOnClose(false) // it has another name then
	if err := errors.Join(os.Chmod(at, mode), os.Rename(at, name)); err != nil {
		return nil, errors.Join(err, listener.Close(), os.Remove(at))
	}
	return listener, nil
}

// runnerBanner prints the properties of a runner that has just started.
func runnerBanner(out io.Writer, c *Config, dir string, f sandbox.Features, rules *policy.Policy) {
	var b strings.Builder
	fmt.Fprintf(&b, "cloister %s  %s/%s  %d commands at once  build directory %s\n", buildinfo.Version, runtime.GOOS, runtime.GOARCH, c.Jobs, dir)
	c.Sandbox.Banner(&b, f, rules)
	// Programs wait for the last line.
	fmt.Fprintf(&b, "runner   unix://%s\n", c.Socket)
	io.WriteString(out, b.String())
}
