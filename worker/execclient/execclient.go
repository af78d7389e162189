// SPDX-License-Identifier: Apache-2.0

// Package execclient executes actions on a server of the Remote Execution API: it is a worker.Executor over the service
// that package execserver serves, with the client of remote-apis-sdks. Importing it registers flags such as -v in
// flag.CommandLine.
package execclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	sdk "github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/retry"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/response"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A Client executes the actions of one instance of a server. Use New; the zero Client is not usable. It is safe for
// concurrent use.
type Client struct {
	sdk *sdk.Client
}

var _ worker.Executor = (*Client)(nil)

// New returns a Client. The connection stays the caller's.
func New(conn grpc.ClientConnInterface, instance string) (*Client, error) {
	if conn == nil {
		return nil, errors.New("execclient: New needs a connection")
	}
	if err := cas.CheckInstanceName(instance); err != nil {
		return nil, err
	}
	shared := connection{conn}
	c, err := sdk.NewClientFromConnection(context.Background(), instance, shared, shared, sdk.StartupCapabilities(false), &sdk.Retrier{
		Backoff: retry.ExponentialBackoff(time.Second, 4*time.Second, 6),
		ShouldRetry: func(err error) bool {
			return status.Code(err) == codes.Unavailable || status.Code(err) == codes.ResourceExhausted
		},
	})
	return &Client{c}, err
}

// A connection wraps that of the caller, so that the SDK can neither close it nor raise its message limit to 100 MiB.
// Its streams end with the operation.
type connection struct{ grpc.ClientConnInterface }

func (connection) Close() error { return nil }

func (c connection) NewStream(ctx context.Context, d *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.ClientConnInterface.NewStream(ctx, d, method)
	return &stream{ClientStream: s}, err
}

// A stream ends once the operation is done, even if the server keeps it open or the connection breaks. If the server
// ends it before, that is like a broken connection.
type stream struct {
	grpc.ClientStream
	done bool
}

func (s *stream) RecvMsg(m any) error {
	if s.done {
		return io.EOF
	}
	err := s.ClientStream.RecvMsg(m)
	if op, ok := m.(*longrunningpb.Operation); ok && err == nil {
		s.done = op.Done
	} else if err == io.EOF {
		return status.Error(codes.Unavailable, "the stream ended before the operation did")
	}
	return err
}

// Upload copies an action, marked as not to be cached, and its inputs to the store of a server, and returns the digest
// there.
func Upload(ctx context.Context, from, to cas.Store, action cas.Digest) (cas.Digest, error) {
	f := action.Function()
	var a repb.Action
	if err := cas.ReadProto(ctx, from, action, &a); err != nil {
		return cas.Digest{}, err
	}
	a.DoNotCache = true
	there, err := cas.PutProto(ctx, from, f, &a)
	if err != nil {
		return cas.Digest{}, err
	}
	command, err := cas.FromProto(f, a.CommandDigest)
	if err != nil {
		return cas.Digest{}, fmt.Errorf("command of action %s: %w", action, err)
	}
	root, err := cas.FromProto(f, a.InputRootDigest)
	if err != nil {
		return cas.Digest{}, fmt.Errorf("input root of action %s: %w", action, err)
	}
	inputs, err := cas.DirectoryClosure(ctx, from, root)
	if err != nil {
		return cas.Digest{}, err
	}
	if err := send(ctx, from, to, append(inputs, command, there)); err != nil {
		return cas.Digest{}, fmt.Errorf("upload the inputs of action %s: %w", action, err)
	}
	return there, nil
}

