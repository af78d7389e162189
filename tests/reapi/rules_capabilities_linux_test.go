// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/bazelbuild/remote-apis/build/bazel/semver"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/ca"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// capabilityRules are the rules 1 to 15.
var capabilityRules = []rule{
	{1, "capabilities", "capabilities describe the cache and execution", anything, reportsCapabilities},
	{2, "capabilities", "clients of API 2.0 to 2.12 are supported", anything, servesOldAndNew},
	{3, "capabilities", "every supported digest function is listed", anything, listsFunctions},
	{4, "capabilities", "the digest function of execution is in its list", execution, listsExecutionFunction},
	{5, "capabilities", "exec_enabled is correct", anything, execEnabledIsTrue},
	{6, "capabilities", "update_enabled is correct", anything, updateEnabledIsTrue},
	{7, "capabilities", "priority ranges are advertised and accepted", anything, prioritiesAreAccepted},
	{8, "capabilities", "the batch limit is exact", anything, batchLimit},
	{9, "capabilities", "messages of a whole batch are accepted", anything, largeMessages},
	{10, "capabilities", "the blob limit applies to every kind of upload", anything, blobLimit},
	{11, "capabilities", "listed compressors work for streams and batches", anything, listedCompressors},
	{12, "capabilities", "absolute symlinks behave as advertised", anything, absoluteSymlinks},
	{13, "capabilities", "advertised chunking methods are implemented", anything, chunkMethods},
	{14, "capabilities", "chunking parameters are within the ranges of the API", anything, chunkParameters},
	{15, "capabilities", "unknown instances have the same code everywhere", anything, wrongInstance},
}

// refusals are the codes for callers without permission.
var refusals = []codes.Code{codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented}

func reportsCapabilities(c *client) {
	caps, err := repb.NewCapabilitiesClient(c.conn).GetCapabilities(c.Context(),
		&repb.GetCapabilitiesRequest{InstanceName: c.instance})
	if !c.wantCode("GetCapabilities", err, codes.OK, codes.PermissionDenied, codes.Unauthenticated) || err != nil {
		return
	}
	expect.That(c, caps.GetCacheCapabilities() != nil, "cache_capabilities are missing")
	if caps.GetExecutionCapabilities() == nil && c.server != nil {
		c.Error("execution_capabilities are missing")
	}
	if caps.GetExecutionCapabilities() == nil {
		err := c.request(absentDigest(100), nil).err
		c.wantCode("Execute without execution_capabilities", err, codes.Unimplemented, refusals...)
	}
}

func servesOldAndNew(c *client) {
	order := func(v *semver.SemVer) int64 { return int64(v.GetMajor())<<32 + int64(v.GetMinor()) }
	text := func(v *semver.SemVer) string { return fmt.Sprintf("%d.%d", v.GetMajor(), v.GetMinor()) }
	low, high, deprecated := c.caps.GetLowApiVersion(), c.caps.GetHighApiVersion(), c.caps.GetDeprecatedApiVersion()
	expect.That(c, low.GetMajor() == 2 && low.GetMinor() == 0,
		"low_api_version is %s, want 2.0: clients of 2.0 would be warned or rejected", text(low))
	expect.That(c, order(high) >= order(&semver.SemVer{Major: 2, Minor: 12}),
		"high_api_version is %s, want 2.12 or above", text(high))
	if c.ours && (text(high) != "2.13" || text(deprecated) != "2.0") {
		c.Errorf("high_api_version is %s, deprecated_api_version %s, want 2.13 and 2.0", text(high), text(deprecated))
	}
	if deprecated != nil && order(deprecated) > order(low) {
		c.Errorf("deprecated_api_version %s is above low_api_version %s", text(deprecated), text(low))
	}
}

// function returns our digest function for an API value.
func function(v repb.DigestFunction_Value) (cas.Function, bool) {
	for _, f := range cas.Functions() {
		if f.Proto() == v {
			return f, true
		}
	}
	return 0, false
}

