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
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/fleet"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// serveConfig is what the flags of serve say.
type serveConfig struct {
	nodeConfig
	listen  string
	maxBlob size // 0: half of maxSize
	meant   meant
	history amount
	door    door
	repro   sampling
	workers workersConfig
}

// defaultListen is where serve listens, and where other commands look for it.
const defaultListen = "127.0.0.1:8980"

func serveCommand() *cobra.Command {
	c := serveConfig{nodeConfig: newNodeConfig(), history: history.DefaultBytes}
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
their rights; docs/auth.md says how one is written.

With --worker-listen other machines execute actions, too: cloister join takes them from that port, and
finds there all that it needs for them. With --jobs 0 this one executes none, and needs no sandbox. What
runs on a machine that is lost runs again on another. docs/farm.md says more.`,
		Example: `  cloister serve
  cloister serve --listen 127.0.0.1:9000 --dir /var/cache/cloister --jobs 4 --max-size 50GiB
  cloister serve --cas grpcs://cache.example.com:443 --cas-write back
  cloister serve --listen 0.0.0.0:8980 --tls-cert server.pem --tls-key server.key --auth auth.yaml
  cloister serve --store 's3://builds/cache?region=eu-central-1' --lease 12h
  cloister serve --listen 0.0.0.0:8980 --worker-listen 0.0.0.0:8983 --jobs 0

  bazel build --remote_executor=grpc://127.0.0.1:8980 //...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(cmd); err != nil {
				return err
			}
			return serve(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	c.nodeConfig.register(cmd)
	c.far.register(cmd)
	c.repro.register(cmd)
	c.workers.register(cmd)
	f := cmd.Flags()
	c.door.register(f)
	f.StringVar(&c.listen, "listen", defaultListen, "address and port of the gRPC services; port 0 chooses a free one")
	f.Var(&c.maxBlob, "max-blob", "size of the largest blob that is taken (default: half of --max-size, which is the most)")
	noDefault(f, "max-blob")
	f.Var(&c.history, "history-size", "size of the record of what was asked for, which action ls and diff look into; the oldest goes first; 0 keeps none")
	f.Var(&c.meant, "digest-function", "[INSTANCE=]FUNCTION that is meant by a client that states none, of those with hashes of equal length; Buck2 with BLAKE3 needs blake3")
	return cmd
}

// check returns what is wrong with the command line, before anything is made.
func (c *serveConfig) check(cmd *cobra.Command) error {
	switch {
	case c.history > 0 && c.history < 1<<20:
		return fmt.Errorf("--history-size %s: write at least 1MiB, as 64MiB or 1GiB, or 0 for none", &c.history)
	case c.maxBlob.percent > 0:
		return fmt.Errorf("--max-blob %s: write it as 512MiB or 4GiB", &c.maxBlob)
	}
	return errors.Join(c.checkWorkers(cmd), c.nodeConfig.check(cmd), c.door.check(), c.repro.check(cmd))
}

