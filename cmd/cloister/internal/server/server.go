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

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// A server is a running cloister serve.
type server struct {
	*Config
	log       *slog.Logger
	node      *node.Node
	history   *history.Log       // nil without a history
	builds    *buildevents.Store // nil without build events
	verdicts  *repro.Verdicts
	functions *functionTable
	services  *service.Server
	listener  net.Listener
	runFlags  []string // with which a command on this machine reruns an action
	grpc      *grpc.Server
	health    *health.Server
	limits    *quota.Table
	workers   *workersPort // nil without other workers
	web       *webPort     // nil without a console
	clients   downloads
	closers   []func() // called by close in reverse order
}

// Run serves until a signal or ctx ends it.
func Run(ctx context.Context, c *Config, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	s := &server{Config: c, log: slog.Default(), functions: newFunctionTable(&c.DigestFunctions, slog.Default())}
	defer s.close()
	err := s.open(ctx)
	if err == nil {
		err = s.assemble(ctx)
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

// open opens the node and the history.
func (s *server) open(ctx context.Context) (err error) {
	if err := s.Auth.open(s.log); err != nil {
		return err
	}
	s.onClose(s.Auth.close)
	if s.node, err = node.Open(ctx, &s.Config.Config, s.log); err != nil {
		return err
	}
	s.onClose(s.node.Close)
	if err := s.boundBlobs(s.node.Store.Stats().MaxBytes); err != nil {
		return err
	}
	if s.history, err = s.openHistory(s.log); err != nil {
		return err
	}
	if s.history != nil {
		s.onClose(func() { s.history.Close() })
	}
	if s.builds, err = s.openBuilds(s.log); err != nil {
		return err
	}
	if s.verdicts, err = s.Sampling.openVerdicts(&s.Config.Config, s.log); err != nil {
		return err
	}
	s.onClose(func() { s.verdicts.Close() })
	return nil
}

// assemble makes the Server that executes actions, with the drains of an earlier server, and opens the clients' port.
func (s *server) assemble(ctx context.Context) error {
	n := s.node
	if err := n.Start(ctx, s.functions.instances); err != nil {
		return err
	}
	s.limits = s.callers()
	config, err := s.assembly()
	if err != nil {
		return err
	}
	if s.services, err = service.NewServer(ctx, config); err != nil {
		return exit.New(exit.Environment, err)
	}
	s.onClose(n.Attach(s.services))
	if s.listener, err = node.Listen(s.Listen, "--listen"); err != nil {
		return err
	}
	if err := s.listenWeb(); err != nil {
		return err
	}
	s.runFlags = append(s.addressFlags(s.listener.Addr()), s.RunFlags()...)
	n.Ready.Workers = func() string { return AllDrained(s.services.Queue()) }
	if s.Auth.rules != nil {
		n.Ready.Callers = s.Auth.stale
	}
	if s.Auth.pair != nil {
		n.Ready.Certificate = s.Auth.staleCertificate
	}
	return n.ServeMetrics()
}

// openServices makes the gRPC server of the clients, and the port of the workers.
func (s *server) openServices() error {
	s.grpc = grpc.NewServer(slices.Concat(
		s.node.ServerOptions(), casserver.ServerOptions(s.log), []grpc.ServerOption{casserver.Codec(), grpc.StatsHandler(&s.clients)},
		s.Auth.clients(), s.limits.Options())...)
	if err := s.registerServices(); err != nil {
		return err
	}
	if s.Auth.public(s.listener.Addr()) {
		s.log.Warn("everyone who can connect can run commands in the sandbox and write results; see --auth and --tls-client-ca",
			"address", s.listener.Addr().String())
	}
	if s.Fleet {
		var err error
		if s.workers, err = s.openWorkers(); err != nil {
			return err
		}
		s.onClose(s.workers.server.Stop)
	}
	return s.openConsole()
}

// serve serves until a signal, and then drains.
func (s *server) serve(ctx context.Context, out io.Writer, signals <-chan os.Signal) error {
	failed, failedWorkers := make(chan error, 1), make(chan error, 1)
	var workers net.Addr
	if s.workers != nil {
		workers = s.workers.listener.Addr()
		go func() { failedWorkers <- s.workers.server.Serve(s.workers.listener) }()
	}
	s.node.Watchers.Go(func() { s.node.Ready.ReportHealth(s.node.Background, s.health) })

	// The port is open: clients that connect now are answered as soon as Serve runs.
	if err := s.node.NotifyReady(queueStatus(s.services.Queue())); err != nil {
		return err
	}
	web := ""
	if s.web != nil {
		web = s.web.url
		s.web.serve(s.log)
	}
	s.banner(out, s.node, s.listener.Addr(), workers, web)
	go func() { failed <- s.grpc.Serve(s.listener) }()
	stopStatus := showStatus(out, s.services.Queue())
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
	s.drain(out, signals)
	if s.workers != nil {
		node.StopServer(s.workers.server)
	}
	node.StopServer(s.grpc)
	<-failed //nolint:errcheck // it was stopped
	s.node.SendPending(out, signals)
	return nil
}

// registerServices adds the services of clients and operators to the gRPC server.
func (s *server) registerServices() error {
	if err := s.services.Register(s.grpc); err != nil {
		return err
	}
	s.registerBuilds(s.grpc)
	s.node.RegisterIndex(s.grpc)
	if s.Auth.rules != nil { // without them anyone could delete results and read what others attempted
		s.node.RegisterOperators(s.grpc)
	}
	s.health = registerHealth(s.grpc)
	reflection.Register(s.grpc)
	return access.Check(s.grpc.GetServiceInfo())
}

// registerBuilds adds the services of build events, if they are stored.
func (s *server) registerBuilds(g *grpc.Server) {
	if s.builds == nil {
		return
	}
	var callers buildevents.Callers // not an interface with a nil service.Access
	if access := s.Auth.access(); access != nil {
		callers = access
	}
	s.builds.Register(g, callers)
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

// drain waits for queued and running actions, and then for clients that download their outputs, until the drain timeout
// or the next signal.
func (s *server) drain(out io.Writer, signals <-chan os.Signal) {
	ctx, cancel := node.DrainContext(s.DrainTimeout, signals)
	defer cancel()
	if s := s.services.Queue().Stats(); s.Queued+s.Running > 0 {
		fmt.Fprintf(out, "draining %d running, %d queued; Ctrl-C again stops at once\n", s.Running, s.Queued)
	}
	if err := s.services.Drain(ctx); err != nil {
		fmt.Fprintln(out, "stopped  running actions were cancelled; clients will retry")
		return
	}
	if n := s.clients.busy(); n > 0 {
		fmt.Fprintf(out, "serving  outputs, until the clients of the last actions have been idle for %s; Ctrl-C again stops at once\n", idleTime)
		s.clients.wait(ctx)
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
