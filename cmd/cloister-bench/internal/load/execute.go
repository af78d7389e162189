// SPDX-License-Identifier: Apache-2.0

package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// ExecConfig configures Execute.
type ExecConfig struct {
	Salt      string // of the actions and their inputs
	Workloads []Workload
	Rounds    int                       // repetitions of each workload, each with new actions
	Platform  []*repb.Platform_Property // of every action
	LocalTime time.Duration             // per measurement of the bare machine
	Settle    bool                      // before each workload of a server, wait until the watched processes are idle
	// Progress, unless nil, is called before each workload of each round, counted from 1.
	Progress func(round int, w *Workload)
}

// idleTimeout limits the time in which no action completes.
const idleTimeout = 5 * time.Minute

// Execute measures servers and the bare machine, which alternate workload by workload. All inputs are uploaded before
// the clock starts. The first failed action or wrong result ends it.
func Execute(ctx context.Context, c ExecConfig, servers []*Server) (*ExecReport, error) {
	report := newExecReport(&c, servers)
	for round := range c.Rounds {
		for n := range c.Workloads {
			w := &c.Workloads[n]
			if c.Progress != nil {
				c.Progress(round+1, w)
			}
			j, err := newJob(w, platformOf(c.Platform), fmt.Sprintf("%s/%d/%d", c.Salt, n, round))
			if err != nil {
				return nil, err
			}
			m := &report.Workloads[n]
			turns := []func() error{func() error { return m.Local.measure(ctx, w, j, &c) }}
			for i, s := range servers {
				turns = append(turns, func() error {
					err := settle(ctx, c.Settle, servers)
					if err == nil {
						err = m.Servers[i].measure(ctx, w, j, s, servers)
					}
					if err != nil {
						return fmt.Errorf("%s: %s: %w", s.Name, w.Kind, err)
					}
					return nil
				})
			}
			for turn := range turns {
				if err := turns[(turn+round)%len(turns)](); err != nil { // each round begins with another one
					return nil, err
				}
			}
		}
	}
	return report, nil
}

// Execute executes the actions of a workload on s and checks all results, without measuring anything.
func (s *Server) Execute(ctx context.Context, w *Workload, salt string) error {
	j, err := newJob(w, nil, salt)
	if err != nil {
		return err
	}
	return (&ExecResult{}).measure(ctx, w, j, s, nil)
}

// An answer is the result of one Execute call.
type answer struct {
	took time.Duration
	last reply // the last message of the stream
}

// measure executes the actions of a job on s, checks all results, and adds the measurements to r.
func (r *ExecResult) measure(ctx context.Context, w *Workload, j *job, s *Server, servers []*Server) error {
	requests, err := s.executeRequests(j.actions)
	if err != nil {
		return err
	}
	if err := s.upload(ctx, j); err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	// A deadline per call would be sent to the server, which would also enforce it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(idleTimeout, func() { cancel(fmt.Errorf("no action completed in %s", idleTimeout)) })
	defer idle.Stop()
	answers := make([]answer, len(requests))
	do := func(ctx context.Context, i int) (err error) {
		if answers[i], err = s.execute(ctx, requests[i]); err != nil {
			return fmt.Errorf("action %s: %w", j.actions[i].name(), cmp.Or(context.Cause(ctx), err))
		}
		idle.Reset(idleTimeout)
		return nil
	}
	// Two actions run alone: the first has a tree new to the server, the second one does not.
	const alone = 2
	for i := range alone {
		if err := do(ctx, i); err != nil {
			return err
		}
	}
	runtime.GC()
	before, err := s.observe(servers)
	if err != nil {
		return err
	}
	start := time.Now()
	err = each(ctx, w.Parallel, w.Actions, func(ctx context.Context, i int) error { return do(ctx, alone+i) })
	elapsed := time.Since(start)
	if err != nil {
		return err
	}
	after, err := s.observe(servers)
	if err != nil {
		return err
	}
	metadata, err := s.checkAll(ctx, j, answers)
	if err != nil {
		return err
	}
	r.addRun(answers[:alone], answers[alone:], metadata[alone:])
	r.addUsage(w.Actions, elapsed, before, after)
	return nil
}

