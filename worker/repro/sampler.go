// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/results"
	"google.golang.org/protobuf/proto"
)

// SamplerConfig configures a Sampler. Executor, Instances, Name and Features are required.
type SamplerConfig struct {
	Executor  worker.Executor
	Instances cas.Instances
	// Name is the worker's name.
	Name     string
	Features sandbox.Features
	Host     Host
	// Command, if not nil, returns the command that shows more of an action, for the messages about it.
	Command func(instance string, action cas.Digest) string
	// SampleRate is the fraction of executed actions that are checked, from 0 to 1.
	SampleRate float64
	// Gate checks an action before its result is recorded, and records it only if both runs are equal. Without it,
	// checks run while the worker is idle.
	Gate bool
	// Salt determines, with the digest, which actions are checked. nil means the current day: all servers choose the
	// same actions on a day, and over time each action is chosen.
	Salt func() uint64
	// BacklogBytes limits the size of the results of pending checks; zero is 64 MiB.
	BacklogBytes int64
	// Count, if not nil, is called for every check with the label of a metric: a Result or "skipped".
	Count    func(result string)
	Recorder Recorder
	// Verdicts belong to the caller; nil keeps verdicts in memory.
	Verdicts *Verdicts
	Log      *slog.Logger
}

// A Recorder receives the results of checks. It must not block. Calls for one action are not concurrent.
type Recorder interface {
	Record(*Summary)
}

// A Summary is the result of a check by a Sampler.
type Summary struct {
	Time                         time.Time
	Instance                     string
	Action                       cas.Digest
	Target, Mnemonic, Invocation string
	Result                       Result
	Causes                       []string // as far as they are known
	// Line states what differs and which command shows more; "" if nothing differs.
	Line string
	// Report is the digest of the Verdict in JSON, a blob of the instance, if it differs and could be stored.
	Report cas.Digest
}

// Limits of a Sampler.
const (
	maxBacklog = 1000 // pending checks
	maxTries   = 10   // of a check that is interrupted, or during which the toolchain changes
	putTimeout = 10 * time.Second
)

// A Sampler is an Executor that runs a sample of the actions a second time, varies every factor that needs no second
// slot, and compares the results. Use NewSampler; the zero Sampler is not usable. It is safe for concurrent use.
type Sampler struct {
	cfg     SamplerConfig
	factors []Factor

	mu      sync.Mutex         // guards everything below
	backlog []*pending         // next one first
	bytes   int64              // of backlog
	queued  map[actionKey]bool // actions in backlog
	filled  chan struct{}      // has a value if backlog may have grown
}

// An actionKey is an action of an instance.
type actionKey struct {
	instance string
	action   cas.Digest
}

// A pending check waits for a free slot.
type pending struct {
	task  worker.Task
	first *worker.Outcome // nil if the toolchain has changed since
	bytes int64           // of its result
	tries int
}

// NewSampler returns a Sampler, and fails if a required field is missing. Without Gate, the caller must call Idle.
func NewSampler(c SamplerConfig) (*Sampler, error) {
	switch {
	case c.Executor == nil:
		return nil, errors.New("repro: SamplerConfig.Executor is missing")
	case c.Instances == nil:
		return nil, errors.New("repro: SamplerConfig.Instances is missing")
	case c.Name == "":
		return nil, errors.New("repro: SamplerConfig.Name is missing")
	case len(c.Features.Audits) == 0: // every backend supports one
		return nil, errors.New("repro: SamplerConfig.Features is missing: set it to the result of Backend.Probe")
	case !(c.SampleRate >= 0 && c.SampleRate <= 1):
		return nil, fmt.Errorf("repro: SamplerConfig.SampleRate is %v: it must be from 0 to 1", c.SampleRate)
	}
	if c.Salt == nil {
		c.Salt = func() uint64 { return uint64(time.Now().Unix() / 86_400) }
	}
	c.BacklogBytes = cmp.Or(c.BacklogBytes, 64<<20)
	if c.Count == nil {
		c.Count = func(string) {}
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Verdicts == nil {
		c.Verdicts, _ = OpenVerdicts(VerdictsConfig{}) // cannot fail without a file
	}
	s := &Sampler{
		cfg:    c,
		queued: map[actionKey]bool{},
		filled: make(chan struct{}, 1),
	}
	for _, f := range factors {
		if f.copies == 0 {
			s.factors = append(s.factors, f.name)
		}
	}
	return s, nil
}

// Execute executes t. If t is chosen it checks it now, with Gate, or later.
func (s *Sampler) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	if t == nil {
		return nil, invalidf("the Task is missing")
	}
	if t.Variation != nil || t.Args != nil || t.Terminal != nil || !s.chosen(t) {
		return s.cfg.Executor.Execute(ctx, t, report)
	}
	task := *t
	if s.cfg.Gate {
		task.Approve = func(ctx context.Context, out *worker.Outcome) bool { return s.approve(ctx, t, out) }
		return s.cfg.Executor.Execute(ctx, &task, report)
	}
	out, err := s.cfg.Executor.Execute(ctx, t, report)
	if err == nil && !out.Cached && !out.Uncacheable && out.Status == worker.StatusOK {
		s.add(t, out)
	}
	return out, err
}

