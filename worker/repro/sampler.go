// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// SamplerConfig configures a Sampler. Executor and Instances are required.
type SamplerConfig struct {
	Executor  worker.Executor
	Instances cas.Instances
	// Name is what this worker is called.
	Name     string
	Features sandbox.Features
	Host     Host
	// Command, if not nil, returns the command that shows more of an action, for the messages about it.
	Command func(instance string, action cas.Digest) string
	// SampleRate is that of the executed actions which are checked, 0 to 1.
	SampleRate float64
	// Gate has an action that is checked run again before its result is recorded, which it is only if both runs are the
	// same. Without, it runs again when there is time.
	Gate bool
	// Salt decides, with the digest, which actions are chosen; nil is the day, so that those of one day are the same on
	// all servers and over time each action has its turn.
	Salt func() uint64
	// Count, if not nil, is told of every check by its result: a Result in the words of a metric, or "skipped".
	Count    func(result string)
	Recorder Recorder
	// Verdicts are what is known of actions that are not reproducible; nil is a memory of the Sampler's own. They stay the
	// caller's.
	Verdicts *Verdicts
	Log      *slog.Logger
}

// A Recorder keeps what checks have come to. It is called by one goroutine at a time for each action, and must not block.
type Recorder interface {
	Record(*Summary)
}

// A Summary is what a check by a Sampler came to.
type Summary struct {
	Time                         time.Time
	Instance                     string
	Action                       cas.Digest
	Target, Mnemonic, Invocation string
	Result                       Result
	// Line says to a person what differs and how to see more, "" if nothing does.
	Line string
}

// What a Sampler keeps.
const (
	maxBacklog      = 1000     // checks that wait for a free slot
	maxBacklogBytes = 64 << 20 // of the results that they have
	maxTries        = 10       // of a check that other work interrupts
	maxTallied      = 10_000   // kinds of actions that are counted apart
)

// A Sampler is an Executor that runs a share of the actions a second time, varied in all that this host can but that
// another run is made at the same time, and compares. It is safe for concurrent use.
type Sampler struct {
	SamplerConfig
	factors []string

	mu      sync.Mutex         // guards everything below
	backlog []*pending         // the next first
	bytes   int64              // of backlog
	queued  map[actionKey]bool // what is in backlog
	filled  chan struct{}      // holds a value if there may be more in backlog
	tallies map[Kind]*Tally
}

// An actionKey is an action of an instance.
type actionKey struct {
	instance string
	action   cas.Digest
}

// A Kind is what clients say of the actions of one rule of a target.
type Kind struct{ Mnemonic, Target string }

// A Tally counts the checks of one Kind.
type Tally struct{ Same, Differs, FlakyExit, Skipped int }

// A pending check waits for a slot.
type pending struct {
	task  worker.Task
	first *worker.Outcome
	bytes int64 // that its result takes
	tries int
}

// NewSampler returns a Sampler. It starts nothing: without the gate, Idle does the work.
func NewSampler(c SamplerConfig) *Sampler {
	if c.Salt == nil {
		c.Salt = func() uint64 { return uint64(time.Now().Unix() / 86_400) }
	}
	if c.Count == nil {
		c.Count = func(string) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Verdicts == nil {
		c.Verdicts, _ = OpenVerdicts(VerdictsConfig{}) // which reads nothing
	}
	s := &Sampler{SamplerConfig: c, queued: map[actionKey]bool{}, filled: make(chan struct{}, 1), tallies: map[Kind]*Tally{}}
	for _, f := range factors {
		if f.copies == 0 { // a second slot is nobody's to take
			s.factors = append(s.factors, f.Name)
		}
	}
	return s
}

// Execute executes t, and checks it or has it checked later if it is chosen.
func (s *Sampler) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	if t.Variation != nil || t.Args != nil || t.Terminal != nil || !s.chosen(t) {
		return s.Executor.Execute(ctx, t, report)
	}
	task := *t
	if s.Gate {
		task.Approve = func(ctx context.Context, out *worker.Outcome) bool { return s.approve(ctx, t, out) }
		return s.Executor.Execute(ctx, &task, report)
	}
	out, err := s.Executor.Execute(ctx, t, report)
	if err == nil && !out.Cached && !out.Uncacheable && out.Status == worker.OK {
		s.add(t, out)
	}
	return out, err
}

// chosen reports whether an action is of the share. What the gate once held back is, until it comes out the same: else
// another day would let it through.
func (s *Sampler) chosen(t *worker.Task) bool {
	if s.Gate && s.Remark(t.Instance, t.Action) != "" {
		return true
	}
	h := sha256.New()
	var salt [8]byte
	binary.BigEndian.PutUint64(salt[:], s.Salt())
	h.Write(salt[:])
	fmt.Fprintf(h, "%s\n%s", t.Action, t.Instance)
	sum := h.Sum(nil)
	// The first 53 bits of the hash are a number that a float64 has as it is.
	return float64(binary.BigEndian.Uint64(sum)>>11) < s.SampleRate*(1<<53)
}

// approve runs the action of t again and reports whether its first outcome may be recorded.
func (s *Sampler) approve(ctx context.Context, t *worker.Task, first *worker.Outcome) bool {
	v, err := s.check(ctx, t, first)
	if err != nil {
		if ctx.Err() == nil {
			s.skip(t, fmt.Sprintf("not cached, since it could not be run again: %v", err))
		}
		return false
	}
	s.learn(t, v)
	return v.Result == Same
}

