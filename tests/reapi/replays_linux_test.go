// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	grpcmd "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// replayed is the instance of the replays.
const replayed = "builds/main"

// A buck2 behaves like the re_grpc client of Buck2: it never states a digest function, compresses streams if possible,
// and follows a single Execute stream to its end.
type buck2 struct {
	*client
	fn    cas.Function
	limit int64 // of a batch, and of one WriteRequest
	zstd  bool
}

// TestBuck2 replays the calls for one Buck2 action, with several digest functions; BLAKE3 is the one that Buck2
// recommends.
func TestBuck2(t *testing.T) {
	for _, fn := range []cas.Function{cas.BLAKE3, cas.SHA256, cas.SHA1} {
		t.Run(fn.String(), func(t *testing.T) {
			confined(t)
			b := &buck2{fn: fn, client: serveAs(t, bazelrun.ServerConfig{
				Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--digest-function", replayed + "=" + fn.String()},
			})}
			b.configure()
			b.build()
		})
	}
}

// configure is the startup of Buck2.
func (b *buck2) configure() {
	b.Helper()
	caps, err := repb.NewCapabilitiesClient(b.conn).GetCapabilities(b.Context(), &repb.GetCapabilitiesRequest{InstanceName: replayed})
	if err != nil {
		b.Fatal(err)
	}
	if !caps.GetExecutionCapabilities().GetExecEnabled() {
		b.Fatal("exec_enabled is false: Buck2 would fail")
	}
	b.limit = min(caps.CacheCapabilities.MaxBatchTotalSizeBytes, 4_000_000)
	b.zstd = slices.Contains(caps.CacheCapabilities.SupportedCompressors, repb.Compressor_ZSTD)
	if !b.zstd {
		b.Error("supported_compressors lacks zstd, which Buck2 prefers")
	}
}

// build executes an action with a large input and with a file, a directory and a symlink as outputs. It then executes
// it again as a cache hit.
func (b *buck2) build() {
	b.Helper()
	large := bytes.Repeat([]byte("a line of a large input\n"), 400_000) // 9.6 MB
	blobs := map[string][]byte{}
	add := func(data []byte) *repb.Digest {
		d := b.fn.Sum(data)
		blobs[d.Hash()] = data
		return d.Proto()
	}
	message := func(m proto.Message) *repb.Digest {
		data, err := proto.Marshal(m)
		if err != nil {
			b.Fatal(err)
		}
		return add(data)
	}
	sub := message(&repb.Directory{Files: []*repb.FileNode{{Name: "large.txt", Digest: add(large)}}})
	root := message(&repb.Directory{
		Files:       []*repb.FileNode{{Name: ".buckconfig", Digest: b.fn.Sum(nil).Proto()}},
		Directories: []*repb.DirectoryNode{{Name: "src", Digest: sub}},
	})
	command := message(&repb.Command{
		// Programs must be found although PATH is not set.
		Arguments: []string{"sh", "-c", "wc -l < src/large.txt > buck-out/count; cp src/large.txt buck-out/copy; " +
			"mkdir buck-out/dir; echo one > buck-out/dir/one; ln -s count buck-out/link; echo said"},
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "BUCK_SCRATCH_PATH", Value: "buck-out/tmp"}},
		OutputPaths:          []string{"buck-out/copy", "buck-out/count", "buck-out/dir", "buck-out/link"},
		Platform:             &repb.Platform{Properties: []*repb.Platform_Property{{Name: "OSFamily", Value: "linux"}}}, // not set in the Action
	})
	action := message(&repb.Action{CommandDigest: command, InputRootDigest: root})

	_, err := b.ac.GetActionResult(b.caller(), &repb.GetActionResultRequest{InstanceName: replayed, ActionDigest: action})
	if status.Code(err) != codes.NotFound {
		b.Fatalf("GetActionResult of a new action: got %v, want NOT_FOUND", err)
	}
	b.upload(blobs)
	first := b.run(action)
	if first.CachedResult {
		b.Error("a new action is a cache hit")
	}
	again := b.run(action)
	if !again.CachedResult {
		b.Error("the same action is not a cache hit")
	}
	for _, r := range []*repb.ActionResult{first.Result, again.Result} {
		b.check(r, large)
	}
	r, err := b.ac.GetActionResult(b.caller(), &repb.GetActionResultRequest{InstanceName: replayed, ActionDigest: action})
	if err != nil {
		b.Fatalf("GetActionResult of an executed action: %v", err)
	}
	b.check(r, large)
}

