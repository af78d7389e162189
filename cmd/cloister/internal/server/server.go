// SPDX-License-Identifier: Apache-2.0

// Package server runs cloister serve: a node behind a queue, with the services for clients, workers and operators.
package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
)

// Run runs until a signal or ctx ends it.
func Run(ctx context.Context, c *Config, out io.Writer) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))

	if err := c.Auth.open(log); err != nil {
		return err
	}
	n, err := node.Open(ctx, &c.Config, log)
	if err != nil {
		return err
	}
	defer n.Close()
	if err := c.boundBlobs(n.Store.MaxBytes); err != nil {
		return err
	}
	past, err := c.openHistory(log)
	if err != nil {
		return err
	}
	if past != nil {
		defer past.Close()
	}
	known, err := c.Sampling.known(&c.Config, log)
	if err != nil {
		return err
	}
	defer known.Close()
	if !c.Head {
		if err := n.Confine(ctx); err != nil {
			return err
		}
	}
	listener, err := node.Listen(c.Listen, "--listen")
	if err != nil {
		return err
	}
	seen := func(next cas.Instances) cas.Instances {
		return c.Sampling.seen(known, c.DigestFunctions.Instances(next))
	}
	runFlags := append(c.reach(listener.Addr()), c.RunFlags()...)
	if err := n.Start(ctx, runFlags, seen); err != nil {
		return err
	}

	logs := logstream.New(logstream.Config{Instances: n.Instances})
	defer logs.Close()
	sampler := c.Sampling.sampler(n.Local, runFlags, n.Telemetry.Check, past, known)
	line := c.queue(n, sampler, logs, past)
	if line.Drains, err = readDrains(n.Dir); err != nil {
		return err
	}
	work := queue.New(line)
	defer work.Close()
	n.Ready.Workers = func() string { return AllDrained(work) }
	if err := n.ServeMetrics(queueMetrics(n.Registry, work)...); err != nil {
		return err
	}
	server := grpc.NewServer(append(casserver.ServerOptions(log), c.Auth.clients()...)...)
	alive, endUploads, err := c.serveAll(server, n, work, sampler, logs, past)
	if err != nil {
		return err
	}
	defer endUploads() // the store waits for them when it is closed
	if c.Auth.public(listener.Addr()) {
		log.Warn("everybody who reaches this address can execute commands in the sandbox, and write results: see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}
	stopWorkers, failedWorkers := func() {}, make(chan error, 1)
	defer func() { stopWorkers() }()
	workers := ""
	if c.Fleet {
		port, err := c.openWorkers(n, work)
		if err != nil {
			return err
		}
		stopWorkers, workers = sync.OnceFunc(port.stop), port.listener.Addr().String()
		go func() { failedWorkers <- port.server.Serve(port.listener) }()
	}
	n.Watchers.Go(func() { n.Ready.ReportHealth(n.Background, alive) })

	// Who connects from now on is answered, if after a moment.
	if err := n.NotifyReady(queueStatus(work)); err != nil {
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
	n.Ready.Draining.Store(true)
	n.Service.Stopping()
	alive.Shutdown()
	drain(out, c.DrainTimeout, signals, work)
	stopWorkers()
	logs.Close() // whoever follows one would hold up the server
	node.StopServer(server)
	<-failed
	n.SendPending(out, signals)
	return nil
}

// drain lets what is queued and running end, until the time is up or a second signal comes.
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

// showStatus keeps one line about the queue up to date if out is a terminal. The caller calls what it
// returns to end it.
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

// queueStatus returns what a queue is doing.
func queueStatus(work *queue.Queue) func() string {
	return func() string {
		s := work.Stats()
		return fmt.Sprintf("%d running, %d queued, %d done", s.Running, s.Queued, s.Done)
	}
}
