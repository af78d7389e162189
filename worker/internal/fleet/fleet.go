// SPDX-License-Identifier: Apache-2.0

// Package fleet serves operators: it reports the state of a queue and its workers, and drains workers. It translates
// between the queue and messages, and holds no state.
//
// The queue drains workers by name: a drained worker gets no new actions and is not notified. So draining also works
// for Buildbarn's workers, and a worker that leaves and rejoins stays drained. Draining all workers includes those that
// join later, so an operator does not race with an autoscaler. Ages in messages are by the server's clock, so the
// clocks of clients do not matter.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
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
	// Name, Version and Started describe this server.
	Name, Version string
	Started       time.Time
	// Hits, if not nil, counts the results that clients have found in the action cache without an operation.
	Hits func() int64
	// Unready, if not nil, returns the reasons why the server is not ready for work.
	Unready func() []string
	// Notes, if not nil, returns what else an operator should know.
	Notes func() []string
	// Viewers, if not nil, decides what each caller may see. Other instances and workers are reported as numbers, and
	// other actions on a visible worker by stage and age only.
	Viewers Viewers
	// Caller, if not nil, returns the identity of a caller, "" if unknown, for the reason of a drain.
	Caller func(context.Context) string
	// Keep, if not nil, saves all drains for the next server. Calls are sequential.
	Keep func(queue.DrainState) error
}

// Viewers decides what callers may see.
type Viewers interface {
	// Sees reports whether the caller may see the actions of an instance.
	Sees(ctx context.Context, instance string) bool
	// SeesBelow reports whether the caller may see the actions of any instance at or below prefix.
	SeesBelow(ctx context.Context, prefix string) bool
}

// Register adds the service cloister.v1.Fleet to s, and fails without a Queue.
func Register(s grpc.ServiceRegistrar, c Config) error {
	if c.Queue == nil {
		return errors.New("fleet: Config.Queue is missing")
	}
	cloisterpb.RegisterFleetServer(s, &service{Config: c})
	return nil
}

type service struct {
	cloisterpb.UnimplementedFleetServer
	Config
	mu sync.Mutex // held while drains change and are kept
}

// Status implements the method.
func (s *service) Status(ctx context.Context, _ *cloisterpb.StatusRequest) (*cloisterpb.StatusResponse, error) {
	now, stats := time.Now(), s.Queue.Stats()
	m := &cloisterpb.StatusResponse{
		Name: s.Name, Version: s.Version, Time: timestamppb.New(now), Started: timestamp(s.Started),
		Queued: int64(stats.Queued), Running: int64(stats.Running),
		Done: stats.Done, Cached: stats.Cached, Failed: stats.Failed, Again: stats.Again,
	}
	if s.Hits != nil {
		m.Cached += s.Hits()
	}
	if !stats.Oldest.IsZero() {
		m.Oldest = durationpb.New(max(now.Sub(stats.Oldest), 0))
	}
	if s.Unready != nil {
		m.Unready = s.Unready()
	}
	if s.Notes != nil {
		m.Notes = s.Notes()
	}
	other := &cloisterpb.Elsewhere{}
	size, unlisted := 0, 0
	for _, d := range s.Queue.Demands() {
		if s.Viewers != nil && !s.Viewers.Sees(ctx, d.Instance) {
			other.Queued += int64(d.Queued)
			continue
		}
		for _, p := range d.Properties {
			size += len(p.Name) + len(p.Value)
		}
		if size += len(d.Unmet); size > maxDemands {
			unlisted += d.Queued
			continue
		}
		m.Demands = addDemand(m.Demands, d)
	}
	if unlisted > 0 {
		m.Notes = append(slices.Clip(m.Notes),
			fmt.Sprintf("the demands of %d waiting actions are not listed: the list has reached its limit of 1 MiB", unlisted))
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

// maxDemands is the maximum size of all demands in a message, in bytes: clients choose them.
const maxDemands = 1 << 20

// addDemand adds d to all, merging it with the last if that has the same properties and reason, by which demands of
// several instances are sorted.
func addDemand(all []*cloisterpb.Demand, d queue.Demand) []*cloisterpb.Demand {
	properties := texts(d.Properties)
	if n := len(all); n > 0 && all[n-1].Unmet == d.Unmet && slices.Equal(all[n-1].Properties, properties) {
		all[n-1].Queued += int64(d.Queued)
		return all
	}
	return append(all, &cloisterpb.Demand{Properties: properties, Queued: int64(d.Queued), Unmet: d.Unmet})
}

// count adds a present worker to the numbers of those that the caller may not see.
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

// worker returns the part of w that the caller may see.
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
		} else if slot.Pulling {
			row.Stage = "pull"
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
		return nil, status.Errorf(codes.InvalidArgument, "reason is not one line of printable text of at most %d bytes", maxReason)
	}
	why := req.Reason
	if s.Caller != nil {
		if caller := s.Caller(ctx); caller != "" {
			why = strings.TrimPrefix(why+" (by "+caller+")", " ")
		}
	}
	return s.apply(req, func() ([]string, int) { return s.Queue.DrainWorker(req.Worker, why) })
}

// maxReason bounds the bytes of a drain's reason.
const maxReason = 500

// Undrain implements the method.
func (s *service) Undrain(_ context.Context, req *cloisterpb.DrainRequest) (*cloisterpb.DrainResponse, error) {
	return s.apply(req, func() ([]string, int) { return s.Queue.UndrainWorker(req.Worker) })
}

// apply changes the drains of the workers that a request names, and returns these workers.
func (s *service) apply(req *cloisterpb.DrainRequest, change func() ([]string, int)) (*cloisterpb.DrainResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, running := change()
	if len(names) == 0 && req.Worker != "" {
		return nil, status.Errorf(codes.NotFound, "no worker is named %s; known workers: %s", quote(req.Worker), s.known())
	}
	if s.Keep != nil {
		if err := s.Keep(s.Queue.DrainState()); err != nil {
			return nil, status.Errorf(codes.Internal, "done, but lost when this server restarts, because it cannot be saved: %v", err)
		}
	}
	return &cloisterpb.DrainResponse{Workers: names, Running: int64(running)}, nil
}

// known lists the names of all workers, for messages.
func (s *service) known() string {
	var names []string
	for _, w := range s.Queue.Workers() {
		names = append(names, quote(w.Name))
	}
	names = slices.Compact(names)
	const most = 20
	switch more := len(names) - most; {
	case len(names) == 0:
		return "none"
	case more > 0:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

func quote(name string) string { return printable.Quote(name, 200) }

// stage returns the stage of a run in the three terms that all workers report.
func stage(s worker.Stage) string {
	switch {
	case s == 0:
		return ""
	case s < worker.StageRun:
		return "fetch"
	case s == worker.StageRun:
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
