// SPDX-License-Identifier: Apache-2.0

package nested_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/internal/nested"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

// TestClosedSessionAnswersNothing: it ends open connections, and Close returns what was called before.
func TestClosedSessionAnswersNothing(t *testing.T) {
	instances := castest.Instances()
	e := nested.New(nested.Config{Instances: instances, Cancel: func(string) {}})
	defer e.Close()
	stop := must.Get(casserver.Register(e, casserver.Config{Instances: instances}))(t)
	defer stop()
	blob := must.Get(cas.PutBytes(t.Context(), must.Get(instances("main"))(t).Store, cas.SHA256, []byte("blob")))(t)
	path := filepath.Join(t.TempDir(), "s")
	s := e.Serve(actionapi.Action{Caller: &actionapi.Caller{Identity: context.Background()}, Instance: "main"}, must.Get(net.Listen("unix", path))(t))
	conn := grpctest.Dial(t, "unix:"+path)
	read := func() error {
		_, err := repb.NewContentAddressableStorageClient(conn).BatchReadBlobs(t.Context(),
			&repb.BatchReadBlobsRequest{InstanceName: "main", Digests: []*repb.Digest{blob.Proto(), cas.SHA256.Sum([]byte("absent")).Proto()}})
		return err
	}
	must.Succeed(t, read())
	must.Succeed(t, read())
	for range 2 {
		use := s.Close()
		expect.That(t, use.Calls == 2 && len(use.Fetched) == 1 && use.Fetched[0].Digest == blob, "got %+v, want 2 calls and one blob", use)
		expect.Code(t, read(), codes.Unavailable, "after the end")
	}
}

// TestSessionsAreApart: what one fetches is not in the record of another.
func TestSessionsAreApart(t *testing.T) {
	instances := castest.Instances()
	e := nested.New(nested.Config{Instances: instances, Cancel: func(string) {}})
	defer e.Close()
	stop := must.Get(casserver.Register(e, casserver.Config{Instances: instances}))(t)
	defer stop()
	var uses []actionapi.Use
	for _, instance := range []string{"one", "two"} {
		blob := must.Get(cas.PutBytes(t.Context(), must.Get(instances(instance))(t).Store, cas.SHA256, []byte(instance)))(t)
		path := filepath.Join(t.TempDir(), "s")
		s := e.Serve(actionapi.Action{Caller: &actionapi.Caller{Identity: context.Background()}, Instance: instance}, must.Get(net.Listen("unix", path))(t))
		client := repb.NewContentAddressableStorageClient(grpctest.Dial(t, "unix:"+path))
		for _, of := range []string{"one", "two"} {
			_, err := client.BatchReadBlobs(t.Context(), &repb.BatchReadBlobsRequest{InstanceName: of, Digests: []*repb.Digest{blob.Proto()}})
			want := codes.OK
			if of != instance {
				want = codes.PermissionDenied
			}
			expect.Code(t, err, want, "action of %s, instance %s", instance, of)
		}
		uses = append(uses, s.Close())
	}
	expect.That(t, !slices.Equal(uses[0].Fetched, uses[1].Fetched) && len(uses[0].Fetched)+len(uses[1].Fetched) == 2, "got %+v", uses)
}

// waiting is a service whose calls wait until release is closed, or their caller leaves.
type waiting struct {
	repb.UnimplementedCapabilitiesServer
	entered chan int // the number of the call
	count   atomic.Int32
	release chan struct{}
}

func (w *waiting) GetCapabilities(ctx context.Context, _ *repb.GetCapabilitiesRequest) (*repb.ServerCapabilities, error) {
	w.entered <- int(w.count.Add(1))
	select {
	case <-w.release:
	case <-ctx.Done():
	}
	return &repb.ServerCapabilities{}, nil
}

