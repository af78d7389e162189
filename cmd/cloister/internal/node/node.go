// SPDX-License-Identifier: Apache-2.0

// Package node holds what serve and join share: a store, optionally in front of an upstream, a sandbox, a worker over
// both, and the signals of whether they can take more work.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/assetservice"
	"github.com/cloister-build/cloister/cmd/cloister/internal/auditlog"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/images"
	"github.com/cloister-build/cloister/cmd/cloister/internal/imageservice"
	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/cloister/internal/tracing"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	versioncollector "github.com/prometheus/client_golang/prometheus/collectors/version"
	"github.com/prometheus/common/version"
	"google.golang.org/grpc"
)

// A Node has the parts that a machine needs to execute actions: a store, optionally in front of an upstream, and a
// sandbox. Open and Start make it in two steps, so that mistakes are reported before anything slow happens, and
// Assembly configures what executes the actions. Close undoes the steps that were made.
type Node struct {
	*Config
	Log      *slog.Logger
	Name     string // of this machine
	Store    *disk.Cache
	Upstream *upstream // nil without one
	Ready    *readiness
	policy   *policy.Policy
	images   *images.Provider // nil if this node runs no container images
	control  *diskctl.Server
	tracing  *tracing.Tracing

	// Set by Start. Instances are the stores that clients and actions see; overlay is nil without an upstream.
	Instances cas.Instances
	started   chan struct{} // closed when Instances is set
	overlay   *overlay.Overlay
	Registry  *prometheus.Registry
	counted   bool // somebody reads the Registry
	calls     *callMetrics

	violations *slog.Logger // for violations by actions

	backendConfig namespace.Config
	machine       Machine // set by Attach
	record        *audit.Log
	Background    context.Context // ends when the node is closed
	Watchers      sync.WaitGroup
	stopMetrics   func()
	Service       *notify.Service // nil without a service manager
	stopSending   context.CancelFunc
	sending       context.Context // ends when Close stops waiting for pending writes
	closers       []func()        // called by Close in reverse order
}

// Open opens policy, upstream, store and audit log. The caller closes the Node.
func Open(ctx context.Context, c *Config, log *slog.Logger) (_ *Node, err error) {
	n := &Node{Config: c, Log: log, Ready: &readiness{}, started: make(chan struct{})}
	n.Ready.notes = n.Notes
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	if n.policy, err = c.Sandbox.LoadPolicy(); err != nil {
		return nil, err
	}
	rules, err := c.Sandbox.Images(n.policy)
	if err != nil {
		return nil, err
	}
	if n.Fleet && (c.Sandbox.IgnoreImages() || c.StrictProperties) {
		return nil, exit.New(exit.Usage, errors.New("--images=ignore and --strict-properties are for a server without other workers: "+
			"with them, an action goes to a worker whose --property match all of its properties"))
	}
	if n.backendConfig, err = c.Sandbox.BackendConfig(); err != nil {
		return nil, err
	}
	if n.tracing, err = tracing.Start(ctx, log); err != nil {
		return nil, exit.New(exit.Usage, err)
	}
	n.onClose(n.tracing.Close)
	if n.Upstream, err = c.Upstream.open(ctx, log, n.tracing); err != nil {
		return nil, err
	}
	if n.Upstream != nil {
		n.onClose(func() { n.closed(n.Upstream.close()) })
	}
	if n.Store, err = openStore(c, log); err != nil {
		return nil, err
	}
	n.onClose(func() { n.closed(n.Store.Close()) })
	n.Ready.writable = n.Store.CheckWritable
	if err := n.openImages(rules); err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	registerImages := func(r grpc.ServiceRegistrar) { n.registerImages(r, true) }
	n.control, err = diskctl.Serve(c.Dir, n.Store, registerImages, casserver.ServerOptions(log)...)
	if errors.Is(err, errors.ErrUnsupported) {
		log.Warn("other commands cannot manage the store while it is served: this system has no Unix sockets", "err", err)
	} else if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	n.onClose(func() { n.control.Close() })
	if pending, err := storedir.Pending(c.Dir); err != nil {
		return nil, exit.New(exit.Environment, err)
	} else if pending > 0 && n.Upstream == nil {
		log.Warn("writes wait for an upstream and may be evicted before they are sent; start with --cas or --store to send them",
			"blobs and results", pending, "journal", storedir.Journal(c.Dir))
	}
	if n.record, err = audit.Open(audit.Config{Dir: storedir.Audit(c.Dir), MaxBytes: int64(c.Audit), Log: log}); err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	n.onClose(func() { n.closed(n.record.Close()) })
	if n.Name, err = os.Hostname(); err != nil || n.Name == "" {
		n.Name = "cloister"
	}
	return n, nil
}

