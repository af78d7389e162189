// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"path/filepath"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
)

// TestFullStoreRejectsByName checks that only requests that do not fit fail, and that they leave nothing behind.
func TestFullStoreRejectsByName(t *testing.T) {
	t.Parallel()
	// Without leases the store makes room by eviction. With leases the outcome would depend on the order in which
	// outputs are stored; TestRule024_ShortLeases covers leases.
	c := serveAs(t,
		bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), MaxSize: "4MiB", Args: []string{"--lease", "0"}})
	three := func(size string) *repb.Digest {
		script := "for f in a b c; do head -c " + size + " /dev/urandom > $f; done"
		return c.prepare(job{script: script, outputs: []string{"a", "b", "c"}, same: true})
	}
	large := three("2000000")
	c.ours = true
	c.wantText("outputs of 6 MB into 4 MiB", c.request(large, nil).err,
		[]string{"increase the size of the store"}, codes.ResourceExhausted)
	c.notRecorded("outputs of 6 MB into 4 MiB", large)
	big := blob(make([]byte, 3<<20))
	errs, err := c.update(big)
	c.wantText("a blob of most of the budget", first(errs, err), []string{big.Digest.Hash}, codes.InvalidArgument)
	// Outputs that fit still succeed.
	for range 5 {
		_, r := c.wantSuccess("outputs of 1.5 MB", c.request(three("500000"), nil))
		c.wantOutputs("outputs of 1.5 MB", r, "file a", "file b", "file c")
	}
}
