// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/cloister-build/cloister/worker/telemetry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
)

// nodeConfig is what the flags say of a machine that executes actions, whoever hands them to it.
type nodeConfig struct {
	dir          string
	jobs         int
	maxSize      size
	maxFiles     int64
	lease        span
	sync         bool
	scrub        rate
	trees        amount
	audit        bound
	far          far
	write        overlay.Policy
	drainTimeout time.Duration
	metrics      string
	box          confinement

	// head says that it executes nothing itself, and fleet that it is one of several machines among which a scheduler
	// chooses. No flag says so.
	head, fleet bool
}

// newNodeConfig returns the defaults.
func newNodeConfig() nodeConfig {
	return nodeConfig{maxSize: size{percent: 10}, lease: span(disk.DefaultLease), trees: 512 << 20, audit: audit.DefaultBytes}
}

func (c *nodeConfig) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.IntVar(&c.jobs, "jobs", runtime.GOMAXPROCS(0), "how many actions run at once")
	f.Var(&c.maxSize, "max-size", "size of the store, in bytes with a unit or as a share of the disk")
	f.Int64Var(&c.maxFiles, "max-files", 0, "files of the store (default: a tenth of what the disk can hold)")
	f.Var(&c.lease, "lease", "how long a blob stays at least after it was used; 0 promises nothing")
	f.BoolVar(&c.sync, "sync", false, "write to the disk before a write is answered, so that a loss of power loses nothing")
	f.Var(&c.scrub, "scrub", "read everything again and again at this rate, and compare it with its digest; 0 is never")
	f.Var(&c.trees, "mounted-trees", "bytes of input directories that stay mounted because several actions have them; what is read of them is in the operating system's cache; 0 mounts each anew")
	f.Var(&c.audit, "audit-size", "size of the record of what actions tried; the oldest goes first, and the record says so; unlimited keeps everything")
	f.StringVar(&c.metrics, "metrics", "", "address and port that serve /metrics for Prometheus, /ready and /live over HTTP (default: none)")
	f.DurationVar(&c.drainTimeout, "drain-timeout", 10*time.Minute, "how long running actions may take after Ctrl-C")
	c.box.register(cmd)
}

// check returns what is wrong with the command line, before anything is made.
func (c *nodeConfig) check(cmd *cobra.Command) (err error) {
	switch {
	case c.jobs < 0 || c.jobs == 0 && !c.head:
		return fmt.Errorf("--jobs %d: at least one action must be able to run", c.jobs)
	case c.maxFiles < 0:
		return fmt.Errorf("--max-files %d: write a positive number, or 0 for a tenth of what the disk can hold", c.maxFiles)
	case c.lease > 0 && c.lease < span(time.Second):
		return fmt.Errorf("--lease %s: write at least 1s, or 0 to promise nothing", &c.lease)
	case c.audit > 0 && c.audit < audit.LeastBytes:
		return fmt.Errorf("--audit-size %s: write at least %s, or %s", &c.audit, sandbox.Bytes(audit.LeastBytes), unlimited)
	}
	c.write, err = c.far.policy(cmd)
	if c.write == overlay.WriteBack && c.lease == 0 {
		return errors.New("--cas-write back needs a --lease: what is yet to be sent could be evicted before")
	}
	return err
}

// renew returns how often what is still needed is marked as used, so that its lease does not end.
func (c *nodeConfig) renew() time.Duration { return time.Duration(c.lease) / 3 }

// flags returns what a command on this machine must be told to run an action as this node does.
func (c *nodeConfig) flags() []string {
	var flags []string
	if c.box.policy != "" {
		file, err := filepath.Abs(c.box.policy)
		if err != nil {
			file = c.box.policy
		}
		flags = append(flags, "--policy", file)
	}
	if c.box.tier != "full" {
		flags = append(flags, "--sandbox", c.box.tier)
	}
	return flags
}