// RegisterIndex adds the services that find blobs: by a prefix of their digest, and as assets.
func (n *Node) RegisterIndex(r grpc.ServiceRegistrar) {
	index := n.control.Index()
	cloisterpb.RegisterBlobIndexServer(r, index)
	assetservice.Register(r, assetservice.Config{Instances: n.Instances, Index: index})
}

// RegisterOperators adds the services with which operators manage the store and its images and read the audit log.
func (n *Node) RegisterOperators(r grpc.ServiceRegistrar) {
	n.control.Register(r)
	n.registerImages(r, false)
	auditlog.Register(r, storedir.Audit(n.Dir), n.Log)
}

// Start puts the store in front of the upstream, and begins to watch what the node depends on. wrap, if not nil,
// decorates the store.
func (n *Node) Start(ctx context.Context, wrap func(cas.Instances) cas.Instances) (err error) {
	n.Registry = prometheus.NewRegistry()
	version.Version = buildinfo.Version
	n.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewBuildInfoCollector(), versioncollector.NewCollector("cloister"))
	n.calls = newCallMetrics(n.Registry)
	stopExport, err := tracing.ExportMetrics(ctx, n.Log, n.Registry)
	if err != nil {
		return exit.New(exit.Usage, err)
	}
	if n.counted = n.metrics != "" || stopExport != nil; stopExport != nil {
		n.onClose(stopExport)
	}
	// Metrics stay available while Close sends pending writes.
	n.stopMetrics = func() {}
	n.onClose(func() { n.stopMetrics() })
	n.onClose(func() { n.Service.Close() })
	var flush func()
	n.violations, flush = LimitRepeats(n.Log)
	n.onClose(flush)
	var stop context.CancelFunc
	n.Background, stop = context.WithCancel(ctx)
	n.onClose(func() {
		stop()
		n.Watchers.Wait()
	})
	if n.writePolicy == overlay.WriteThrough {
		n.Ready.upstream = n.Upstream
	}
	if err := n.open(wrap); err != nil {
		return err
	}
	if n.Upstream != nil {
		n.Upstream.calls.register(n.Registry)
		n.Watchers.Go(func() { n.Upstream.watch(n.Background, n.Log) })
	}
	if n.scrub > 0 {
		n.Watchers.Go(func() { n.control.Scrub(n.Background, int64(n.scrub), n.Log) })
	}
	return nil
}

