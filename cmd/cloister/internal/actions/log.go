// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Log is the flags of action log.
type Log struct {
	From   client.Server
	Follow bool
	Stderr bool
	Failed bool // the output of the latest failure
	Notes  io.Writer
}

// Print prints the output of the action that a digest or an operation names.
func (c *Log) Print(ctx context.Context, name string, out io.Writer) error {
	what, err := c.From.Action(ctx, name) // selects the instance
	conn, instance, failed := c.From.Dial()
	if failed != nil {
		return failed
	}
	defer conn.Close()
	l := &logs{Log: c, conn: conn, instance: instance, out: out}
	var e *exit.Error
	switch {
	case err == nil:
	case client.Recent.MatchString(name), errors.As(err, &e) && e.Code == exit.Unreachable:
		return err
	default: // an operation can have any name
		return l.operation(ctx, name)
	}
	action := what.Digest
	if c.Follow && !c.Failed {
		if op, err := l.find(ctx, action); err != nil && status.Code(err) != codes.Unimplemented {
			return l.explain("look for executions of action "+action.String(), err)
		} else if op != nil && !op.Done {
			return l.operation(ctx, op.Name)
		}
	}
	return l.recorded(ctx, action)
}

// logs prints the output of actions at one server.
type logs struct {
	*Log
	conn     *grpc.ClientConn
	instance string
	out      io.Writer
}

// explain returns what failed, with its exit code.
func (l *logs) explain(what string, err error) error {
	code, reason := exit.No, remote.Reason(status.Convert(err))
	switch status.Code(err) {
	case codes.NotFound:
		code = exit.Absent
	case codes.Unavailable, codes.DeadlineExceeded:
		return l.From.Unreachable(reason)
	}
	return exit.New(code, fmt.Errorf("%s at %s: %s", what, l.From.Address, reason))
}

// find returns the latest operation of an action, preferably an unfinished one, or nil if the server lists none.
func (l *logs) find(ctx context.Context, action cas.Digest) (*longrunningpb.Operation, error) {
	client := longrunningpb.NewOperationsClient(l.conn)
	base := fmt.Sprintf("action=%s/%d", action.Hash(), action.Size())
	for _, filter := range []string{base + " stage=EXECUTING", base} {
		r, err := client.ListOperations(ctx, &longrunningpb.ListOperationsRequest{Name: l.instance, Filter: filter, PageSize: 1})
		if err != nil {
			return nil, err
		}
		if len(r.Operations) > 0 {
			return r.Operations[0], nil
		}
	}
	return nil, nil
}

// recorded prints the output of the latest run if it failed, or else of the cached result or of the latest operation.
func (l *logs) recorded(ctx context.Context, action cas.Digest) error {
	f, err := failureOf(ctx, &l.From, action, l.Failed)
	if err != nil {
		return err
	}
	if f != nil {
		return l.failure(ctx, action, f)
	}
	r, err := repb.NewActionCacheClient(l.conn).GetActionResult(ctx, &repb.GetActionResultRequest{
		InstanceName: l.instance, ActionDigest: action.Proto(), DigestFunction: action.Function().Proto(),
	})
	if err == nil {
		return l.result(ctx, action.Function(), r)
	}
	if status.Code(err) != codes.NotFound {
		return l.explain("look up the result of action "+action.String(), err)
	}
	if op, err := l.find(ctx, action); err == nil && op != nil {
		return l.operation(ctx, op.Name)
	}
	return exit.New(exit.Absent, fmt.Errorf("action %s: no result is recorded at %s, instance %q, and no execution is known", action, l.From.Address, l.instance))
}

// failure prints the output of a failed run.
func (l *logs) failure(ctx context.Context, action cas.Digest, f *failure) error {
	store, err := l.From.Open(ctx)
	if err != nil {
		return err
	}
	defer store.Close()
	err = f.read(ctx, store)
	switch {
	case err != nil:
		return l.From.Explain(err, exit.No)
	case f.evicted:
		return f.errEvicted(action)
	case f.result == nil:
		return exit.New(exit.No, fmt.Errorf("action %s ended without a result: %s: %s", action, f.summary(), printable.Text(strings.Join(f.lines, " "))))
	}
	return l.result(ctx, action.Function(), f.result)
}