// check runs the action of t again. A defect that what it made has found, of ours or of a library's, is an error: it must
// end no server.
func (s *Sampler) check(ctx context.Context, t *worker.Task, first *worker.Outcome) (v *Verdict, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.Log.Error("a check of an action failed", "action", t.Action.String(), "err", p, "stack", string(debug.Stack()))
			v, err = nil, &worker.Fault{Kind: worker.Internal, Err: fmt.Errorf("panic: %v", p)}
		}
	}()
	in, err := s.Instances(t.Instance)
	if err != nil {
		return nil, err
	}
	task := *t
	task.Approve = nil
	var pause time.Duration
	if s.Gate {
		pause = -1 // somebody waits
	}
	return Check(ctx, &task, Options{
		Runs: 2, Factors: s.factors, Host: s.Host, First: first, Pause: pause,
		Executors: []Executor{{Name: s.Name, Executor: s.Executor, Store: in.Store, Features: &s.Features}},
	})
}

// add has the action of t checked when there is time. What finds no room is skipped.
func (s *Sampler) add(t *worker.Task, first *worker.Outcome) {
	p := &pending{task: *t, first: first, bytes: int64(proto.Size(first.Result))}
	p.task.Stdout, p.task.Stderr, p.task.Logs = nil, nil, nil
	k := actionKey{t.Instance, t.Action}
	s.mu.Lock()
	full := len(s.backlog) >= maxBacklog || s.bytes+p.bytes > maxBacklogBytes
	if !full && !s.queued[k] {
		s.put(p)
	}
	s.mu.Unlock()
	if full {
		s.skip(t, "")
	}
}

// put puts a check behind all others. The caller holds s.mu.
func (s *Sampler) put(p *pending) {
	s.queued[actionKey{p.task.Instance, p.task.Action}] = true
	s.bytes += p.bytes
	s.backlog = append(s.backlog, p)
	select {
	case s.filled <- struct{}{}:
	default:
	}
}

// Idle checks what waits for it, one action after the other, and waits for more, until ctx ends. The check that is under
// way then is made again later. It is called by one goroutine.
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
		case ctx.Err() != nil:
			s.again(p)
		default:
			s.skip(&p.task, "") // its inputs may be gone by now
		}
	}
}

// next takes the next check, or nil.
func (s *Sampler) next() *pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.backlog) == 0 {
		return nil
	}
	p := s.backlog[0]
	s.backlog[0] = nil // else the array behind the slice would keep it
	s.backlog = s.backlog[1:]
	s.bytes -= p.bytes
	delete(s.queued, actionKey{p.task.Instance, p.task.Action})
	return p
}

// again puts a check back that was interrupted, behind the others, so that one that takes long holds up no short ones.
func (s *Sampler) again(p *pending) {
	if p.tries++; p.tries >= maxTries {
		s.skip(&p.task, "")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(p)
}

// learn remembers what a check came to.
func (s *Sampler) learn(t *worker.Task, v *Verdict) {
	k, why := actionKey{t.Instance, t.Action}, v.Line()
	sum := &Summary{
		Time: time.Now(), Instance: t.Instance, Action: t.Action, Target: t.Target, Mnemonic: t.Mnemonic, Invocation: t.Invocation, Result: v.Result,
	}
	s.mu.Lock()
	tally, word := s.tally(t), string(v.Result)
	switch v.Result {
	case Same:
		tally.Same++
	case FlakyExit:
		tally.FlakyExit++
		word = "flaky_exit"
	default:
		tally.Differs++
	}
	s.mu.Unlock()
	if v.Result == Same {
		s.Verdicts.forget(k)
	} else {
		s.Verdicts.keep(k, why)
		sum.Line = s.message(k, why)
	}
	s.Count(word)
	if v.Result != Same {
		s.Log.Warn("an action is not reproducible", "action", v.Action, "instance", v.Instance, "target", v.Target, "mnemonic", v.Mnemonic, "why", sum.Line)
	}
	if s.Recorder != nil {
		s.Recorder.Record(sum)
	}
}

// message words why an action is not reproducible, what that does to its result, and which command shows more.
func (s *Sampler) message(k actionKey, why string) string {
	if s.Command != nil {
		if command := s.Command(k.instance, k.action); command != "" {
			why += "; see: " + command
		}
	}
	if s.Gate {
		return "not cached: " + why
	}
	return why
}

// skip counts a check that was not made. Line is what a person is told of the action, if anything.
func (s *Sampler) skip(t *worker.Task, line string) {
	s.mu.Lock()
	s.tally(t).Skipped++
	s.mu.Unlock()
	if line != "" {
		s.Verdicts.suspect(actionKey{t.Instance, t.Action}, text(line))
	}
	s.Count("skipped")
}

// tally returns the counts of the kind of t; kinds beyond the bound have one together. The caller holds s.mu.
func (s *Sampler) tally(t *worker.Task) *Tally {
	k := Kind{text(t.Mnemonic), text(t.Target)}
	if s.tallies[k] == nil {
		if len(s.tallies) >= maxTallied {
			k = Kind{}
		}
		if s.tallies[k] == nil {
			s.tallies[k] = &Tally{}
		}
	}
	return s.tallies[k]
}

// Remark returns what a person is to be told of an action beside each of its results, in one line of ASCII, "" if there is
// nothing.
func (s *Sampler) Remark(instance string, action cas.Digest) string {
	k := actionKey{instance, action}
	why, verdict := s.Verdicts.of(k)
	if verdict {
		return s.message(k, why)
	}
	return why
}

// Tallies returns the counts of all checks by kind.
func (s *Sampler) Tallies() map[Kind]Tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[Kind]Tally, len(s.tallies))
	for k, t := range s.tallies {
		all[k] = *t
	}
	return all
}

// Waiting returns how many checks wait.
func (s *Sampler) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.backlog)
}
