// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
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

// upload makes the actions of all builds, and stores them. The longest build has ten times as many as the shortest.
func (f *farm) upload(ctx context.Context, conn *grpc.ClientConn) error {
	f.builds = make([]build, f.cfg.Builds)
	var turns []int // the builds, each as often as its length demands
	for i := range f.builds {
		f.builds[i].priority = int32(i % 3)
		for range 1 + i/3%10 {
			turns = append(turns, i)
		}
	}
	command, commandDigest, err := encode(&repb.Command{Arguments: []string{"simulated"}})
	if err != nil {
		return err
	}
	blobs := []*repb.BatchUpdateBlobsRequest_Request{
		{Digest: commandDigest, Data: command},
	}
	root, rootDigest, err := encode(&repb.Directory{})
	if err != nil {
		return err
	}
	blobs = append(blobs, &repb.BatchUpdateBlobsRequest_Request{Digest: rootDigest, Data: root})
	for n := range f.cfg.Actions {
		data, digest, err := encode(&repb.Action{
			CommandDigest: commandDigest, InputRootDigest: rootDigest, Salt: fmt.Appendf(nil, "%s/%d", f.cfg.Salt, n),
		})
		if err != nil {
			return err
		}
		a := &action{digest: digest, build: turns[n%len(turns)]}
		f.actions[digest.Hash] = a
		f.builds[a.build].actions = append(f.builds[a.build].actions, a)
		blobs = append(blobs, &repb.BatchUpdateBlobsRequest_Request{Digest: digest, Data: data})
	}
	const batch = 5000 // less than 4 MiB
	for len(blobs) > 0 {
		n := min(batch, len(blobs))
		answer, err := repb.NewContentAddressableStorageClient(conn).BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{Requests: blobs[:n]})
		if err != nil {
			return fmt.Errorf("upload: %w", err)
		}
		for _, r := range answer.Responses {
			if err := status.ErrorProto(r.Status); err != nil {
				return fmt.Errorf("upload: %w", err)
			}
		}
		blobs = blobs[n:]
	}
	return nil
}

// execute has an action executed once, and submits it again when the head is lost.
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
	for {
		op, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("action %s: the stream ended without a result", a.digest.Hash)
		}
		if err != nil {
			return err
		}
		if !accepted {
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
