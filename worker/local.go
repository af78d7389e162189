// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// Config is what a Local needs.
type Config struct {
	// Name is the worker's, in the metadata of every result; it must not be empty.
	Name      string
	Instances cas.Instances
	// Backend performs the runs. Nil is for a worker that executes nothing: it admits for others.
	Backend sandbox.Backend
	// Fleet says that actions come to this worker, or go from it to others, by the properties that they demand, and that
	// each worker has a policy of its own. No property is ignored then, and what decides on a grant elsewhere is among
	// the terms of an admission.
	Fleet bool
	// Features are what Backend.Probe said; they become part of every result's metadata.
	Features sandbox.Features
	// Stager lays out input trees. Nil copies them.
	Stager *tree.Stager
	// Toolchain is what every action may read besides its input root; see HostToolchain.
	Toolchain []sandbox.Input
	// Host is what every run sees of this machine. Its zero value is what ReadHost says.
	Host manifest.Host
	// Policy says what an action may be given. Nil is policy.Default.
	Policy *policy.Policy
	// Reproduce returns the command line that reruns the action of a task on this machine, or "" if there is none. A
	// nil function returns "".
	Reproduce func(*Task) string
	// Audit, if not nil, is told what each run tried, once and only if there is something to tell, even if
	// nobody waits for the result any more; and of each action that the policy refuses, whose exit code is
	// sandbox.NeverRan. It is called by many goroutines, which wait for it.
	Audit func(*Task, *Violations)
	// MaxTimeout bounds what an action may ask for and is what one gets that asks for nothing.
	// Zero is 24 hours.
	MaxTimeout time.Duration
	// Grace is how long an action has to end after SIGTERM. Zero is 5 seconds.
	Grace time.Duration
	// RenewInterval is how often the inputs of a running action are marked as used, so that no store lets them go
	// while the run may still read them: well within the time for which the store keeps what was used. Zero
	// is an hour.
	RenewInterval time.Duration
	// CacheBytes is how much memory the cache of decoded actions, commands and input trees takes. Zero is
	// DefaultCacheBytes.
	CacheBytes int64
	// LogBytes is how much of stdout and how much of stderr is kept. Zero is 32 MiB.
	LogBytes int64
	Log      *slog.Logger
}

// DefaultCacheBytes is what Config.CacheBytes is by default: the decoded trees of some 300,000 files.
const DefaultCacheBytes = 64 << 20

// A Local executes actions on this machine.
type Local struct {
	Config

	inputs     *tree.Cache
	policyHash string
	sums       *sums         // of programs of this host
	renewing   chan struct{} // holds a value while inputs are being marked
	mu         sync.Mutex
	ignored    map[string]bool // platform properties that were warned of
}

var _ Executor = (*Local)(nil)

// New returns a Local. It starts nothing.
func New(c Config) *Local {
	if c.MaxTimeout == 0 {
		c.MaxTimeout = 24 * time.Hour
	}
	if c.Grace == 0 {
		c.Grace = 5 * time.Second
	}
	if c.Policy == nil {
		c.Policy = policy.Default()
	}
	if c.Host == (manifest.Host{}) {
		c.Host = ReadHost()
	}
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	if c.Stager == nil {
		c.Stager = tree.NewStager(tree.StagerConfig{})
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = DefaultCacheBytes
	}
	if c.Reproduce == nil {
		c.Reproduce = func(*Task) string { return "" }
	}
	if c.LogBytes == 0 {
		c.LogBytes = 32 << 20
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Local{
		Config: c,
		// What was marked for the last time a quarter of Renew ago, and is marked again after Renew, is kept by a
		// store that keeps what was used for three times Renew.
		inputs:     tree.NewCache(c.CacheBytes, c.RenewInterval/4),
		policyHash: c.Policy.Hash(),
		sums:       newSums(),
		renewing:   make(chan struct{}, 1),
		ignored:    map[string]bool{},
	}
}

// Execute carries t through the seven verbs.
func (l *Local) Execute(ctx context.Context, t *Task, report func(Stage)) (*Outcome, error) {
	began := time.Now()

	report(Fetch)
	req, cached, err := l.fetch(ctx, t)
	if err != nil || cached != nil {
		return cached, fault(Fetch, err)
	}
	defer l.keepInputs(ctx, t)()

	report(Confine)
	box, err := l.confine(t, req)
	if err != nil {
		return nil, fault(Confine, err)
	}

	report(StageInputs)
	staged, err := l.stage(ctx, t, req, box)
	if err != nil {
		if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
			l.inputs.Invalidate(req.Instance.Name) // so that the client is told of all that is missing when it asks again
		}
		return nil, fault(StageInputs, err)
	}
	defer staged.close()

	report(Run)
	ran, err := l.run(ctx, t, box.spec)
	if err != nil {
		return nil, fault(Run, err)
	}

	if ran.Released {
		staged.tree.AllowReuse()
	}
	if !staged.tree.Valid() {
		l.inputs.Invalidate(req.Instance.Name)
		return nil, faultf(Unavailable, "run: somebody else wrote to the files of the store, or a blob was found damaged, while action %s read its inputs: run it again", t.Action)
	}

	report(Collect)
	got, err := l.collect(ctx, t, req, box, staged, ran)
	if err != nil {
		return nil, fault(Collect, err)
	}

	report(Seal)
	out, err := l.seal(ctx, &execution{began: began, task: t, req: req, box: box, staged: staged, ran: ran, collected: got})
	if err != nil {
		return nil, fault(Seal, err)
	}

	report(Publish)
	return out, fault(Publish, l.publish(ctx, t, req, out, got.blobs))
}

// fault gives err its kind and says in which stage it arose; nil stays nil.
func fault(s Stage, err error) error {
	if err == nil {
		return nil
	}
	var f *Fault
	if errors.As(err, &f) {
		return f
	}
	var missing *tree.MissingError
	if errors.As(err, &missing) {
		f = faultf(Missing, "%s: %w", s, err)
		f.Blobs = missing.Blobs
		return f
	}
	for _, row := range []struct {
		err  error
		kind Kind
	}{
		{context.Canceled, Cancelled},
		{context.DeadlineExceeded, Unavailable}, // of something on the way: an execution has no deadline
		{cas.ErrInvalid, Invalid},
		{sandbox.ErrSpec, Invalid},
		{cas.ErrFull, Exhausted},
		{syscall.ENOSPC, Exhausted},    // of this host; an action that fills its own room is an Outcome
		{cas.ErrCorrupt, Unavailable},  // the store has dropped the blob: the next try reports it missing
		{cas.ErrNotFound, Unavailable}, // evicted since it was looked for: likewise
		{cas.ErrUnavailable, Unavailable},
		{sandbox.ErrUnsupported, Unmet},
		{policy.ErrRefused, Unmet},
	} {
		if errors.Is(err, row.err) {
			return faultf(row.kind, "%s: %w", s, err)
		}
	}
	return faultf(Internal, "%s: %w", s, err)
}