func listsFunctions(c *client) {
	listed := c.caps.GetCacheCapabilities().GetDigestFunctions()
	must.Be(c, len(listed) != 0, "digest_functions is empty")
	oneOf(c, "first of digest_functions", listed[0], repb.DigestFunction_SHA256, listed[0])
	for i, v := range listed {
		expect.That(c, v != repb.DigestFunction_UNKNOWN && !slices.Contains(listed[:i], v),
			"digest_functions %v has UNKNOWN, or one function twice", listed)
	}
	for _, f := range cas.Functions() {
		if c.ours && !slices.Contains(listed, f.Proto()) {
			c.Errorf("digest_functions %v lacks %v", listed, f.Proto())
		}
		b := fresh(2000)
		req := &repb.BatchUpdateBlobsRequest{
			InstanceName: c.instance, DigestFunction: f.Proto(),
			Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: f.Sum(b).Proto(), Data: b}},
		}
		if slices.Contains(listed, f.Proto()) {
			errs, err := c.updateAs(req)
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of a blob with %v, which is listed", f.Proto()), first(errs, err), codes.OK)
			rs, err := c.fetch(&repb.BatchReadBlobsRequest{DigestFunction: f.Proto(), Digests: []*repb.Digest{f.Sum(b).Proto()}})
			if err := only(rs, err); err != nil || string(rs[0].Data) != string(b) {
				c.Errorf("BatchReadBlobs of the uploaded blob: %v", err)
			}
		} else {
			errs, err := c.updateAs(req)
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of a blob with %v, which is not listed", f.Proto()), first(errs, err),
				codes.InvalidArgument)
		}
	}
}

// first returns err or, if nil, the first of errs.
func first(errs []error, err error) error {
	for _, e := range errs {
		if err == nil {
			err = e
		}
	}
	return err
}

func listsExecutionFunction(c *client) {
	x := c.caps.GetExecutionCapabilities()
	expect.That(c, x.GetDigestFunction() != repb.DigestFunction_UNKNOWN,
		"execution_capabilities.digest_function is UNKNOWN")
	oneOf(c, "execution_capabilities.digest_function", x.GetDigestFunction(), repb.DigestFunction_SHA256, x.GetDigestFunction())
	if all := x.GetDigestFunctions(); (len(all) > 0 || c.ours) && !slices.Contains(all, x.GetDigestFunction()) {
		c.Errorf("execution_capabilities.digest_functions %v lacks digest_function %v", all, x.GetDigestFunction())
	}
}

func execEnabledIsTrue(c *client) {
	action := absentDigest(100)
	err := c.request(action, nil).err
	if c.caps.GetExecutionCapabilities().GetExecEnabled() {
		c.wantCode("Execute of an absent action with exec_enabled true", err, codes.FailedPrecondition, codes.NotFound)
	} else {
		c.wantCode("Execute with exec_enabled false", err, codes.Unimplemented, refusals...)
	}
	c.forCallers(func(c *client, may bool) {
		expect.Equal(c, c.caps.GetExecutionCapabilities().GetExecEnabled(), may, "exec_enabled")
		err := c.request(action, nil).err
		want := codes.PermissionDenied
		if may {
			want = codes.FailedPrecondition
		}
		c.wantCode(fmt.Sprintf("Execute of an absent action by a caller with permission %t", may), err, want)
	})
}

// forCallers runs check for a caller with all rights and for one that may only read and write blobs. It does nothing
// unless the server is of this tree.
func (c *client) forCallers(check func(c *client, may bool)) {
	if c.server == nil {
		return
	}
	tokens := map[bool]string{true: uuid(), false: uuid()}
	text := "version: 1\ncallers:\n"
	for may, token := range tokens {
		rights := "[read, write]"
		if may {
			rights = "[read, write, cache, execute]"
		}
		text += fmt.Sprintf("  - name: may-%t\n    token_sha256: %s\n    rights: %s\n", may,
			cas.SHA256.Sum([]byte(token)).Hash(), rights)
	}
	file := filepath.Join(c.TempDir(), "auth.yaml")
	must.Succeed(c, os.WriteFile(file, []byte(text), 0o600))
	server := c.own(bazelrun.ServerConfig{Args: []string{"--auth", file}})
	nobody := server.methods()[0].call("", repb.DigestFunction_SHA256, absentDigest(10))
	c.wantCode("FindMissingBlobs without a token", nobody, codes.Unauthenticated)
	for may, token := range tokens {
		d := dial(c.TB, server.server.Addr, grpc.WithPerRPCCredentials(ca.Bearer(token)))
		d.ours = true
		must.Succeed(c, d.getCapabilities(c.Context()))
		check(d, may)
	}
}

// record calls UpdateActionResult.
func (c *client) record(action *repb.Digest, r *repb.ActionResult) error {
	_, err := c.ac.UpdateActionResult(c.Context(),
		&repb.UpdateActionResultRequest{InstanceName: c.instance, ActionDigest: action, ActionResult: r})
	return err
}

