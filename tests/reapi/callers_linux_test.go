// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// beginUpload begins to upload a text.
func (c *client) beginUpload(text string) (stream bspb.ByteStream_WriteClient, name string) {
	c.Helper()
	stream, name = must.Get(c.bs.Write(c.Context()))(c), c.writeName(cas.SHA256.Sum([]byte(text)).Proto())
	must.Succeed(c, stream.Send(&bspb.WriteRequest{ResourceName: name, Data: []byte(text[:1])}))
	return stream, name
}

// beginUploadAndWait is beginUpload, and waits until the server has the first byte.
func (c *client) beginUploadAndWait(text string) bspb.ByteStream_WriteClient {
	c.Helper()
	stream, name := c.beginUpload(text)
	must.Hold(c, "the server has the beginning of "+text, func() bool {
		s, err := c.bs.QueryWriteStatus(c.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
		return err == nil && s.CommittedSize == 1
	})
	return stream
}

// TestUploadsOfOneCallerAreLimited by --caller-limit. A call that has ended leaves room.
func TestUploadsOfOneCallerAreLimited(t *testing.T) {
	t.Parallel()
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--caller-limit", "uploads=2"}})
	c.beginUploadAndWait("first")
	second := c.beginUploadAndWait("second")
	third, _ := c.beginUpload("third")
	c.wantCode("the third upload of a caller", third.RecvMsg(&bspb.WriteResponse{}), codes.ResourceExhausted)
	must.Succeed(c, second.CloseSend())
	expect.That(t, second.RecvMsg(&bspb.WriteResponse{}) != nil, "an incomplete upload succeeds")
	c.put([]byte("another blob"))
}

// TestSilentUploadEnds after --stream-idle.
func TestSilentUploadEnds(t *testing.T) {
	t.Parallel()
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--stream-idle", "5s"}})
	c.put([]byte("a blob"))
	stream := c.beginUploadAndWait("text")
	c.wantCode("a silent upload", stream.RecvMsg(&bspb.WriteResponse{}), codes.Unavailable)
}

// TestUploadsToOneInstanceAreLimited by --instance-limit, for all callers together.
func TestUploadsToOneInstanceAreLimited(t *testing.T) {
	t.Parallel()
	c := serveAs(t, bazelrun.ServerConfig{
		Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--instance-limit", "uploads=2", "--instance-limit", "wide=uploads=3"},
	})
	in := func(instance, address string) *client {
		other := over(c, grpctest.Dial(c, "passthrough:///"+c.server.Addr, grpc.WithContextDialer(from(address))))
		other.instance = instance
		return other
	}
	in("narrow", "127.0.0.2").beginUploadAndWait("first")
	in("narrow", "127.0.0.3").beginUploadAndWait("second")
	third, _ := in("narrow", "127.0.0.4").beginUpload("third")
	c.wantCode("the third upload to an instance", third.RecvMsg(&bspb.WriteResponse{}), codes.ResourceExhausted)
	for _, text := range []string{"first", "second", "third"} {
		in("wide", "127.0.0.2").beginUploadAndWait(text + " of an instance with a limit of its own")
	}
	fourth, _ := in("wide", "127.0.0.2").beginUpload("fourth")
	c.wantCode("the fourth upload", fourth.RecvMsg(&bspb.WriteResponse{}), codes.ResourceExhausted)
	c.put([]byte("an upload to another instance"))
}

// TestExecutionsOfNamedCallersAndInstances: a caller's address selects its limit, and instances limit executions.
func TestExecutionsOfNamedCallersAndInstances(t *testing.T) {
	t.Parallel()
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Args: []string{
		"--caller-limit", "executions=1", "--caller-limit", "127.0.0.2=executions=9", "--instance-limit", "executions=2",
	}})
	waits := func(address string) error {
		action := c.actions(1, "sleep 600 # "+string(fmt.Appendf(nil, "%x", fresh(8))))[0]
		exec := repb.NewExecutionClient(grpctest.Dial(c, "passthrough:///"+c.server.Addr, grpc.WithContextDialer(from(address))))
		s := must.Get(exec.Execute(c.Context(), &repb.ExecuteRequest{ActionDigest: action}))(c)
		_, err := s.Recv()
		return err
	}
	must.Succeed(c, waits("127.0.0.3"))
	c.wantCode("a second execution of a caller", waits("127.0.0.3"), codes.ResourceExhausted)
	must.Succeed(c, waits("127.0.0.2"))
	c.wantCode("a third execution in an instance", waits("127.0.0.2"), codes.ResourceExhausted)
}

// TestLearnedFunctionsOfOneCallerAreLimited: a caller that teaches a digest function to many instances leaves room for
// the others.
func TestLearnedFunctionsOfOneCallerAreLimited(t *testing.T) {
	t.Parallel()
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store")})
	teach := func(conn *grpc.ClientConn, instance string) codes.Code {
		data := []byte("a blob")
		r, err := repb.NewContentAddressableStorageClient(conn).BatchUpdateBlobs(c.Context(), &repb.BatchUpdateBlobsRequest{
			InstanceName: instance,
			Requests:     []*repb.BatchUpdateBlobsRequest_Request{{Digest: cas.BLAKE3.Sum(data).Proto(), Data: data}},
		})
		must.Succeed(c, err)
		return codes.Code(r.Responses[0].Status.GetCode())
	}
	for i := range 1000 {
		expect.Equal(c, teach(c.conn, fmt.Sprint("mine-", i)), codes.OK, "instance %d", i)
	}
	expect.Equal(c, teach(c.conn, "one-more"), codes.InvalidArgument, "one more instance of the caller")
	expect.Equal(c, teach(c.conn, "mine-7"), codes.OK, "a known instance")
	neighbour := grpctest.Dial(c, "passthrough:///"+c.server.Addr, grpc.WithContextDialer(from("127.0.0.2")))
	expect.Equal(c, teach(neighbour, "theirs"), codes.OK, "an instance of another caller")
}

// from returns a dialer with a local address.
func from(address string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, server string) (net.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
		return d.DialContext(ctx, "tcp", server)
	}
}
