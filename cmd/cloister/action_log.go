// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/spf13/cobra"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// logConfig is what the flags of action log say.
type logConfig struct {
	from   origin
	follow bool
	stderr bool
}

func actionLogCommand() *cobra.Command {
	var c logConfig
	cmd := &cobra.Command{
		Use:   "log OPERATION|DIGEST [-f] [--stderr] [--cas URL] [--instance NAME]",
		Short: "Prints what an action says, or has said",
		Long: `Log prints the stdout of an action, or with --stderr its stderr: of one that has ended, as its result has
it; with -f also of one that runs, as it comes and to its end, or that is yet to run.

OPERATION is the name of an execution, as action ls, clients and messages print it, for as long as the
server knows it. DIGEST is that of an action, as for cloister action show: then the result in the action cache counts, or else its
latest execution, if the server lists executions; with -f first an execution that has not ended.

It exits with 1 if the action has not ended and -f is not given, or if it ended without a result; with 4 if the
operation, or the result, or what it said is absent; and with 5 if the server cannot be reached.`,
		Example: `  cloister action log e3b0...55/142
  cloister action log -f operations/5f1d6c0e3b0a4f7c9d1e2a3b4c5d6e7f
  cloister action log -f --stderr e3b0...55/142 --cas grpc://build.example.com:8980`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.from.explain(c.print(cmd.Context(), args[0], cmd.OutOrStdout()), exitNo)
		},
	}
	c.from.register(cmd)
	f := cmd.Flags()
	f.BoolVarP(&c.follow, "follow", "f", false, "go on until the action has ended")
	f.BoolVar(&c.stderr, "stderr", false, "print its stderr and not its stdout")
	return cmd
}

// print prints the output of an action that is named by its digest or by an operation.
func (c *logConfig) print(ctx context.Context, name string, out io.Writer) error {
	conn, instance, err := c.from.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	l := &logs{logConfig: c, conn: conn, instance: instance, out: out}
	what, err := c.from.subject(ctx, name)
	var e *exit
	switch {
	case err == nil:
	case nth.MatchString(name), errors.As(err, &e) && e.code == exitConnect:
		return err
	default: // names of operations may be anything
		return l.operation(ctx, name)
	}
	action := what.digest
	if c.follow {
		if op, err := l.find(ctx, action); err != nil && status.Code(err) != codes.Unimplemented {
			return l.explain("look for executions of action "+action.String(), err)
		} else if op != nil && !op.Done {
			return l.operation(ctx, op.Name)
		}
	}
	return l.recorded(ctx, action)
}

// dial returns a connection on which calls may be silent for as long as they like, and the name of the instance. The
// caller closes the connection.
func (o *origin) dial() (*grpc.ClientConn, string, error) {
	u, err := url.Parse(o.cas)
	if err != nil || u.Port() == "" || u.User != nil || u.Scheme != "grpc" && u.Scheme != "grpcs" {
		return nil, "", newExit(exitUsage, fmt.Errorf("--cas: %w", remote.ErrAddress))
	}
	options, err := o.who.options(o.cas)
	if err != nil {
		return nil, "", err
	}
	options = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)
	conn, err := grpc.NewClient(u.Host, options...)
	if err != nil {
		return nil, "", newExit(exitUsage, fmt.Errorf("--cas: %w", err))
	}
	return conn, strings.Trim(u.Path+"/"+o.instance, "/"), nil
}

// logs print the output of actions at one server.
type logs struct {
	*logConfig
	conn     *grpc.ClientConn
	instance string
	out      io.Writer
}

// explain says what did not succeed, with its exit code.
func (l *logs) explain(what string, err error) error {
	code := exitNo
	switch status.Code(err) {
	case codes.NotFound:
		code = exitAbsent
	case codes.Unavailable, codes.DeadlineExceeded:
		code = exitConnect
	}
	return newExit(code, fmt.Errorf("%s at %s: %s", what, l.from.cas, remote.Reason(status.Convert(err))))
}

// find returns the latest operation of an action that the server lists, one that has not ended before all others,
// or nil if there is none.
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

