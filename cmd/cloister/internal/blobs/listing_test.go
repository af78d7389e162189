// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// failing is a store in which one blob cannot be read.
type failing struct {
	cas.Store
	digest cas.Digest
	err    error
}

func (f *failing) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if d == f.digest {
		return nil, fmt.Errorf("read %s: %w", d, f.err)
	}
	return f.Store.Open(ctx, d, off)
}

// TestTreeDistinguishesAbsentFromUnreachable: an absent directory is marked and skipped; an unreachable server or an
// interrupt ends the listing.
func TestTreeDistinguishesAbsentFromUnreachable(t *testing.T) {
	in := must.Get(castest.Instances()(""))(t)
	put := func(m proto.Message) cas.Digest {
		b, d, err := cas.MarshalProto(cas.SHA256, m)
		if err == nil {
			err = in.Store.Put(t.Context(), d, bytes.NewReader(b))
		}
		must.Succeed(t, err)
		return d
	}
	sub := put(&repb.Directory{Symlinks: []*repb.SymlinkNode{{Name: "link", Target: "x"}}})
	root := put(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: "a", Digest: sub.Proto()}, {Name: "b", Digest: put(&repb.Directory{}).Proto()}}})
	for _, why := range []error{cas.ErrNotFound, cas.ErrUnavailable, context.Canceled} {
		var out strings.Builder
		l := &Listing{Store: &failing{in.Store, sub, why}, Out: &out}
		err := l.PrintPath(t.Context(), root, ".", true)
		if why != cas.ErrNotFound {
			expect.That(t, errors.Is(err, why) && !l.Absent && !strings.Contains(out.String(), "ABSENT"),
				"%v: got %v, and printed %q", why, err, &out)
			continue
		}
		if err != nil || !l.Absent || strings.Count(out.String(), "ABSENT") != 1 || !strings.Contains(out.String(), "b/") {
			t.Errorf("an absent directory: got %v, and printed %q", err, &out)
		}
	}
}