// caller returns a context with the header of Buck2.
func (b *buck2) caller() context.Context {
	header, err := proto.Marshal(&repb.RequestMetadata{
		ToolDetails: &repb.ToolDetails{ToolName: "buck2"}, ToolInvocationId: "4b1c7d2e-0000-4000-8000-000000000001", ActionMnemonic: "cxx_compile",
	})
	if err != nil {
		b.Fatal(err)
	}
	return grpcmd.AppendToOutgoingContext(b.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", string(header))
}

// upload checks for blobs, a hundred at a time, and uploads the absent ones: small ones in batches, large ones alone.
func (b *buck2) upload(blobs map[string][]byte) {
	b.Helper()
	var all []*repb.Digest
	for hash, data := range blobs {
		all = append(all, &repb.Digest{Hash: hash, SizeBytes: int64(len(data))})
	}
	var missing []*repb.Digest
	for part := range slices.Chunk(all, 100) {
		resp, err := b.cas.FindMissingBlobs(b.caller(), &repb.FindMissingBlobsRequest{InstanceName: replayed, BlobDigests: part})
		if err != nil {
			b.Fatal(err)
		}
		missing = append(missing, resp.MissingBlobDigests...)
	}
	if len(missing) != len(all) {
		b.Errorf("%d of %d new blobs are missing", len(missing), len(all))
	}
	batch := &repb.BatchUpdateBlobsRequest{InstanceName: replayed}
	for _, d := range missing {
		if d.SizeBytes > b.limit {
			b.stream(d, blobs[d.Hash])
			continue
		}
		batch.Requests = append(batch.Requests, &repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: blobs[d.Hash]})
	}
	resp, err := b.cas.BatchUpdateBlobs(b.caller(), batch)
	if err != nil {
		b.Fatal(err)
	}
	for _, r := range resp.Responses {
		if r.GetStatus().GetCode() != 0 {
			b.Errorf("upload of %v: %v", r.Digest, r.Status)
		}
	}
}

// stream uploads one blob by ByteStream, in messages of the batch limit.
func (b *buck2) stream(d *repb.Digest, data []byte) {
	b.Helper()
	name, sent := fmt.Sprintf("%s/uploads/1d8f0c52-7a6e-4b7e-9f58-6f2f2c1a0b11/blobs/%s/%d", replayed, d.Hash, d.SizeBytes), data
	if b.zstd {
		name = strings.Replace(name, "/blobs/", "/compressed-blobs/zstd/", 1)
		e, err := zstd.NewWriter(nil)
		if err != nil {
			b.Fatal(err)
		}
		sent = e.EncodeAll(data, nil)
	}
	w, err := b.bs.Write(b.caller())
	if err != nil {
		b.Fatal(err)
	}
	for off := 0; off < len(sent); {
		n := min(len(sent)-off, int(b.limit))
		err := w.Send(&bspb.WriteRequest{ResourceName: name, WriteOffset: int64(off), Data: sent[off : off+n], FinishWrite: off+n == len(sent)})
		if err != nil && !errors.Is(err, io.EOF) {
			b.Fatal(err)
		}
		off += n
	}
	r, err := w.CloseAndRecv()
	if err != nil || r.CommittedSize != int64(len(sent)) && r.CommittedSize != -1 {
		b.Fatalf("upload of %s: committed %d of the %d bytes sent, %v", name, r.GetCommittedSize(), len(sent), err)
	}
}

// run executes an action and follows its stream to the end.
func (b *buck2) run(action *repb.Digest) *repb.ExecuteResponse {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.caller(), time.Minute)
	defer cancel()
	s, err := b.exec.Execute(ctx, &repb.ExecuteRequest{
		InstanceName: replayed, ActionDigest: action, ExecutionPolicy: &repb.ExecutionPolicy{}, ResultsCachePolicy: &repb.ResultsCachePolicy{},
	})
	if err != nil {
		b.Fatal(err)
	}
	op, err := last(s)
	if err != nil {
		b.Fatalf("the stream of Execute broke: %v", err)
	}
	r := responseOf(b, op)
	if code(r) != codes.OK || r.Result.GetExitCode() != 0 {
		b.Fatalf("status %v, exit code %d, message %q", r.Status, r.Result.GetExitCode(), r.Message)
	}
	return r
}

// check checks what Buck2 requires of a result.
func (b *buck2) check(r *repb.ActionResult, large []byte) {
	b.Helper()
	if r.ExecutionMetadata == nil {
		b.Error("no execution_metadata")
	}
	want := map[string]string{"buck-out/copy": string(large), "buck-out/count": "400000\n"}
	for _, f := range r.OutputFiles {
		if f.Digest == nil {
			b.Fatalf("output file %s has no digest", f.Path)
		}
		if got := b.read(f.Digest); got != want[f.Path] {
			b.Errorf("output file %s has %d bytes, want %d", f.Path, len(got), len(want[f.Path]))
		}
		delete(want, f.Path)
	}
	if len(want) > 0 {
		b.Errorf("output files %v lack %d", r.OutputFiles, len(want))
	}
	if len(r.OutputDirectories) != 1 || r.OutputDirectories[0].TreeDigest == nil {
		b.Fatalf("output directories are %v, want one with a tree_digest", r.OutputDirectories)
	}
	var tree repb.Tree
	if err := proto.Unmarshal([]byte(b.read(r.OutputDirectories[0].TreeDigest)), &tree); err != nil || len(tree.GetRoot().GetFiles()) != 1 {
		b.Errorf("the Tree is %v, %v, want one file", &tree, err)
	}
	if len(r.OutputSymlinks) != 1 || r.OutputSymlinks[0].Target != "count" {
		b.Errorf("output_symlinks are %v, want buck-out/link -> count", r.OutputSymlinks)
	}
}

