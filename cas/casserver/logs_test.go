// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"io"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

// logs records its calls.
type logs struct {
	mu    sync.Mutex
	asked []string
}

func (l *logs) note(call, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, call+" "+name)
}

func (l *logs) Read(req *bspb.ReadRequest, to bspb.ByteStream_ReadServer) error {
	l.note("read", req.ResourceName)
	return to.Send(&bspb.ReadResponse{Data: []byte("logged")})
}

func (l *logs) Write(first *bspb.WriteRequest, rest bspb.ByteStream_WriteServer) error {
	l.note("write", first.ResourceName)
	second, err := rest.Recv()
	if err != nil {
		return err
	}
	return rest.SendAndClose(&bspb.WriteResponse{CommittedSize: int64(len(string(first.Data) + string(second.Data)))})
}

func (l *logs) QueryWriteStatus(_ context.Context, req *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error) {
	l.note("query", req.ResourceName)
	return &bspb.QueryWriteStatusResponse{CommittedSize: 7}, nil
}

func TestRule127_LogStreamNamesGoToLogs(t *testing.T) {
	var l logs
	c := serve(t, casserver.Config{Logs: &l})
	ctx := t.Context()
	r := must.Get(c.Read(ctx, &bspb.ReadRequest{ResourceName: "main/logstreams/a"}))(t)
	if m, err := r.Recv(); err != nil || string(m.Data) != "logged" {
		t.Errorf("read: %v, %v", m, err)
	}
	if _, err := r.Recv(); err != io.EOF {
		t.Errorf("read: %v", err)
	}
	w := c.open(ctx, t, []*bspb.WriteRequest{message("logstreams/a/b", 0, "one", false), message("", 3, "three", false)}...)
	if res, err := w.CloseAndRecv(); err != nil || res.CommittedSize != 8 {
		t.Errorf("write: %v, %v", res, err)
	}
	if res, err := c.QueryWriteStatus(ctx, &bspb.QueryWriteStatusRequest{ResourceName: "x/y/logstreams/a/b"}); err != nil || res.CommittedSize != 7 {
		t.Errorf("query: %v, %v", res, err)
	}
	expect.Slices(t, l.asked, []string{"read main/logstreams/a", "write logstreams/a/b", "query x/y/logstreams/a/b"},
		"calls")
}

func TestLogStreamNamesAreInvalidWithoutLogs(t *testing.T) {
	c := serve(t, casserver.Config{})
	r := must.Get(c.Read(t.Context(), &bspb.ReadRequest{ResourceName: "main/logstreams/a"}))(t)
	expect.Code(t, expect.Err(r.Recv()), codes.InvalidArgument)
}

func TestRule054_HeaderMustMatchLogStreamName(t *testing.T) {
	var l logs
	c := serve(t, casserver.Config{Logs: &l})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.resource-name", "other/logstreams/a")
	_, err := c.read(ctx, &bspb.ReadRequest{ResourceName: "main/logstreams/a"})
	wantCode(t, err, codes.InvalidArgument)
	_, err = c.write(ctx, message("main/logstreams/a/token", 0, "data", true))
	wantCode(t, err, codes.InvalidArgument)
	_, err = c.QueryWriteStatus(ctx, &bspb.QueryWriteStatusRequest{ResourceName: "main/logstreams/a/token"})
	wantCode(t, err, codes.InvalidArgument)
	expect.That(t, len(l.asked) == 0, "got calls %q, want none", l.asked)
}