// recorded prints the output of the result in the action cache, or else that of an operation which has ended otherwise.
func (l *logs) recorded(ctx context.Context, action cas.Digest) error {
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
	return newExit(exitAbsent, fmt.Errorf("action %s: no result is recorded at %s, instance %q, and no execution is known", action, l.from.cas, l.instance))
}

// operation prints the output of an execution.
func (l *logs) operation(ctx context.Context, name string) error {
	op, m, err := l.await(ctx, name)
	if err != nil {
		return err
	}
	switch {
	case !op.Done && l.follow:
		return l.stream(ctx, l.streamOf(m))
	case !op.Done:
		return newExit(exitNo, fmt.Errorf("operation %s has not ended, it is at %v: follow it with -f", quote(name), m.Stage))
	}
	if i := strings.LastIndex(name, "operations/"); i >= 0 { // as a server may name it: INSTANCE/operations/ID
		l.instance = strings.TrimSuffix(name[:i], "/")
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return newExit(exitNo, fmt.Errorf("operation %s: %w", quote(name), err))
	}
	if r.Result == nil {
		return newExit(exitNo, fmt.Errorf("operation %s ended without a result: %s", quote(name), quote(r.Status.GetMessage())))
	}
	f, err := function(m)
	if err != nil {
		return fmt.Errorf("operation %s: %w", quote(name), err)
	}
	return l.result(ctx, f, r.Result)
}

// streamOf returns the name by which the output of an operation is read while it runs, "" if it cannot be.
func (l *logs) streamOf(m *repb.ExecuteOperationMetadata) string {
	if l.stderr {
		return m.StderrStreamName
	}
	return m.StdoutStreamName
}

// await returns an operation as it is; or, to follow it, when its output can be read.
func (l *logs) await(ctx context.Context, name string) (*longrunningpb.Operation, *repb.ExecuteOperationMetadata, error) {
	// Nobody is to keep a run alive by reading its output: the call ends before that.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	what := "wait for operation " + quote(name)
	s, err := repb.NewExecutionClient(l.conn).WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name})
	if err != nil {
		return nil, nil, l.explain(what, err)
	}
	for {
		op, err := s.Recv()
		if err == io.EOF {
			return nil, nil, newExit(exitConnect, fmt.Errorf("%s at %s: it ended without saying how", what, l.from.cas))
		}
		if err != nil {
			return nil, nil, l.explain(what, err)
		}
		var m repb.ExecuteOperationMetadata
		if err := op.Metadata.UnmarshalTo(&m); err != nil {
			return nil, nil, newExit(exitNo, fmt.Errorf("%s: %w", what, err))
		}
		if op.Done || !l.follow || l.streamOf(&m) != "" {
			return op, &m, nil
		}
	}
}

// function returns the digest function of an operation's result.
func function(m *repb.ExecuteOperationMetadata) (cas.Function, error) {
	for _, f := range cas.Functions() {
		if f.Proto() == m.DigestFunction {
			return f, nil
		}
	}
	if m.DigestFunction == repb.DigestFunction_UNKNOWN {
		return cas.SHA256, nil
	}
	return 0, fmt.Errorf("its digest function is %v: %w", m.DigestFunction, errors.ErrUnsupported)
}

// stream prints a resource of ByteStream as it comes.
func (l *logs) stream(ctx context.Context, name string) error {
	what := "read " + quote(name)
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
			return newExit(exitNo, err)
		}
	}
}

// result prints what a result says.
func (l *logs) result(ctx context.Context, f cas.Function, r *repb.ActionResult) error {
	raw, digest := r.StdoutRaw, r.StdoutDigest
	if l.stderr {
		raw, digest = r.StderrRaw, r.StderrDigest
	}
	if len(raw) > 0 || digest.GetSizeBytes() == 0 {
		if _, err := l.out.Write(raw); err != nil {
			return newExit(exitNo, err)
		}
		return nil
	}
	d, err := cas.FromProto(f, digest)
	if err != nil {
		return newExit(exitNo, fmt.Errorf("the result: %w", err))
	}
	return l.stream(ctx, strings.TrimPrefix(l.instance+"/"+d.Resource(), "/"))
}