// name returns the digest of an action as HASH/SIZE.
func (a *action) name() string { return fmt.Sprintf("%s/%d", a.digest.hash, len(a.digest.data)) }

func (s *Server) executeRequests(actions []action) ([]message, error) {
	requests := make([]message, len(actions))
	for i := range actions {
		b, err := proto.Marshal(&repb.ExecuteRequest{
			InstanceName: s.execInstance, ActionDigest: actions[i].digest.digest(), SkipCacheLookup: true,
		})
		if err != nil {
			return nil, err
		}
		requests[i] = message{b}
	}
	return requests, nil
}

// upload writes the blobs of a job that the server lacks: in batches, and those that fit into none by streams.
func (s *Server) upload(ctx context.Context, j *job) error {
	missing, err := s.missing(ctx, maps.Keys(j.blobs), func(h string) int64 { return int64(len(j.blobs[h].data)) })
	if err != nil {
		return err
	}
	slices.SortFunc(missing, func(a, b string) int { return len(j.blobs[a].data) - len(j.blobs[b].data) })
	left := make([]blob, len(missing))
	for i, hash := range missing {
		left[i] = j.blobs[hash]
	}
	limit := min(s.batch, maxMessage-1<<16)
	for len(left) > 0 {
		n, size := 0, int64(0)
		for n < len(left) && size+int64(len(left[n].data))+entryBytes <= limit {
			size += int64(len(left[n].data)) + entryBytes
			n++
		}
		if n == 0 {
			break // the others are larger
		}
		answer, err := repb.NewContentAddressableStorageClient(s.conn).BatchUpdateBlobs(ctx, s.updateRequest(left[:n]))
		if err == nil {
			err = checkUpdate(left[:n], answer)
		}
		if err != nil {
			return err
		}
		left = left[n:]
	}
	return s.writes(1, left)(ctx)
}

// execute executes one action, and returns the last message at the end of the stream.
func (s *Server) execute(ctx context.Context, request message) (a answer, err error) {
	start := time.Now()
	err = receive(ctx, s.exec, repb.Execution_Execute_FullMethodName, request, func(r reply) error {
		a.last.free()
		a.last = r
		return nil
	})
	a.took = time.Since(start)
	return a, err
}

// phasesOf returns the durations of an execution's phases in milliseconds, in the order of phases.
func phasesOf(m *repb.ExecutedActionMetadata, took time.Duration) (p [len(phases)]float64) {
	rest := milliseconds(took)
	for i, t := range [][2]*timestamppb.Timestamp{
		{m.GetQueuedTimestamp(), m.GetWorkerStartTimestamp()},
		{m.GetInputFetchStartTimestamp(), m.GetInputFetchCompletedTimestamp()},
		{m.GetExecutionStartTimestamp(), m.GetExecutionCompletedTimestamp()},
		{m.GetOutputUploadStartTimestamp(), m.GetOutputUploadCompletedTimestamp()},
	} {
		if t[0] != nil && t[1] != nil {
			p[i] = milliseconds(t[1].AsTime().Sub(t[0].AsTime()))
		}
		rest -= p[i]
	}
	p[len(p)-1] = rest
	return p
}

// An observation is the resource usage up to a moment.
type observation struct {
	usage
	live, exited time.Duration // CPU time of the server's processes and descendants
	self         time.Duration // of this process
	machine      time.Duration // of all processes; 0 if unknown
	known        time.Duration // of all watched servers and this process
}

// observe reads the resource usage of the server and the machine, as far as the operating system reports it.
func (s *Server) observe(servers []*Server) (o observation, err error) {
	if o.usage, err = s.usage(); err != nil {
		return o, err
	}
	if o.live, o.exited, err = treeCPU(s.pids); err != nil {
		return o, err
	}
	var children time.Duration
	o.self, children = ownCPU()
	if o.machine, err = machineCPU(); errors.Is(err, errors.ErrUnsupported) {
		return o, nil
	} else if err != nil {
		return o, err
	}
	var all []int
	for _, s := range servers {
		all = append(all, s.pids...)
	}
	live, exited, err := treeCPU(all)
	o.known = live + exited + o.self + children
	return o, err
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
