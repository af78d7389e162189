// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A buck2 behaves like the re_grpc client of Buck2: it never states a digest function, compresses streams if possible,
// and follows a single Execute stream to its end.
type buck2 struct {
	*client
	fn    cas.Function
	limit int64 // of a batch, and of one WriteRequest
	zstd  bool
}

// A calling test adds headers to its calls.
type calling struct {
	testing.TB
	ctx context.Context
}

func (c calling) Context() context.Context { return c.ctx }

// TestBuck2 replays the calls for one genrule of Buck2, with several digest functions; BLAKE3 is the one that Buck2
// recommends. The server learns the function from the uploads, or gets it from the flag.
func TestBuck2(t *testing.T) {
	for _, fn := range []cas.Function{cas.BLAKE3, cas.SHA256, cas.SHA1} {
		for name, args := range map[string][]string{"learned": nil, "flag": {"--digest-function", "builds/main=" + fn.String()}} {
			t.Run(fn.String()+"/"+name, func(t *testing.T) {
				confined(t)
				c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Args: args})
				c.instance = "builds/main"
				c.buck2(t, fn).build()
			})
		}
	}
}

// TestClientsOfTwoFunctions lets Buck2 with BLAKE3 use an instance first, and then a client with SHA256. Neither states
// its function. The default applies from then on, and the error for Buck2 names the flag.
func TestClientsOfTwoFunctions(t *testing.T) {
	confined(t)
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store")})
	c.buck2(t, cas.BLAKE3).build()
	c.buck2(t, cas.SHA256).build()
	data := fresh(100)
	errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: cas.BLAKE3.Sum(data).Proto(), Data: data})
	c.wantCode("BatchUpdateBlobs of Buck2 after another client", first(errs, err), codes.InvalidArgument)
	expect.Message(t, first(errs, err), "--digest-function =blake3", "BatchUpdateBlobs of Buck2 after another client")
}

// buck2 returns a Buck2 that has begun a build on the server of c.
func (c *client) buck2(t *testing.T, fn cas.Function) *buck2 {
	t.Helper()
	b := &buck2{fn: fn, client: c.in(calling{t, c.building(&repb.RequestMetadata{
		ToolDetails: &repb.ToolDetails{ToolName: "buck2"}, ActionMnemonic: "genrule",
		ToolInvocationId: "4b1c7d2e-0000-4000-8000-000000000001",
	})})}
	b.configure()
	return b
}

// configure is the startup of Buck2.
func (b *buck2) configure() {
	b.Helper()
	must.Succeed(b, b.getCapabilities(b.Context()))
	must.Be(b, execution.met(b.client), "exec_enabled is false: Buck2 would fail")
	b.limit = min(b.caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes(), 4_000_000)
	if b.zstd = zstdStreams.met(b.client); !b.zstd {
		b.Error("supported_compressors lacks zstd, which Buck2 prefers")
	}
}

// genruleDir is where Buck2 puts the script, the sources and the outputs of a genrule.
const genruleDir = "buck-out/v2/gen/root/904931f735703749/__large__"

// genruleScript is the script that Buck2 writes for a genrule; its last lines are the user's command. $SRCDIR contains
// a link to each source, and a genrule may write there.
const genruleScript = `export BUCK_SCRATCH_PATH=../../../../../../../$BUCK_SCRATCH_PATH
cd ` + genruleDir + `/srcs
mkdir -p ./../out || exit 99
export TMP=${TMPDIR:-/tmp}
cd "$SRCDIR"
wc -l < $SRCS > $OUT/count; cp $SRCS $OUT/copy
echo scratch > scratch; mkdir -p below; mv scratch below
echo scratch > $TMP/scratch; mkdir -p $BUCK_SCRATCH_PATH; cp $TMP/scratch $BUCK_SCRATCH_PATH
mkdir $OUT/dir; echo one > $OUT/dir/one; ln -s count $OUT/link; echo said
`

