// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// checkAll checks the results of all actions, and that the server stores their outputs. It frees the answers.
func (s *Server) checkAll(ctx context.Context, j *job, answers []answer) ([]*repb.ExecutedActionMetadata, error) {
	metadata := make([]*repb.ExecutedActionMetadata, len(answers))
	type output struct {
		size int64
		of   *action
	}
	outputs := map[string]output{}
	for i := range answers {
		a := &j.actions[i]
		encoded := answers[i].last.bytes()
		answers[i].last.free()
		result, err := resultOf(encoded)
		if err == nil {
			err = s.check(ctx, a, result, func(d *repb.Digest) { outputs[d.GetHash()] = output{d.GetSizeBytes(), a} })
		}
		if err != nil {
			return nil, fmt.Errorf("action %s: %w", a.name(), err)
		}
		metadata[i] = result.ExecutionMetadata
	}
	missing, err := s.missing(ctx, maps.Keys(outputs), func(h string) int64 { return outputs[h].size })
	if err == nil && len(missing) > 0 {
		b := outputs[missing[0]]
		err = fmt.Errorf("action %s: output blob %s/%d is absent from the store (in total %d of %d blobs)",
			b.of.name(), missing[0], b.size, len(missing), len(outputs))
	}
	return metadata, err
}

// missing returns the hashes of blobs that the server lacks.
func (s *Server) missing(ctx context.Context, hashes iter.Seq[string], size func(hash string) int64) ([]string, error) {
	var missing []string
	for part := range slices.Chunk(slices.Collect(hashes), lookupsBatch) {
		q := &repb.FindMissingBlobsRequest{InstanceName: s.instance}
		for _, h := range part {
			q.BlobDigests = append(q.BlobDigests, &repb.Digest{Hash: h, SizeBytes: size(h)})
		}
		a, err := repb.NewContentAddressableStorageClient(s.conn).FindMissingBlobs(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, d := range a.MissingBlobDigests {
			missing = append(missing, d.Hash)
		}
	}
	return missing, nil
}

// resultOf decodes the last message of an execution.
func resultOf(encoded []byte) (*repb.ActionResult, error) {
	var op longrunningpb.Operation
	if err := proto.Unmarshal(encoded, &op); err != nil {
		return nil, err
	}
	if err := status.FromProto(op.GetError()).Err(); err != nil {
		return nil, err
	}
	if !op.Done {
		return nil, errors.New("the stream ended before the operation was done")
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return nil, err
	}
	if err := status.FromProto(r.Status).Err(); err != nil {
		return nil, err
	}
	if r.CachedResult {
		return nil, errors.New("the result is cached in spite of skip_cache_lookup")
	}
	if r.Result == nil {
		return nil, errors.New("no result")
	}
	return r.Result, nil
}

// check checks the result of an action, and passes the blobs that the server must store to stored.
func (s *Server) check(ctx context.Context, a *action, r *repb.ActionResult, stored func(*repb.Digest)) error {
	if r.ExitCode != 0 {
		return fmt.Errorf("exit code %d, stderr %+.1000q", r.ExitCode, r.StderrRaw)
	}
	if err := checkStdout([]byte(a.stdout), r, stored); err != nil {
		return err
	}
	files := map[string]string{}
	for _, f := range r.OutputFiles {
		files[f.Path] = f.Digest.GetHash()
		stored(f.Digest)
	}
	if err := compareFiles(files, a.files); err != nil {
		return err
	}
	if links := len(r.OutputSymlinks) + len(r.OutputFileSymlinks) + len(r.OutputDirectorySymlinks); links > 0 {
		return fmt.Errorf("got %d output symlinks, want none", links)
	}
	switch dirs := r.OutputDirectories; {
	case a.dir == nil && len(dirs) == 0:
		return nil
	case a.dir == nil:
		return fmt.Errorf("got output directories %v, want none", dirs)
	case len(dirs) != 1 || dirs[0].Path != "d":
		return fmt.Errorf("got output directories %v, want only d", dirs)
	}
	return s.checkTree(ctx, a, r.OutputDirectories[0].TreeDigest, stored)
}

func checkStdout(want []byte, r *repb.ActionResult, stored func(*repb.Digest)) error {
	d := r.StdoutDigest
	switch {
	case len(r.StdoutRaw) > 0 && !bytes.Equal(r.StdoutRaw, want):
		return fmt.Errorf("stdout is %+.256q, want %+.256q", r.StdoutRaw, want)
	case len(r.StdoutRaw) == 0 && len(want) > 0:
		if d.GetHash() != hash(want) {
			return fmt.Errorf("stdout has digest %s/%d, want that of %+.256q", d.GetHash(), d.GetSizeBytes(), want)
		}
		stored(d)
	case len(want) == 0 && d.GetSizeBytes() > 0:
		return fmt.Errorf("stdout has %d bytes, want none", d.SizeBytes)
	}
	return nil
}

// checkTree checks the output directory of an action.
func (s *Server) checkTree(ctx context.Context, a *action, d *repb.Digest, stored func(*repb.Digest)) error {
	tree, err := s.readTree(ctx, d)
	if err != nil {
		return fmt.Errorf("output directory d, tree %s/%d: %w", d.GetHash(), d.GetSizeBytes(), err)
	}
	files := map[string]string{}
	for _, f := range tree.Root.GetFiles() {
		files["d/"+f.Name] = f.Digest.GetHash()
		stored(f.Digest)
	}
	if n := len(tree.Root.GetDirectories()) + len(tree.Root.GetSymlinks()); n > 0 {
		return fmt.Errorf("output directory d has %d subdirectories and symlinks, want none", n)
	}
	return compareFiles(files, a.dir)
}

func (s *Server) readTree(ctx context.Context, d *repb.Digest) (*repb.Tree, error) {
	var data []byte
	err := s.read(ctx, d.GetHash(), d.GetSizeBytes(), func(part []byte) error {
		data = append(data, part...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if got := hash(data); got != d.GetHash() {
		return nil, fmt.Errorf("the server sent a blob with digest %s", got)
	}
	tree := &repb.Tree{}
	return tree, proto.Unmarshal(data, tree)
}

// compareFiles returns the first difference between digests by path.
func compareFiles(got, want map[string]string) error {
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if h, ok := got[path]; !ok {
			return fmt.Errorf("output %s is absent", path)
		} else if want[path] != anyContent && h != want[path] {
			return fmt.Errorf("output %s has digest %s, want %s", path, h, want[path])
		}
	}
	for _, path := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[path]; !ok {
			return fmt.Errorf("unexpected output %+.256q", path)
		}
	}
	return nil
}
