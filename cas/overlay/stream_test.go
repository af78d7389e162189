// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
)

// streamsTo returns a ByteStream client of a new server for instances.
func streamsTo(t testing.TB, instances cas.Instances) bspb.ByteStreamClient {
	t.Helper()
	conn := grpctest.Dial(t, serve(t, instances))
	return bspb.NewByteStreamClient(conn)
}

// stream uploads b with one message.
func stream(ctx context.Context, c bspb.ByteStreamClient, b []byte) (cas.Digest, error) {
	d := cas.SHA256.Sum(b)
	s, err := c.Write(ctx)
	if err != nil {
		return d, err
	}
	err = s.Send(&bspb.WriteRequest{ResourceName: "uploads/u/" + d.Resource(), Data: b, FinishWrite: true})
	if err != nil && err != io.EOF {
		return d, err
	}
	_, err = s.CloseAndRecv()
	return d, err
}

// TestStreamedWriteDoesNotAsk checks that nobody asks the upstream for a blob that is being uploaded.
func TestStreamedWriteDoesNotAsk(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			p.faultyUpstream.Hold(faulty.Missing)
			c := streamsTo(t, p.Instance)
			for i := range 10 {
				d, err := stream(t.Context(), c, fmt.Append(nil, i))
				must.Be(t, err == nil && has(t, p.local, d), "write %d: %v", i, err)
			}
			p.drain(t)
			if n := p.faultyUpstream.Calls(faulty.Missing); n > 0 || p.upstream.Len() != 10 {
				t.Errorf("got %d questions and %d of 10 blobs in the upstream", n, p.upstream.Len())
			}
		})
	}
}
