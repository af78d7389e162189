// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/test/bufconn"
)

func TestRule091_PingsOnAnIdleConnectionAreTolerated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := grpc.NewServer(casserver.ServerOptions(slog.New(slog.DiscardHandler))...)
		casserver.Register(s, casserver.Config{Instances: castest.Instances()})
		l := bufconn.Listen(1 << 20)
		go s.Serve(l)
		defer s.Stop()
		var dials atomic.Int32
		conn, err := grpc.NewClient("passthrough:///bufconn",
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, PermitWithoutStream: true}),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				dials.Add(1)
				return l.DialContext(ctx)
			}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		c := repb.NewCapabilitiesClient(conn)
		for range 3 {
			if _, err := c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Minute)
		}
		if n := dials.Load(); n != 1 {
			t.Errorf("the client had to connect %d times", n)
		}
	})
}
