// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/internal/persistent"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// Config configures a Local. Name and Instances are required, and to execute actions Backend, Features and Toolchain.
type Config struct {
	// Name identifies the worker in the metadata of every result.
	Name      string
	Instances cas.Instances
	// Backend runs the commands. It is nil for a worker that only admits actions for others.
	Backend sandbox.Backend
	// Fleet is set if several workers, each with its own policy, share actions by their platform properties. No
	// property is ignored then, and an Admission's MergeKey covers everything that another policy might use.
	Fleet bool
	// Images provides the container images that actions name. Without it, such actions are refused, or with IgnoreImages
	// run with the Toolchain, which every result states. In a Fleet, a worker without it that offers such a property has
	// the Toolchain of the image. Actions whose image only the policy's default properties name are refused there.
	Images       Images
	IgnoreImages bool
	// CacheUnpinned caches results although the action's digest does not determine the image: it names a tag, or the
	// policy's default properties name the image.
	CacheUnpinned bool
	// StrictProperties refuses platform properties that have no effect. It has no effect in a Fleet.
	StrictProperties bool
	// Features is the result of Backend.Probe. It becomes part of every result's metadata.
	Features sandbox.Features
	// AcceptGaps runs every action in spite of Features.Gaps, for callers who chose the Backend for their own actions.
	// Otherwise an action has to name the Backend with PropertySandbox.
	AcceptGaps bool
	// Stager stages input trees; nil copies them.
	Stager *tree.Stager
	// Toolchain lists what every action may read in addition to its inputs; see sandbox.HostToolchain. With an empty list,
	// which is not nil, only programs among the inputs are found.
	Toolchain []sandbox.Input
	// Fingerprint identifies the contents of Toolchain. Every result records it. If it changes during a run, the result is
	// not cached. nil means unknown.
	Fingerprint func() string
	// Certificates lists what an action may also read if the policy grants it network access; see
	// sandbox.HostCertificates.
	Certificates []sandbox.Input
	// Host describes this machine; a zero value is filled in.
	Host manifest.Host
	// Policy decides what an action may use; nil is policy.Default().
	Policy *policy.Policy
	// Reproduce returns the command line that reruns the action of a task on this machine, or "" if there is none. A
	// nil function returns "".
	Reproduce func(*Task) string
	// Audit, if not nil, receives the violations of each run that has any, even if the client is gone, and each refusal
	// by the policy, with the exit code sandbox.NeverRan. It is called concurrently, and the callers wait for it.
	Audit func(*Task, *Violations)
	// RemoteAPIs serves remote APIs to the actions that the policy permits to call them. Package service sets it; without
	// it, such actions are refused.
	RemoteAPIs actionapi.Endpoint
	// MaxTimeout is the longest timeout an action may set, and the default; zero is 24 hours.
	MaxTimeout time.Duration
	// Grace is the time between SIGTERM and SIGKILL; zero is 5 seconds.
	Grace time.Duration
	// RenewInterval is the interval at which the inputs of a running action are marked as used, so that no store evicts
	// them before the run has read them. It must be well below the time for which the store keeps a used blob. Zero is
	// an hour.
	RenewInterval time.Duration
	// CacheBytes is the size of the cache of decoded actions, commands and input trees; zero is 64 MiB.
	CacheBytes int64
	// LogBytes limits stdout and stderr, each; zero is 32 MiB.
	LogBytes int64
	Log      *slog.Logger
}

// defaultCacheBytes is the default of Config.CacheBytes: enough for the decoded trees of some 300,000 files.
const defaultCacheBytes = 64 << 20

// A Local executes actions on this machine. Use New; the zero Local is not usable.
type Local struct {
	cfg Config

	inputs     *tree.Cache
	policyHash string
	sums       *sums                               // of this host's programs
	persistent *persistent.Pool[*persistentWorker] // nil if the policy permits none
	renewing   chan struct{}                       // holds a value while inputs are being marked as used
	mu         sync.Mutex
	ignored    map[string]bool // guarded by mu; platform properties that were warned about
	mentioned  map[string]bool // guarded by mu; lines of messages about ignored properties
}

var _ Executor = (*Local)(nil)

// CachedBytes returns the estimated memory of the cache of decoded messages.
func (l *Local) CachedBytes() int64 { return l.inputs.Bytes() }

