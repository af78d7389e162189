// SPDX-License-Identifier: Apache-2.0

// Package fleet serves what operators want of a queue and the workers that take from it: to see how they stand, and to
// drain them. It keeps nothing and decides nothing: the queue does both.
package fleet

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Config configures the service. Queue is required.
type Config struct {
	Queue *queue.Queue
	// Name, Version and Started say which server this is.
	Name, Version string
	Started       time.Time
	// Unready, if not nil, returns why the server should be given no work now, none if it should.
	Unready func() []string
	// Viewers, if not nil, say what each caller may know. Of all else he is told numbers, and of an action that he may not
	// know of on a worker that he may, the stage and the age.
	Viewers Viewers
	// Caller, if not nil, names who calls, "" if that is not known; it becomes a part of why a worker is drained.
	Caller func(context.Context) string
	// Keep, if not nil, keeps which workers are drained for the next server. Calls come one after the other, each with all
	// of them.
	Keep func(queue.DrainState) error
}

// Viewers are those who call, and what they may know.
type Viewers interface {
	// Sees reports whether the caller may know what waits and runs in an instance.
	Sees(ctx context.Context, instance string) bool
	// SeesBelow reports whether there may be an instance of the name prefix, or below it, of which that is true.
	SeesBelow(ctx context.Context, prefix string) bool
}

// Register adds the service cloister.v1.Fleet to s.
func Register(s grpc.ServiceRegistrar, c Config) {
	cloisterpb.RegisterFleetServer(s, &service{Config: c})
}

type service struct {
	cloisterpb.UnimplementedFleetServer
	Config
	mu sync.Mutex // held while workers are drained or undrained, and that is kept
}

// Status implements the method.
func (s *service) Status(ctx context.Context, _ *cloisterpb.StatusRequest) (*cloisterpb.StatusResponse, error) {
	now, stats := time.Now(), s.Queue.Stats()
	m := &cloisterpb.StatusResponse{
		Name: s.Name, Version: s.Version, Time: timestamppb.New(now), Started: timestamp(s.Started),
		Queued: int64(stats.Queued), Running: int64(stats.Running),
		Done: stats.Done, Cached: stats.Cached, Failed: stats.Failed, Again: stats.Again,
	}
	if !stats.Oldest.IsZero() {
		m.Oldest = durationpb.New(max(now.Sub(stats.Oldest), 0))
	}
	if s.Unready != nil {
		m.Unready = s.Unready()
	}
	other := &cloisterpb.Elsewhere{}
	for _, d := range s.Queue.Demands() {
		if s.Viewers != nil && !s.Viewers.Sees(ctx, d.Instance) {
			other.Queued += int64(d.Queued)
			continue
		}
		m.Demands = demanded(m.Demands, d)
	}
	for _, w := range s.Queue.Workers() {
		if s.Viewers != nil && !s.Viewers.SeesBelow(ctx, w.Prefix) {
			count(other, w)
			continue
		}
		m.Workers = append(m.Workers, s.worker(ctx, w))
	}
	if other.Queued > 0 || other.Workers > 0 {
		m.Elsewhere = other
	}
	return m, nil
}

// demanded adds what waits in one instance to what waits in others, which comes sorted by what it demands.
func demanded(all []*cloisterpb.Demand, d queue.Demand) []*cloisterpb.Demand {
	properties := texts(d.Properties)
	if n := len(all); n > 0 && slices.Equal(all[n-1].Properties, properties) {
		last := all[n-1]
		last.Queued += int64(d.Queued)
		last.Unmet = cmp.Or(last.Unmet, d.Unmet)
		return all
	}
	return append(all, &cloisterpb.Demand{Properties: properties, Queued: int64(d.Queued), Unmet: d.Unmet})
}

// count adds a worker that is there to those of which only numbers are told.
func count(other *cloisterpb.Elsewhere, w queue.WorkerState) {
	if !w.Left.IsZero() {
		return
	}
	other.Workers++
	other.Slots += int64(len(w.Slots))
	for _, slot := range w.Slots {
		if !slot.Action.IsZero() || !slot.Ending.IsZero() {
			other.Busy++
		}
	}
}

