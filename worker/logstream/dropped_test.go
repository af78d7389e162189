// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"testing"
	"time"

	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

// TestMessageOfADroppedStreamIsRejected lets a stream expire after a write has found it, and checks that the
// message is rejected and not counted, whether or not its caller has another stream.
func TestMessageOfADroppedStreamIsRejected(t *testing.T) {
	for _, other := range []bool{false, true} {
		r := must.Get(New(Config{Instances: castest.Instances()}))(t)
		defer r.Close()
		create := func() *logpb.LogStream {
			return must.Get(r.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{Parent: "main"}))(t)
		}
		s := must.Get(r.writable(create().WriteResourceName))(t)
		r.expire(time.Now().Add(time.Hour))
		if other {
			create()
		}
		_, err := r.admit(s, &bspb.WriteRequest{Data: []byte("text")})
		expect.Code(t, err, codes.NotFound, "message of a dropped stream")
		expect.Equal(t, r.ClientBytes(), 0, "bytes")
	}
}
