// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/response"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// servers are the servers of --on, by their names there.
type servers map[string]*server

// A server is a worker.Executor over a server of the API, which also has the blobs.
type server struct {
	store    *remote.Store
	conn     *grpc.ClientConn
	instance string
}

func (all servers) close() {
	for _, s := range all {
		s.store.Close()
		if s.conn != nil {
			s.conn.Close()
		}
	}
}

// executor returns the server as an executor of an action, after uploading the action, marked as not to be cached, and
// its inputs from a store that has them.
func (s *server) executor(ctx context.Context, name string, from cas.Store, action cas.Digest) (*repro.Executor, error) {
	f := action.Function()
	var a repb.Action
	if err := cas.ReadProto(ctx, from, action, &a); err != nil {
		return nil, err
	}
	a.DoNotCache = true
	there, err := cas.PutProto(ctx, from, f, &a)
	if err != nil {
		return nil, err
	}
	needed := []cas.Digest{there}
	for _, p := range []*repb.Digest{a.CommandDigest, a.InputRootDigest} {
		d, err := cas.FromProto(f, p)
		if err != nil {
			return nil, err
		}
		needed = append(needed, d)
	}
	// The input root comes last, and subdirectories are appended behind their parents.
	seen := map[cas.Digest]bool{}
	for i := 2; i < len(needed); i++ {
		var d repb.Directory
		if err := cas.ReadProto(ctx, from, needed[i], &d); err != nil {
			return nil, err
		}
		if needed, err = localworker.AppendNew(f, d.Directories, seen, needed); err != nil {
			return nil, err
		}
	}
	directories := len(needed)
	for i := 2; i < directories; i++ {
		var d repb.Directory
		if err := cas.ReadProto(ctx, from, needed[i], &d); err != nil {
			return nil, err
		}
		if needed, err = localworker.AppendNew(f, d.Files, seen, needed); err != nil {
			return nil, err
		}
	}
	if err := send(ctx, from, s.store, needed); err != nil {
		return nil, fmt.Errorf("upload the inputs of action %s: %w", action, err)
	}
	return &repro.Executor{Name: name, Executor: s, Store: s.store, Action: there}, nil
}

// send copies those of ds that a store lacks.
func send(ctx context.Context, from cas.Store, to *remote.Store, ds []cas.Digest) error {
	missing, err := to.Missing(ctx, ds)
	if err != nil {
		return err
	}
	const small, batch = 64 << 10, 1 << 20
	var blobs []cas.Blob
	size := int64(0)
	flush := func() error {
		err := errors.Join(to.PutAll(ctx, blobs)...)
		blobs, size = nil, 0
		return err
	}
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
		if err != nil {
			return err
		}
		if blobs, size = append(blobs, cas.Blob{Digest: d, Data: data}), size+d.Size()+256; size > batch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// Execute makes the server execute the action, even if it has a cached result. It uses nothing else of t.
func (s *server) Execute(ctx context.Context, t *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	for try := 0; ; try++ {
		r, err := s.execute(ctx, t)
		if err == nil {
			return outcome(r)
		}
		if ctx.Err() != nil {
			return nil, &worker.Fault{Kind: worker.Cancelled, Err: ctx.Err()}
		}
		if try == 3 || status.Code(err) != codes.Unavailable && status.Code(err) != codes.ResourceExhausted {
			st := status.Convert(err)
			return nil, &worker.Fault{Kind: worker.Unavailable, Err: fmt.Errorf("execute action %s: %s: %+.1000q", t.Action, st.Code(), st.Message())}
		}
		select {
		case <-time.After(time.Second << try):
		case <-ctx.Done():
		}
	}
}

// execute makes one call and follows it to its end.
func (s *server) execute(ctx context.Context, t *worker.Task) (*repb.ExecuteResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := repb.NewExecutionClient(s.conn).Execute(ctx, &repb.ExecuteRequest{
		InstanceName: s.instance, ActionDigest: t.Action.Proto(), DigestFunction: t.Action.Function().Proto(), SkipCacheLookup: true,
	})
	var last *longrunningpb.Operation
	for err == nil {
		var op *longrunningpb.Operation
		if op, err = stream.Recv(); err == nil {
			last = op
		}
		if op.GetDone() {
			break
		}
	}
	switch {
	case err == io.EOF:
		return nil, status.Error(codes.Unavailable, "the stream ended before the operation did")
	case err != nil:
		return nil, err
	case last.GetError() != nil:
		return nil, status.FromProto(last.GetError()).Err()
	}
	var r repb.ExecuteResponse
	if err := last.GetResponse().UnmarshalTo(&r); err != nil {
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
		return nil, &worker.Fault{Kind: worker.Unmet, Err: errors.New("the server answered from its cache despite skip_cache_lookup")}
	case r.Result == nil || !ok:
		return nil, &worker.Fault{Kind: worker.Unavailable, Err: fmt.Errorf("the server did not execute it: %s: %+.1000q", code, r.GetStatus().GetMessage())}
	}
	return &worker.Outcome{Result: r.Result, Status: state, Message: r.Message}, nil
}