// anAction uploads a unique action and returns its digest.
func (c *client) anAction() *repb.Digest {
	c.Helper()
	cmd := c.putProto(&repb.Command{Arguments: []string{"/bin/true", uuid()}, OutputPaths: []string{"out"}})
	return c.putProto(&repb.Action{CommandDigest: cmd, InputRootDigest: c.putProto(&repb.Directory{})})
}

func updateEnabledIsTrue(c *client) {
	updateAndLookup(c)
	c.forCallers(func(c *client, may bool) {
		expect.Equal(c, updates.met(c), may, "update_enabled")
		updateAndLookup(c)
	})
}

func prioritiesAreAccepted(c *client) {
	check := func(what string, p *repb.PriorityCapabilities) []int32 {
		var inside []int32
		expect.That(c, len(p.GetPriorities()) != 0, "%s has no ranges: Bazel rejects all priorities", what)
		for _, r := range p.GetPriorities() {
			expect.That(c, r.GetMinPriority() <= r.GetMaxPriority(),
				"%s: got range %d to %d, want minimum before maximum", what, r.GetMinPriority(), r.GetMaxPriority())
			inside = append(inside, r.GetMinPriority(), r.GetMaxPriority())
		}
		if c.ours && !slices.Equal(inside, []int32{math.MinInt32, math.MaxInt32}) {
			c.Errorf("%s: got the ranges %v, want one of all numbers", what, inside)
		}
		return inside
	}
	for _, p := range check("cache_priority_capabilities", c.caps.GetCacheCapabilities().GetCachePriorityCapabilities()) {
		if !updates.met(c) {
			break
		}
		_, err := c.ac.UpdateActionResult(c.Context(), &repb.UpdateActionResultRequest{
			InstanceName: c.instance, ActionDigest: c.anAction(),
			ActionResult:       &repb.ActionResult{StdoutDigest: c.put(fresh(10))},
			ResultsCachePolicy: &repb.ResultsCachePolicy{Priority: p},
		})
		c.wantCode(fmt.Sprintf("UpdateActionResult with the priority %d", p), err, codes.OK)
	}
	if !execution.met(c) {
		return
	}
	inside := check("execution_priority_capabilities",
		c.caps.GetExecutionCapabilities().GetExecutionPriorityCapabilities())
	execute := func(p int32) error {
		return c.request(absentDigest(100), func(r *repb.ExecuteRequest) {
			r.ExecutionPolicy = &repb.ExecutionPolicy{Priority: p}
			r.ResultsCachePolicy = &repb.ResultsCachePolicy{Priority: p}
		}).err
	}
	for _, p := range inside {
		c.wantCode(fmt.Sprintf("Execute of an absent action with the priority %d", p), execute(p), codes.FailedPrecondition,
			codes.NotFound)
		for _, q := range []int32{p - 1, p + 1} {
			c.wantCode(fmt.Sprintf("Execute of an absent action with the priority %d", q), execute(q),
				codes.FailedPrecondition, codes.NotFound, codes.InvalidArgument)
		}
	}
}

// batchBytes returns the batch limit.
func (c *client) batchBytes() int {
	n := c.caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes()
	if n <= 0 || n > 64<<20 {
		n = 4_000_000 // as Buck2 assumes
	}
	return int(n)
}

func batchLimit(c *client) {
	n := c.batchBytes()
	errs, err := c.update(blob(fresh(n/2)), blob(fresh(n-n/2)))
	c.wantCode(fmt.Sprintf("BatchUpdateBlobs of %d bytes, as max_batch_total_size_bytes permits", n), first(errs, err),
		codes.OK)
	if int64(n) != c.caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes() {
		expect.That(c, !c.ours, "max_batch_total_size_bytes is not set")
		return
	}
	_, err = c.update(blob(fresh(n/2)), blob(fresh(n-n/2+1)))
	c.wantText(fmt.Sprintf("BatchUpdateBlobs of %d bytes, one too many", n+1), err, []string{fmt.Sprint(n)},
		codes.InvalidArgument)
}

func largeMessages(c *client) {
	size := c.batchBytes()
	if c.ours {
		size *= 2
	}
	b, d := freshBlob(size)
	r, err := c.write(pieces(c.writeName(d), b, len(b))...)
	c.wantCode(fmt.Sprintf("Write with one message of %d bytes", len(b)), err, codes.OK)
	if err == nil && r.CommittedSize != d.SizeBytes {
		c.Errorf("Write with one message: committed %d of %d bytes", r.CommittedSize, d.SizeBytes)
	}
}

