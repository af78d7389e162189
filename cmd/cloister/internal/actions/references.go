// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"context"
	"errors"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
)

// References returns the blobs that a result refers to, and those among them that are absent. An absent Tree hides its
// contents.
func References(ctx context.Context, s *remote.Store, f cas.Function, r *repb.ActionResult) (ds, missing []cas.Digest, err error) {
	ds, err = cas.Closure(ctx, s, f, r)
	if errors.Is(err, cas.ErrNotFound) {
		r := &repb.ActionResult{OutputFiles: r.OutputFiles, StdoutDigest: r.StdoutDigest, StderrDigest: r.StderrDigest}
		if ds, err = cas.Closure(ctx, s, f, r); err != nil {
			return nil, nil, err
		}
	}
	if err != nil {
		return nil, nil, err
	}
	for _, o := range r.OutputDirectories {
		for _, p := range []*repb.Digest{o.TreeDigest, o.RootDirectoryDigest} {
			if p == nil {
				continue
			}
			d, err := cas.FromProto(f, p)
			if err != nil {
				return nil, nil, err
			}
			ds = append(ds, d)
		}
	}
	missing, err = s.Missing(ctx, ds)
	return ds, missing, err
}