// read downloads a blob: a small one in a batch, a large one compressed.
func (b *buck2) read(d *repb.Digest) string {
	b.Helper()
	if d.SizeBytes <= b.limit {
		resp, err := b.cas.BatchReadBlobs(b.caller(), &repb.BatchReadBlobsRequest{InstanceName: replayed, Digests: []*repb.Digest{d}})
		if err != nil || resp.Responses[0].GetStatus().GetCode() != 0 {
			b.Fatalf("read %v: %v, %v", d, resp, err)
		}
		return string(resp.Responses[0].Data)
	}
	s, err := b.bs.Read(b.caller(), &bspb.ReadRequest{ResourceName: fmt.Sprintf("%s/compressed-blobs/zstd/%s/%d", replayed, d.Hash, d.SizeBytes)})
	if err != nil {
		b.Fatal(err)
	}
	var packed []byte
	for {
		m, err := s.Recv()
		if err == io.EOF {
			break
		} else if err != nil {
			b.Fatalf("read %v: %v", d, err)
		}
		packed = append(packed, m.Data...)
	}
	z, err := zstd.NewReader(nil)
	if err != nil {
		b.Fatal(err)
	}
	defer z.Close()
	data, err := z.DecodeAll(packed, nil)
	if err != nil || b.fn.Sum(data).Hash() != d.Hash {
		b.Fatalf("read %v: %d bytes of other content, %v", d, len(data), err)
	}
	return string(data)
}

// responseOf returns the response of an operation that is done.
func responseOf(t testing.TB, op *longrunningpb.Operation) *repb.ExecuteResponse {
	t.Helper()
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil || !op.Done {
		t.Fatalf("operation %v: %v", op, err)
	}
	return &r
}

// slow is an action that takes about two seconds.
var slow = action{script: "sleep 2; echo done > out", outputs: []string{"out"}}

// TestSiso replays Siso, which drops the Execute stream every minute (here every 300 ms) and continues with
// WaitExecution. It sets the platform in Action and Command, and rejects a success without outputs.
func TestSiso(t *testing.T) {
	c := serve(t)
	d := c.upload(slow)
	drop := 300 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.exec.Execute(ctx, &repb.ExecuteRequest{ActionDigest: d, DigestFunction: repb.DigestFunction_SHA256, SkipCacheLookup: true})
	if err != nil {
		t.Fatal(err)
	}
	op, err := s.Recv() // may take long on a busy machine
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(drop, cancel)
	name := op.Name
	drops := 0
	for ; !op.GetDone() && drops < 100; drops++ {
		for {
			next, err := s.Recv()
			if err != nil {
				break // dropped or ended
			}
			if op = next; op.Name != name {
				t.Errorf("operation name: got %q, want %q", op.Name, name)
			}
		}
		cancel()
		if op.Done {
			break
		}
		ctx, cancel = context.WithTimeout(t.Context(), drop)
		w, err := c.exec.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		s = w
	}
	cancel()
	if drops < 3 {
		t.Errorf("got %d dropped streams, want at least 3", drops)
	}
	if r := responseOf(t, op); code(r) != codes.OK || len(r.Result.OutputFiles) != 1 || r.CachedResult {
		t.Errorf("after %d dropped streams: %v", drops, r)
	}
}

// TestBazelKeepalive replays --experimental_remote_execution_keepalive: each call has a short deadline, the next call
// resumes the operation, and the action runs once. NOT_FOUND would fail the build (bazel#21530).
func TestBazelKeepalive(t *testing.T) {
	c := serve(t)
	d := c.upload(slow)
	const deadline = 200 * time.Millisecond
	var op *longrunningpb.Operation
	calls := 0
	for ; !op.GetDone() && calls < 100; calls++ {
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		var s interface {
			Recv() (*longrunningpb.Operation, error)
		}
		var err error
		if op == nil {
			s, err = c.exec.Execute(ctx, &repb.ExecuteRequest{ActionDigest: d})
		} else {
			s, err = c.exec.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: op.Name})
		}
		for err == nil {
			var next *longrunningpb.Operation
			if next, err = s.Recv(); err == nil {
				op = next
			}
		}
		cancel()
		if err != io.EOF && status.Code(err) != codes.DeadlineExceeded {
			t.Fatalf("call %d: %v", calls+1, err)
		}
	}
	if calls < 4 {
		t.Errorf("got %d calls, want at least 4", calls)
	}
	r := responseOf(t, op)
	if code(r) != codes.OK || r.CachedResult || len(r.Result.OutputFiles) != 1 {
		t.Errorf("after %d calls: %v", calls, r)
	}
	// The result remains available.
	w, err := c.exec.WaitExecution(t.Context(), &repb.WaitExecutionRequest{Name: op.Name})
	if err != nil {
		t.Fatal(err)
	}
	if op, err = last(w); err != nil || !proto.Equal(responseOf(t, op), r) {
		t.Errorf("WaitExecution after the end: %v, %v", op, err)
	}
}