// chosen reports whether an action is in the sample. With Gate, actions that are not known to be reproducible always
// are: otherwise their results would be recorded on a day on which they are not chosen.
func (s *Sampler) chosen(t *worker.Task) bool {
	if s.cfg.Gate && s.Remark(t.Instance, t.Action) != "" {
		return true
	}
	h := sha256.New()
	var salt [8]byte
	binary.BigEndian.PutUint64(salt[:], s.cfg.Salt())
	h.Write(salt[:])
	fmt.Fprintf(h, "%s\n%s", t.Action, t.Instance)
	sum := h.Sum(nil)
	// A float64 represents 53 bits exactly.
	return float64(binary.BigEndian.Uint64(sum)>>11) < s.cfg.SampleRate*(1<<53)
}

// approve checks t and reports whether its first outcome may be recorded.
func (s *Sampler) approve(ctx context.Context, t *worker.Task, first *worker.Outcome) bool {
	v, err := s.check(ctx, t, first)
	if err != nil {
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, errToolchain):
			s.skip(t, fmt.Sprintf("not cached: %v", err))
		default:
			s.skip(t, fmt.Sprintf("not cached: the action could not be run again: %v", err))
		}
		return false
	}
	s.learn(t, v)
	return v.Result.AllEqual()
}

// check runs the action of t again, or twice if first is nil. It turns a panic into an error: hostile outputs must not
// end the server, even if they trigger a bug.
func (s *Sampler) check(ctx context.Context, t *worker.Task, first *worker.Outcome) (v *Verdict, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Log.Error("checking an action panicked", "action", t.Action.String(), "err", p, "stack",
				string(debug.Stack()))
			v, err = nil, &worker.Fault{Kind: worker.FaultInternal, Err: fmt.Errorf("panic: %v", p)}
		}
	}()
	in, err := s.cfg.Instances(t.Instance)
	if err != nil {
		return nil, err
	}
	task := *t
	task.Approve = nil
	var pause time.Duration
	if s.cfg.Gate {
		pause = -1 // a client waits
	}
	v, err = Check(ctx, &task, Options{
		Runs: 2, Factors: s.factors, Host: s.cfg.Host, First: first, Pause: pause,
		Executors: []Executor{{Name: s.cfg.Name, Executor: s.cfg.Executor, Store: in.Store, Features: &s.cfg.Features}},
	})
	if err == nil && !v.Result.AllEqual() && toolchain(&v.Runs[0]) != toolchain(&v.Runs[1]) {
		return nil, errToolchain
	}
	return v, err
}

// errToolchain means that the runs of a check differ, but so do their toolchains.
var errToolchain = errors.New("the toolchain of this machine changed between both runs")

// toolchain returns the fingerprint of the toolchain that a run recorded, or "".
func toolchain(r *Run) string { return results.Recorded(r.Result).GetToolchain() }

// add appends a check of t to the backlog, or skips it if the backlog is full.
func (s *Sampler) add(t *worker.Task, first *worker.Outcome) {
	p := &pending{task: *t, first: first, bytes: int64(proto.Size(first.Result))}
	p.task.Stdout, p.task.Stderr, p.task.Logs = nil, nil, nil
	k := actionKey{t.Instance, t.Action}
	s.mu.Lock()
	full := len(s.backlog) >= maxBacklog || s.bytes+p.bytes > s.cfg.BacklogBytes
	if !full && !s.queued[k] {
		s.put(p)
	}
	s.mu.Unlock()
	if full {
		s.skip(t, "")
	}
}

// PendingBytes returns the size of the results of pending checks.
func (s *Sampler) PendingBytes() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes
}

// Waiting returns the number of pending checks, without the one that is running.
func (s *Sampler) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.backlog)
}