// New returns a Local. It starts nothing, and fails if a required field is missing.
func New(c Config) (*Local, error) {
	missing := ""
	switch {
	case c.Name == "":
		missing = "Config.Name is missing"
	case c.Instances == nil:
		missing = "Config.Instances is missing"
	case c.Backend == nil: // it only admits actions
	case len(c.Features.Audits) == 0: // every backend supports one
		missing = "Config.Features is missing: set it to the result of Backend.Probe"
	case c.Toolchain == nil:
		missing = "Config.Toolchain is missing: set it to the result of sandbox.HostToolchain, or to []sandbox.Input{} for none"
	}
	if missing != "" {
		return nil, errors.New("worker: " + missing)
	}
	return newLocal(c), nil
}

// newLocal returns a Local with the defaults of c.
func newLocal(c Config) *Local {
	c.MaxTimeout = cmp.Or(c.MaxTimeout, 24*time.Hour)
	c.Grace = cmp.Or(c.Grace, 5*time.Second)
	c.Policy = cmp.Or(c.Policy, policy.Default())
	if c.Host == (manifest.Host{}) {
		c.Host = readHost()
	}
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	if c.Stager == nil {
		c.Stager = tree.NewStager(tree.StagerConfig{})
	}
	c.CacheBytes = cmp.Or(c.CacheBytes, defaultCacheBytes)
	if c.Reproduce == nil {
		c.Reproduce = func(*Task) string { return "" }
	}
	c.LogBytes = cmp.Or(c.LogBytes, 32<<20)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	l := &Local{
		cfg: c,
		// A blob is marked at most RenewInterval/4 after its last use and again after RenewInterval, so a store that
		// keeps used blobs for three intervals does not evict it.
		inputs:     tree.NewCache(c.CacheBytes, c.RenewInterval/4),
		policyHash: c.Policy.Hash(),
		sums:       newSums(),
		renewing:   make(chan struct{}, 1),
		ignored:    map[string]bool{},
		mentioned:  map[string]bool{},
	}
	if c.Policy.PermitsPersistentWorkers() {
		l.persistent = persistent.NewPool[*persistentWorker]()
	}
	return l
}

// Execute carries t through the seven stages. It calls report, if not nil, when each begins.
func (l *Local) Execute(ctx context.Context, t *Task, report func(Stage)) (*Outcome, error) {
	switch {
	case t == nil:
		return nil, faultf(FaultInvalid, "the Task is missing")
	case t.Action.IsZero():
		return nil, faultf(FaultInvalid, "Task.Action is missing")
	case l.cfg.Backend == nil:
		return nil, faultf(FaultInternal, "worker.Config.Backend is missing: this worker executes nothing")
	}
	if report == nil {
		report = func(Stage) {}
	}
	began := time.Now()

	report(StageFetch)
	req, cached, err := l.fetch(ctx, t)
	if err != nil || cached != nil {
		return cached, fault(StageFetch, err)
	}
	defer l.keepInputs(ctx, t, req.root.digest)()

	report(StageConfine)
	box, err := l.confine(t, req)
	if err != nil {
		return nil, fault(StageConfine, err)
	}
	box.toolchain = l.fingerprint(req) // not in Admit: the first call waits until the toolchain has been read

	report(StageInputs)
	staged, err := l.stage(ctx, t, req, box)
	if err != nil {
		if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
			l.inputs.Invalidate(req.Instance.Name) // a retry then reports everything that is missing
			if req.root.image != "" {              // and pulls the image, whose blobs no client can upload
				return nil, faultf(FaultUnavailable, "stage: the store lost inputs or blobs of image %s: run action %s again: %w",
					req.root.image, t.Action, err)
			}
		}
		return nil, fault(StageInputs, err)
	}
	defer staged.close(l.cfg.Log)

	report(StageRun)
	ran, err := l.run(ctx, t, box, staged)
	if err != nil {
		return nil, fault(StageRun, err)
	}
	if ran.Released {
		staged.tree.AllowReuse()
	}
	if !staged.valid() {
		l.inputs.Invalidate(req.Instance.Name)
		return nil, faultf(FaultUnavailable, "run: the store's files changed, or a blob was found corrupt, "+
			"while action %s read its inputs: run it again", t.Action)
	}

	report(StageCollect)
	got, err := l.collect(ctx, t, req, box, staged, ran)
	if err != nil {
		return nil, fault(StageCollect, err)
	}

	report(StageSeal)
	e := &execution{began: began, task: t, req: req, box: box, staged: staged, ran: ran, collected: got}
	out, err := l.seal(ctx, e)
	if err != nil {
		return nil, fault(StageSeal, err)
	}

	report(StagePublish)
	return out, fault(StagePublish, l.publish(ctx, t, req, out, got.blobs))
}
