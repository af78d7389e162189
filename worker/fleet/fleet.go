// SPDX-License-Identifier: Apache-2.0

// Package fleet serves what operators want of a queue and the workers that take from it: to see how they stand, and to
// drain them. It keeps nothing and decides nothing: the queue does both.
package fleet

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
	// Sees, if not nil, reports whether a caller may know what runs in an instance; of what he may not know only the stage
	// and the age are told.
	Sees func(ctx context.Context, instance string) bool
	// Caller, if not nil, names who calls, "" if that is not known; it becomes a part of why a worker is drained.
	Caller func(context.Context) string
}

// Register adds the service cloister.v1.Fleet to s.
func Register(s grpc.ServiceRegistrar, c Config) {
	cloisterpb.RegisterFleetServer(s, &service{Config: c})
}

type service struct {
	cloisterpb.UnimplementedFleetServer
	Config
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
	for _, d := range s.Queue.Demands() {
		m.Demands = append(m.Demands, &cloisterpb.Demand{Properties: texts(d.Properties), Queued: int64(d.Queued), Unmet: d.Unmet})
	}
	for _, w := range s.Queue.Workers() {
		m.Workers = append(m.Workers, s.worker(ctx, w))
	}
	return m, nil
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
		if !slot.Action.IsZero() && (s.Sees == nil || s.Sees(ctx, slot.Instance)) {
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
	names, running := do()
	if len(names) == 0 && req.Worker != "" {
		return nil, status.Errorf(codes.NotFound, "no worker is called %+.200q; there %s", req.Worker, s.known())
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