// build executes a genrule with a large input and with a file, a directory and a symlink as outputs. It then executes it
// again as a cache hit.
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
		data, _ := encoded(b, m)
		return add(data)
	}
	dir := message(&repb.Directory{Directories: []*repb.DirectoryNode{
		{Name: "sh", Digest: message(&repb.Directory{Files: []*repb.FileNode{
			{Name: "genrule.sh", Digest: add([]byte(genruleScript)), IsExecutable: true},
		}})},
		{Name: "srcs", Digest: message(&repb.Directory{Symlinks: []*repb.SymlinkNode{
			{Name: "large.txt", Target: "../../../../../../../src/large.txt"},
		}})},
	}})
	parents := strings.Split(genruleDir, "/")
	for _, name := range slices.Backward(parents[1:]) {
		dir = message(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: name, Digest: dir}}})
	}
	root := message(&repb.Directory{
		Files: []*repb.FileNode{{Name: ".buckconfig", Digest: b.fn.Sum(nil).Proto()}},
		Directories: []*repb.DirectoryNode{
			{Name: parents[0], Digest: dir},
			{Name: "src", Digest: message(&repb.Directory{Files: []*repb.FileNode{{Name: "large.txt", Digest: add(large)}}})},
		},
	})
	const out = genruleDir + "/out/"
	command := message(&repb.Command{
		Arguments: []string{"/usr/bin/env", "bash", "-e", genruleDir + "/sh/genrule.sh"},
		// Programs must be found although PATH is not set. All paths but the first are relative to $SRCDIR.
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{
			{Name: "BUCK_SCRATCH_PATH", Value: "buck-out/v2/tmp/root/904931f735703749/__large__/genrule"},
			{Name: "GEN_DIR", Value: "GEN_DIR_DEPRECATED"},
			{Name: "OUT", Value: "../out"},
			{Name: "SRCDIR", Value: "./."},
			{Name: "SRCS", Value: "././large.txt"},
		},
		OutputPaths: []string{out + "copy", out + "count", out + "dir", out + "link"},
		// Not set in the Action.
		Platform: &repb.Platform{Properties: []*repb.Platform_Property{{Name: "OSFamily", Value: "linux"}}},
	})
	action := message(&repb.Action{CommandDigest: command, InputRootDigest: root})

	_, err := b.lookup(action)
	b.wantCode("GetActionResult of a new action", err, codes.NotFound)
	b.upload(blobs)
	for _, cached := range []bool{false, true} {
		r := b.wantResult("Execute", b.request(action, func(r *repb.ExecuteRequest) {
			r.ExecutionPolicy, r.ResultsCachePolicy = &repb.ExecutionPolicy{}, &repb.ResultsCachePolicy{}
		}))
		if r.CachedResult != cached || r.Result.GetExitCode() != 0 {
			b.Errorf("got cached %t, exit code %d, %q, want cached %t and 0", r.CachedResult, r.Result.GetExitCode(), r.Message,
				cached)
		}
		b.check(r.Result, large)
	}
	r, err := b.lookup(action)
	b.wantCode("GetActionResult of an executed action", err, codes.OK)
	b.check(r, large)
}

// upload checks for blobs, a hundred at a time, and uploads the absent ones: small ones in batches, large ones alone,
// in messages of the batch limit.
func (b *buck2) upload(blobs map[string][]byte) {
	b.Helper()
	var all, missing []*repb.Digest
	for hash, data := range blobs {
		all = append(all, &repb.Digest{Hash: hash, SizeBytes: int64(len(data))})
	}
	for part := range slices.Chunk(all, 100) {
		missing = append(missing, must.Get(b.absent(b.Context(), part...))(b)...)
	}
	expect.Equal(b, len(missing), len(all))
	var batch []*repb.BatchUpdateBlobsRequest_Request
	for _, d := range missing {
		data := blobs[d.Hash]
		if d.SizeBytes <= b.limit {
			batch = append(batch, &repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: data})
			continue
		}
		name := b.writeName(d)
		if b.zstd {
			name, data = b.zstdUpload(d), zstdOf(data)
		}
		r, err := b.write(pieces(name, data, int(b.limit))...)
		if err != nil || r.CommittedSize != int64(len(data)) && r.CommittedSize != -1 {
			b.Fatalf("upload of %s: committed %d of the %d bytes sent, %v", name, r.GetCommittedSize(), len(data), err)
		}
	}
	errs, err := b.update(batch...)
	b.wantCode("BatchUpdateBlobs", first(errs, err), codes.OK)
}

