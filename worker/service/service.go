// SPDX-License-Identifier: Apache-2.0

// Package service assembles remote execution from a store, a sandbox, a worker, a queue and the services of the Remote
// Execution API. The commands serve and join are built on it, and other programs can use it in the same way.
//
// A [Server] executes the actions of clients, and registers its services on any grpc.ServiceRegistrar, beside those of
// the program. A [Worker] executes the actions of a head, which is a Server with RegisterWorkers or Buildbarn's
// scheduler. Both take a [Config] with a store and a backend of the program's choice:
//
//	store, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 10 << 30})
//	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
//	server, err := service.NewServer(ctx, service.Config{Worker: worker.Config{
//		Name: "example", Instances: store.Instance, Backend: backend,
//	}})
//	g := grpc.NewServer(casserver.ServerOptions(nil)...)
//	err = server.Register(g)
//
// A program with the backend of package namespace calls namespace.Init at the start of main. To shut down, it calls
// Server.Drain, stops its gRPC servers, and calls Server.Close; then it closes the backend and the store.
//
// The parts are usable without this package: sandbox runs commands, worker.Local executes actions without RPC, and
// casserver serves a cache. It does not check callers by itself: see Config.Access.
package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/toolchain"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/internal/requestmetadata"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/telemetry"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
)

// Config configures a Server or a Worker. Worker.Name and Worker.Instances are required; a Worker also needs
// Worker.Backend. Every other zero value selects its default. It is copied: later changes have no effect.
type Config struct {
	// Worker configures the execution of actions. If missing, Features are probed from the Backend, Toolchain and
	// Certificates are those of this host, Fingerprint follows from Toolchain, and Stager is made from Trees. CacheBytes
	// follows from Memory. A Server without a Backend is a head: only workers that join it execute actions.
	Worker worker.Config
	// ToolchainDrift serves cached results that another toolchain of this machine produced. Worker.Fleet implies it.
	ToolchainDrift bool
	// Slots is the number of actions that run at once on this machine; the default is the number of CPUs.
	Slots int
	// Trees says how input trees are mounted. Without its Dir, inputs are copied for each action. Mounter, CopyUpTo,
	// SeenBytes and Log are filled in.
	Trees tree.StagerConfig
	// Memory limits all caches in memory together, in bytes; the default is DefaultMemory, the minimum MinMemory.
	Memory int64
	// Metrics, if not nil, receives the metrics, whose names begin with cloister_. It can be used for only one Server
	// or Worker.
	Metrics prometheus.Registerer
	// Tracer, if not nil, records a span for each executed action, below the client's span, and for each of its stages.
	Tracer trace.Tracer

	// The fields below are those of a Server.

	// Queue configures the queue. Executor, Slots, Head, Renew, RenewEvery, MaxRetainedBytes, Logs, Ended, Fetch and
	// Idle are filled in, and the Worker of the Offer if it is missing. With FetchBytes, inputs of the next actions are
	// fetched ahead, for Instances with a remote store.
	Queue queue.Config
	// Blobs configures the services of the store. Instances, Execution, Logs, OnLookup, OnUpdate and Rights are filled
	// in.
	Blobs casserver.Config
	// Actions are the options of the gRPC server that actions call, if Worker.Policy permits that: those of the clients'
	// server that authenticate callers and limit calls. Required then if Access is set.
	Actions []grpc.ServerOption
	// Access, if not nil, returns callers and rights for answers that depend on them. It does not refuse calls: the
	// gRPC server's interceptors do that, such as those of package access.
	Access Access
	// History, if not nil, records requests and their results, and is served to clients. The caller closes it.
	History *history.Log
	// FailureBytes limits the blobs of failed actions in the History that are protected from eviction; 0 protects none.
	FailureBytes int64
	// Sampler, if not nil, runs a sample of the actions a second time. Executor, Instances, Name, Features, Host,
	// BacklogBytes and Log are filled in, and Count, Recorder and Verdicts if they are missing.
	Sampler *repro.SamplerConfig
	// Version, Unready and Notes are shown to operators: the version of the program, the reasons why it is not ready
	// for work, and other information. The functions may be nil.
	Version        string
	Unready, Notes func() []string
	// KeepDrains, if not nil, saves the set of drained workers, which the next Server gets as Queue.Drains. Calls are
	// sequential.
	KeepDrains func(queue.DrainState) error
	// Workers configures the service for workers that join. Queue, Instances, Action, Caller and Log are filled in. With
	// a Toolchain, cached results of others are not served.
	Workers buildbarn.ServerConfig

	// Join configures which actions a Worker takes. Scheduler, Executor, Instances, Worker, Slots, Toolchain and Log are
	// filled in.
	Join buildbarn.ClientConfig
}

