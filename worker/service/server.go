// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/internal/fleet"
	"github.com/cloister-build/cloister/worker/internal/nested"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/grpc"
)

// A Server executes the actions of clients, on this machine or on workers that join. Use NewServer; the zero Server
// is not usable. Its methods are safe for concurrent use, except that Close waits for no other.
type Server struct {
	*machine
	started time.Time
	logs    *logstream.Registry
	sampler *repro.Sampler // nil without sampling
	queue   *queue.Queue
	lookups lookups

	mu      sync.Mutex
	workers []*buildbarn.Server // guarded by mu
}

// NewServer returns a Server, which the caller closes. It probes the sandbox and fails if that cannot run anything, if
// a required field is missing, or if Config.Metrics has metrics of the same names. It serves nothing before Register.
func NewServer(ctx context.Context, c Config) (_ *Server, err error) {
	if err := withhold(&c); err != nil {
		return nil, err
	}
	if required := c.Workers.Toolchain; required != "" && c.Worker.Instances != nil {
		if c.Worker.Backend != nil {
			return nil, errors.New("service: Config.Workers.Toolchain is set with a Worker.Backend: only workers that join are checked")
		}
		c.Worker.Instances = results.Filter(c.Worker.Instances, results.OtherToolchain(func() string { return required }))
	}
	s := &Server{started: time.Now()}
	endpoint, err := s.endpoint(&c)
	if err != nil {
		return nil, err
	}
	if s.machine, err = newMachine(ctx, &c); err != nil {
		return nil, err
	}
	m := s.machine
	if endpoint != nil && c.Slots > maxSlotsNesting {
		return nil, errors.Join(fmt.Errorf("service: Config.Slots is %d: the policy permits remote APIs, with which it must be at most %d",
			c.Slots, maxSlotsNesting), s.Close())
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	s.logs, err = logstream.New(logstream.Config{
		Instances: c.Worker.Instances, MaxBytes: m.caches.streams, MaxStreamBytes: min(m.caches.streams, 32<<20),
	})
	if err != nil {
		return nil, err
	}
	m.onClose(func() error { s.logs.Close(); return nil })
	m.metrics.cache("log_streams", m.caches.streams, s.logs.ClientBytes)
	if err := s.sample(); err != nil {
		return nil, err
	}
	if s.queue, err = queue.New(s.queueConfig()); err != nil {
		return nil, err
	}
	if endpoint != nil {
		if err := s.Register(endpoint); err != nil {
			s.queue.Close()
			return nil, err
		}
		m.onClose(func() error { endpoint.Close(); return nil })
	}
	m.onClose(func() error { s.queue.Close(); return nil })
	m.metrics.cache("operations", m.caches.operations, s.queue.RetainedBytes)
	m.metrics.queue(s.queue)
	m.metrics.lookups(&s.lookups)
	if c.History != nil {
		m.metrics.add("cloister_history_lost_total", "Answers that are missing from the history.", nil,
			func() float64 { return float64(c.History.Lost()) })
	}
	if err := m.metrics.err(); err != nil {
		return nil, fmt.Errorf("service: Config.Metrics: %w", err)
	}
	return s, nil
}

// withhold fills in the verdicts of the sampler, and makes a gate withhold the results of actions that are not
// reproducible.
func withhold(c *Config) (err error) {
	if c.Sampler == nil {
		return nil
	}
	if c.Worker.Backend == nil {
		return errors.New("service: Config.Sampler needs a Worker.Backend: only this machine's actions can be sampled")
	}
	sampler := *c.Sampler
	c.Sampler = &sampler
	if sampler.Verdicts == nil {
		if sampler.Verdicts, err = repro.OpenVerdicts(repro.VerdictsConfig{}); err != nil {
			return err
		}
	}
	if sampler.Gate && c.Worker.Instances != nil {
		c.Worker.Instances = sampler.Verdicts.Withhold(c.Worker.Instances)
	}
	return nil
}

// maxSlotsNesting is the maximum of Config.Slots if actions execute actions. A backend of namespaces has users for some
// 300 runs at once: actions that wait for nested ones must leave some for them.
const maxSlotsNesting = 200

// endpoint makes the endpoint of the actions that the policy permits to call remote APIs, nil if it permits none. It
// fails rather than serve calls that nobody checks.
func (s *Server) endpoint(c *Config) (*nested.Endpoint, error) {
	w := &c.Worker
	if w.Backend == nil || w.Policy == nil || !w.Policy.PermitsRemoteAPIs() {
		return nil, nil
	}
	if c.Access != nil && len(c.Actions) == 0 {
		return nil, errors.New("service: Config.Actions is missing: Access is set and the policy permits remote APIs, " +
			"so it must have the options that check the calls of clients")
	}
	e := nested.New(nested.Config{Options: c.Actions, Instances: w.Instances, Log: w.Log, Cancel: func(operation string) {
		if o, ok := s.queue.Operation(operation); ok {
			o.Cancel("the action that executed it no longer waits for it")
		}
	}})
	w.RemoteAPIs, c.Queue.Depth = e, actionapi.MaxDepth
	return e, nil
}

// sample makes the sampler of the actions that this machine executes, if one is configured.
func (s *Server) sample() (err error) {
	if s.cfg.Sampler == nil {
		return nil
	}
	c, w := *s.cfg.Sampler, &s.cfg.Worker
	c.Executor, c.Instances, c.Name, c.Features, c.Log = s.local, w.Instances, w.Name, w.Features, w.Log
	c.Host, c.BacklogBytes = repro.ThisHost(), s.caches.checks
	if c.Count == nil {
		c.Count = s.telemetry.Check
	}
	if c.Recorder == nil && s.cfg.History != nil {
		c.Recorder = verdicts{s.cfg.History}
	}
	if s.sampler, err = repro.NewSampler(c); err != nil {
		return err
	}
	s.metrics.cache("checks", s.caches.checks, s.sampler.PendingBytes)
	s.metrics.add("cloister_repro_checks_waiting", "Reproducibility checks waiting for a free slot.", nil,
		func() float64 { return float64(s.sampler.Waiting()) })
	return nil
}

// queueConfig returns the configuration of the queue.
func (s *Server) queueConfig() queue.Config {
	q, w := s.cfg.Queue, &s.cfg.Worker
	q.Head, q.MaxRetainedBytes, q.Renew, q.RenewEvery = w.Backend == nil, s.caches.operations, s.local.RenewInputs, w.RenewInterval
	if s.cfg.History != nil {
		failures := history.KeepFailures(history.FailuresConfig{
			Log: s.cfg.History, Instances: w.Instances, MaxBytes: s.cfg.FailureBytes, RenewInterval: w.RenewInterval,
		})
		s.onClose(func() error { failures.Close(); return nil })
		q.Ended = execserver.RecordOperations(s.cfg.History, failures)
	}
	if q.Head {
		return q
	}
	executor := worker.Executor(s.local)
	if s.sampler != nil {
		executor = s.sampler
		if !s.cfg.Sampler.Gate {
			q.Idle = s.sampler.Idle
		}
	}
	offer := queue.Offer{Any: true}
	if q.Offer != nil {
		offer = *q.Offer
	}
	offer.Worker = cmp.Or(offer.Worker, w.Name)
	q.Executor, q.Slots, q.Offer, q.Logs = s.telemetry.Executor(executor), s.cfg.Slots, &offer, s.logs.Begin
	if q.FetchBytes > 0 {
		q.Fetch = s.local.PrefetchInputs
	}
	return q
}

var errNoRegistrar = errors.New("service: registration needs a gRPC server")

// Register adds the services for clients and operators to r: the four of the store, Execution, Operations, LogStream,
// cloister.v1.Fleet, and with a history cloister.v1.History. casserver.ServerOptions returns suitable options for r. It
// may be called for several servers.
func (s *Server) Register(r grpc.ServiceRegistrar) error {
	if r == nil {
		return errNoRegistrar
	}
	c, instances := &s.cfg, s.cfg.Worker.Instances
	blobs := c.Blobs
	blobs.Instances, blobs.Execution, blobs.Logs = instances, execserver.Capabilities(), s.logs
	execution := execserver.Config{
		Queue: s.queue, Instances: instances, Admit: s.local.Admit, Action: s.local.Action, Worker: c.Worker.Name, Log: c.Worker.Log,
	}
	operators := fleet.Config{
		Queue: s.queue, Name: c.Worker.Name, Version: c.Version, Started: s.started,
		Unready: c.Unready, Notes: c.Notes, Keep: c.KeepDrains, Hits: s.lookups.hits.Load,
	}
	var reads func(context.Context, string) bool
	if c.Access != nil {
		blobs.Rights, execution.Rights, execution.Caller = c.Access.Rights, c.Access.Rights, c.Access.Caller
		reads = c.Access.Reads
		operators.Viewers, operators.Caller = c.Access, c.Access.Caller
	}
	if s.sampler != nil {
		execution.Remark = s.sampler.Remark
	}
	blobs.OnLookup = s.lookups.count(nil)
	if c.History != nil {
		blobs.OnLookup = s.lookups.count(execserver.RecordLookups(c.History, execution.Caller))
		blobs.OnUpdate = execserver.RecordUploads(c.History, execution.Caller)
		if err := history.Register(r, c.History, instances, reads); err != nil {
			return err
		}
	}
	if err := s.registerBlobs(r, blobs); err != nil {
		return err
	}
	s.logs.Register(r)
	return errors.Join(execserver.Register(r, execution), fleet.Register(r, operators))
}

// RegisterWorkers adds the services for workers that join to r: the four of the store, and OperationQueue of
// Buildbarn's protocol. Anyone who can call them can forge results. The Server must be a head, or Config.Worker.Fleet
// must be set.
func (s *Server) RegisterWorkers(r grpc.ServiceRegistrar) error {
	c, w := s.cfg.Workers, &s.cfg.Worker
	if r == nil {
		return errNoRegistrar
	}
	if w.Backend != nil && !w.Fleet {
		return errors.New("service: Config.Worker.Fleet is not set: workers that join need it")
	}
	blobs := s.cfg.Blobs
	blobs.Instances = w.Instances
	c.Queue, c.Instances, c.Action, c.Log = s.queue, w.Instances, s.local.Action, w.Log
	if s.cfg.Access != nil {
		blobs.Rights, c.Caller = s.cfg.Access.WorkerRights, s.cfg.Access.Caller
	}
	if err := s.registerBlobs(r, blobs); err != nil {
		return err
	}
	b, err := buildbarn.Register(r, c)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workers = append(s.workers, b)
	return nil
}

// registerBlobs adds the services of the store to r.
func (s *Server) registerBlobs(r grpc.ServiceRegistrar, c casserver.Config) error {
	stop, err := casserver.Register(r, c)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onClose(func() error { stop(); return nil })
	return nil
}

// Queue returns the queue, which shows and drains workers and counts actions.
func (s *Server) Queue() *queue.Queue { return s.queue }

// Drain prepares for shutdown: it refuses new actions, and waits for those that are queued or running until ctx ends;
// then it cancels them and returns the error of ctx. Afterwards workers are gone and logs have ended, so that gRPC
// servers can be stopped gracefully.
func (s *Server) Drain(ctx context.Context) error {
	err := s.queue.Drain(ctx)
	s.closeWorkers()
	s.logs.Close() // readers of a log would keep the server from stopping
	return err
}

// closeWorkers ends the calls of the workers.
func (s *Server) closeWorkers() {
	s.mu.Lock()
	workers := slices.Clone(s.workers)
	s.mu.Unlock()
	for _, w := range workers {
		w.Close()
	}
}

// Close ends running actions, uploads and everything else that NewServer and Register started. The caller stops its
// gRPC servers first. It closes neither the backend nor the store. Later calls do nothing.
func (s *Server) Close() error {
	s.closeWorkers()
	return s.machine.Close()
}

// verdicts records verdicts in a history.
type verdicts struct{ to *history.Log }

// Record implements repro.Recorder.
func (v verdicts) Record(s *repro.Summary) {
	report := ""
	if !s.Report.IsZero() {
		report = s.Report.String()
	}
	v.to.Add(history.Entry{
		Time: s.Time, Instance: s.Instance, How: history.Checked, Action: s.Action.String(),
		Invocation: s.Invocation, Target: s.Target, Mnemonic: s.Mnemonic, Verdict: string(s.Result),
		Response: report,
	})
}