// Assembly returns the configuration with which this machine executes actions. flags returns those with which a command
// reruns one of them.
func (n *Node) Assembly(flags func() []string) service.Config {
	c := service.Config{
		Worker: worker.Config{
			Name: n.Name, Instances: n.Instances, Policy: n.policy, RenewInterval: n.Renew(), Fleet: n.Fleet, Log: n.Log,
			IgnoreImages: n.Sandbox.IgnoreImages(), StrictProperties: n.StrictProperties, CacheUnpinned: n.policy.Images().CacheUnpinned,
			Reproduce: func(t *worker.Task) string { return reproduce(t, flags()) },
			Audit:     func(t *worker.Task, a *worker.Violations) { recordViolations(n.violations, n.record, n.Name, t, a) },
		},
		Slots: n.Jobs, Memory: int64(n.memory), Metrics: n.Registry, Tracer: n.tracing.Tracer(),
	}
	if n.images != nil {
		c.Worker.Images = n.images
	}
	if declared := n.toolchain; declared != "" {
		c.Worker.Fingerprint = func() string { return declared }
	}
	if !n.Head {
		n.backendConfig.Hidden = []string{n.Dir}
		backend := n.Sandbox.NewBackend(n.backendConfig)
		n.onClose(func() { n.closed(backend.Close()) })
		c.Worker.Backend = backend
		c.Trees = tree.StagerConfig{Dir: filepath.Join(n.Dir, "tmp"), Budget: int64(n.trees)}
	}
	return c
}

// A Machine is an assembled Server or Worker.
type Machine interface {
	Features() sandbox.Features
	CopyReason() error
	MessageBytes() int64
	ReleaseRemoved() bool
	Close() error
}

// Attach connects m, which Assembly configured, with the node. detach closes m; no action may be running.
func (n *Node) Attach(m Machine) (detach func()) {
	n.machine = m
	n.Store.SetHolder(m.ReleaseRemoved)
	return func() { n.closed(m.Close()) }
}

// closed logs an error of Close.
func (n *Node) closed(err error) {
	if err != nil {
		n.Log.Warn("shutdown is incomplete", "err", err)
	}
}

// open puts the store in front of the upstream.
func (n *Node) open(wrap func(cas.Instances) cas.Instances) (err error) {
	n.Instances = n.Store.Instance
	n.sending, n.stopSending = context.WithCancel(context.Background())
	n.stopSending() // Close waits for pending writes only after SendPending
	if n.Upstream != nil {
		n.overlay, err = overlay.New(overlay.Config{
			Local: n.Store.Instance, Policy: n.writePolicy, Sync: n.Sync,
			Upstream: n.Upstream.full.instances(n.Upstream.instances, math.MaxInt64),
			Journal:  storedir.Journal(n.Dir), RenewInterval: n.Renew(),
			UpstreamInterval: n.Config.Upstream.RenewInterval, Log: n.Log,
		})
		if err != nil {
			return exit.New(exit.Environment, err)
		}
		n.Instances = n.overlay.Instance
		n.onClose(func() {
			if err := n.overlay.Close(n.sending); err != nil {
				n.Log.Warn("writes to the upstream are incomplete", "address", n.Upstream.address, "err", err)
			}
			n.stopSending()
		})
	}
	n.Ready.store.hint = n.FullHint
	n.Instances = n.Ready.store.instances(n.Instances, n.Store.Stats().MaxBytes/2)
	if wrap != nil {
		n.Instances = wrap(n.Instances)
	}
	close(n.started)
	return nil
}

// openImages opens the library of container images, unless this node runs none. In a fleet, a node runs images if rules
// permit registries; otherwise its property container-image describes this machine.
func (n *Node) openImages(rules policy.Images) (err error) {
	if n.Head || n.Sandbox.IgnoreImages() || n.Fleet && len(rules.Registries) == 0 {
		return nil
	}
	if rules.MaxBytes == 0 { // no image evicts everything else, or fills the store with blobs that have leases
		rules.MaxBytes = min(image.DefaultLimits.Bytes, n.Store.Stats().MaxBytes/2)
	}
	n.images, err = images.Open(images.Config{
		Instances: n.instance, Dir: filepath.Join(n.Dir, "tmp"), File: filepath.Join(n.Dir, image.LibraryFile), Rules: rules, Log: n.Log,
	})
	if err == nil {
		n.onClose(func() { n.closed(n.images.Close()) })
	}
	return err
}

