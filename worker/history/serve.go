// SPDX-License-Identifier: Apache-2.0

package history

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/quota"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// defaultLimit and maxLimit bound the entries that a call lists.
	defaultLimit = 1000
	maxLimit     = 1_000_000
	// maxDistinct bounds them if each action is listed once, because these are held in memory.
	maxDistinct = 100_000
	// pageSize is the number of entries in a message.
	pageSize = 200
)

// Register adds the service cloister.v1.History to s, and fails without a log or instances. reads reports whether the
// caller may read an instance, for lists of all instances; nil means every caller may.
func Register(s grpc.ServiceRegistrar, l *Log, instances cas.Instances, reads func(ctx context.Context, instance string) bool) error {
	if l == nil || instances == nil {
		return errors.New("history: Register needs a Log and the instances that it serves")
	}
	cloisterpb.RegisterHistoryServer(s, &service{log: l, instances: instances, reads: reads})
	return nil
}

type service struct {
	cloisterpb.UnimplementedHistoryServer
	log       *Log
	instances cas.Instances
	reads     func(ctx context.Context, instance string) bool
}

// List implements the method of the service.
func (s *service) List(req *cloisterpb.ListHistoryRequest, to grpc.ServerStreamingServer[cloisterpb.ListHistoryResponse]) error {
	if _, err := s.instances(req.InstanceName); err != nil {
		return casstatus.Error(err)
	}
	if req.AllInstances && req.InstanceName != "" {
		return status.Errorf(codes.InvalidArgument, "instance_name %+.100q excludes all_instances", req.InstanceName)
	}
	if req.Limit < 0 {
		return status.Errorf(codes.InvalidArgument, "limit %d is negative; use 0 for the default of %d", req.Limit, defaultLimit)
	}
	limit := defaultLimit
	if req.Limit > 0 {
		limit = int(min(req.Limit, maxLimit))
	}
	if req.Distinct {
		limit = min(limit, maxDistinct)
	}
	select {
	case s.log.lists <- struct{}{}:
		defer func() { <-s.log.lists }()
	default: // waiting could take forever: other clients may never receive
		return quota.Exhausted(fmt.Sprintf("clients have %d history queries in progress, which is the limit; retry later", maxLists))
	}
	var page cloisterpb.ListHistoryResponse
	send := func() error {
		err := to.Send(&page)
		page.Entries = nil
		return err
	}
	filter := Filter{
		Instance: req.InstanceName, Invocation: req.InvocationId, Correlated: req.CorrelatedInvocationsId, Target: req.TargetId,
		Mnemonic: req.ActionMnemonic, Action: req.Action, Failed: req.Failed, Distinct: req.Distinct, Before: req.Before,
	}
	if req.AllInstances {
		filter.Instances = func(name string) bool { return s.reads == nil || s.reads(to.Context(), name) }
	}
	slot := &readerSlot{readers: s.log.readers}
	err := s.log.search(to.Context(), filter, limit, slot, func(e *Entry) error {
		if page.Entries = append(page.Entries, e.proto()); len(page.Entries) < pageSize {
			return nil
		}
		return slot.suspend(to.Context(), send)
	})
	if err == nil && len(page.Entries) > 0 {
		err = send()
	}
	var sent interface{ GRPCStatus() *status.Status } // an error of Send
	switch {
	case err == nil || errors.As(err, &sent):
		return err
	case to.Context().Err() != nil:
		return status.FromContextError(to.Context().Err()).Err()
	}
	// The error names files of this host, which clients need not know.
	s.log.cfg.Log.Error("cannot read the history", "dir", s.log.cfg.Dir, "err", err)
	return status.Error(codes.Internal, "reading the history failed; see the server's log")
}

// proto returns e as a message.
func (e *Entry) proto() *cloisterpb.HistoryEntry {
	m := &cloisterpb.HistoryEntry{
		Number: e.Number, Time: timestamppb.New(e.Time), How: string(e.How), Action: e.Action,
		InvocationId: e.Invocation, CorrelatedInvocationsId: e.Correlated, TargetId: e.Target, ActionMnemonic: e.Mnemonic,
		Code: e.Code, ExitCode: e.Exit, Result: e.Result, Manifest: e.Manifest, StableHash: e.StableHash,
		Worker: e.Worker, Verdict: e.Verdict, Lost: e.Lost, Caller: e.Caller, Message: e.Message, Response: e.Response,
		InstanceName: e.Instance,
	}
	for _, d := range []struct {
		to   **durationpb.Duration
		from time.Duration
	}{{&m.Waited, e.Waited}, {&m.Prepared, e.Prepared}, {&m.Ran, e.Ran}, {&m.Stored, e.Stored}} {
		if d.from > 0 {
			*d.to = durationpb.New(d.from)
		}
	}
	return m
}
