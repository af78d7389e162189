// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// Inlining tells Inline which blobs to write into a result.
type Inlining struct {
	Function Function
	// Hints is the client's GetActionResultRequest or ExecuteRequest.
	Hints interface {
		GetInlineStdout() bool
		GetInlineStderr() bool
		GetInlineOutputFiles() []string
	}
	// MaxBytes limits the size of the encoded result. Contents that do not fit are left out: stdout and stderr have
	// priority, then the files in order.
	MaxBytes int
}

// Inline writes the contents of the blobs that the client wants into r, and removes other contents that have a digest.
// Digests stay. If a blob cannot be read, Inline returns the error and leaves r valid. It returns ErrInvalid if r or
// the Hints are nil.
func Inline(ctx context.Context, s Store, r *repb.ActionResult, in Inlining) error {
	if err := checkResult(r); err != nil {
		return err
	}
	if in.Hints == nil {
		return invalidf("Inlining.Hints is missing")
	}
	type blob struct {
		digest *repb.Digest
		data   *[]byte
		want   bool
	}
	blobs := []blob{
		{r.StdoutDigest, &r.StdoutRaw, in.Hints.GetInlineStdout()},
		{r.StderrDigest, &r.StderrRaw, in.Hints.GetInlineStderr()},
	}
	files := map[string]bool{}
	for _, path := range in.Hints.GetInlineOutputFiles() {
		files[path] = true
	}
	for _, f := range r.OutputFiles {
		blobs = append(blobs, blob{f.Digest, &f.Contents, files[f.Path]})
	}
	blobs = slices.DeleteFunc(blobs, func(b blob) bool { return b.digest == nil })
	for _, b := range blobs {
		*b.data = nil
	}
	const framing = 16 // upper bound of the protobuf encoding around one blob
	room := int64(in.MaxBytes - proto.Size(r))
	for _, b := range blobs {
		d, err := FromProto(in.Function, b.digest)
		if err != nil {
			return err
		}
		if !b.want || d.size == 0 || d.size > room-framing {
			continue
		}
		if *b.data, err = ReadAll(ctx, s, d, room); err != nil {
			return err
		}
		room -= d.size + framing
	}
	return nil
}