func blobLimit(c *client) {
	limit := c.caps.GetCacheCapabilities().GetMaxCasBlobSizeBytes()
	if limit <= 0 {
		c.Skip("max_cas_blob_size_bytes")
	}
	// The first bytes must suffice to reject the blob.
	over := &repb.Digest{Hash: absentDigest(1).Hash, SizeBytes: limit + 1}
	_, err := c.write(&bspb.WriteRequest{ResourceName: c.writeName(over), Data: fresh(100)})
	c.wantText("Write of a blob of max_cas_blob_size_bytes + 1", err, []string{fmt.Sprint(limit)}, codes.InvalidArgument)
	if c.server == nil {
		return
	}
	// With a small limit the whole blob can be sent.
	const small = 1 << 20
	c = c.own(bazelrun.ServerConfig{NoJobs: true, Args: []string{"--max-blob", "1MiB"}})
	if got := c.caps.GetCacheCapabilities().GetMaxCasBlobSizeBytes(); got != small {
		c.Fatalf("max_cas_blob_size_bytes is %d, want %d", got, small)
	}
	fits, big := fresh(small), fresh(small+1)
	d := cas.SHA256.Sum(big).Proto()
	c.put(fits)
	_, err = c.write(pieces(c.writeName(d), big, 64<<10)...)
	c.wantCode("Write of 1 MiB and a byte", err, codes.InvalidArgument)
	errs, err := c.update(blob(big), blob(fresh(100)))
	if err != nil || status.Code(errs[0]) != codes.InvalidArgument || errs[1] != nil {
		c.Errorf("BatchUpdateBlobs of 1 MiB and a byte, and of 100: got %v, %v, want INVALID_ARGUMENT only for the first",
			errs, err)
	}
	if zstdStreams.met(c) {
		_, err = c.write(pieces(c.zstdUpload(d), zstdOf(big), 64<<10)...)
		c.wantCode("compressed Write of 1 MiB and a byte", err, codes.InvalidArgument)
		errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: zstdOf(big), Compressor: zstdCompressor})
		c.wantCode("compressed BatchUpdateBlobs of 1 MiB and a byte", first(errs, err), codes.InvalidArgument)
	}
	if splicing.met(c) {
		halves := []*repb.Digest{c.put(big[:small/2]), c.put(big[small/2:])}
		for _, unary := range []bool{false, true} {
			c.wantCode("chunks of 1 MiB and a byte", c.splices(unary, d, 0, halves...), codes.InvalidArgument)
		}
	}
	for what, r := range map[string]*repb.ActionResult{
		"stdout_raw": {StdoutRaw: big}, "stderr_raw": {StderrRaw: big},
		"contents": {OutputFiles: []*repb.OutputFile{{Path: "a", Digest: d, Contents: big}}},
	} {
		c.wantCode("UpdateActionResult with 1 MiB and a byte of "+what, c.record(c.anAction(), r), codes.InvalidArgument)
	}
	c.wantPresent("the rejected blob", d, false)
}

func absoluteSymlinks(c *client) {
	strategy := c.caps.GetCacheCapabilities().GetSymlinkAbsolutePathStrategy()
	oneOf(c, "symlink_absolute_path_strategy", strategy,
		repb.SymlinkAbsolutePathStrategy_ALLOWED, repb.SymlinkAbsolutePathStrategy_DISALLOWED)
	if updates.met(c) && strategy == repb.SymlinkAbsolutePathStrategy_ALLOWED {
		err := c.record(c.anAction(), &repb.ActionResult{OutputSymlinks: []*repb.OutputSymlink{{Path: "l", Target: "/usr/bin/true"}}})
		c.wantCode("UpdateActionResult with an absolute symlink, which is ALLOWED", err, codes.OK)
	}
	if !execution.met(c) {
		return
	}
	link := map[string]file{"link": {link: "/absolute/" + uuid()}}
	a := c.try(job{script: "readlink link", files: link, change: func(a *repb.Action) { a.DoNotCache = true }})
	err := a.err
	switch refused := status.Code(err) == codes.InvalidArgument &&
		strings.Contains(status.Convert(err).Message(), "link"); {
	case strategy == repb.SymlinkAbsolutePathStrategy_DISALLOWED:
		c.wantCode("Execute with an absolute symlink, which is DISALLOWED", err, codes.InvalidArgument)
	case refused, c.ours && (err != nil || a.response.GetResult().GetExitCode() != 0):
		c.Errorf("Execute with an absolute symlink, which is ALLOWED: %v", err)
	}
}

