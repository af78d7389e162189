// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// A client requests actions from a server.
type client struct {
	in        *cas.Instance
	execution repb.ExecutionClient
	cancels   longrunningpb.OperationsClient
}

// dial connects to a server until the test ends.
func dial(t *testing.T, address string) *client {
	t.Helper()
	server := must.Get(remote.Dial(t.Context(), "grpc://"+address))(t)
	t.Cleanup(func() { server.Close() })
	in := must.Get(server.Instance(""))(t)
	conn := grpctest.Dial(t, address)
	return &client{in: in, execution: repb.NewExecutionClient(conn), cancels: longrunningpb.NewOperationsClient(conn)}
}

// put stores an action that runs a shell script, on the worker of that name unless it is "".
func (c *client) put(ctx context.Context, script, worker string) (cas.Digest, error) {
	message := func(m proto.Message) (cas.Digest, error) { return cas.PutProto(ctx, c.in.Store, cas.SHA256, m) }
	command, err := message(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}})
	if err != nil {
		return cas.Digest{}, err
	}
	root, err := message(&repb.Directory{})
	if err != nil {
		return cas.Digest{}, err
	}
	action := &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()}
	if worker != "" {
		action.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: "host", Value: worker}}}
	}
	return message(action)
}

// execute executes an action and returns its only response. It calls begun, unless nil, with the operation's name.
func (c *client) execute(ctx context.Context, action cas.Digest, begun func(string)) (*repb.ExecuteResponse, error) {
	stream, err := c.execution.Execute(ctx, &repb.ExecuteRequest{ActionDigest: action.Proto(), SkipCacheLookup: true})
	if err != nil {
		return nil, err
	}
	var answer *repb.ExecuteResponse
	for {
		op, err := stream.Recv()
		if err == io.EOF && answer != nil {
			return answer, nil
		}
		if err != nil {
			return nil, fmt.Errorf("with a response: %v: %w", answer != nil, err)
		}
		if answer != nil {
			return nil, fmt.Errorf("message after the response: %v", op)
		}
		if begun != nil {
			begun(op.Name)
			begun = nil
		}
		if op.Done {
			answer = &repb.ExecuteResponse{}
			if err := op.GetResponse().UnmarshalTo(answer); err != nil {
				return nil, err
			}
		}
	}
}

// awaitJoin waits until the head knows the worker: it refuses actions that no worker takes.
func (w *farmWorker) awaitJoin(t *testing.T, c *client) {
	t.Helper()
	action := must.Get(c.put(t.Context(), "true", w.name))(t)
	until(t, time.Minute, w.name+" has joined", func() bool {
		answer, err := c.execute(t.Context(), action, nil)
		must.Be(t, err == nil, "%s: %v", w.name, err)
		return codes.Code(answer.GetStatus().GetCode()) != codes.FailedPrecondition
	})
}

// wantExecutes checks that the worker executes an action that only it may.
func (w *farmWorker) wantExecutes(t *testing.T, c *client, script string) {
	t.Helper()
	answer, err := c.execute(t.Context(), must.Get(c.put(t.Context(), script, w.name))(t), nil)
	must.Be(t, err == nil, "%s: %v", w.name, err)
	must.Be(t, answer.GetStatus().GetCode() == 0 && answer.GetResult().GetExitCode() == 0,
		"%s: got %v, want exit code 0", w.name, answer)
}

// workerOf returns the worker of a result.
func workerOf(r *repb.ActionResult) string { return r.GetExecutionMetadata().GetWorker() }