// A node is a machine that executes actions: a store, perhaps in front of another, a sandbox, and a worker over both. It
// is made in three steps, openNode, confine and start, so that what is wrong is told before anything is done that takes
// long; close undoes those that were made.
type node struct {
	*nodeConfig
	log   *slog.Logger
	rules *policy.Policy
	// name is this machine's.
	name string
	// store is on the disk; behind is nil if nothing is.
	store   *disk.Cache
	control *diskctl.Server
	behind  *upstream
	// ready says whether more work should be taken.
	ready *readiness

	// From confine on.
	features sandbox.Features

	// From start on. Instances are what clients and actions see, of the disk and what is behind it; front is nil if
	// nothing is. Copied is why inputs are not read from the store, nil if they are.
	instances cas.Instances
	front     *overlay.Overlay
	copied    error
	local     *worker.Local
	registry  *prometheus.Registry
	telemetry *telemetry.Metrics

	box         namespace.Config
	backend     *namespace.Backend
	toolchain   []sandbox.Input
	record      *audit.Log
	background  context.Context // of what goes on until the node is closed
	watchers    sync.WaitGroup
	stopMetrics func()
	service     *notify.Service // nil without a service manager
	stopSending context.CancelFunc
	sending     context.Context // how long close may wait for what is still to be sent
	ends        []func()        // what close does, the last first
}

// openNode opens what the flags name: policy, upstream, store and audit log. The caller closes the node.
func openNode(ctx context.Context, c *nodeConfig, log *slog.Logger) (_ *node, err error) {
	n := &node{nodeConfig: c, log: log, ready: &readiness{}}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	if n.rules, err = c.box.rules(); err != nil {
		return nil, err
	}
	if n.box, err = c.box.backend(); err != nil {
		return nil, err
	}
	if n.behind, err = c.far.open(ctx, log); err != nil {
		return nil, err
	}
	if n.behind != nil {
		n.atEnd(func() { n.behind.close() })
	}
	if n.store, err = openStore(c, log); err != nil {
		return nil, err
	}
	n.atEnd(func() { n.store.Close() })
	if n.control, err = diskctl.Serve(c.dir, n.store, casserver.ServerOptions(log)...); err != nil {
		return nil, newExit(exitEnvironment, err)
	}
	n.atEnd(func() { n.control.Close() })
	if pending, err := unsent(c.dir); err != nil {
		return nil, newExit(exitEnvironment, err)
	} else if pending > 0 && c.write != overlay.WriteBack {
		log.Warn("not sent to an upstream, and not kept until they are: start with --cas-write back to send them",
			"blobs and results", pending, "journal", journalOf(c.dir))
	}
	if n.record, err = audit.Open(audit.Config{Dir: auditDir(c.dir), MaxBytes: int64(c.audit), Log: log}); err != nil {
		return nil, newExit(exitEnvironment, err)
	}
	n.atEnd(func() { n.record.Close() })
	if n.name, err = os.Hostname(); err != nil || n.name == "" {
		n.name = "cloister"
	}
	return n, nil
}

// confine makes the sandbox, and finds out what it can.
func (n *node) confine(ctx context.Context) (err error) {
	n.box.Hidden = []string{n.dir}
	n.backend = namespace.New(n.box)
	n.atEnd(func() { n.backend.Close() })
	if n.features, err = n.backend.Probe(ctx); err != nil {
		return newExit(exitEnvironment, fmt.Errorf("actions cannot be sandboxed here, and are never run without: %w", err))
	}
	if n.toolchain, err = worker.HostToolchain(); err != nil {
		return newExit(exitEnvironment, fmt.Errorf("toolchain of this host: %w", err))
	}
	return nil
}

