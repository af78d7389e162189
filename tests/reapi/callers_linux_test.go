// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
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
	if err := second.RecvMsg(&bspb.WriteResponse{}); err == nil {
		t.Error("an incomplete upload succeeds")
	}
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
