// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// Inlining says what of a result's blobs Inline writes into the result.
type Inlining struct {
	Function Function
	// Hints is the client's wish: a GetActionResultRequest or an ExecuteRequest.
	Hints interface {
		GetInlineStdout() bool
		GetInlineStderr() bool
		GetInlineOutputFiles() []string
	}
	// MaxBytes is the size that the encoded result must not exceed by inlining. What does not fit
	// is left out: stdout and stderr come first, then the files in the order of the result.
	MaxBytes int
}

// Inline writes into r the contents of those of its blobs that the client wishes to have there, and
// removes others. Digests stay as they are; contents without a digest beside them stay, too. A blob
// that cannot be read ends it with the error of Open or of reading, and r as it is then is valid.
func Inline(ctx context.Context, s Store, r *repb.ActionResult, in Inlining) error {
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
	const framing = 16 // upper bound of what protobuf adds to one blob
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