func chunkMethods(c *client) {
	cache := c.caps.GetCacheCapabilities()
	if !cache.GetSplitBlobSupport() && !cache.GetSpliceBlobSupport() {
		c.Skip("split_blob_support or splice_blob_support")
	}
	low, high := c.caps.GetLowApiVersion().GetMinor(), c.caps.GetHighApiVersion().GetMinor()
	d, f := absentDigest(5000), repb.DigestFunction_SHA256
	if cache.GetSplitBlobSupport() && high >= 13 {
		_, err := c.mapping(&repb.GetChunkMappingRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: f})
		c.wantCode("GetChunkMapping of an absent blob", err, codes.NotFound)
	}
	if cache.GetSplitBlobSupport() && low < 13 {
		_, err := c.cas.SplitBlob(c.Context(),
			&repb.SplitBlobRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: f})
		c.wantCode("SplitBlob of an absent blob", err, codes.NotFound)
	}
	chunks := []*repb.Digest{absentDigest(2500), absentDigest(2500)}
	if cache.GetSpliceBlobSupport() && high >= 13 {
		err := c.register(&repb.RegisterChunkMappingRequest{
			InstanceName: c.instance, BlobDigest: d, DigestFunction: f,
			ChunkDigests: chunks,
		})
		c.wantCode("RegisterChunkMapping of absent chunks", err, codes.NotFound)
	}
	if cache.GetSpliceBlobSupport() && low < 13 {
		_, err := c.cas.SpliceBlob(c.Context(),
			&repb.SpliceBlobRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: f, ChunkDigests: chunks})
		c.wantCode("SpliceBlob of absent chunks", err, codes.NotFound)
	}
	if c.ours && (high < 13 || !cache.GetSplitBlobSupport() || !cache.GetSpliceBlobSupport()) {
		c.Errorf("split_blob_support %t, splice_blob_support %t, high_api_version 2.%d: want both, and 2.13",
			cache.GetSplitBlobSupport(), cache.GetSpliceBlobSupport(), high)
	}
}

func chunkParameters(c *client) {
	fast, rep := c.caps.GetCacheCapabilities().GetFastCdc_2020Params(), c.caps.GetCacheCapabilities().GetRepMaxCdcParams()
	if fast == nil && rep == nil {
		c.Skip("fast_cdc_2020_params or rep_max_cdc_params")
	}
	if avg := fast.GetAvgChunkSizeBytes(); fast != nil && (avg < 1<<10 || avg > 8<<20) {
		c.Errorf("fast_cdc_2020_params.avg_chunk_size_bytes is %d, want 1 KiB to 8 MiB", avg)
	}
	if least := rep.GetMinChunkSizeBytes(); rep != nil && least < 64 {
		c.Errorf("rep_max_cdc_params.min_chunk_size_bytes is %d, want at least 64", least)
	}
	wantFast := &repb.FastCdc2020Params{AvgChunkSizeBytes: 512 << 10}
	wantRep := &repb.RepMaxCdcParams{MinChunkSizeBytes: 256 << 10, HorizonSizeBytes: 8 * 256 << 10}
	if c.ours && (!proto.Equal(fast, wantFast) || !proto.Equal(rep, wantRep)) {
		c.Errorf("got %v and %v, want the recommended ones: %v and %v", fast, rep, wantFast, wantRep)
	}
}

func wrongInstance(c *client) {
	// A server that accepts every name still rejects reserved words.
	wrong := "no/blobs/instance"
	if !c.ours {
		wrong = "no-such-instance-" + uuid()
	}
	var codesSeen, refused []string
	for _, m := range c.methods() {
		err := m.call(wrong, repb.DigestFunction_SHA256, absentDigest(100))
		codesSeen = append(codesSeen, fmt.Sprintf("%s %v", m.name, status.Code(err)))
		if code := status.Code(err); code == codes.InvalidArgument || code == codes.NotFound {
			refused = append(refused, code.String())
		}
	}
	_, err := repb.NewCapabilitiesClient(c.conn).GetCapabilities(c.Context(),
		&repb.GetCapabilitiesRequest{InstanceName: wrong})
	if !c.ours && err == nil {
		c.Skip("a list of instances: it accepts every name")
	}
	c.wantCode(fmt.Sprintf("GetCapabilities of instance %q", wrong), err, codes.InvalidArgument, codes.NotFound)
	slices.Sort(refused)
	if len(refused) != len(codesSeen) || len(slices.Compact(refused)) != 1 || refused[0] != status.Code(err).String() {
		c.Errorf("instance %q: got %s; want %v from each, as from GetCapabilities", wrong, strings.Join(codesSeen, ", "),
			status.Code(err))
	}
}