// put appends a check to the backlog. The caller holds s.mu.
func (s *Sampler) put(p *pending) {
	s.queued[actionKey{p.task.Instance, p.task.Action}] = true
	s.bytes += p.bytes
	s.backlog = append(s.backlog, p)
	select {
	case s.filled <- struct{}{}:
	default:
	}
}

// Idle runs pending checks and waits for more, until ctx ends. It repeats an interrupted check later. Only one
// goroutine may call it at a time.
func (s *Sampler) Idle(ctx context.Context) {
	for ctx.Err() == nil {
		p := s.next()
		if p == nil {
			select {
			case <-ctx.Done():
			case <-s.filled:
			}
			continue
		}
		v, err := s.check(ctx, &p.task, p.first)
		switch {
		case err == nil:
			s.learn(&p.task, v)
		case errors.Is(err, errToolchain):
			p.first, p.bytes = nil, 0
			s.requeue(p)
		case ctx.Err() != nil:
			s.requeue(p)
		default:
			s.skip(&p.task, "") // its inputs may be gone by now
		}
	}
}

// next takes the next check from the backlog, nil if it is empty.
func (s *Sampler) next() *pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.backlog) == 0 {
		return nil
	}
	p := s.backlog[0]
	s.backlog[0] = nil // release it to the garbage collector
	s.backlog = s.backlog[1:]
	s.bytes -= p.bytes
	delete(s.queued, actionKey{p.task.Instance, p.task.Action})
	return p
}

// requeue puts a check without a verdict at the end of the backlog, so that a long one does not block short ones.
func (s *Sampler) requeue(p *pending) {
	if p.tries++; p.tries >= maxTries {
		s.skip(&p.task, "")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(p)
}

// learn records the result of a check.
func (s *Sampler) learn(t *worker.Task, v *Verdict) {
	k, why := actionKey{t.Instance, t.Action}, v.Line()
	sum := &Summary{
		Time: time.Now(), Instance: t.Instance, Action: t.Action, Target: t.Target, Mnemonic: t.Mnemonic,
		Invocation: t.Invocation, Result: v.Result, Causes: v.Causes(),
	}
	if v.Result.AllEqual() {
		s.cfg.Verdicts.forget(k)
	} else {
		s.cfg.Verdicts.keep(k, why, found{clip(v.Target), clip(v.Mnemonic), v.Result, sum.Causes})
		sum.Line, sum.Report = s.message(k, why), s.storeReport(t, v)
	}
	s.cfg.Count(strings.ReplaceAll(string(v.Result), " ", "_"))
	if !v.Result.AllEqual() {
		s.cfg.Log.Warn("action is not reproducible", "action", v.Action, "instance", v.Instance, "target", v.Target,
			"mnemonic", v.Mnemonic, "why", sum.Line)
	}
	if s.cfg.Recorder != nil {
		s.cfg.Recorder.Record(sum)
	}
}

// storeReport stores v and returns its digest, or the zero Digest if that fails: the verdict does not need it.
func (s *Sampler) storeReport(t *worker.Task, v *Verdict) cas.Digest {
	ctx, cancel := context.WithTimeout(context.Background(), putTimeout)
	defer cancel()
	data, err := json.Marshal(v)
	var in *cas.Instance
	if err == nil {
		in, err = s.cfg.Instances(t.Instance)
	}
	var d cas.Digest
	if err == nil {
		d, err = cas.PutBytes(ctx, in.Store, t.Action.Function(), data)
	}
	if err != nil {
		s.cfg.Log.Warn("cannot store the report of a check", "action", v.Action, "instance", v.Instance, "err", err)
		return cas.Digest{}
	}
	return d
}

// message explains why an action is not reproducible, what happens to its result, and which command shows more.
func (s *Sampler) message(k actionKey, why string) string {
	if s.cfg.Command != nil {
		if command := s.cfg.Command(k.instance, k.action); command != "" {
			why += "; see: " + command
		}
	}
	if s.cfg.Gate {
		return "not cached: " + why
	}
	return why
}

// skip counts a check that was not made. line, if any, becomes the remark on the action.
func (s *Sampler) skip(t *worker.Task, line string) {
	if line != "" {
		s.cfg.Verdicts.suspect(actionKey{t.Instance, t.Action}, text(line))
	}
	s.cfg.Count("skipped")
}

// Remark returns a line about an action to show with each of its results, "" if there is none.
func (s *Sampler) Remark(instance string, action cas.Digest) string {
	k := actionKey{instance, action}
	why, verdict := s.cfg.Verdicts.of(k)
	if verdict {
		return s.message(k, why)
	}
	return why
}