// instance is Instances for callers that may run before Start sets it.
func (n *Node) instance(name string) (*cas.Instance, error) {
	select {
	case <-n.started:
		return n.Instances(name)
	default:
		return nil, fmt.Errorf("the server is starting: %w", cas.ErrUnavailable)
	}
}

// registerImages adds the service for container images, if this node runs any. local permits reading files of this
// host.
func (n *Node) registerImages(r grpc.ServiceRegistrar, local bool) {
	if n.images != nil {
		imageservice.Register(r, imageservice.Config{Library: n.images.Library, Instances: n.instance, Local: local, Log: n.Log})
	}
}

// SendPending makes Close wait for writes that wait to be sent upstream, up to the drain timeout or the next signal.
func (n *Node) SendPending(out io.Writer, signals <-chan os.Signal) {
	if n.overlay == nil {
		return
	}
	if pending := n.overlay.Stats().Pending; pending > 0 {
		fmt.Fprintf(out, "sending  %d blobs and results to %s, for up to %s; Ctrl-C leaves them to the next start\n",
			pending, n.Upstream.address, n.DrainTimeout)
		if why := n.Upstream.Down(); why != "" {
			fmt.Fprintf(out, "         %s\n", why)
		}
	}
	n.sending, n.stopSending = DrainContext(n.DrainTimeout, signals)
}

// onClose makes Close call f, before the functions registered earlier.
func (n *Node) onClose(f func()) { n.closers = append(n.closers, f) }

// Close ends the node. No action may be running.
func (n *Node) Close() {
	for _, f := range slices.Backward(n.closers) {
		f()
	}
	n.closers = nil
}

// Banner prints the properties of a node that has just started.
func (n *Node) Banner(out io.Writer) {
	stats := n.Store.Stats()
	fmt.Fprintf(out, "cloister %s  %s/%s  %d slots  cache %s %s of %s\n",
		buildinfo.Version, runtime.GOOS, runtime.GOARCH, n.Jobs, n.Dir, sandbox.Bytes(stats.Bytes), sandbox.Bytes(stats.MaxBytes))
	lease := "no lease: any blob can be evicted at any time"
	if n.lease > 0 {
		lease = "used blobs are kept for " + n.lease.String()
	}
	if n.Sync {
		lease += ", synced"
	}
	fmt.Fprintf(out, "store    %s\n", lease)
	if n.Head {
		n.Config.Sandbox.BannerPolicy(out, n.policy)
		return
	}
	if why := n.machine.CopyReason(); why != nil {
		fmt.Fprintf(out, "inputs   copied for each action: %v\n", why)
	} else {
		fmt.Fprintf(out, "inputs   read from the store; %s of them stay mounted, %s decoded\n",
			sandbox.Bytes(int64(n.trees)), sandbox.Bytes(n.machine.MessageBytes()))
	}
	n.Config.Sandbox.Banner(out, n.machine.Features(), n.policy)
}

// recordViolations writes the violations of an action to the log and the audit log.
func recordViolations(log *slog.Logger, record *audit.Log, name string, t *worker.Task, a *worker.Violations) {
	level := slog.LevelWarn
	if a.Harmless() {
		level = slog.LevelDebug
	}
	log.Log(context.Background(), level, "action violated the sandbox", "action", t.Action.String(), "instance", t.Instance, "target", t.Target,
		"mnemonic", t.Mnemonic, "exit", a.ExitCode, "on_violation", cmp.Or(a.OnViolation, "report"), "events", len(a.Events)+a.Unrecorded, "first", a.First().String())
	err := record.Append(audit.Entry{
		Time: time.Now(), Action: t.Action.String(), Instance: t.Instance, Target: t.Target, Mnemonic: t.Mnemonic,
		Invocation: t.Invocation, Worker: name, Exit: a.ExitCode, OnViolation: a.OnViolation, Events: a.Events, Unrecorded: a.Unrecorded,
	})
	if err != nil {
		log.Error("cannot write the audit log; the entry is lost", "action", t.Action.String(), "err", err)
	}
}