// TestCallsInProgressAreLimited: a call beyond the limit waits before its message is received, on whatever connection,
// and is answered once another has ended. Sessions have limits of their own.
func TestCallsInProgressAreLimited(t *testing.T) {
	const most = 64
	w := &waiting{entered: make(chan int, 2*most), release: make(chan struct{})}
	e := nested.New(nested.Config{Instances: castest.Instances(), Cancel: func(string) {}})
	defer e.Close()
	repb.RegisterCapabilitiesServer(e, w)
	serve := func() []repb.CapabilitiesClient {
		path := filepath.Join(t.TempDir(), "s")
		s := e.Serve(actionapi.Action{Caller: &actionapi.Caller{Identity: context.Background()}, Instance: "main"}, must.Get(net.Listen("unix", path))(t))
		t.Cleanup(func() { s.Close() })
		var clients []repb.CapabilitiesClient
		for range 4 {
			clients = append(clients, repb.NewCapabilitiesClient(grpctest.Dial(t, "unix:"+path)))
		}
		return clients
	}
	clients := serve()
	ended := make(chan error, most+1)
	call := func(ctx context.Context, c repb.CapabilitiesClient) {
		_, err := c.GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: "main"})
		ended <- err
	}
	for n := range most {
		go call(t.Context(), clients[n%len(clients)])
	}
	for range most {
		<-w.entered
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	call(ctx, clients[0])
	expect.Code(t, <-ended, codes.DeadlineExceeded, "a call beyond the limit")
	expect.Equal(t, len(w.entered), 0, "calls beyond the limit that have begun")
	go call(t.Context(), serve()[0])
	<-w.entered // that of another action
	go call(t.Context(), clients[1])
	close(w.release)
	for range most + 2 {
		must.Succeed(t, <-ended)
	}
}

// TestCallsAreConfined: operations cannot be waited for, log streams cannot be read or written, and a stream stays in the
// instance in which it began.
func TestCallsAreConfined(t *testing.T) {
	instances := castest.Instances()
	e := nested.New(nested.Config{Instances: instances, Cancel: func(string) {}})
	defer e.Close()
	stop := must.Get(casserver.Register(e, casserver.Config{Instances: instances}))(t)
	defer stop()
	repb.RegisterExecutionServer(e, repb.UnimplementedExecutionServer{})
	path := filepath.Join(t.TempDir(), "s")
	s := e.Serve(actionapi.Action{Caller: &actionapi.Caller{Identity: context.Background()}, Instance: "main"}, must.Get(net.Listen("unix", path))(t))
	defer s.Close()
	conn := grpctest.Dial(t, "unix:"+path)

	operation := must.Get(repb.NewExecutionClient(conn).WaitExecution(t.Context(), &repb.WaitExecutionRequest{Name: "main/operations/x"}))(t)
	_, err := operation.Recv()
	expect.Code(t, err, codes.NotFound, "WaitExecution")
	streams := bspb.NewByteStreamClient(conn)
	read := must.Get(streams.Read(t.Context(), &bspb.ReadRequest{ResourceName: "main/logstreams/x"}))(t)
	_, err = read.Recv()
	expect.Code(t, err, codes.PermissionDenied, "Read of a log stream")
	d := cas.SHA256.Sum([]byte("ab"))
	of := func(instance string) string {
		return fmt.Sprintf("%s/uploads/6f1f8f0e-3f54-4b3c-9f0a-0d1d6f6f0a11/blobs/%s", instance, d)
	}
	for first, second := range map[string]string{
		"main/logstreams/x": "", of("other"): "", of("main"): of("other"),
	} {
		write := must.Get(streams.Write(t.Context()))(t)
		must.Succeed(t, write.Send(&bspb.WriteRequest{ResourceName: first, Data: []byte("a")}))
		if second != "" {
			must.Succeed(t, write.Send(&bspb.WriteRequest{ResourceName: second, WriteOffset: 1, Data: []byte("b"), FinishWrite: true}))
		}
		expect.Code(t, write.RecvMsg(&bspb.WriteResponse{}), codes.PermissionDenied, "Write of %s, then %q", first, second)
	}
}
