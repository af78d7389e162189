// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	sdk "github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/command"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/filemetadata"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/outerr"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/rexec"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// waiting returns a script that prints a line to stdout, and another one on SIGUSR1 before it exits. It forks before it
// prints, since the shell reports children that a signal ends. The first line of stdout is the last output before the
// wait, so that a test that has read it may wake the script.
func waiting(mark string) string {
	return "trap 'echo second; exit 0' USR1; sleep 600 & echo oh >&2; echo first; wait # " + mark
}

// wake sends SIGUSR1 to the sandboxed process whose command line contains mark.
func wake(t testing.TB, mark string) {
	t.Helper()
	must.Be(t, sandboxtest.Signal(t, mark, syscall.SIGUSR1) != 0, "the action is not running")
}

// A log is a log stream that a client reads.
type log struct {
	testing.TB
	bspb.ByteStream_ReadClient
	text string
}

// log starts reading a log stream.
func (c *client) log(name string, offset int64) *log {
	c.Helper()
	r := must.Get(c.bs.Read(c.Context(), &bspb.ReadRequest{ResourceName: name, ReadOffset: offset}))(c)
	return &log{c, r, ""}
}

// next waits for more data.
func (l *log) next() error {
	m, err := l.Recv()
	l.text += string(m.GetData())
	return err
}

// reach waits for as many bytes as text has, and checks them.
func (l *log) reach(text string) {
	l.Helper()
	for len(l.text) < len(text) {
		if err := l.next(); err != nil {
			l.Fatalf("after %q: %v", l.text, err)
		}
	}
	expect.Equal(l.TB, l.text, text)
}

// end reads to the end, and checks the text.
func (l *log) end(text string) {
	l.Helper()
	for err := error(nil); err != io.EOF; {
		if err = l.next(); err != nil && err != io.EOF {
			l.Fatalf("after %q: %v", l.text, err)
		}
	}
	expect.Equal(l.TB, l.text, text)
}

// executing executes an action and returns its operation and metadata once it is executing.
func (c *client) executing(d *repb.Digest) (stream, *longrunningpb.Operation, *repb.ExecuteOperationMetadata) {
	c.Helper()
	s, err := c.open(c.Context(), d, nil)
	for err == nil {
		op, e := s.Recv()
		if err = e; err == nil {
			var m *repb.ExecuteOperationMetadata
			if m, err = stageOf(op); err == nil && m.Stage >= repb.ExecutionStage_EXECUTING {
				return s, op, m
			}
		}
	}
	c.Fatal(err)
	return nil, nil, nil
}

func TestRule127_OutputIsReadWhileTheActionRuns(t *testing.T) {
	c := serve(t)
	mark := fmt.Sprintf("logs %d", os.Getpid())
	d := c.prepare(job{script: waiting(mark)})
	s, op, m := c.executing(d)
	_, _, other := c.executing(d) // merged with the first
	if m.StdoutStreamName == "" || m.StderrStreamName == "" || m.StdoutStreamName != other.StdoutStreamName {
		t.Fatalf("got streams %q and %q, and %q and %q of an equal action, want the same",
			m.StdoutStreamName, m.StderrStreamName, other.StdoutStreamName, other.StderrStreamName)
	}
	readers := []*log{c.log(m.StdoutStreamName, 0), c.log(m.StdoutStreamName, 0)}
	errs := c.log(m.StderrStreamName, 0)
	for _, l := range readers {
		l.reach("first\n")
	}
	errs.reach("oh\n")
	w := must.Get(c.exec.WaitExecution(t.Context(), &repb.WaitExecutionRequest{Name: op.Name}))(t)
	if now, err := w.Recv(); err != nil || now.Done {
		t.Fatalf("operation after the first line: got %v, %v, want it running", now, err)
	}
	wake(t, mark)
	for _, l := range readers {
		l.end("first\nsecond\n")
	}
	errs.end("oh\n")
	if got, _ := c.wantSuccess("the action", answered(s, nil)); got != "first\nsecond\n" {
		t.Errorf("result: got output %q, want both lines", got)
	}
	l := c.log(m.StdoutStreamName, 6)
	l.end("second\n")
	l = c.log(m.StdoutStreamName+"/0123", 0)
	expect.Code(t, l.next(), codes.InvalidArgument, "read of a write name")
	if _, err := c.bs.QueryWriteStatus(t.Context(),
		&bspb.QueryWriteStatusRequest{ResourceName: m.StdoutStreamName}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("write of a read name: %v", err)
	}
}

// TestRule127_ClientWritesLogStream is the example of the API on a running server.
func TestRule127_ClientWritesLogStream(t *testing.T) {
	c := serve(t)
	c.put([]byte("a blob"))
	made := must.Get(logpb.NewLogStreamServiceClient(c.conn).CreateLogStream(t.Context(),
		&logpb.CreateLogStreamRequest{Parent: "main"}))(t)
	l := c.log(made.Name, 0)
	for i, text := range []string{"one ", "two"} {
		w := must.Get(c.bs.Write(t.Context()))(t)
		m := &bspb.WriteRequest{
			ResourceName: made.WriteResourceName, WriteOffset: int64(4 * i), Data: []byte(text),
			FinishWrite: i == 1,
		}
		must.Succeed(t, w.Send(m))
		if r, err := w.CloseAndRecv(); err != nil || r.CommittedSize != int64(4*i+len(text)) {
			t.Fatalf("%v, %v", r, err)
		}
		l.reach("one two"[:4*i+len(text)])
	}
	l.end("one two")
}

// TestRule127_SDKStreamsOutput checks that the Go SDK prints output while the action runs.
func TestRule127_SDKStreamsOutput(t *testing.T) {
	c := serve(t)
	for _, instance := range []string{"", "main"} {
		g := must.Get(sdk.NewClient(t.Context(), instance, sdk.DialParams{Service: c.server.Addr, NoSecurity: true}))(t)
		defer g.Close()
		mark := fmt.Sprintf("streamed to %q %d", instance, os.Getpid())
		cmd := &command.Command{
			Identifiers: &command.Identifiers{}, ExecRoot: t.TempDir(), Args: []string{"/bin/sh", "-c", waiting(mark)},
			InputSpec: &command.InputSpec{},
		}
		must.Succeed(t, os.WriteFile(filepath.Join(cmd.ExecRoot, "input"), []byte("x"), 0o644))
		cmd.InputSpec.Inputs = []string{"input"}
		out, into := io.Pipe()
		var stderr strings.Builder
		go func() {
			defer into.Close()
			r := &rexec.Client{FileMetadataCache: filemetadata.NewNoopCache(), GrpcClient: g}
			opts := command.DefaultExecutionOptions()
			opts.StreamOutErr = true
			res, _ := r.Run(t.Context(), cmd, opts, outerr.NewStreamOutErr(into, &stderr))
			expect.That(t, res.IsOk() && res.ExitCode == 0, "instance %q: %+v", instance, res)
		}()
		line := make([]byte, len("first\n"))
		if _, err := io.ReadFull(out, line); err != nil || string(line) != "first\n" {
			t.Fatalf("instance %q: %q, %v", instance, line, err)
		}
		wake(t, mark)
		rest, err := io.ReadAll(out)
		expect.That(t, err == nil && string(rest) == "second\n" && stderr.String() == "oh\n",
			"instance %q: got %q and %q at the end, %v", instance, rest, stderr.String(), err)
	}
}