// operation prints the output of an execution.
func (l *logs) operation(ctx context.Context, name string) error {
	op, m, err := l.await(ctx, name)
	if err != nil {
		return err
	}
	switch {
	case !op.Done && l.Follow:
		return l.stream(ctx, l.streamOf(m))
	case !op.Done:
		return exit.New(exit.No, fmt.Errorf("operation %s is still %v; follow it with -f", render.Quote(name), m.Stage))
	}
	if i := strings.LastIndex(name, "operations/"); i >= 0 { // INSTANCE/operations/ID
		l.instance = strings.TrimSuffix(name[:i], "/")
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return exit.New(exit.No, fmt.Errorf("operation %s: %w", render.Quote(name), err))
	}
	if r.Result == nil {
		return exit.New(exit.No, fmt.Errorf("operation %s ended without a result: %s", render.Quote(name), render.Quote(r.Status.GetMessage())))
	}
	f, err := new(cas.Instance).FunctionOf(m.DigestFunction, m.ActionDigest)
	if err != nil {
		return fmt.Errorf("operation %s: %w", render.Quote(name), err)
	}
	return l.result(ctx, f, r.Result)
}

// streamOf returns the name of the live output of an operation, "" if it has none.
func (l *logs) streamOf(m *repb.ExecuteOperationMetadata) string {
	if l.Stderr {
		return m.StderrStreamName
	}
	return m.StdoutStreamName
}

// await returns an operation immediately, or with -f once its output can be read.
func (l *logs) await(ctx context.Context, name string) (*longrunningpb.Operation, *repb.ExecuteOperationMetadata, error) {
	// End the call, because waiting for an operation keeps it alive.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	what := "wait for operation " + render.Quote(name)
	s, err := repb.NewExecutionClient(l.conn).WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name})
	if err != nil {
		return nil, nil, l.explain(what, err)
	}
	for {
		op, err := s.Recv()
		if err == io.EOF {
			return nil, nil, exit.New(exit.Unreachable, fmt.Errorf("%s at %s: it ended without a result", what, l.From.Address))
		}
		if err != nil {
			return nil, nil, l.explain(what, err)
		}
		var m repb.ExecuteOperationMetadata
		if err := op.Metadata.UnmarshalTo(&m); err != nil {
			return nil, nil, exit.New(exit.No, fmt.Errorf("%s: %w", what, err))
		}
		if op.Done || !l.Follow || l.streamOf(&m) != "" {
			return op, &m, nil
		}
	}
}

// stream prints a ByteStream resource as it arrives.
func (l *logs) stream(ctx context.Context, name string) error {
	what := "read " + render.Quote(name)
	s, err := bspb.NewByteStreamClient(l.conn).Read(ctx, &bspb.ReadRequest{ResourceName: name})
	if err != nil {
		return l.explain(what, err)
	}
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return l.explain(what, err)
		}
		if _, err := l.out.Write(m.Data); err != nil {
			return exit.New(exit.No, err)
		}
	}
}

// result prints the output in a result.
func (l *logs) result(ctx context.Context, f cas.Function, r *repb.ActionResult) error {
	raw, digest := r.StdoutRaw, r.StdoutDigest
	if l.Stderr {
		raw, digest = r.StderrRaw, r.StderrDigest
	} else if len(raw) == 0 && digest.GetSizeBytes() == 0 && (len(r.StderrRaw) > 0 || r.StderrDigest.GetSizeBytes() > 0) {
		fmt.Fprintln(l.Notes, "cloister: the action wrote only to stderr; pass --stderr to see it")
	}
	if len(raw) > 0 || digest.GetSizeBytes() == 0 {
		if _, err := l.out.Write(raw); err != nil {
			return exit.New(exit.No, err)
		}
		return nil
	}
	d, err := cas.FromProto(f, digest)
	if err != nil {
		return exit.New(exit.No, fmt.Errorf("result: %w", err))
	}
	return l.stream(ctx, strings.TrimPrefix(l.instance+"/"+d.Resource(), "/"))
}
