// SPDX-License-Identifier: Apache-2.0

// Package server runs cloister serve: a node behind a queue, with the services for clients, workers and operators.
package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/fleet"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// A server is a running cloister serve.
type server struct {
	*Config
	log      *slog.Logger
	node     *node.Node
	history  *history.Log // nil without a history
	verdicts *repro.Verdicts
	listener net.Listener
	runFlags []string // with which a command on this machine reruns an action
	logs     *logstream.Registry
	sampler  *repro.Sampler // nil without sampling
	queue    *queue.Queue
	grpc     *grpc.Server
	health   *health.Server
	workers  *workersPort // nil without other workers
	closers  []func()     // called by close in reverse order
}

// Run serves until a signal or ctx ends it.
func Run(ctx context.Context, c *Config, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	s := &server{Config: c, log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))}
	defer s.close()
	err := s.open(ctx)
	if err == nil {
		err = s.openQueue()
	}
	if err == nil {
		err = s.openServices()
	}
	if err != nil {
		return err
	}
	return s.serve(ctx, out, signals)
}

func (s *server) onClose(f func()) { s.closers = append(s.closers, f) }

func (s *server) close() {
	for _, f := range slices.Backward(s.closers) {
		f()
	}
}

// open opens the node, the history and the port of the clients, and starts the node.
func (s *server) open(ctx context.Context) (err error) {
	if err := s.Auth.open(s.log); err != nil {
		return err
	}
	if s.node, err = node.Open(ctx, &s.Config.Config, s.log); err != nil {
		return err
	}
	s.onClose(s.node.Close)
	if err := s.boundBlobs(s.node.Store.MaxBytes); err != nil {
		return err
	}
	if s.history, err = s.openHistory(s.log); err != nil {
		return err
	}
	if s.history != nil {
		s.onClose(func() { s.history.Close() })
	}
	if s.verdicts, err = s.Sampling.openVerdicts(&s.Config.Config, s.log); err != nil {
		return err
	}
	s.onClose(func() { s.verdicts.Close() })
	if !s.Head {
		if err := s.node.Confine(ctx); err != nil {
			return err
		}
	}
	if s.listener, err = node.Listen(s.Listen, "--listen"); err != nil {
		return err
	}
	s.runFlags = append(s.addressFlags(s.listener.Addr()), s.RunFlags()...)
	return s.node.Start(ctx, s.runFlags, func(next cas.Instances) cas.Instances {
		return s.Sampling.withhold(s.verdicts, s.DigestFunctions.Instances(next))
	})
}

// openQueue makes the queue with the drains of an earlier server, and its metrics.
func (s *server) openQueue() (err error) {
	n := s.node
	s.logs = logstream.New(logstream.Config{Instances: n.Instances})
	s.onClose(s.logs.Close)
	s.sampler = s.Sampling.sampler(n.Local, s.runFlags, n.Telemetry.Check, s.history, s.verdicts)
	config := s.queueConfig()
	if config.Drains, err = readDrains(n.Dir); err != nil {
		return err
	}
	s.queue = queue.New(config)
	s.onClose(s.queue.Close)
	n.Ready.Workers = func() string { return AllDrained(s.queue) }
	return n.ServeMetrics(queueMetrics(n.Registry, s.queue)...)
}

// openServices makes the gRPC server of the clients, and the port of the workers.
func (s *server) openServices() error {
	s.grpc = grpc.NewServer(append(casserver.ServerOptions(s.log), s.Auth.clients()...)...)
	if err := s.registerServices(); err != nil {
		return err
	}
	if s.Auth.public(s.listener.Addr()) {
		s.log.Warn("everyone who can connect can run commands in the sandbox and write results; see --auth and --tls-client-ca",
			"address", s.listener.Addr().String())
	}
	if s.Fleet {
		var err error
		if s.workers, err = s.openWorkers(s.node, s.queue); err != nil {
			return err
		}
		s.onClose(s.workers.stop)
	}
	return nil
}

