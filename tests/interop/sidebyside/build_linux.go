// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

// targets of the example are what is built unless others are named.
const targets = "//examples/hash/..."

// A setup is a configuration of servers for Bazel.
type setup struct {
	name string
	// start starts servers, and returns the address and the flags for Bazel. Before each later build it is called again,
	// to replace what holds copies of the far store's blobs.
	start func(ctx context.Context, r *run, build int) (addr string, flags []string, err error)
	cache bool // Bazel executes actions itself
}

var setups = []setup{
	{"remote execution, far server", farServer(), false},
	{"the same, --remote_download_toplevel", farServer("--remote_download_toplevel"), false},
	{"remote execution, serve --cas in front of a far server", nearServer, false},
	{"remote execution, server with a far worker", farWorker, false},
	{"far cache: cloister", farServer(), true},
	{"far cache: bazel-remote", farBazelRemote, true},
}

// builds are the three builds of a setup. Bazel removes its outputs before the second and third one.
var builds = []string{"from empty stores", "all from the cache", "all executed again"}

// buildWith builds targets with each setup, with stores that are empty at first, and prints a table of the time and the
// bytes that passed through the network.
func (n network) buildWith(ctx context.Context, program, parent string, size int64, args []string, out, info io.Writer) (err error) {
	if len(args) == 0 {
		args = []string{targets}
	}
	bazel, err := newRun(ctx, program, parent, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bazel.close()) }()
	root, err := peers.ModuleDir(ctx, "github.com/cloister-build/cloister")
	if err != nil {
		return err
	}
	b := &bazelrun.Bazel{Workspace: filepath.Join(bazel.dir, "workspace"), Root: filepath.Join(bazel.dir, "bazel"), Log: info}
	if err := errors.Join(bazelrun.Find(), bazelrun.CopyWorkspace(b.Workspace, root), os.Mkdir(b.Root, 0o755)); err != nil {
		return err
	}
	bazel.stops = append(bazel.stops, b.Shutdown)
	// So that no setup pays for the start of Bazel.
	if _, err := build(ctx, b, append([]string{"--nobuild", "--remote_executor="}, args...)); err != nil {
		return err
	}
	fmt.Fprintf(out, "| | %s |\n|---|%s\n", strings.Join(builds, " | "), strings.Repeat("---|", len(builds)))
	n.passed = new(atomic.Int64)
	for _, s := range setups {
		cells, err := n.row(ctx, b, s, bazel.program, parent, size, args)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(out, "| %s | %s |\n", s.name, strings.Join(cells, " | "))
	}
	return nil
}

// row measures a setup.
func (n network) row(
	ctx context.Context, b *bazelrun.Bazel, s setup, program, parent string, size int64, args []string,
) (cells []string, err error) {
	r, err := newRun(ctx, program, parent, size)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.network = n
	for i := range builds {
		if s.cache && i == 2 {
			return append(cells, ""), nil
		}
		addr, flags, err := s.start(ctx, r, i)
		if err != nil {
			return nil, err
		}
		b.Endpoint = addr
		if s.cache {
			flags = append(flags, "--remote_executor=", "--remote_cache=grpc://"+addr, "--spawn_strategy=sandboxed")
		}
		if i == 2 {
			flags = append(flags, "--noremote_accept_cached")
		}
		if err := b.Clean(ctx); err != nil {
			return nil, err
		}
		before := n.passed.Load()
		built, err := build(ctx, b, append(flags, args...))
		if err != nil {
			return nil, err
		}
		counts := built.Processes()
		if hits := counts["remote cache hit"]; (hits > 0) != (i == 1) || i == 1 && len(counts) > 2 {
			return nil, fmt.Errorf("build %s: got %v", builds[i], counts)
		}
		mb := float64(n.passed.Load()-before) / 1e6
		cells = append(cells, fmt.Sprintf("%.1f s, %.1f MB", built.Wall.Round(100*time.Millisecond).Seconds(), mb))
	}
	return cells, nil
}

// build runs bazel build, which must succeed.
func build(ctx context.Context, b *bazelrun.Bazel, args []string) (*bazelrun.Build, error) {
	built, err := b.Run(ctx, "build", args...)
	if err == nil && built.ExitCode != 0 {
		err = fmt.Errorf("bazel build: exit %d\n%s", built.ExitCode, built.Output)
	}
	return built, err
}

// farServer starts cloister behind the network. Bazel gets flags.
func farServer(flags ...string) func(context.Context, *run, int) (string, []string, error) {
	return func(ctx context.Context, r *run, build int) (string, []string, error) {
		if build > 0 {
			return r.addr, flags, nil
		}
		server, err := r.serve(ctx, "far", bazelrun.ServerConfig{})
		if err != nil {
			return "", nil, err
		}
		r.addr, err = r.behind(ctx, server.Addr)
		return r.addr, flags, err
	}
}

// farBazelRemote starts bazel-remote behind the network.
func farBazelRemote(ctx context.Context, r *run, build int) (string, []string, error) {
	if build > 0 {
		return r.addr, nil, nil
	}
	peer, err := r.start(ctx, peers.BazelRemote)
	if err != nil {
		return "", nil, err
	}
	r.addr, err = r.behind(ctx, peer.Addr)
	return r.addr, nil, err
}

// nearServer starts cloister in front of a far one that executes nothing. Each build has a new near one.
func nearServer(ctx context.Context, r *run, build int) (string, []string, error) {
	if build == 0 {
		far, err := r.serve(ctx, "far", bazelrun.ServerConfig{NoJobs: true})
		if err != nil {
			return "", nil, err
		}
		if r.addr, err = r.behind(ctx, far.Addr); err != nil {
			return "", nil, err
		}
	} else if err := r.stop(); err != nil { // the last one started is the near one
		return "", nil, err
	}
	near, err := r.serve(ctx, fmt.Sprint("near", build), bazelrun.ServerConfig{Args: []string{"--cas", "grpc://" + r.addr}})
	if err != nil {
		return "", nil, err
	}
	return near.Addr, nil, nil
}

// farWorker starts a head and a worker behind the network. Each build has a new worker.
func farWorker(ctx context.Context, r *run, build int) (string, []string, error) {
	if build == 0 {
		workers, err := loopback.Address()
		if err != nil {
			return "", nil, err
		}
		head, err := r.serve(ctx, "head", bazelrun.ServerConfig{Args: []string{"--jobs", "0", "--worker-listen", workers}})
		if err != nil {
			return "", nil, err
		}
		r.addr = head.Addr
		if r.workers, err = r.behind(ctx, workers); err != nil {
			return "", nil, err
		}
	} else if err := r.stop(); err != nil { // the last one started is the worker
		return "", nil, err
	}
	_, err := r.serve(ctx, fmt.Sprint("worker", build), bazelrun.ServerConfig{Join: r.workers})
	return r.addr, nil, err
}