// Access returns the caller of an admitted call and its rights. Package access implements it.
type Access interface {
	// Caller returns the name of the caller, "" if that is unknown.
	Caller(ctx context.Context) string
	// Rights reports whether the caller may execute actions and write results in an instance; WorkerRights reports the
	// same at the workers' port.
	Rights(ctx context.Context, instance string) (execute, update bool)
	WorkerRights(ctx context.Context, instance string) (execute, update bool)
	// Reads reports whether the caller may read the blobs and the history of an instance.
	Reads(ctx context.Context, instance string) bool
	// Sees reports whether the caller may see what runs in an instance, and SeesBelow in an instance of that name or
	// any below it.
	Sees(ctx context.Context, instance string) bool
	SeesBelow(ctx context.Context, prefix string) bool
}

// A machine executes actions: what a Server and a Worker have in common.
type machine struct {
	cfg        Config
	caches     caches
	metrics    metrics
	telemetry  *telemetry.Metrics
	stager     *tree.Stager // nil without a backend
	copyReason error
	confirmer  *results.Confirmer // nil without a scanned toolchain
	local      *worker.Local
	closers    []func() error // called by Close in reverse order
}

// newMachine returns a machine, which the caller closes. It changes c to the configuration in force.
func newMachine(ctx context.Context, c *Config) (_ *machine, err error) {
	switch {
	case c.Slots < 0:
		return nil, fmt.Errorf("service: Config.Slots is %d: it must not be negative", c.Slots)
	case c.Memory != 0 && c.Memory < MinMemory:
		return nil, fmt.Errorf("service: Config.Memory is %d: it must be at least %d bytes", c.Memory, MinMemory)
	}
	c.Slots = cmp.Or(c.Slots, runtime.GOMAXPROCS(0))
	c.Memory = cmp.Or(c.Memory, DefaultMemory)
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	m := &machine{caches: divide(c.Memory), metrics: metrics{to: c.Metrics}}
	if m.telemetry, err = telemetry.New(c.Metrics, c.Tracer); err != nil {
		return nil, fmt.Errorf("service: Config.Metrics: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if audit := c.Worker.Audit; audit != nil {
		c.Worker.Audit = func(t *worker.Task, v *worker.Violations) {
			m.telemetry.Violations(v)
			audit(t, v)
		}
	} else {
		c.Worker.Audit = func(_ *worker.Task, v *worker.Violations) { m.telemetry.Violations(v) }
	}
	c.Worker.CacheBytes = m.caches.messages
	all := c.Worker.Instances
	if next := all; next != nil {
		c.Worker.Instances = results.Filter(next, results.OtherSandbox(next, c.Worker.Policy, described))
		// IgnoreImages has no effect in a fleet, nor on a head that executes nothing.
		if !c.Worker.IgnoreImages || c.Worker.Fleet || c.Worker.Backend == nil {
			c.Worker.Instances = results.Filter(c.Worker.Instances, results.IgnoredImage)
		}
	}
	if err := m.confine(ctx, c, all); err != nil {
		return nil, err
	}
	local := c.Worker
	if m.confirmer != nil { // results that other servers record have their own toolchains
		local.Instances = m.confirmer.Watch(local.Instances)
	}
	if m.local, err = worker.New(local); err != nil {
		return nil, err
	}
	m.metrics.cache("messages", m.caches.messages, m.local.CachedBytes)
	m.cfg = *c
	return m, nil
}

// described returns the target and the mnemonic that a call states.
func described(ctx context.Context) (target, mnemonic string) {
	var t worker.Task
	t.SetMetadata(requestmetadata.Of(ctx))
	return t.Target, t.Mnemonic
}

// confine fills in what the sandbox determines: what it can enforce, how inputs are staged, and the toolchain.
// all is Config.Worker.Instances before newMachine filters them.
func (m *machine) confine(ctx context.Context, c *Config, all cas.Instances) (err error) {
	w := &c.Worker
	if w.Backend == nil {
		return nil
	}
	if len(w.Features.Audits) == 0 {
		if w.Features, err = w.Backend.Probe(ctx); err != nil {
			return fmt.Errorf("this host cannot sandbox actions: %w", err)
		}
	}
	if w.Toolchain == nil {
		if w.Toolchain, err = sandbox.HostToolchain(); err != nil {
			return fmt.Errorf("toolchain of this host: %w", err)
		}
	}
	if w.Fingerprint == nil {
		watch := toolchain.NewWatch(w.Toolchain, w.Log)
		if w.Fingerprint = watch.Fingerprint; w.Fleet {
			watch.Fingerprint() // waits for the first scan, since the head may require it of each call
			c.Join.Toolchain = watch.Last
		}
		if all != nil {
			m.confirmer = results.NewConfirmer(all, watch.Scanned, w.Log)
			m.onClose(func() error { m.confirmer.Close(); return nil }) // closed after the watch, which ends its waiting
		}
		m.onClose(func() error { watch.Close(); return nil })
	}
	if !c.ToolchainDrift && !w.Fleet && w.Instances != nil {
		w.Instances = results.Filter(w.Instances, results.OtherToolchain(w.Fingerprint))
	}
	if w.Images != nil && !w.Fleet && w.Instances != nil {
		w.Instances = results.Filter(w.Instances, results.OtherImage(w.CacheUnpinned, func(instance string) bool {
			return slices.ContainsFunc(w.Policy.Properties(policy.Request{Instance: instance}), func(p worker.Property) bool {
				return strings.EqualFold(p.Name, results.ImageProperty) && p.Value != "" && !strings.EqualFold(p.Value, results.NoImage)
			})
		}))
		if w.CacheUnpinned {
			w.Instances = results.Filter(w.Instances, results.MovedImage(all, w.Policy, w.Images.Pin))
		}
	}
	if w.Certificates == nil {
		if w.Certificates, err = sandbox.HostCertificates(); err != nil {
			return fmt.Errorf("certificates of this host: %w", err)
		}
	}
	if w.Stager != nil {
		return nil
	}
	c.Trees.SeenBytes, c.Trees.Log = m.caches.subtrees, w.Log
	if c.Trees.Dir == "" {
		m.stager, m.copyReason = tree.NewStager(c.Trees), errors.New("no directory for images is configured")
	} else {
		m.stager, m.copyReason = worker.NewStager(ctx, w.Backend, c.Trees)
	}
	w.Stager = m.stager
	m.metrics.cache("subtrees", m.caches.subtrees, m.stager.SeenBytes)
	m.onClose(func() error {
		if err := m.stager.Close(); err != nil {
			return fmt.Errorf("input trees: %w", err)
		}
		return nil
	})
	return nil
}

// Features returns what the sandbox enforces; they are empty without a Backend.
func (m *machine) Features() sandbox.Features { return m.cfg.Worker.Features }

// CopyReason returns why inputs are copied for each action, nil if they are mounted.
func (m *machine) CopyReason() error { return m.copyReason }

// MessageBytes returns the size limit of the cache of decoded actions, commands and input trees.
func (m *machine) MessageBytes() int64 { return m.caches.messages }

// ReleaseRemoved unmounts an input tree that keeps files on the disk which the store has removed, and reports whether
// there was one. A store on disk calls it: pass it to disk.Cache.SetHolder.
func (m *machine) ReleaseRemoved() bool { return m.stager != nil && m.stager.ReleaseRemoved() }

// onClose makes Close call f, before the functions registered earlier.
func (m *machine) onClose(f func() error) { m.closers = append(m.closers, f) }

// Close ends everything that was started, and running actions. It closes neither the backend nor the store. Later calls
// do nothing.
func (m *machine) Close() error {
	var errs []error
	for _, f := range slices.Backward(m.closers) {
		errs = append(errs, f())
	}
	m.closers = nil
	return errors.Join(errs...)
}