// check checks what Buck2 requires of a result.
func (b *buck2) check(r *repb.ActionResult, large []byte) {
	b.Helper()
	expect.That(b, r.ExecutionMetadata != nil, "no execution_metadata")
	want := map[string]string{genruleDir + "/out/copy": string(large), genruleDir + "/out/count": "400000\n"}
	for _, f := range r.OutputFiles {
		must.Be(b, f.Digest != nil, "output file %s has no digest", f.Path)
		if got := b.load(f.Digest); got != want[f.Path] {
			b.Errorf("output file %s has %d bytes, want %d", f.Path, len(got), len(want[f.Path]))
		}
		delete(want, f.Path)
	}
	expect.That(b, len(want) == 0, "output files %v lack %d", r.OutputFiles, len(want))
	must.Be(b, len(r.OutputDirectories) == 1 && r.OutputDirectories[0].TreeDigest != nil,
		"output directories are %v, want one with a tree_digest", r.OutputDirectories)
	var tree repb.Tree
	err := proto.Unmarshal([]byte(b.load(r.OutputDirectories[0].TreeDigest)), &tree)
	expect.That(b, err == nil && len(tree.GetRoot().GetFiles()) == 1, "the Tree is %v, %v, want one file", &tree, err)
	expect.That(b, len(r.OutputSymlinks) == 1 && r.OutputSymlinks[0].Target == "count",
		"output_symlinks are %v, want out/link -> count", r.OutputSymlinks)
}

// load downloads a blob: a small one in a batch, a large one compressed.
func (b *buck2) load(d *repb.Digest) string {
	b.Helper()
	if d.SizeBytes <= b.limit {
		rs, err := b.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{d}})
		if err := only(rs, err); err != nil {
			b.Fatalf("read %v: %v", d, err)
		}
		return string(rs[0].Data)
	}
	packed, _, err := b.read(b.compressedName(zstdCompressor, d), 0, 0)
	must.Be(b, err == nil, "read %v: %v", d, err)
	data, err := decompress(zstdCompressor, packed)
	must.Be(b, err == nil && b.fn.Sum(data).Hash() == d.Hash,
		"read %v: %d bytes of other content, %v", d, len(data), err)
	return string(data)
}

// held uploads an action that runs until release is called.
func (c *client) held() (d *repb.Digest, release func()) {
	c.Helper()
	mark := "held " + uuid()
	script := `trap 'go=1' USR1; while [ "$go" = "" ]; do sleep 0.05; done; echo done > out # ` + mark
	return c.prepare(job{script: script, outputs: []string{"out"}}), func() {
		must.Hold(c, "the action runs", func() bool { return sandboxtest.Signal(c, mark, syscall.SIGUSR1) > 0 })
	}
}

// wantFresh checks that an operation is done and has the result of a held action, not from the action cache.
func (c *client) wantFresh(what string, op *longrunningpb.Operation) *repb.ExecuteResponse {
	c.Helper()
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil || !op.Done {
		c.Fatalf("%s: got operation %v, %v, want it done", what, op, err)
	}
	expect.That(c, r.GetStatus().GetCode() == 0 && !r.CachedResult && len(r.Result.GetOutputFiles()) == 1,
		"%s: got %v, want a new result with one output", what, &r)
	return &r
}

// TestSiso replays Siso, which drops the Execute stream every minute (here three times, after 300 ms) and continues
// with WaitExecution. It sets the platform in Action and Command, and rejects a success without outputs.
func TestSiso(t *testing.T) {
	c := serve(t)
	d, release := c.held()
	ctx, cancel := context.WithCancel(t.Context())
	s := must.Get(c.open(ctx, d, func(r *repb.ExecuteRequest) {
		r.DigestFunction, r.SkipCacheLookup = repb.DigestFunction_SHA256, true
	}))(t)
	op, err := s.Recv() // may take long on a busy machine
	must.Succeed(t, err)
	name := op.Name
	for drops := 0; !op.GetDone(); drops++ {
		if drops == 3 {
			release()
		} else {
			time.AfterFunc(300*time.Millisecond, cancel)
		}
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
		if drops == 3 {
			break
		}
		ctx, cancel = context.WithCancel(t.Context())
		s = must.Get(c.exec.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name}))(t)
	}
	cancel()
	c.wantFresh("after dropped streams", op)
}