// send copies those of ds that a store lacks.
func send(ctx context.Context, from cas.Store, to cas.Store, ds []cas.Digest) error {
	missing, err := to.Missing(ctx, ds)
	if err != nil {
		return err
	}
	const small = 64 << 10
	batch := cas.NewBatch(to)
	for _, d := range missing {
		if d.Size() > small {
			r, err := from.Open(ctx, d, 0)
			if err != nil {
				return err
			}
			if err := errors.Join(to.Put(ctx, d, r), r.Close()); err != nil {
				return err
			}
			continue
		}
		data, err := cas.ReadAll(ctx, from, d, small)
		if err == nil {
			err = batch.Add(ctx, cas.Blob{Digest: d, Data: data})
		}
		if err != nil {
			return err
		}
	}
	return batch.Flush(ctx)
}

// Execute makes the server execute the action of t, even if it has a cached result. It sends the target and mnemonic of
// t, which may select a rule of the server's policy, ignores the other fields and reports no stages. It retries while
// the server is unavailable or busy, and waits for the same execution if the connection breaks. It refuses a task with
// a root file system, which the API cannot express.
func (c *Client) Execute(ctx context.Context, t *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	if t == nil {
		return nil, &worker.Fault{Kind: worker.FaultInvalid, Err: errors.New("the Task is missing")}
	}
	if !t.Root.IsZero() {
		return nil, &worker.Fault{Kind: worker.FaultUnmet, Err: fmt.Errorf("execute action %s: "+
			"the API cannot state its root file system %s: execute it on this machine", t.Action, t.Root)}
	}
	r, err := c.execute(ctx, t)
	if err == nil {
		var out *worker.Outcome
		if out, err = outcome(r); err == nil {
			return out, nil
		}
	} else {
		st := status.Convert(err)
		err = &worker.Fault{Kind: worker.FaultUnavailable, Err: fmt.Errorf("execute action %s: %s: %+.1000q", t.Action, st.Code(), st.Message())}
	}
	if ctx.Err() != nil { // the SDK may return an earlier answer instead
		err = &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
	}
	return nil, err
}

// metadataHeader is the header with the RequestMetadata (remote_execution.proto).
const metadataHeader = "build.bazel.remote.execution.v2.requestmetadata-bin"

// execute returns the answer of the server; its errors are statuses.
func (c *Client) execute(ctx context.Context, t *worker.Task) (*repb.ExecuteResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends streams that the server keeps open
	described, err := proto.Marshal(&repb.RequestMetadata{TargetId: t.Target, ActionMnemonic: t.Mnemonic})
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "target %+.200q, mnemonic %+.200q: %v", t.Target, t.Mnemonic, err)
	}
	ctx = metadata.AppendToOutgoingContext(ctx, metadataHeader, string(described))
	req := &repb.ExecuteRequest{
		InstanceName: c.sdk.InstanceName, ActionDigest: t.Action.Proto(), DigestFunction: t.Action.Function().Proto(), SkipCacheLookup: true,
	}
	op, err := c.sdk.ExecuteAndWait(ctx, req)
	if status.Code(err) == codes.NotFound || err == nil && !op.Done { // the server restarted
		op, err = c.sdk.ExecuteAndWait(ctx, req)
	}
	switch {
	case err != nil:
		return nil, err
	case !op.Done:
		return nil, status.Error(codes.Unavailable, "the stream ended before the operation did")
	case op.GetError() != nil:
		return nil, status.FromProto(op.GetError()).Err()
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return nil, status.Errorf(codes.Internal, "the response cannot be read: %v", err)
	}
	return &r, nil
}

// outcome converts the answer of a server. A failed run, such as one that exceeded its time limit, is an outcome too.
func outcome(r *repb.ExecuteResponse) (*worker.Outcome, error) {
	code := codes.Code(r.GetStatus().GetCode())
	state, ok := response.Status(code)
	switch {
	case r.CachedResult:
		return nil, &worker.Fault{Kind: worker.FaultUnmet, Err: errors.New("the server answered from its cache despite skip_cache_lookup")}
	case r.Result == nil || !ok:
		return nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: fmt.Errorf("the server did not execute it: %s: %+.1000q", code, r.GetStatus().GetMessage())}
	}
	return &worker.Outcome{Result: r.Result, Status: state, Message: r.Message}, nil
}