// serve runs until a signal or ctx ends it.
func serve(ctx context.Context, c *serveConfig, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))

	if err := c.door.open(log); err != nil {
		return err
	}
	n, err := openNode(ctx, &c.nodeConfig, log)
	if err != nil {
		return err
	}
	defer n.close()
	if err := c.boundBlobs(n.store.MaxBytes); err != nil {
		return err
	}
	past, err := c.openHistory(log)
	if err != nil {
		return err
	}
	if past != nil {
		defer past.Close()
	}
	known, err := c.repro.known(&c.nodeConfig, log)
	if err != nil {
		return err
	}
	defer known.Close()
	if !c.head {
		if err := n.confine(ctx); err != nil {
			return err
		}
	}
	listener, err := listen(c.listen, "--listen")
	if err != nil {
		return err
	}
	seen := func(next cas.Instances) cas.Instances { return c.repro.seen(known, c.meant.instances(next)) }
	flags := append(c.reach(listener.Addr()), c.flags()...)
	if err := n.start(ctx, flags, seen); err != nil {
		return err
	}

	logs := logstream.New(logstream.Config{Instances: n.instances})
	defer logs.Close()
	sampler := c.repro.sampler(n.local, flags, n.telemetry.Check, past, known)
	line := c.queue(n, sampler, logs, past)
	if line.Drains, err = readDrains(n.dir); err != nil {
		return err
	}
	work := queue.New(line)
	defer work.Close()
	n.ready.workers = func() string { return allDrained(work) }
	if err := n.serveMetrics(ofQueue(n.registry, work)...); err != nil {
		return err
	}
	server := grpc.NewServer(append(casserver.ServerOptions(log), c.door.clients()...)...)
	alive, endUploads, err := c.serveAll(server, n, work, sampler, logs, past)
	if err != nil {
		return err
	}
	defer endUploads() // the store waits for them when it is closed
	if c.door.unguarded(listener.Addr()) {
		log.Warn("everybody who reaches this address can execute commands in the sandbox, and write results: see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}
	stopWorkers, failedWorkers := func() {}, make(chan error, 1)
	defer func() { stopWorkers() }()
	workers := ""
	if c.fleet {
		port, err := c.openWorkers(n, work)
		if err != nil {
			return err
		}
		stopWorkers, workers = sync.OnceFunc(port.stop), port.listener.Addr().String()
		go func() { failedWorkers <- port.server.Serve(port.listener) }()
	}
	n.watchers.Go(func() { n.ready.tell(n.background, alive) })

	// Who connects from now on is answered, if after a moment.
	if err := n.tellManager(statusOf(work)); err != nil {
		return err
	}
	c.banner(out, n, listener.Addr().String(), workers)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	stopStatus := showStatus(out, work)
	select {
	case err = <-failed:
		stopStatus()
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case err = <-failedWorkers:
		stopStatus()
		return fmt.Errorf("serve %s: %w", workers, err)
	case <-ctx.Done():
	case <-signals:
	}
	stopStatus()
	n.ready.draining.Store(true)
	n.service.Stopping()
	alive.Shutdown()
	drain(out, c.drainTimeout, signals, work)
	stopWorkers()
	logs.Close() // whoever follows one would hold up the server
	stopServer(server)
	<-failed
	n.send(out, signals)
	return nil
}

// listen opens a port that a flag names.
func listen(address, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, newExit(exitEnvironment, fmt.Errorf("%s is in use by another process: stop it, or choose another port with %s", address, flag))
	}
	if _, wrong := errors.AsType[*net.AddrError](err); wrong {
		return nil, newExit(exitUsage, fmt.Errorf("%s %q: write it as ADDRESS:PORT", flag, address))
	}
	if err != nil {
		return nil, newExit(exitEnvironment, fmt.Errorf("%s %s: %w", flag, address, err))
	}
	return l, nil
}

// boundBlobs fills in how large a blob may be, at most half of the store of that size: one must not push out everything else.
func (c *serveConfig) boundBlobs(most int64) error {
	switch half := most / 2; {
	case c.maxBlob.bytes == 0:
		c.maxBlob.bytes = max(half, 1)
	case c.maxBlob.bytes > half:
		return newExit(exitUsage, fmt.Errorf("--max-blob %s: at most half of --max-size, which is %s here", &c.maxBlob, sandbox.Bytes(most)))
	}
	return nil
}

// queue returns how actions wait for the node. Sampler and past are nil if there are none.
func (c *serveConfig) queue(n *node, sampler *repro.Sampler, logs *logstream.Registry, past *history.Log) queue.Config {
	line := queue.Config{Head: c.head, Renew: n.local.RenewInputs, RenewEvery: c.renew(), Hint: matchHint}
	if past != nil {
		line.Ended = execserver.Remember(past)
	}
	if c.head {
		return line
	}
	executor := worker.Executor(n.local)
	if sampler != nil {
		executor = sampler
	}
	line.Executor, line.Slots, line.Offer, line.Logs = n.telemetry.Executor(executor), c.jobs, c.offer(n.name), logs.Begin
	if n.behind != nil {
		line.Fetch, line.FetchBytes = n.local.PrefetchInputs, n.store.MaxBytes/8 // so that leases leave room for outputs
	}
	if sampler != nil && !sampler.Gate {
		line.Idle = sampler.Idle
	}
	return line
}