// start makes the worker, and begins to watch over what it depends on. Flags are what a command on this machine must be
// told to execute what this node does; wrap, if not nil, decides what is seen of the store.
func (n *node) start(ctx context.Context, flags []string, wrap func(cas.Instances) cas.Instances) (err error) {
	n.registry = prometheus.NewRegistry()
	n.telemetry = telemetry.New(n.registry)
	// What is sent at the end is still seen from outside.
	n.stopMetrics = func() {}
	n.atEnd(func() { n.stopMetrics() })
	n.atEnd(func() { n.service.Close() })
	var stop context.CancelFunc
	n.background, stop = context.WithCancel(ctx)
	n.atEnd(func() {
		stop()
		n.watchers.Wait()
	})
	if n.write == overlay.WriteThrough {
		n.ready.upstream = n.behind
	}
	if err := n.open(wrap); err != nil {
		return err
	}
	config := worker.Config{
		Name: n.name, Instances: n.instances, Policy: n.rules, RenewInterval: n.renew(), Fleet: n.fleet, Log: n.log,
		Reproduce: func(t *worker.Task) string { return reproduce(t, flags) },
		Audit: func(t *worker.Task, a *worker.Violations) {
			n.telemetry.Violations(a)
			recordAttempts(n.log, n.record, n.name, t, a)
		},
	}
	if n.backend != nil { // else this machine executes nothing
		config.Stager, n.copied = worker.NewStager(ctx, n.backend, filepath.Join(n.dir, "tmp"), int64(n.trees), n.log)
		n.atEnd(func() {
			if err := config.Stager.Close(); err != nil {
				n.log.Warn("input trees", "err", err)
			}
		})
		config.Backend, config.Features, config.Toolchain = n.backend, n.features, n.toolchain
	}
	n.local = worker.New(config)
	if n.behind != nil {
		n.watchers.Go(func() { n.behind.watch(n.background, n.log) })
	}
	if n.scrub > 0 {
		n.watchers.Go(func() { n.control.Scrub(n.background, int64(n.scrub), n.log) })
	}
	return nil
}

// open puts the store in front of what is behind it.
func (n *node) open(wrap func(cas.Instances) cas.Instances) (err error) {
	n.instances = n.store.Instance
	n.sending, n.stopSending = context.WithCancel(context.Background())
	n.stopSending() // until it is known that all went well, nobody waits for what is still to be sent
	if n.behind != nil {
		n.front, err = overlay.New(overlay.Config{
			Local: n.store.Instance, Upstream: n.behind.instances, Policy: n.write, Journal: journalOf(n.dir), RenewInterval: n.renew(), Log: n.log,
		})
		if err != nil {
			return newExit(exitEnvironment, err)
		}
		n.instances = n.front.Instance
		n.atEnd(func() {
			if err := n.front.Close(n.sending); err != nil {
				n.log.Warn("upstream", "address", n.behind.address, "err", err)
			}
			n.stopSending()
		})
	}
	n.instances = n.ready.store.instances(n.instances, n.store.MaxBytes/2)
	if wrap != nil {
		n.instances = wrap(n.instances)
	}
	return nil
}

// send has close wait for what is still to be sent upstream: as long as running actions may take, or until another
// signal comes.
func (n *node) send(out io.Writer, signals <-chan os.Signal) {
	if n.front == nil {
		return
	}
	if pending := n.front.Stats().Pending; pending > 0 {
		fmt.Fprintf(out, "sending  %d blobs and results to %s, for up to %s; Ctrl-C leaves them to the next start\n", pending, n.behind.address, n.drainTimeout)
		if why := n.behind.down(); why != "" {
			fmt.Fprintf(out, "         %s\n", why)
		}
	}
	n.sending, n.stopSending = patience(n.drainTimeout, signals)
}

// atEnd has close call f before what was registered earlier.
func (n *node) atEnd(f func()) { n.ends = append(n.ends, f) }

// close ends the node. Nothing may execute any more.
func (n *node) close() {
	for len(n.ends) > 0 {
		last := len(n.ends) - 1
		end := n.ends[last]
		n.ends = n.ends[:last]
		end()
	}
}

