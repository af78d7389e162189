// SPDX-License-Identifier: Apache-2.0

// Command sidebyside starts cloister serve (with and without --sync), bazel-remote and bb_storage on one disk, each
// with an empty store, and compares them with cloister-bench blobs, which must be in the directory of cloister. With
// -bucket, it compares cloister serve in front of a bucket of VersityGW, with --cas-write back, with cloister serve
// without one. With -rtt, servers are behind a slow network that loses packets, see network. -bench selects another
// benchmark than blobs, and further arguments are passed to it. With -build, Bazel builds the example over such a
// network, with cloister as a server, worker and cache, and with bazel-remote as a cache; arguments are targets.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

func main() {
	program := flag.String("cloister", "", "cloister binary (default: compiled from this working copy)")
	dir := flag.String("dir", "", "directory on the disk to use (default: the temporary directory)")
	size := flag.Int64("size", 10, "size of each store in GiB")
	bucket := flag.Bool("bucket", false, "compare cloister with and without a bucket")
	var n network
	flag.DurationVar(&n.rtt, "rtt", 0, "round-trip time of the network to compare over; 0 means loopback")
	flag.Float64Var(&n.loss, "loss", 0, "fraction of lost TCP segments, with -rtt")
	build := flag.Bool("build", false, "measure builds of the example")
	bench := flag.String("bench", "blobs", "benchmark of cloister-bench; noop and outputs need -bucket")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	compare, args := n.sideBySide, append([]string{*bench}, flag.Args()...)
	switch {
	case *bucket && (n.rtt != 0 || n.loss != 0 || *build):
		fmt.Fprintln(os.Stderr, "sidebyside: -rtt, -loss and -build exclude -bucket")
		os.Exit(2)
	case *bucket:
		compare = withBucket
	case *build:
		compare, args = n.buildWith, flag.Args()
	}
	if err := compare(ctx, *program, *dir, *size<<30, args, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "sidebyside:", err)
		os.Exit(1)
	}
}