// TestBazelKeepalive replays --experimental_remote_execution_keepalive: each call has a short deadline, the next call
// resumes the operation, and the action runs once. NOT_FOUND would fail the build (bazel#21530).
func TestBazelKeepalive(t *testing.T) {
	c := serve(t)
	d, release := c.held()
	const deadline, least = 200 * time.Millisecond, 4
	var op *longrunningpb.Operation
	for calls := 0; !op.GetDone(); calls++ {
		if calls >= least && op != nil && release != nil {
			release()
			release = nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		var s stream
		var err error
		if op == nil {
			s, err = c.open(ctx, d, nil)
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
		if err != io.EOF && status.Code(err) != codes.DeadlineExceeded || calls == 1000 {
			t.Fatalf("call %d: %v", calls+1, err)
		}
	}
	expect.That(t, release == nil, "the action ended before %d calls", least)
	r := c.wantFresh("after calls with deadlines", op)
	// The result remains available.
	if a := c.waitExecution(op.Name); a.err != nil || !proto.Equal(a.response, r) {
		t.Errorf("WaitExecution after the end: got %v, %v, want %v", a.response, a.err, r)
	}
}

// TestBuildStreamCaches replays BuildStream with an artifact and a source cache: it probes both services with empty
// requests, pushes under two URIs, and pulls after the server was killed, from it and from its upstream.
func TestBuildStreamCaches(t *testing.T) {
	upstream := serve(t)
	cfg := bazelrun.ServerConfig{
		Dir: filepath.Join(t.TempDir(), "store"), NoJobs: true, Args: []string{"--cas", "grpc://" + upstream.server.Addr},
	}
	c := connect(t, cfg)
	_, err := assetpb.NewFetchClient(c.conn).FetchBlob(t.Context(), &assetpb.FetchBlobRequest{InstanceName: c.instance})
	c.wantCode("fetch probe", err, codes.InvalidArgument)
	_, err = assetpb.NewPushClient(c.conn).PushBlob(t.Context(), &assetpb.PushBlobRequest{InstanceName: c.instance})
	c.wantCode("push probe", err, codes.InvalidArgument)
	files := c.putProto(&repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: c.put([]byte("built"))}}})
	artifact := c.put([]byte("an artifact"))
	const urn = "urn:fdc:buildstream.build:2020:"
	uris := []string{urn + "artifact:demo/hello/strong", urn + "artifact:demo/hello/weak"}
	source := []string{urn + "source:local/1"}
	must.Get(assetpb.NewPushClient(c.conn).PushBlob(t.Context(), &assetpb.PushBlobRequest{
		InstanceName: c.instance, Uris: uris, BlobDigest: artifact, ReferencesDirectories: []*repb.Digest{files},
	}))(t)
	must.Get(assetpb.NewPushClient(c.conn).PushDirectory(t.Context(), &assetpb.PushDirectoryRequest{
		InstanceName: c.instance, Uris: source, RootDirectoryDigest: files,
	}))(t)
	c.kill()
	for _, c := range []*client{connect(t, cfg), upstream} {
		fetch := assetpb.NewFetchClient(c.conn)
		for _, uri := range uris {
			m, err := fetch.FetchBlob(t.Context(), &assetpb.FetchBlobRequest{InstanceName: c.instance, Uris: []string{uri}})
			expect.That(t, err == nil && proto.Equal(m.BlobDigest, artifact),
				"%s: got %v, %v, want %v", uri, m, err, artifact)
		}
		m, err := fetch.FetchDirectory(t.Context(), &assetpb.FetchDirectoryRequest{InstanceName: c.instance, Uris: source})
		expect.That(t, err == nil && proto.Equal(m.RootDirectoryDigest, files),
			"source: got %v, %v, want %v", m, err, files)
	}
}