// banner prints of the node what somebody wants to know who has just started it.
func (n *node) banner(out io.Writer) {
	stats := n.store.Stats()
	fmt.Fprintf(out, "cloister %s  %s/%s  %d slots  cache %s %s of %s\n",
		version, runtime.GOOS, runtime.GOARCH, n.jobs, n.dir, sandbox.Bytes(stats.Bytes), sandbox.Bytes(stats.MaxBytes))
	lease := "no lease: anything may be evicted at any time"
	if n.lease > 0 {
		lease = "what was used stays for " + n.lease.String()
	}
	if n.sync {
		lease += ", synced"
	}
	fmt.Fprintf(out, "store    %s\n", lease)
	if n.backend == nil {
		return
	}
	if n.copied != nil {
		fmt.Fprintf(out, "inputs   copied for each action: %v\n", n.copied)
	} else {
		fmt.Fprintf(out, "inputs   read from the store; %s of them stay mounted, %s decoded\n",
			sandbox.Bytes(int64(n.trees)), sandbox.Bytes(worker.DefaultCacheBytes))
	}
	n.nodeConfig.box.banner(out, n.features, n.rules)
}

// recordAttempts writes what an action tried to the log and to the audit log.
func recordAttempts(log *slog.Logger, record *audit.Log, name string, t *worker.Task, a *worker.Violations) {
	log.Warn("attempts of an action", "action", t.Action.String(), "instance", t.Instance, "target", t.Target,
		"mnemonic", t.Mnemonic, "exit", a.ExitCode, "events", len(a.Events)+a.Unrecorded, "first", a.First().String())
	err := record.Append(audit.Entry{
		Time: time.Now(), Action: t.Action.String(), Instance: t.Instance, Target: t.Target, Mnemonic: t.Mnemonic,
		Invocation: t.Invocation, Worker: name, Exit: a.ExitCode, Events: a.Events, Unrecorded: a.Unrecorded,
	})
	if err != nil {
		log.Error("the audit log cannot be written", "err", err)
	}
}

// storeDir returns the directory that --dir names, or the default.
func storeDir(flag string) (string, error) {
	if flag == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", newExit(exitEnvironment, fmt.Errorf("there is no cache directory for this user (%w): state --dir", err))
		}
		flag = filepath.Join(cache, "cloister")
	}
	return filepath.Abs(flag)
}

// openStore opens the store of the flags, and fills in what they leave to it. Log is told what is found damaged.
func openStore(c *nodeConfig, log *slog.Logger) (*disk.Cache, error) {
	dir, err := storeDir(c.dir)
	if err != nil {
		return nil, err
	}
	c.dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, newExit(exitEnvironment, fmt.Errorf("--dir %s: %w", dir, err))
	}
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	if c.dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, newExit(exitEnvironment, fmt.Errorf("--dir %s: %w", dir, err))
	}
	most, err := c.maxSize.on(c.dir)
	if err != nil {
		return nil, newExit(exitEnvironment, err)
	}
	store, err := disk.Open(disk.Config{
		Dir: c.dir, MaxBytes: most, MaxFiles: c.maxFiles, Lease: leaseOf(c.lease), Sync: c.sync,
		Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob: it is absent now, so that it is uploaded or made again",
				"digest", d.String(), "instance", instance, "where", where, "kept", diskctl.Quarantine(c.dir, d))
		},
	})
	if err != nil {
		return nil, newExit(exitEnvironment, err)
	}
	if s := store.Stats(); s.LogDamage > 0 || s.LogLost > 0 {
		log.Warn("damaged logs: some blobs are absent now, so that they are uploaded or made again",
			"dir", filepath.Join(c.dir, "segments"), "unreadable_bytes", s.LogDamage, "records_without_bytes", s.LogLost)
	}
	return store, nil
}

// patience returns a context that ends when the time is up or another signal comes.
func patience(limit time.Duration, signals <-chan os.Signal) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