// serveAll adds the services to server. The caller calls endUploads once the server has stopped.
func (c *serveConfig) serveAll(server *grpc.Server, n *node, work *queue.Queue, sampler *repro.Sampler, logs *logstream.Registry, past *history.Log) (alive *health.Server, endUploads func(), err error) {
	blobs := casserver.Config{
		Rights:       c.door.rights(),
		Instances:    n.instances,
		Execution:    execserver.Capabilities(),
		MaxBlobBytes: c.maxBlob.bytes,
		Logs:         logs,
		FullHint:     "free disk space, raise --max-size or lower --lease",
	}
	execution := execserver.Config{Queue: work, Instances: n.instances, Admit: n.local.Admit, Action: n.local.Action, Worker: n.name, Log: n.log}
	if sampler != nil {
		execution.Remark = sampler.Remark
	}
	if past != nil {
		blobs.OnLookup, blobs.OnUpdate = execserver.RememberLookups(past), execserver.RememberUploads(past)
		history.Register(server, past, n.instances)
		n.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "cloister_history_lost_total", Help: "Answers that the history could not be told of.",
		}, func() float64 { return float64(past.Lost()) }))
	}
	endUploads = casserver.Register(server, blobs)
	logs.Register(server)
	execserver.Register(server, execution)
	fleet.Register(server, c.operators(n, work))
	alive = health.NewServer()
	healthpb.RegisterHealthServer(server, alive)
	for service := range server.GetServiceInfo() {
		alive.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	reflection.Register(server)
	if err := access.Check(server.GetServiceInfo()); err != nil {
		endUploads()
		return nil, nil, err
	}
	return alive, endUploads, nil
}

// operators returns what operators may ask of the node, and of whom it gives actions to.
func (c *serveConfig) operators(n *node, work *queue.Queue) fleet.Config {
	f := fleet.Config{
		Queue: work, Name: n.name, Version: version, Started: time.Now(), Unready: n.ready.why,
		Keep: func(s queue.DrainState) error { return keepDrains(n.dir, s) },
	}
	if rules := c.door.rules; rules != nil {
		now := rules.Rules() // any will do: they look at who was admitted
		f.Viewers, f.Caller = now, now.Caller
	}
	return f
}

// openHistory opens the record of what is asked for, or returns nil if none is to be kept. The caller closes it.
func (c *serveConfig) openHistory(log *slog.Logger) (*history.Log, error) {
	if c.history == 0 {
		return nil, nil
	}
	l, err := history.Open(history.Config{Dir: filepath.Join(c.dir, "history"), MaxBytes: int64(c.history), Log: log})
	if err != nil {
		return nil, newExit(exitEnvironment, err)
	}
	return l, nil
}

// reach returns what a command on this machine must be told to find this server.
func (c *serveConfig) reach(a net.Addr) []string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || a.String() == defaultListen && c.door.cert == "" {
		return nil
	}
	host := tcp.IP.String()
	if tcp.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return []string{"--cas", c.door.scheme() + "://" + net.JoinHostPort(host, strconv.Itoa(tcp.Port))}
}

// banner prints what somebody wants to know who has just started it.
func (c *serveConfig) banner(out io.Writer, n *node, addr, workers string) {
	n.banner(out)
	c.repro.banner(out)
	if line := c.door.line(); line != "" {
		fmt.Fprintf(out, "access   %s\n", line)
	}
	// Programs look for the first address, and take it for a sign that all has been said.
	last := fmt.Sprintf("bazel    build --remote_executor=%s://%s\n", c.door.scheme(), addr)
	if c.far.cas+c.far.store != "" {
		last += fmt.Sprintf("upstream %s   (write %s)\n", c.far.cas+c.far.store, c.far.write)
	}
	if workers != "" {
		last += fmt.Sprintf("workers  cloister join %s://%s\n", c.door.scheme(), workers)
	}
	io.WriteString(out, last)
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
