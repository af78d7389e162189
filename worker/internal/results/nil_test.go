// SPDX-License-Identifier: Apache-2.0

package results

import (
	"context"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
)

// TestFilterKeepsAnAbsentCache, which callers refuse.
func TestFilterKeepsAnAbsentCache(t *testing.T) {
	bare := func(string) (*cas.Instance, error) { return &cas.Instance{Store: castest.NewMemory()}, nil }
	in, err := Filter(bare, func(context.Context, string, cas.Digest, *repb.ActionResult) string { return "" })("")
	if err != nil || in.Actions != nil {
		t.Errorf("got actions %v, %v, want none", in.Actions, err)
	}
}
