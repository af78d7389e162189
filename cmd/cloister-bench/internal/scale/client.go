// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// streams is the number of waiting actions on one connection; the head allows 1,000.
const streams = 900

// A build is a client with one priority.
type build struct {
	priority int32
	actions  []*action
}

// prepare makes the actions of all builds, and returns everything to upload. The longest build has ten times as many
// actions as the shortest.
func (f *farm) prepare() (blobs []*repb.BatchUpdateBlobsRequest_Request) {
	f.builds = make([]build, f.cfg.Builds)
	var turns []int // the builds, each as often as its length demands
	for i := range f.builds {
		f.builds[i].priority = int32(i % 3)
		turns = append(turns, slices.Repeat([]int{i}, 1+i/3%10)...)
	}
	add := func(m proto.Message) *repb.Digest {
		data, _ := proto.Marshal(m) // its texts are ASCII
		digest := cas.SHA256.Sum(data).Proto()
		blobs = append(blobs, &repb.BatchUpdateBlobsRequest_Request{Digest: digest, Data: data})
		return digest
	}
	command, root := add(&repb.Command{Arguments: []string{"simulated"}}), add(&repb.Directory{})
	for n := range f.cfg.Actions {
		digest := add(&repb.Action{
			CommandDigest: command, InputRootDigest: root, Salt: fmt.Appendf(nil, "%s/%d", f.cfg.Salt, n),
		})
		a := &action{digest: digest, build: turns[n%len(turns)]}
		f.actions[digest.Hash] = a
		f.builds[a.build].actions = append(f.builds[a.build].actions, a)
	}
	return blobs
}

// upload stores blobs, which are small.
func upload(ctx context.Context, conn *grpc.ClientConn, blobs []*repb.BatchUpdateBlobsRequest_Request) error {
	for batch := range slices.Chunk(blobs, 5000) { // less than 4 MiB
		answer, err := repb.NewContentAddressableStorageClient(conn).BatchUpdateBlobs(ctx,
			&repb.BatchUpdateBlobsRequest{Requests: batch})
		if err != nil {
			return fmt.Errorf("upload: %w", err)
		}
		for _, r := range answer.Responses {
			if err := status.ErrorProto(r.Status); err != nil {
				return fmt.Errorf("upload: %w", err)
			}
		}
	}
	return nil
}

// execute submits an action, and again when the head is lost, until it has the result.
func (f *farm) execute(ctx context.Context, conn *grpc.ClientConn, a *action) error {
	md, err := proto.Marshal(&repb.RequestMetadata{ToolInvocationId: fmt.Sprint("build ", a.build)})
	if err != nil {
		return err
	}
	ctx = metadata.AppendToOutgoingContext(ctx, "build.bazel.remote.execution.v2.requestmetadata-bin", string(md))
	for {
		err := f.try(ctx, conn, a)
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			return err
		}
		pause(ctx)
	}
}

// pause waits a short random time before a call is repeated.
func pause(ctx context.Context) {
	select {
	case <-time.After(rand.N(500 * time.Millisecond)):
	case <-ctx.Done():
	}
}

// try makes one call of execute.
func (f *farm) try(ctx context.Context, conn *grpc.ClientConn, a *action) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{
		ActionDigest: a.digest, ExecutionPolicy: &repb.ExecutionPolicy{Priority: f.builds[a.build].priority},
	})
	if err != nil {
		return err
	}
	accepted := false
	defer func() {
		if accepted {
			f.waiting.Add(-1)
		}
	}()
	var last *longrunningpb.Operation
	for {
		op, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("action %s: the stream ended without a result, after %v", a.digest.Hash, last)
		}
		if err != nil {
			return err
		}
		if last = op; !accepted {
			accepted = true
			f.waiting.Add(1)
		}
		if !op.Done {
			continue
		}
		var r repb.ExecuteResponse
		if err := op.GetResponse().UnmarshalTo(&r); err != nil {
			return fmt.Errorf("action %s: %w", a.digest.Hash, err)
		}
		if err := status.ErrorProto(r.Status); err != nil {
			return err
		}
		if got := string(r.GetResult().GetStdoutRaw()); got != a.digest.Hash || r.CachedResult {
			return fmt.Errorf("action %s has the result of %q, cached: %t", a.digest.Hash, got, r.CachedResult)
		}
		if op, err := stream.Recv(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("action %s: got %v, %v after the result, want the end of the stream", a.digest.Hash, op, err)
		}
		if int(f.answered.Add(1)) == f.cfg.Actions/2 {
			close(f.halfway)
		}
		return nil
	}
}