// sideBySide starts the servers behind the network, runs a benchmark with flags, and stops the servers.
func (n network) sideBySide(ctx context.Context, program, parent string, size int64, bench []string, out, info io.Writer) (err error) {
	r, err := newRun(ctx, program, parent, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.network = n
	if err := r.addCloister(ctx, "--executor", "cloister"); err != nil {
		return err
	}
	if err := r.addCloister(ctx, "--against", "cloister-sync", "--sync"); err != nil {
		return err
	}
	for _, k := range peers.Kinds() {
		peer, err := r.start(ctx, k)
		if err == nil {
			err = r.add(ctx, "--against", k.Name, peer.Addr, peer.PID)
		}
		if err != nil {
			return err
		}
	}
	return r.measure(ctx, bench, out, info)
}

// withBucket is sideBySide for cloister with and without a bucket.
func withBucket(ctx context.Context, program, parent string, size int64, bench []string, out, info io.Writer) (err error) {
	r, err := newRun(ctx, program, parent, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	gateway, err := r.start(ctx, peers.VersityGW)
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(r.dir, "stores", peers.VersityGW.Name, "cache"), 0o700); err != nil {
		return err
	}
	r.env = []string{"AWS_ACCESS_KEY_ID=" + peers.AccessKey, "AWS_SECRET_ACCESS_KEY=" + peers.SecretKey}
	url := "s3://cache?endpoint=http://" + gateway.Addr
	if err := r.addCloister(ctx, "--executor", "bucket", "--store", url, "--cas-write", "back", "--drain-timeout", "1s"); err != nil {
		return err
	}
	if err := r.watch("bucket", "gateway", gateway.PID); err != nil { // for --settle
		return err
	}
	if err := r.addCloister(ctx, "--against", "none"); err != nil {
		return err
	}
	return r.measure(ctx, bench, out, info)
}

// A run is a comparison.
type run struct {
	program, dir string
	network      network
	size         int64    // of each store in bytes
	env          []string // of cloister
	flags        []string // of cloister-bench, for the servers
	stops        []func() error
	// addr and workers are the addresses of the server for clients and workers of a setup.
	addr, workers string
}

// newRun makes the directory of a run, and compiles cloister unless program is its path. The caller closes the run.
func newRun(ctx context.Context, program, parent string, size int64) (r *run, err error) {
	if program == "" {
		if program, err = peers.BuildCloister(ctx); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp(parent, "sidebyside-")
	return &run{program: program, dir: dir, size: size}, err
}

// close stops the servers, the last one first, and removes the directory.
func (r *run) close() (err error) {
	for len(r.stops) > 0 {
		err = errors.Join(err, r.stop())
	}
	return errors.Join(err, os.RemoveAll(r.dir))
}

// stop stops the server that was started last.
func (r *run) stop() error {
	last := len(r.stops) - 1
	stop := r.stops[last]
	r.stops = r.stops[:last]
	return stop()
}

// store makes the directory of a store.
func (r *run) store(name string) (string, error) {
	store := filepath.Join(r.dir, "stores", name)
	return store, os.MkdirAll(store, 0o700)
}

// add adds a server to the benchmark.
func (r *run) add(ctx context.Context, flag, name, addr string, pid int) error {
	if r.network.rtt > 0 {
		var err error
		if addr, err = r.behind(ctx, addr); err != nil {
			return err
		}
	}
	r.flags = append(r.flags, flag, name+"="+addr)
	return r.watch(name, name, pid)
}

// watch adds a process of a server, under a name of its own, to the benchmark.
func (r *run) watch(server, process string, pid int) error {
	file := filepath.Join(r.dir, process+".pid")
	r.flags = append(r.flags, "--watch", server+"="+file)
	return os.WriteFile(file, []byte(strconv.Itoa(pid)), 0o600)
}

// behind returns an address that reaches addr through the network.
func (r *run) behind(ctx context.Context, addr string) (string, error) {
	listening, stop, err := r.network.forward(ctx, addr)
	if err == nil {
		r.stops = append(r.stops, stop)
	}
	return listening, err
}

// addCloister starts cloister serve with more arguments and adds it.
func (r *run) addCloister(ctx context.Context, flag, name string, args ...string) error {
	server, err := r.serve(ctx, name, bazelrun.ServerConfig{Args: args})
	if err != nil {
		return err
	}
	return r.add(ctx, flag, name, server.Addr, server.PID)
}

// serve starts cloister as configured, with a new store and any address.
func (r *run) serve(ctx context.Context, name string, c bazelrun.ServerConfig) (*bazelrun.Server, error) {
	store, err := r.store(name)
	if err != nil {
		return nil, err
	}
	c.Binary, c.Dir, c.Home, c.Listen, c.Env = r.program, store, r.dir, "127.0.0.1:0", r.env
	c.MaxSize = strconv.FormatInt(r.size, 10)
	server, err := bazelrun.StartServer(ctx, c)
	if err == nil {
		r.stops = append(r.stops, server.Stop)
	}
	return server, err
}

// start compiles and starts a peer.
func (r *run) start(ctx context.Context, k peers.Kind) (*peers.Server, error) {
	store, err := r.store(k.Name)
	if err != nil {
		return nil, err
	}
	built, err := k.Build(ctx)
	if err != nil {
		return nil, err
	}
	peer, err := k.Start(ctx, peers.Options{Program: built, Dir: store, Size: r.size})
	if err == nil {
		r.stops = append(r.stops, peer.Stop)
	}
	return peer, err
}

// measure runs a benchmark with flags.
func (r *run) measure(ctx context.Context, bench []string, out, info io.Writer) error {
	args := slices.Concat(bench[:1], r.flags, bench[1:])
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(r.program), "cloister-bench"), args...)
	cmd.Stdout, cmd.Stderr = out, info
	return cmd.Run()
}
