// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// A queue has operations, in order, some of which cannot be cancelled.
type queue struct {
	longrunningpb.UnimplementedOperationsServer
	operations []*longrunningpb.Operation
	refused    map[string]codes.Code
	filters    []string
}

func (q *queue) ListOperations(_ context.Context, req *longrunningpb.ListOperationsRequest) (*longrunningpb.ListOperationsResponse, error) {
	q.filters = append(q.filters, req.Filter)
	if strings.Contains(req.Filter, "/*") {
		return &longrunningpb.ListOperationsResponse{}, nil
	}
	return &longrunningpb.ListOperationsResponse{Operations: q.operations}, nil
}

func (q *queue) CancelOperation(_ context.Context, req *longrunningpb.CancelOperationRequest) (*emptypb.Empty, error) {
	if code, ok := q.refused[req.Name]; ok {
		return nil, status.Error(code, "refused")
	}
	return &emptypb.Empty{}, nil
}

// TestCancelGoesOn: an operation that ended since it was listed, or that cannot be cancelled, does not save the others.
func TestCancelGoesOn(t *testing.T) {
	for name, test := range map[string]struct {
		refused map[string]codes.Code
		want    []string
		code    int
	}{
		"all":         {nil, []string{"one", "two", "three"}, 0},
		"one ended":   {map[string]codes.Code{"one": codes.NotFound}, []string{"two", "three"}, 0},
		"one refused": {map[string]codes.Code{"one": codes.PermissionDenied}, []string{"two", "three"}, exit.No},
		"all ended":   {map[string]codes.Code{"one": codes.NotFound, "two": codes.NotFound, "three": codes.NotFound}, nil, exit.Absent},
	} {
		q := &queue{refused: test.refused}
		for _, name := range []string{"one", "two", "three"} {
			q.operations = append(q.operations, &longrunningpb.Operation{Name: name, Metadata: packed(t, &repb.ExecuteOperationMetadata{
				Stage: repb.ExecutionStage_QUEUED, ActionDigest: cas.SHA256.Sum([]byte(name)).Proto(), DigestFunction: repb.DigestFunction_SHA256,
			})})
		}
		address := grpctest.Serve(t, func(s *grpc.Server) { longrunningpb.RegisterOperationsServer(s, q) })
		var out strings.Builder
		err := (&Cancel{From: client.Server{Address: "grpc://" + address}}).Run(t.Context(), "//pkg/...", &out)
		code := 0
		if e, ok := errors.AsType[*exit.Error](err); ok {
			code = e.Code
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			if words := strings.Fields(line); len(words) == 3 && words[0] == "cancelled" {
				got = append(got, words[2])
			}
		}
		expect.That(t, slices.Equal(got, test.want) && code == test.code && (err == nil) == (test.code == 0),
			"%s: cancelled %q, %v with code %d, want %q and code %d", name, got, err, code, test.want, test.code)
		expect.Slices(t, q.filters, []string{`target="//pkg/..."`}, "%s: asked for", name)
	}
}
