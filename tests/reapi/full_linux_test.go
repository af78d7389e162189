// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestFullStoreRejectsByName checks that only requests that do not fit fail, and that they leave nothing behind.
func TestFullStoreRejectsByName(t *testing.T) {
	// Without leases the store makes room by eviction. With leases the outcome would depend on the order in which
	// outputs are stored; TestRule024_ShortLeases covers leases.
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), MaxSize: "4MiB", Args: []string{"--lease", "0"}})
	three := func(size string) action {
		return action{script: "for f in a b c; do head -c " + size + " /dev/urandom > $f; done", outputs: []string{"a", "b", "c"}}
	}
	r := c.do(three("2000000"))
	if code(r) != codes.ResourceExhausted || !strings.Contains(r.Status.Message, "increase the size of the store") {
		t.Errorf("outputs of 6 MB into 4 MiB: got %v", r.Status)
	}
	if _, err := c.ac.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: c.upload(three("2000000"))}); status.Code(err) != codes.NotFound {
		t.Errorf("an incomplete result was recorded: %v", err)
	}
	big := make([]byte, 3<<20)
	d := cas.SHA256.Sum(big)
	up, err := c.cas.BatchUpdateBlobs(t.Context(), &repb.BatchUpdateBlobsRequest{
		Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d.Proto(), Data: big}},
	})
	if err != nil || codes.Code(up.Responses[0].Status.GetCode()) != codes.InvalidArgument || !strings.Contains(up.Responses[0].Status.Message, d.Hash()) {
		t.Errorf("a blob of most of the budget: got %v, %v", up, err)
	}
	// Outputs that fit still succeed.
	for range 5 {
		if _, r := c.ok(three("500000")); len(r.OutputFiles) != 3 {
			t.Errorf("got %v", r)
		}
	}
}