// serve serves until a signal, and then drains.
func (s *server) serve(ctx context.Context, out io.Writer, signals <-chan os.Signal) error {
	failed, failedWorkers := make(chan error, 1), make(chan error, 1)
	workers := ""
	if s.workers != nil {
		workers = s.workers.listener.Addr().String()
		go func() { failedWorkers <- s.workers.server.Serve(s.workers.listener) }()
	}
	s.node.Watchers.Go(func() { s.node.Ready.ReportHealth(s.node.Background, s.health) })

	// The port is open: clients that connect now are answered as soon as Serve runs.
	if err := s.node.NotifyReady(queueStatus(s.queue)); err != nil {
		return err
	}
	s.banner(out, s.node, s.listener.Addr().String(), workers)
	go func() { failed <- s.grpc.Serve(s.listener) }()
	stopStatus := showStatus(out, s.queue)
	select {
	case err := <-failed:
		stopStatus()
		return fmt.Errorf("serve %s: %w", s.listener.Addr(), err)
	case err := <-failedWorkers:
		stopStatus()
		return fmt.Errorf("serve %s: %w", workers, err)
	case <-ctx.Done():
	case <-signals:
	}
	stopStatus()
	s.node.Ready.Draining.Store(true)
	s.node.Service.Stopping()
	s.health.Shutdown()
	drain(out, s.DrainTimeout, signals, s.queue)
	if s.workers != nil {
		s.workers.stop()
	}
	s.logs.Close() // readers of a log would keep the server from stopping
	node.StopServer(s.grpc)
	<-failed //nolint:errcheck // it was stopped
	s.node.SendPending(out, signals)
	return nil
}

// fullHint says what the operator can do when the store is full.
const fullHint = "free disk space, raise --max-size or lower --lease"

// registerServices adds the services of clients and operators to the gRPC server.
func (s *server) registerServices() error {
	n := s.node
	blobs := casserver.Config{
		Rights:       s.Auth.rights(),
		Instances:    n.Instances,
		Execution:    execserver.Capabilities(),
		MaxBlobBytes: s.MaxBlob.Bytes,
		Logs:         s.logs,
		FullHint:     fullHint,
	}
	execution := execserver.Config{
		Queue: s.queue, Instances: n.Instances, Admit: n.Local.Admit, Action: n.Local.Action, Worker: n.Name, Log: s.log,
	}
	if s.sampler != nil {
		execution.Remark = s.sampler.Remark
	}
	if s.history != nil {
		blobs.OnLookup, blobs.OnUpdate = execserver.RecordLookups(s.history), execserver.RecordUploads(s.history)
		history.Register(s.grpc, s.history, n.Instances)
		n.Registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "cloister_history_lost_total", Help: "Answers that are missing from the history.",
		}, func() float64 { return float64(s.history.Lost()) }))
	}
	s.onClose(casserver.Register(s.grpc, blobs)) // before the store closes, which waits for uploads
	s.logs.Register(s.grpc)
	execserver.Register(s.grpc, execution)
	fleet.Register(s.grpc, s.fleetConfig())
	s.health = registerHealth(s.grpc)
	reflection.Register(s.grpc)
	return access.Check(s.grpc.GetServiceInfo())
}

// registerHealth adds the health service, which reports every service as serving.
func registerHealth(s *grpc.Server) *health.Server {
	h := health.NewServer()
	healthpb.RegisterHealthServer(s, h)
	for service := range s.GetServiceInfo() {
		h.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	return h
}

// fleetConfig returns the configuration of the service for operators.
func (s *server) fleetConfig() fleet.Config {
	f := fleet.Config{
		Queue: s.queue, Name: s.node.Name, Version: buildinfo.Version, Started: time.Now(), Unready: s.node.Ready.Reasons,
		Keep: func(d queue.DrainState) error { return keepDrains(s.node.Dir, d) },
	}
	if live := s.Auth.rules; live != nil {
		rules := live.Rules() // rules of any moment do: they look up the admitted caller
		f.Viewers, f.Caller = rules, rules.Caller
	}
	return f
}

// drain waits for queued and running actions until limit or the next signal.
func drain(out io.Writer, limit time.Duration, signals <-chan os.Signal, work *queue.Queue) {
	ctx, cancel := node.DrainContext(limit, signals)
	defer cancel()
	if s := work.Stats(); s.Queued+s.Running > 0 {
		fmt.Fprintf(out, "draining %d running, %d queued; Ctrl-C again stops at once\n", s.Running, s.Queued)
	}
	if err := work.Drain(ctx); err != nil {
		fmt.Fprintln(out, "stopped  running actions were cancelled; clients will retry")
	}
}

// queueStatus returns a function that describes what a queue is doing.
func queueStatus(work *queue.Queue) func() string {
	return func() string {
		s := work.Stats()
		return fmt.Sprintf("%d running, %d queued, %d done", s.Running, s.Queued, s.Done)
	}
}

// showStatus keeps a line about the queue up to date if out is a terminal, until the caller calls stop.
func showStatus(out io.Writer, work *queue.Queue) (stop func()) {
	if !terminal.Is(out) {
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
