// SPDX-License-Identifier: Apache-2.0

package quota_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// byteStream is a service whose uploads last until their clients close them.
type byteStream struct {
	bspb.UnimplementedByteStreamServer
	began chan struct{}
	got   chan struct{} // a message; unused if nil
}

func (b *byteStream) Write(from bspb.ByteStream_WriteServer) error {
	b.began <- struct{}{}
	for {
		if _, err := from.Recv(); err != nil {
			return from.SendAndClose(&bspb.WriteResponse{})
		}
		if b.got != nil {
			b.got <- struct{}{}
		}
	}
}

func (*byteStream) QueryWriteStatus(
	context.Context, *bspb.QueryWriteStatusRequest,
) (*bspb.QueryWriteStatusResponse, error) {
	return &bspb.QueryWriteStatusResponse{}, nil
}

// wantExhausted checks that err is RESOURCE_EXHAUSTED with RetryInfo, and that its message contains the words.
func wantExhausted(t *testing.T, err error, words ...string) {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != codes.ResourceExhausted || len(s.Details()) != 1 {
		t.Fatalf("got %v with details %v, want RESOURCE_EXHAUSTED with RetryInfo", err, s.Details())
	}
	if info, ok := s.Details()[0].(*errdetails.RetryInfo); !ok || info.GetRetryDelay().AsDuration() <= 0 {
		t.Errorf("got details %v, want RetryInfo with a delay", s.Details())
	}
	for _, w := range words {
		expect.Text(t, s.Message(), w, "message")
	}
}

func TestCallersHaveSeparateLimits(t *testing.T) {
	limits := quota.Limits{}
	must.Succeed(t, limits.Set("uploads=2,calls=3"))
	must.Succeed(t, limits.Set("large=uploads=3"))
	table := quota.New(quota.Config{Callers: limits, Methods: methods, Name: func(ctx context.Context) string {
		return strings.Join(metadata.ValueFromIncomingContext(ctx, "caller"), "")
	}})
	server := grpc.NewServer(table.Options()...)
	service := &byteStream{began: make(chan struct{}, 100)}
	bspb.RegisterByteStreamServer(server, service)
	healthpb.RegisterHealthServer(server, health.NewServer())
	conn := grpctest.Connect(t, server)
	client, other := bspb.NewByteStreamClient(conn), metadata.AppendToOutgoingContext(t.Context(), "caller", "other")
	upload := func(ctx context.Context) bspb.ByteStream_WriteClient {
		return must.Get(client.Write(ctx))(t)
	}
	var open []bspb.ByteStream_WriteClient
	for range 2 {
		open = append(open, upload(t.Context()), upload(other))
		<-service.began
		<-service.began
	}
	wantExhausted(t, upload(t.Context()).RecvMsg(&bspb.WriteResponse{}), "too many uploads", "2", "--caller-limit uploads")
	query := func() error {
		_, err := client.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{})
		return err
	}
	must.Succeed(t, query()) // the third call
	// What has ended leaves room.
	must.Get(open[0].CloseAndRecv())(t)
	upload(t.Context())
	<-service.began
	wantExhausted(t, upload(t.Context()).RecvMsg(&bspb.WriteResponse{}), "uploads")
}

var methods = map[string]quota.Kind{"/google.bytestream.ByteStream/Write": quota.Uploads}

// TestInstancesHaveSeparateLimits for all callers together, each with the limits of its name.
func TestInstancesHaveSeparateLimits(t *testing.T) {
	var limits quota.Limits
	for _, l := range []string{"uploads=1", "large=uploads=2", "free=uploads=0", "large=calls=9"} {
		must.Succeed(t, limits.Set(l))
	}
	server := grpc.NewServer(quota.New(quota.Config{
		Instances: limits, Methods: methods,
		Name: func(ctx context.Context) string {
			return strings.Join(metadata.ValueFromIncomingContext(ctx, "caller"), "")
		},
		Instance: func(_ string, m any) (string, bool) { return m.(*bspb.WriteRequest).ResourceName, true },
	}).Options()...)
	service := &byteStream{began: make(chan struct{}, 100), got: make(chan struct{})}
	bspb.RegisterByteStreamServer(server, service)
	client := bspb.NewByteStreamClient(grpctest.Connect(t, server))
	callers := 0
	upload := func(instance string) bspb.ByteStream_WriteClient {
		t.Helper()
		callers++
		ctx := metadata.AppendToOutgoingContext(t.Context(), "caller", fmt.Sprint(callers))
		s := must.Get(client.Write(ctx))(t)
		must.Succeed(t, s.Send(&bspb.WriteRequest{ResourceName: instance}))
		<-service.began
		return s
	}
	for instance, n := range map[string]int{"small": 1, "": 1, "large": 2, "free": 5} {
		var open []bspb.ByteStream_WriteClient
		for range n {
			open = append(open, upload(instance))
			<-service.got
		}
		if instance != "free" {
			wantExhausted(t, upload(instance).RecvMsg(&bspb.WriteResponse{}),
				"too many uploads", fmt.Sprintf("instance %q has %d", instance, n), "--instance-limit uploads")
		}
		must.Get(open[0].CloseAndRecv())(t)
		upload(instance) // into the room that it left
		<-service.got
	}
}

func TestAllCallsCountButHealthChecks(t *testing.T) {
	limits := quota.Limits{}
	must.Succeed(t, limits.Set("calls=1"))
	server := grpc.NewServer(quota.New(quota.Config{Callers: limits}).Options()...)
	service := &byteStream{began: make(chan struct{}, 100)}
	bspb.RegisterByteStreamServer(server, service)
	healthpb.RegisterHealthServer(server, health.NewServer())
	conn := grpctest.Connect(t, server)
	client := bspb.NewByteStreamClient(conn)
	must.Get(client.Write(t.Context()))(t)
	<-service.began
	_, err := client.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{})
	wantExhausted(t, err, "too many calls")
	expect.Error(t, expect.Err(healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})), nil,
		"health")
}

func TestLimitsAreAFlag(t *testing.T) {
	limits := quota.Default()
	must.Succeed(t, limits.Set("queries=7"))
	must.Succeed(t, limits.Set("uploads=0"))
	must.Succeed(t, limits.Set("a=b=queries=9,uploads=1"))
	must.Succeed(t, limits.Set("=calls=5"))
	expect.Equal(t, limits.String(), "calls=20000,uploads=0,executions=10000,queries=7,log-streams=250;=calls=5;a=b=uploads=1,queries=9")
	for _, bad := range []string{"", "uploads", "uploads=", "uploads=-1", "uploads=x", "nonsense=1", "uploads=1,"} {
		if err := limits.Set(bad); err == nil || !strings.Contains(err.Error(), "log-streams") {
			t.Errorf("%q: got %v, want an error with the names", bad, err)
		}
	}
}

func TestWithoutTable(t *testing.T) {
	release := must.Get(quota.Hold(t.Context(), quota.LogStreams))(t)
	release()
	release()
	expect.Equal(t, quota.Caller(t.Context()), "", "caller")
}