// worker returns a worker as the caller may see it.
func (s *service) worker(ctx context.Context, w queue.WorkerState) *cloisterpb.Worker {
	m := &cloisterpb.Worker{
		Name: w.Name, InstanceNamePrefix: w.Prefix, Properties: texts(w.Properties),
		Drained: timestamp(w.Drained), Reason: w.Why, Gone: timestamp(w.Left), Done: w.Done, Lost: w.Lost,
	}
	if !w.Local {
		m.Seen = timestamp(w.Seen)
	}
	for _, slot := range w.Slots {
		row := &cloisterpb.Slot{Name: slot.Name, Began: timestamp(slot.Began), Stage: stage(slot.Stage)}
		if slot.Action.IsZero() && !slot.Ending.IsZero() {
			row.Began, row.Stage = timestamp(slot.Ending), "end"
		}
		if !slot.Action.IsZero() && (s.Viewers == nil || s.Viewers.Sees(ctx, slot.Instance)) {
			row.Action, row.InstanceName = slot.Action.String(), slot.Instance
			row.TargetId, row.ActionMnemonic, row.InvocationId = slot.Target, slot.Mnemonic, slot.Invocation
		}
		m.Slots = append(m.Slots, row)
	}
	return m
}

// Drain implements the method.
func (s *service) Drain(ctx context.Context, req *cloisterpb.DrainRequest) (*cloisterpb.DrainResponse, error) {
	if len(req.Reason) > maxReason || strings.ContainsFunc(req.Reason, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return nil, status.Errorf(codes.InvalidArgument, "reason: write it in one line of at most %d bytes of printable text", maxReason)
	}
	why := req.Reason
	if s.Caller != nil {
		if who := s.Caller(ctx); who != "" {
			why = strings.TrimPrefix(why+" (by "+who+")", " ")
		}
	}
	return s.concerned(req, func() ([]string, int) { return s.Queue.DrainWorker(req.Worker, why) })
}

// maxReason bounds, in bytes, what is said of why a worker is drained.
const maxReason = 500

// Undrain implements the method.
func (s *service) Undrain(_ context.Context, req *cloisterpb.DrainRequest) (*cloisterpb.DrainResponse, error) {
	return s.concerned(req, func() ([]string, int) { return s.Queue.UndrainWorker(req.Worker) })
}

// concerned does something to the workers that a request names, and answers with them.
func (s *service) concerned(req *cloisterpb.DrainRequest, do func() ([]string, int)) (*cloisterpb.DrainResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, running := do()
	if len(names) == 0 && req.Worker != "" {
		return nil, status.Errorf(codes.NotFound, "no worker is called %+.200q; there %s", req.Worker, s.known())
	}
	if s.Keep != nil {
		if err := s.Keep(s.Queue.DrainState()); err != nil {
			return nil, status.Errorf(codes.Internal, "that is so from now on, but not once this server is started again, since it cannot be kept: %v", err)
		}
	}
	return &cloisterpb.DrainResponse{Workers: names, Running: int64(running)}, nil
}

// known says which workers there are, as the end of a sentence.
func (s *service) known() string {
	var names []string
	for _, w := range s.Queue.Workers() {
		names = append(names, fmt.Sprintf("%+.200q", w.Name))
	}
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return "is none"
	case len(names) == 1:
		return "is " + names[0]
	case len(names) > 20:
		return fmt.Sprintf("are %s, and %d more", strings.Join(names[:20], ", "), len(names)-20)
	}
	return "are " + strings.Join(names, ", ")
}

// stage returns how far a run has come, in the three words that a worker of whatever make has for it.
func stage(s worker.Stage) string {
	switch {
	case s == 0:
		return ""
	case s < worker.Run:
		return "fetch"
	case s == worker.Run:
		return "run"
	}
	return "upload"
}

// texts returns properties as NAME=VALUE.
func texts(all []worker.Property) []string {
	var texts []string
	for _, p := range all {
		texts = append(texts, p.Name+"="+p.Value)
	}
	return texts
}

// timestamp returns t, or nil if it is zero.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
