// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

func TestRule091_PingsOnIdleConnectionArePermitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := grpc.NewServer(casserver.ServerOptions(nil)...)
		casserver.Register(s, casserver.Config{Instances: castest.Instances()})
		var dials atomic.Int32
		c := &client{}
		c.connect(t, s, func(conn net.Conn) net.Conn {
			dials.Add(1)
			return conn
		}, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, PermitWithoutStream: true}))
		for range 3 {
			must.Get(c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{}))(t)
			time.Sleep(10 * time.Minute)
		}
		expect.Equal(t, dials.Load(), 1, "connections")
	})
}

// A client that vanishes without closing must not hold its upload longer than one that disconnects.
func TestSilentClientIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dead atomic.Bool
		began, ended := make(chan struct{}), make(chan error, 1)
		instances, _ := behind(&probe{})
		c := dial(t, func(name string) (*cas.Instance, error) {
			in, err := instances(name)
			in.Store = &putting{in.Store, began, ended}
			return in, err
		}, func(conn net.Conn) net.Conn { return &mute{conn, &dead} })
		c.open(t.Context(), t, message(uploadName("12345678"), 0, "1234", false))
		<-began
		time.Sleep(10 * time.Minute)
		select {
		case err := <-ended:
			t.Fatalf("the upload of a slow client ended: %v", err)
		default:
		}
		dead.Store(true)
		time.Sleep(11 * time.Minute)
		select {
		case err := <-ended:
			expect.That(t, err != nil, "the upload of a silent client succeeded")
		default:
			t.Error("the upload of a silent client did not end")
		}
	})
}

// mute is a connection that drops outgoing data once it is dead.
type mute struct {
	net.Conn
	dead *atomic.Bool
}

func (m *mute) Write(p []byte) (int, error) {
	if m.dead.Load() {
		return len(p), nil
	}
	return m.Conn.Write(p)
}

func TestCallsPerConnectionAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := dial(t, castest.Instances(), nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var opened atomic.Int32
		for range 1010 {
			go func() {
				if _, err := c.Write(ctx); err == nil {
					opened.Add(1)
				}
			}()
		}
		synctest.Wait()
		expect.Equal(t, opened.Load(), 1000, "calls at once")
	})
}

// dial serves instances on a connection that wrap may replace, and returns a client.
func dial(t *testing.T, instances cas.Instances, wrap func(net.Conn) net.Conn) *client {
	t.Helper()
	s := grpc.NewServer(casserver.ServerOptions(nil)...)
	casserver.Register(s, casserver.Config{Instances: instances})
	c := &client{}
	c.connect(t, s, wrap)
	return c
}

// Headers arrive before authentication, so their size must be limited.
func TestHeadersAreLimited(t *testing.T) {
	c := dial(t, castest.Instances(), nil)
	for size, want := range map[int]codes.Code{100 << 10: codes.NotFound, 300 << 10: codes.Internal} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", strings.Repeat("x", size))
		r, err := c.Read(ctx, &bspb.ReadRequest{ResourceName: "blobs/" + sum("absent").Hash() + "/6"})
		if err == nil {
			_, err = r.Recv()
		}
		wantCode(t, err, want) // from the client itself, since the server has announced its limit
	}
}

func TestRegisterNamesMissingField(t *testing.T) {
	s := grpc.NewServer()
	if _, err := casserver.Register(s, casserver.Config{}); err == nil || !strings.Contains(err.Error(), "Config.Instances") {
		t.Errorf("no Instances: got %v, want an error that names Config.Instances", err)
	}
	m := castest.NewMemory()
	if _, err := casserver.Register(nil, casserver.Config{Instances: instances(m, nil)}); err == nil || !strings.Contains(err.Error(), "gRPC server") {
		t.Errorf("no server: got %v, want an error that names it", err)
	}
	expect.Equal(t, len(s.GetServiceInfo()), 0, "services registered after an error")
}

// An incomplete instance is an error of the call and not a panic.
func TestIncompleteInstanceFailsTheCall(t *testing.T) {
	m, empty := castest.NewMemory(), cas.SHA256.Sum(nil).Proto()
	for want, in := range map[string]*cas.Instance{
		"no Store":                {Actions: m},
		"neither an instance nor": nil,
	} {
		c := dial(t, func(string) (*cas.Instance, error) { return in, nil }, nil)
		_, err := c.FindMissingBlobs(t.Context(), &repb.FindMissingBlobsRequest{BlobDigests: []*repb.Digest{empty}})
		expect.That(t, err != nil && strings.Contains(err.Error(), want), "got %v, want an error with %q", err, want)
	}
	c := dial(t, instances(m, nil), nil)
	if _, err := c.FindMissingBlobs(t.Context(), &repb.FindMissingBlobsRequest{BlobDigests: []*repb.Digest{empty}}); err != nil {
		t.Errorf("a store alone: %v", err)
	}
	_, err := c.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: empty})
	expect.That(t, err != nil && strings.Contains(err.Error(), "no Actions"),
		"got %v, want an error with %q", err, "no Actions")
}
