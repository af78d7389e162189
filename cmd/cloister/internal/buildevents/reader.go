// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"context"
	"errors"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// maxListed bounds the builds that a call lists.
const maxListed = 1000

// A reader implements cloister.v1.Builds.
type reader struct {
	cloisterpb.UnimplementedBuildsServer
	store *Store
	reads func(ctx context.Context, instance string) bool
}

// A selection is the part of a request that selects instances.
type selection interface {
	GetInstanceName() string
	GetAllInstances() bool
}

// selects reports whether a request selects an instance.
func (r *reader) selects(ctx context.Context, req selection, instance string) bool {
	if req.GetAllInstances() {
		return r.reads(ctx, instance)
	}
	return instance == req.GetInstanceName()
}

// checkSelection refuses a request that selects both one instance and all.
func checkSelection(req selection) error {
	if req.GetAllInstances() && req.GetInstanceName() != "" {
		return status.Errorf(codes.InvalidArgument, "instance_name %+.100q excludes all_instances", req.GetInstanceName())
	}
	return nil
}

// List implements the method of cloister.v1.Builds.
func (r *reader) List(ctx context.Context, req *cloisterpb.ListBuildsRequest) (*cloisterpb.ListBuildsResponse, error) {
	if err := checkSelection(req); err != nil {
		return nil, err
	}
	if req.Limit < 0 {
		return nil, status.Errorf(codes.InvalidArgument, "limit %d is negative; use 0 for the default of %d", req.Limit, maxListed)
	}
	limit := maxListed
	if req.Limit > 0 {
		limit = min(int(req.Limit), maxListed)
	}
	list := &cloisterpb.ListBuildsResponse{}
	for _, h := range r.store.List(limit, func(instance string) bool { return r.selects(ctx, req, instance) }) {
		list.Builds = append(list.Builds, &cloisterpb.BuildState{
			InvocationId: h.ID, InstanceName: h.Instance, Caller: h.Caller, Received: timestamppb.New(h.Received), Status: h.Status,
		})
	}
	return list, nil
}

// Read implements the method of cloister.v1.Builds.
func (r *reader) Read(req *cloisterpb.ReadBuildRequest, to grpc.ServerStreamingServer[cloisterpb.ReadBuildResponse]) error {
	if err := checkSelection(req); err != nil {
		return err
	}
	h, err := r.store.Header(req.InvocationId)
	if err == nil && !r.selects(to.Context(), req, h.Instance) {
		err = ErrUnknown
	}
	page, size := &cloisterpb.ReadBuildResponse{Caller: h.Caller, InstanceName: h.Instance}, 0
	send := func() error {
		full := page
		page, size = &cloisterpb.ReadBuildResponse{}, 0
		return to.Send(full)
	}
	var missing int64
	if err == nil {
		missing, err = r.store.Events(req.InvocationId, func(event []byte) error {
			if size += len(event); size > maxBatch && len(page.Events) > 0 {
				if err := send(); err != nil {
					return err
				}
			}
			page.Events = append(page.Events, event)
			return nil
		})
	}
	if err == nil {
		page.Missing, page.Publishing = missing, h.Publishing
		err = send()
	}
	var sent interface{ GRPCStatus() *status.Status } // an error of Send
	switch {
	case err == nil || errors.As(err, &sent):
		return err
	case errors.Is(err, ErrUnknown) && req.AllInstances:
		return status.Errorf(codes.NotFound, "no build events of invocation %+.80q", req.InvocationId)
	case errors.Is(err, ErrUnknown):
		return status.Errorf(codes.NotFound, "no build events of invocation %+.80q in instance %+.256q", req.InvocationId, req.InstanceName)
	}
	r.store.cfg.Log.Error("cannot read build events", "err", err)
	return status.Error(codes.Internal, "reading build events failed; see the server's log")
}
