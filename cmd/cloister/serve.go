// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/audit"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/telemetry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// serveConfig is what the flags of serve say.
type serveConfig struct {
	listen       string
	dir          string
	jobs         int
	maxSize      size
	maxBlob      size // 0: half of maxSize
	maxFiles     int64
	lease        span
	sync         bool
	scrub        rate
	trees        amount
	far          far
	write        overlay.Policy
	meant        meant
	history      amount
	drainTimeout time.Duration
	metrics      string
	box          confinement
	door         door
	repro        sampling
}

// defaultListen is where serve listens, and where other commands look for it.
const defaultListen = "127.0.0.1:8980"

func serveCommand() *cobra.Command {
	c := serveConfig{maxSize: size{percent: 10}, history: history.DefaultBytes, lease: span(disk.DefaultLease), trees: 512 << 20}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serves remote execution and its cache on this machine",
		Long: `Serve executes the actions of Bazel and other clients of the Remote Execution API in the sandbox, and
keeps inputs, outputs and results in a directory. It needs no configuration, accepts every instance
name and keeps each apart. Ctrl-C drains: no new actions, running ones finish; a second Ctrl-C stops.

A blob that a client was told is there stays for the time of --lease. With --cas or --store the directory
is in front of another server, or of a bucket, which then has everything, too; what only that has, it
keeps for as long as it likes. docs/store.md says more.

It listens on loopback unless told otherwise, and whoever reaches the port can execute commands in the
sandbox. With --tls-client-ca that is who has a certificate, with --auth who may by a file of callers and
their rights; docs/auth.md says how one is written.`,
		Example: `  cloister serve
  cloister serve --listen 127.0.0.1:9000 --dir /var/cache/cloister --jobs 4 --max-size 50GiB
  cloister serve --cas grpcs://cache.example.com:443 --cas-write back
  cloister serve --listen 0.0.0.0:8980 --tls-cert server.pem --tls-key server.key --auth auth.yaml
  cloister serve --store 's3://builds/cache?region=eu-central-1' --lease 12h

  bazel build --remote_executor=grpc://127.0.0.1:8980 //...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(cmd); err != nil {
				return err
			}
			return serve(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.listen, "listen", defaultListen, "address and port of the gRPC services; port 0 chooses a free one")
	f.StringVar(&c.dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.IntVar(&c.jobs, "jobs", runtime.GOMAXPROCS(0), "how many actions run at once")
	f.Var(&c.maxSize, "max-size", "size of the store, in bytes with a unit or as a share of the disk")
	f.Var(&c.maxBlob, "max-blob", "size of the largest blob that is taken (default: half of --max-size, which is the most)")
	f.Int64Var(&c.maxFiles, "max-files", 0, "files of the store (default: a tenth of what the disk can hold)")
	f.Var(&c.lease, "lease", "how long a blob stays at least after it was used; 0 promises nothing")
	f.BoolVar(&c.sync, "sync", false, "write to the disk before a write is answered, so that a loss of power loses nothing")
	f.Var(&c.scrub, "scrub", "read everything again and again at this rate, and compare it with its digest; 0 is never")
	f.Var(&c.trees, "mounted-trees", "bytes of input directories that stay mounted because several actions have them; what is read of them is in the operating system's cache; 0 mounts each anew")
	f.Var(&c.history, "history-size", "size of the record of what was asked for, which action ls and diff look into; the oldest goes first; 0 keeps none")
	c.far.register(cmd)
	c.door.register(f)
	f.Var(&c.meant, "digest-function", "[INSTANCE=]FUNCTION that is meant by a client that states none, of those with hashes of equal length; Buck2 with BLAKE3 needs blake3")
	f.StringVar(&c.metrics, "metrics", "", "address and port that serve /metrics for Prometheus, /ready and /live over HTTP (default: none)")
	c.repro.register(cmd)
	c.box.register(cmd)
	f.DurationVar(&c.drainTimeout, "drain-timeout", 10*time.Minute, "how long running actions may take after Ctrl-C")
	return cmd
}

// check returns what is wrong with the command line, before anything is made.
func (c *serveConfig) check(cmd *cobra.Command) (err error) {
	switch {
	case c.jobs < 1:
		return fmt.Errorf("--jobs %d: at least one action must be able to run", c.jobs)
	case c.maxFiles < 0:
		return fmt.Errorf("--max-files %d: write a positive number, or 0 for a tenth of what the disk can hold", c.maxFiles)
	case c.lease > 0 && c.lease < span(time.Second):
		return fmt.Errorf("--lease %s: write at least 1s, or 0 to promise nothing", &c.lease)
	case c.history > 0 && c.history < 1<<20:
		return fmt.Errorf("--history-size %s: write at least 1MiB, as 64MiB or 1GiB, or 0 for none", &c.history)
	case c.maxBlob.percent > 0:
		return fmt.Errorf("--max-blob %s: write it as 512MiB or 4GiB", &c.maxBlob)
	}
	if err := errors.Join(c.door.check(), c.repro.check(cmd)); err != nil {
		return err
	}
	c.write, err = c.far.policy(cmd)
	if c.write == overlay.Back && c.lease == 0 {
		return errors.New("--cas-write back needs a --lease: what is yet to be sent could be evicted before")
	}
	return err
}

// serve runs until a signal or ctx ends it.
func serve(ctx context.Context, c *serveConfig, out io.Writer) error {
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
	options, err := c.door.open(log)
	if err != nil {
		return err
	}
	behind, err := c.far.open(ctx, log)
	if err != nil {
		return err
	}
	if behind != nil {
		defer behind.close()
	}
	store, err := openStore(c, log)
	if err != nil {
		return err
	}
	defer store.Close()
	control, err := diskctl.Serve(c.dir, store, casserver.ServerOptions(log)...)
	if err != nil {
		return &exit{exitEnvironment, err}
	}
	defer control.Close()

	if n, err := unsent(c.dir); err != nil {
		return &exit{exitEnvironment, err}
	} else if n > 0 && c.write != overlay.Back {
		log.Warn("not sent to an upstream, and not kept until they are: start with --cas-write back to send them",
			"blobs and results", n, "journal", journalOf(c.dir))
	}

	record, err := audit.Open(auditDir(c.dir))
	if err != nil {
		return &exit{exitEnvironment, err}
	}
	defer record.Close()
	past, err := c.openHistory(log)
	if err != nil {
		return err
	}
	if past != nil {
		defer past.Close()
	}

	box.Hidden = []string{c.dir}
	backend := namespace.New(box)
	defer backend.Close()
	features, err := backend.Probe(ctx)
	if err != nil {
		return &exit{exitEnvironment, fmt.Errorf("actions cannot be sandboxed here, and are never run without: %w", err)}
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		return &exit{exitEnvironment, fmt.Errorf("toolchain of this host: %w", err)}
	}
	name, err := os.Hostname()
	if err != nil || name == "" {
		name = "cloister"
	}

	listener, err := net.Listen("tcp", c.listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return &exit{exitEnvironment, fmt.Errorf("%s is in use by another process: stop it, or choose another port with --listen", c.listen)}
	}
	if err != nil {
		return &exit{exitEnvironment, fmt.Errorf("--listen %s: %w", c.listen, err)}
	}

	// What is sent at the end is still seen from outside.
	stopMetrics := func() {}
	defer func() { stopMetrics() }()
	background, stopBackground := context.WithCancel(ctx)
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer stopBackground()

	ready := &readiness{}
	if c.write == overlay.Through {
		ready.upstream = behind
	}
	instances := store.Instance
	var front *overlay.Overlay
	sending, stopSending := context.WithCancel(context.Background())
	stopSending() // until it is known that all went well, nobody waits for what is still to be sent
	if behind != nil {
		front, err = overlay.New(overlay.Config{
			Near: store.Instance, Far: behind.instances, Policy: c.write, Journal: journalOf(c.dir), Renew: c.renew(), Log: log,
		})
		if err != nil {
			return &exit{exitEnvironment, err}
		}
		instances = front.Instance
		defer func() {
			if err := front.Close(sending); err != nil {
				log.Warn("upstream", "address", behind.address, "err", err)
			}
			stopSending()
		}()
	}
	instances = c.meant.instances(ready.store.instances(instances, store.MaxBytes/2))

	stager, copied := worker.NewStager(ctx, backend, filepath.Join(c.dir, "tmp"), int64(c.trees), log)
	defer func() {
		if err := stager.Close(); err != nil {
			log.Warn("input trees", "err", err)
		}
	}()
	registry := prometheus.NewRegistry()
	metrics := telemetry.New(registry)
	local := worker.New(worker.Config{
		Stager: stager,
		Name:   name, Instances: instances, Backend: backend, Features: features, Toolchain: toolchain, Log: log,
		Policy: rules, Flags: c.flags(listener.Addr()), Renew: c.renew(),
		Audit: func(t *worker.Task, a *worker.Attempts) {
			metrics.Attempts(a)
			recordAttempts(log, record, name, t, a)
		},
	})
	logs := logstream.New(logstream.Config{Instances: instances})
	defer logs.Close()
	executor := worker.Executor(local)
	sampler := c.repro.sampler(local, metrics.Check, past)
	if sampler != nil {
		executor = sampler
	}
	line := queue.Config{Executor: metrics.Executor(executor), Slots: c.jobs, Renew: local.RenewInputs, RenewEvery: c.renew(), Logs: logs.Begin}
	if behind != nil {
		line.Fetch, line.FetchBytes = local.FetchInputs, store.MaxBytes/8 // so that leases leave room for outputs
	}
	if sampler != nil && !sampler.Gate {
		line.Idle = sampler.Idle
	}
	blobs := casserver.Config{
		Rights:       c.door.rights(),
		Instances:    instances,
		Execution:    execserver.Capabilities(),
		MaxBlobBytes: c.maxBlob.bytes,
		Logs:         logs,
	}
	if past != nil {
		line.Ended, blobs.Asked = execserver.Remember(past), execserver.RememberLookups(past)
	}
	work := queue.New(line)
	defer work.Close()
	stopMetrics, err = serveMetrics(c.metrics, registry, work, store, front, behind, ready)
	if err != nil {
		return err
	}

	server := grpc.NewServer(append(casserver.ServerOptions(log), options...)...)
	endUploads := casserver.Register(server, blobs)
	defer endUploads() // the store waits for them when it is closed
	logs.Register(server)
	execution := execserver.Config{Queue: work, Instances: instances, Admit: local.Admit, Action: local.Action, Worker: name, Log: log}
	if sampler != nil {
		execution.Remark = sampler.Remark
	}
	execserver.Register(server, execution)
	if past != nil {
		history.Register(server, past, instances)
		registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "cloister_history_lost_total", Help: "Answers that the history could not be told of.",
		}, func() float64 { return float64(past.Lost()) }))
	}
	alive := health.NewServer()
	healthpb.RegisterHealthServer(server, alive)
	for service := range server.GetServiceInfo() {
		alive.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	reflection.Register(server)
	if err := access.Check(server.GetServiceInfo()); err != nil {
		return err
	}
	if c.door.unguarded(listener.Addr()) {
		log.Warn("everybody who reaches this address can execute commands in the sandbox, and write results: see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}

	watchers.Go(func() { ready.tell(background, alive) })
	if behind != nil {
		watchers.Go(func() { behind.watch(background, log) })
	}
	if c.scrub > 0 {
		watchers.Go(func() { control.Scrub(background, int64(c.scrub), log) })
	}

	banner(out, c, store, features, copied, rules, listener.Addr().String())
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	stopStatus := showStatus(out, work)
	select {
	case err = <-failed:
		stopStatus()
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	case <-signals:
	}
	stopStatus()
	ready.draining.Store(true)
	alive.Shutdown()
	drain(out, c.drainTimeout, signals, work)
	logs.Close() // whoever follows one would hold up the server
	stopServer(server)
	<-failed
	if front != nil {
		if n := front.Stats().Pending; n > 0 {
			fmt.Fprintf(out, "sending  %d blobs and results to %s, for up to %s; Ctrl-C leaves them to the next start\n", n, behind.address, c.drainTimeout)
			if why := behind.down(); why != "" {
				fmt.Fprintf(out, "         %s\n", why)
			}
		}
		sending, stopSending = patience(c.drainTimeout, signals)
	}
	return nil
}

// openHistory opens the record of what is asked for, or returns nil if none is to be kept. The caller closes it.
func (c *serveConfig) openHistory(log *slog.Logger) (*history.Log, error) {
	if c.history == 0 {
		return nil, nil
	}
	l, err := history.Open(history.Config{Dir: filepath.Join(c.dir, "history"), MaxBytes: int64(c.history), Log: log})
	if err != nil {
		return nil, &exit{exitEnvironment, err}
	}
	return l, nil
}

// renew returns how often what is still needed is marked as used, so that its lease does not end.
func (c *serveConfig) renew() time.Duration { return time.Duration(c.lease) / 3 }

// recordAttempts writes what an action tried to the log and to the audit log.
func recordAttempts(log *slog.Logger, record *audit.Log, name string, t *worker.Task, a *worker.Attempts) {
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

// flags returns what a command on this machine must be told, to find this server and to run as it does.
func (c *serveConfig) flags(a net.Addr) []string {
	var flags []string
	if tcp, ok := a.(*net.TCPAddr); ok && (a.String() != defaultListen || c.door.cert != "") {
		host := tcp.IP.String()
		if tcp.IP.IsUnspecified() {
			host = "127.0.0.1"
		}
		flags = append(flags, "--cas", c.door.scheme()+"://"+net.JoinHostPort(host, strconv.Itoa(tcp.Port)))
	}
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

// storeDir returns the directory that --dir names, or the default.
func storeDir(flag string) (string, error) {
	if flag == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", &exit{exitEnvironment, fmt.Errorf("there is no cache directory for this user (%w): state --dir", err)}
		}
		flag = filepath.Join(cache, "cloister")
	}
	return filepath.Abs(flag)
}

// openStore opens the store of the flags, and fills in what they leave to it. Log is told what is found damaged.
func openStore(c *serveConfig, log *slog.Logger) (*disk.Cache, error) {
	dir, err := storeDir(c.dir)
	if err != nil {
		return nil, err
	}
	c.dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, &exit{exitEnvironment, fmt.Errorf("--dir %s: %w", dir, err)}
	}
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	if c.dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, &exit{exitEnvironment, fmt.Errorf("--dir %s: %w", dir, err)}
	}
	most, err := c.maxSize.on(c.dir)
	if err != nil {
		return nil, &exit{exitEnvironment, err}
	}
	// One blob must not push out everything else.
	switch half := most / 2; {
	case c.maxBlob.bytes == 0:
		c.maxBlob.bytes = max(half, 1)
	case c.maxBlob.bytes > half:
		return nil, &exit{exitUsage, fmt.Errorf("--max-blob %s: at most half of --max-size, which is %s here", &c.maxBlob, sandbox.Bytes(most))}
	}
	store, err := disk.Open(disk.Config{
		Dir: c.dir, MaxBytes: most, MaxFiles: c.maxFiles, Lease: leaseOf(c.lease), Sync: c.sync,
		Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob: it is absent now, so that it is uploaded or made again",
				"digest", d.String(), "instance", instance, "where", where, "kept", diskctl.Quarantine(c.dir, d))
		},
	})
	if err != nil {
		return nil, &exit{exitEnvironment, err}
	}
	if s := store.Stats(); s.LogDamage > 0 || s.LogLost > 0 {
		log.Warn("damaged logs: some blobs are absent now, so that they are uploaded or made again",
			"dir", filepath.Join(c.dir, "segments"), "unreadable_bytes", s.LogDamage, "records_without_bytes", s.LogLost)
	}
	return store, nil
}

// banner prints what somebody wants to know who has just started it.
func banner(out io.Writer, c *serveConfig, store *disk.Cache, f sandbox.Features, copied error, rules *policy.Policy, addr string) {
	stats := store.Stats()
	fmt.Fprintf(out, "cloister %s  %s/%s  %d slots  cache %s %s of %s\n",
		version, runtime.GOOS, runtime.GOARCH, c.jobs, c.dir, sandbox.Bytes(stats.Bytes), sandbox.Bytes(stats.MaxBytes))
	lease := "no lease: anything may be evicted at any time"
	if c.lease > 0 {
		lease = "what was used stays for " + c.lease.String()
	}
	if c.sync {
		lease += ", synced"
	}
	fmt.Fprintf(out, "store    %s\n", lease)
	if copied != nil {
		fmt.Fprintf(out, "inputs   copied for each action: %v\n", copied)
	} else {
		fmt.Fprintf(out, "inputs   read from the store; %s of them stay mounted, %s decoded\n",
			sandbox.Bytes(int64(c.trees)), sandbox.Bytes(worker.DefaultCacheBytes))
	}
	fmt.Fprintf(out, "sandbox  %s   (%s)\n", strings.Join(f.Layers, ", "), f.Tier)
	var off []string
	for _, check := range f.Checks {
		if !check.OK {
			line := check.Name
			if check.Fix != "" {
				line += " (fix: " + check.Fix + ")"
			}
			off = append(off, line)
		}
	}
	if len(off) > 0 {
		fmt.Fprintf(out, "         not enforced: %s; cloister check says more\n", strings.Join(off, ", "))
	}
	if c.box.policy != "" {
		fmt.Fprintf(out, "policy   %s   (%.12s)\n", c.box.policy, rules.Hash())
	}
	c.repro.banner(out)
	if line := c.door.line(); line != "" {
		fmt.Fprintf(out, "access   %s\n", line)
	}
	// Programs look for the first address, and take it for a sign that all has been said.
	last := fmt.Sprintf("bazel    build --remote_executor=%s://%s\n", c.door.scheme(), addr)
	if c.far.cas+c.far.store != "" {
		last += fmt.Sprintf("upstream %s   (write %s)\n", c.far.cas+c.far.store, c.far.write)
	}
	io.WriteString(out, last)
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

// drain lets what is queued and running end, until the time is up or a second signal comes.
func drain(out io.Writer, limit time.Duration, signals <-chan os.Signal, work *queue.Queue) {
	ctx, cancel := patience(limit, signals)
	defer cancel()
	if s := work.Stats(); s.Queued+s.Running > 0 {
		fmt.Fprintf(out, "draining %d running, %d queued; Ctrl-C again stops at once\n", s.Running, s.Queued)
	}
	if err := work.Drain(ctx); err != nil {
		fmt.Fprintln(out, "stopped  running actions were cancelled; clients will retry")
	}
}

// stopServer lets clients read what they were promised, for a few seconds.
func stopServer(server *grpc.Server) {
	stopped := make(chan struct{})
	go func() {
		server.GracefulStop()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(5 * time.Second):
		server.Stop()
		<-stopped
	}
}

// showStatus keeps one line about the queue up to date if out is a terminal. The caller calls what it
// returns to end it.
func showStatus(out io.Writer, work *queue.Queue) (stop func()) {
	if !isTerminal(out) {
		return func() {}
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			s := work.Stats()
			fmt.Fprintf(out, "\r\x1b[Kready    %d queued · %d running · %d done · %d hits · %d errors", s.Queued, s.Running, s.Done, s.Cached, s.Failed)
			select {
			case <-done:
				fmt.Fprintln(out)
				return
			case <-tick.C:
			}
		}
	}()
	return func() { close(done); <-ended }
}
