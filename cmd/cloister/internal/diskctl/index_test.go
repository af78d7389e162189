// SPDX-License-Identifier: Apache-2.0

package diskctl

import (
	"context"
	"testing"

	"github.com/cloister-build/cloister/cas/disk"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
)

// TestSearchesAreLimited: a search that waits for another one ends with its call, and beyond maxSearching they are
// refused.
func TestSearchesAreLimited(t *testing.T) {
	cache := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20}))(t)
	defer cache.Close()
	x := &blobIndex{cache: cache, searching: make(chan struct{}, maxSearching), search: make(chan struct{}, 1)}
	req := &cloisterpb.FindRequest{Prefix: "01234567", Limit: 1}
	must.Get(x.Find(t.Context(), req))(t)
	x.search <- struct{}{} // as a search in progress
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Code(t, expect.Err(x.Find(ctx, req)), codes.Canceled, "cancelled while it waits")
	for range maxSearching {
		x.searching <- struct{}{}
	}
	expect.Code(t, expect.Err(x.Find(t.Context(), req)), codes.ResourceExhausted, "too many")
}
