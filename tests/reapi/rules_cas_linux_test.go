// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// storageRules are the rules 16 to 35.
var storageRules = []rule{
	{16, "cas", "every method rejects malformed digests", anything, malformedDigests},
	{17, "cas", "a known hash with another size is another digest", anything, otherSize},
	{18, "cas", "the empty blob is always present", anything, emptyBlob},
	{19, "cas", "the digest function is inferred from the hash length", anything, inferredFunction},
	{20, "cas", "equal hashes of two functions are two blobs", anything, functionsDoNotAlias},
	{21, "cas", "instance names have any number of segments, none reserved", anything, instanceNames},
	{22, "cas", "instances do not share blobs", anything, isolation},
	{23, "cas", "exactly the absent blobs are reported missing", anything, findMissing},
	{24, "cas", "blobs reported present stay", ownServer, presentStays},
	{25, "cas", "each blob of a batch update has its own status", anything, batchStatus},
	{26, "cas", "a batch update stores no mismatched blob", anything, batchMismatch},
	{27, "cas", "batches above the limit are rejected", anything, batchTooLarge},
	{28, "cas", "a full store is reported for each blob of a batch", ownServer, batchFull},
	{29, "cas", "batch updates may be compressed", zstdBatches, compressedBatch},
	{30, "cas", "a batch may contain a blob twice", anything, batchTwice},
	{31, "cas", "each blob of a batch read has its own status", anything, batchRead},
	{32, "cas", "batch reads above the limit are rejected", anything, batchReadTooLarge},
	{33, "cas", "replies are only compressed if acceptable", anything, acceptableCompressors},
	{34, "cas", "trees are sent completely and in pages, without absent directories", trees, getTree},
	{35, "cas", "a tree of 100,000 directories is sent", trees, largeTree},
}

func malformedDigests(c *client) {
	good := absentDigest(100)
	for _, bad := range []struct {
		what string
		d    *repb.Digest
		body bool // cannot be expressed in a resource name
	}{
		{"a hash in upper case", &repb.Digest{Hash: strings.ToUpper(good.Hash), SizeBytes: 100}, false},
		{"a hash that is too short", &repb.Digest{Hash: good.Hash[1:], SizeBytes: 100}, false},
		{"a hash that is too long", &repb.Digest{Hash: good.Hash + "0", SizeBytes: 100}, false},
		{"a hash with invalid digits", &repb.Digest{Hash: "g" + good.Hash[1:], SizeBytes: 100}, false},
		{"a negative size", &repb.Digest{Hash: good.Hash, SizeBytes: -1}, false},
		{"no hash", &repb.Digest{SizeBytes: 100}, true},
		{"a hash with a slash", &repb.Digest{Hash: "../" + good.Hash[3:], SizeBytes: 100}, true},
		{"no digest", nil, true},
	} {
		for _, m := range c.methods() {
			if m.names && bad.body || bad.d == nil && strings.HasPrefix(m.name, "FindMissing") || bad.d == nil && m.name == "BatchReadBlobs" {
				continue // lists cannot contain unset digests
			}
			if bad.d == nil && m.name == "RegisterChunkMapping" {
				continue // rule 59
			}
			c.wantCode(fmt.Sprintf("%s of %s, %s", m.name, bad.what, name(bad.d)), m.call(c.instance, 0, bad.d), codes.InvalidArgument)
		}
	}
	if !updates.met(c) {
		return
	}
	err := c.record(c.anAction(), &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "out", Digest: &repb.Digest{Hash: strings.ToUpper(good.Hash), SizeBytes: 100}}}})
	c.wantCode("UpdateActionResult with an output whose hash is in upper case", err, codes.InvalidArgument)
}

func otherSize(c *client) {
	b, d := freshBlob(1000)
	c.put(b)
	for _, size := range []int64{999, 1001, 1, 1 << 40} {
		other := &repb.Digest{Hash: d.Hash, SizeBytes: size}
		what := fmt.Sprintf("a blob of 1000 bytes is there, asked for with size %d", size)
		c.wantPresent(what, other, false)
		got, _, err := c.read(c.readName(other), 0, 0)
		c.wantCode(what+": Read", err, codes.NotFound, codes.InvalidArgument)
		expect.That(c, len(got) == 0, "%s: got data %s, want none", what, brief(got))
		if size <= 1001 {
			rs, err := c.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{other}})
			c.wantCode(what+": BatchReadBlobs", only(rs, err), codes.NotFound, codes.InvalidArgument)
			errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: other, Data: b})
			c.wantCode(what+": BatchUpdateBlobs", first(errs, err), codes.InvalidArgument)
			ms := pieces(c.writeName(other), b, 500)
			_, err = c.write(ms...)
			c.wantCode(what+": Write", err, codes.InvalidArgument)
		}
		c.wantPresent(what+", after rejected uploads", other, false)
	}
}

func emptyBlob(c *client) {
	servers := []*client{c}
	if c.server != nil {
		// A server that has evicted blobs.
		small := c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: "4MiB", Args: []string{"--lease", "0"}})
		for range 12 {
			small.put(fresh(1 << 20))
		}
		servers = append(servers, small)
	}
	for _, c := range servers {
		for _, v := range c.caps.GetCacheCapabilities().GetDigestFunctions() {
			f, ok := function(v)
			if !ok {
				continue
			}
			d := f.Sum(nil)
			resp, err := c.cas.FindMissingBlobs(c.Context(), &repb.FindMissingBlobsRequest{
				InstanceName: c.instance, DigestFunction: v, BlobDigests: []*repb.Digest{d.Proto()},
			})
			expect.That(c, err == nil && len(resp.MissingBlobDigests) == 0,
				"%v: FindMissingBlobs of the empty blob: got %v, %v, want none", v, resp.GetMissingBlobDigests(), err)
			c.wantBlob(fmt.Sprintf("%v: the empty blob", v), c.resource("%s", d.Resource()), nil)
			rs, err := c.fetch(&repb.BatchReadBlobsRequest{DigestFunction: v, Digests: []*repb.Digest{d.Proto()}})
			if err := only(rs, err); err != nil || len(rs[0].Data) > 0 {
				c.Errorf("%v: BatchReadBlobs of the empty blob: %v", v, err)
			}
			pages, err := c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, DigestFunction: v, RootDigest: d.Proto()})
			if !c.ours && status.Code(err) == codes.Unimplemented {
				continue
			}
			expect.That(c, err == nil && len(pages) != 0 && len(pages[0].Directories) == 1,
				"%v: GetTree of the empty blob: got %v, %v, want one empty Directory", v, pages, err)
		}
	}
}

func inferredFunction(c *client) {
	listed := c.caps.GetCacheCapabilities().GetDigestFunctions()
	for _, v := range listed {
		f, ok := function(v)
		if !ok {
			continue
		}
		b := fresh(3000)
		d := f.Sum(b).Proto()
		switch v {
		case repb.DigestFunction_SHA256, repb.DigestFunction_SHA1, repb.DigestFunction_MD5, repb.DigestFunction_SHA384, repb.DigestFunction_SHA512:
			errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: b})
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs with a hash of %v and no digest_function", v), first(errs, err), codes.OK)
		default:
			errs, err := c.updateAs(&repb.BatchUpdateBlobsRequest{
				InstanceName: c.instance, DigestFunction: v,
				Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d, Data: b}},
			})
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs with digest_function %v", v), first(errs, err), codes.OK)
			// The stated function wins although another one has hashes of this length.
			b := fresh(3000)
			errs, err = c.updateAs(&repb.BatchUpdateBlobsRequest{
				InstanceName: c.instance, DigestFunction: v,
				Requests: []*repb.BatchUpdateBlobsRequest_Request{blob(b)},
			})
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs with digest_function %v and the hash of SHA256", v), first(errs, err), codes.InvalidArgument)
		}
		resp, err := c.cas.FindMissingBlobs(c.Context(), &repb.FindMissingBlobsRequest{
			InstanceName: c.instance, DigestFunction: v, BlobDigests: []*repb.Digest{d},
		})
		if err != nil || len(resp.MissingBlobDigests) > 0 {
			c.Errorf("FindMissingBlobs with digest_function %v after that: got %v, %v, want none", v, resp.GetMissingBlobDigests(), err)
		}
	}
	for _, v := range []repb.DigestFunction_Value{repb.DigestFunction_VSO, repb.DigestFunction_MURMUR3, 99} {
		if slices.Contains(listed, v) {
			continue
		}
		for _, m := range c.methods() {
			if !m.names {
				c.wantCode(fmt.Sprintf("%s with digest_function %v, which is not listed", m.name, v), m.call(c.instance, v, absentDigest(100)), codes.InvalidArgument)
			}
		}
	}
	for _, m := range c.methods() {
		if !m.names {
			err := m.call(c.instance, repb.DigestFunction_SHA256, &repb.Digest{Hash: absentDigest(100).Hash[:40], SizeBytes: 100})
			c.wantCode(m.name+" with digest_function SHA256 and a hash of 40 digits", err, codes.InvalidArgument)
		}
	}
}

func functionsDoNotAlias(c *client) {
	if c.ours { // up to 1024 bytes, SHA256TREE has the hashes of SHA256
		small := fresh(1000)
		_, _, err := c.read(c.resource("blobs/sha256tree/%s/1000", c.put(small).Hash), 0, 0)
		c.wantCode("Read as SHA256TREE of a blob with the same hash by SHA256", err, codes.NotFound)
	}
	found := false
	for _, v := range []repb.DigestFunction_Value{repb.DigestFunction_BLAKE3, repb.DigestFunction_SHA256TREE} {
		f, ok := function(v)
		if !ok || !slices.Contains(c.caps.GetCacheCapabilities().GetDigestFunctions(), v) {
			continue
		}
		found = true
		segment := strings.ToLower(v.String())
		b := fresh(3000)
		d := c.put(b) // by SHA256
		resp, err := c.cas.FindMissingBlobs(c.Context(), &repb.FindMissingBlobsRequest{
			InstanceName: c.instance, DigestFunction: v, BlobDigests: []*repb.Digest{d},
		})
		if err != nil || len(resp.MissingBlobDigests) != 1 {
			c.Errorf("FindMissingBlobs of the SHA256 of a blob as %v: got %v, %v, want it missing", v, resp.GetMissingBlobDigests(), err)
		}
		_, _, err = c.read(c.resource("blobs/%s/%s/3000", segment, d.Hash), 0, 0)
		c.wantCode(fmt.Sprintf("Read of the SHA256 of a blob as %v", v), err, codes.NotFound)
		_, err = c.write(pieces(c.resource("uploads/%s/blobs/%s/%s/3000", uuid(), segment, d.Hash), b, 1000)...)
		c.wantCode(fmt.Sprintf("Write of the hash of SHA256 as %v", v), err, codes.InvalidArgument)
		own := f.Sum(b)
		_, err = c.write(pieces(c.resource("uploads/%s/blobs/%s/%s/3000", uuid(), segment, own.Hash()), b, 1000)...)
		c.wantCode(fmt.Sprintf("Write by %v", v), err, codes.OK)
		c.wantBlob(fmt.Sprintf("after a Write by %v", v), c.resource("blobs/%s/%s/3000", segment, own.Hash()), b)
		c.wantPresent(fmt.Sprintf("by SHA256, the hash of %v", v), own.Proto(), false)
	}
	if !found {
		c.Skip("BLAKE3 or SHA256TREE in digest_functions")
	}
}

func instanceNames(c *client) {
	valid := []string{c.instance}
	if c.ours {
		valid = append(valid, "", "one", "many/segments/here", "blob/upload/action")
	}
	for _, instance := range valid {
		d := *c
		d.instance = instance
		b := fresh(100)
		errs, err := d.update(blob(b))
		c.wantCode(fmt.Sprintf("BatchUpdateBlobs of instance %q", instance), first(errs, err), codes.OK)
		d.wantBlob("after BatchUpdateBlobs", d.readName(cas.SHA256.Sum(b).Proto()), b)
		b = fresh(100)
		_, err = d.write(pieces(d.writeName(cas.SHA256.Sum(b).Proto()), b, 50)...)
		c.wantCode(fmt.Sprintf("Write of instance %q", instance), err, codes.OK)
		d.wantPresent(fmt.Sprintf("after Write of instance %q", instance), cas.SHA256.Sum(b).Proto(), true)
	}
	words := []string{"blobs", "uploads", "actions", "actionResults", "operations", "capabilities", "compressed-blobs"}
	if c.ours {
		words = cas.Reserved()
	}
	for _, word := range words {
		for _, instance := range []string{word, "some/" + word + "/where"} {
			for _, m := range c.methods() {
				err := m.call(instance, repb.DigestFunction_SHA256, absentDigest(100))
				c.wantCode(fmt.Sprintf("%s of instance %q", m.name, instance), err, codes.InvalidArgument, codes.NotFound)
			}
		}
	}
}

func isolation(c *client) {
	other := *c
	other.instance = strings.TrimPrefix(c.instance+"/other-"+uuid(), "/")
	b, d := freshBlob(5000)
	c.put(b)
	missing, err := other.absent(c.Context(), d)
	switch code := status.Code(err); {
	case !c.ours && (code == codes.NotFound || code == codes.InvalidArgument || code == codes.PermissionDenied):
		return // it has no other instance
	case !c.ours && err == nil && len(missing) == 0:
		c.Skip("separate instances: all names share one store")
	case err != nil || len(missing) != 1:
		c.Errorf("FindMissingBlobs of a blob of instance %q in instance %q: got %v, %v, want it missing", c.instance, other.instance, missing, err)
	}
	_, _, err = other.read(other.readName(d), 0, 0)
	c.wantCode(fmt.Sprintf("Read from instance %q of a blob of instance %q", other.instance, c.instance), err, codes.NotFound)
	rs, err := other.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{d}})
	c.wantCode("BatchReadBlobs of it", only(rs, err), codes.NotFound)
	c.wantBlob("in its own instance", c.readName(d), b)
}

func findMissing(c *client) {
	// The rule requires 100,000; for our own server, check ten times as many.
	total, each := 100_000, 50_000
	if c.server != nil {
		total = 1_000_000
	}
	present := map[string]bool{}
	var blobs [][]byte
	for range 1000 {
		blobs = append(blobs, fresh(50))
	}
	stored := c.putAll(blobs)
	for _, d := range stored {
		present[d.Hash] = true
	}
	random := fresh(32 * total)
	for begin := 0; begin < total; begin += each {
		var ask []*repb.Digest
		want := map[string]bool{}
		for i := begin; i < begin+each; i++ {
			h := fmt.Sprintf("%x", random[32*i:32*i+32])
			ask, want[h] = append(ask, &repb.Digest{Hash: h, SizeBytes: int64(i) + 1}), true
			if i%1000 == 0 {
				// Add present ones, and some twice.
				ask = append(ask, stored[i%len(stored)], stored[(i+7)%len(stored)], stored[i%len(stored)], ask[len(ask)-1])
			}
		}
		missing, err := c.absent(c.Context(), ask...)
		must.Be(c, err == nil, "FindMissingBlobs of %d digests: %v", len(ask), err)
		for _, d := range missing {
			must.Be(c, !present[d.GetHash()], "FindMissingBlobs returns %s, which is present", name(d))
			must.Be(c, want[d.GetHash()], "FindMissingBlobs returns %s twice or without being asked", name(d))
			delete(want, d.GetHash())
		}
		if len(want) > 0 {
			c.Fatalf("FindMissingBlobs of %d digests: %d absent ones are not returned", len(ask), len(want))
		}
	}
	c.Logf("%d digests, %d in each call", total, each)
}

// presentStays checks that blobs which were reported present or acknowledged stay when the store is full, and that new
// ones are rejected because of leases.
func presentStays(c *client) {
	c = c.own(bazelrun.ServerConfig{Dir: filepath.Join(c.TempDir(), "store"), NoJobs: true, MaxSize: "16MiB"})
	rnd := seeded(24)
	var promised []*repb.Digest
	for i := range 60 {
		b := random(rnd, 1+rnd.IntN([]int{1000, 50_000, 300_000}[i%3]))
		must.Succeed(c, c.store(b))
		promised = append(promised, cas.SHA256.Sum(b).Proto())
	}
	if missing, err := c.absent(c.Context(), promised...); err != nil || len(missing) > 0 {
		c.Fatalf("%d of %d blobs are missing: %v", len(missing), len(promised), err)
	}
	for _, size := range []int{1 << 20, 100_000, 10_000} {
		stored, _, err := c.fill(rnd, size, 64<<20)
		expect.Text(c, err.Error(), "lease", "rejection of %d bytes", size)
		promised = append(promised, stored...)
	}
	c.wantAll(promised)
}

func batchStatus(c *client) {
	good, wrong, better := fresh(100), fresh(100), fresh(200)
	bad := &repb.BatchUpdateBlobsRequest_Request{Digest: absentDigest(100), Data: wrong}
	malformed := &repb.BatchUpdateBlobsRequest_Request{Digest: &repb.Digest{Hash: "xyz", SizeBytes: 100}, Data: fresh(100)}
	errs, err := c.update(blob(good), bad, malformed, blob(better))
	if !c.wantCode("BatchUpdateBlobs of two good and two bad blobs", err, codes.OK) {
		return
	}
	for i, want := range []codes.Code{codes.OK, codes.InvalidArgument, codes.InvalidArgument, codes.OK} {
		c.wantCode(fmt.Sprintf("blob %d of 4", i+1), errs[i], want)
	}
	c.wantText("blob 2 of 4", errs[1], []string{bad.Digest.Hash}, codes.InvalidArgument)
	c.wantPresent("a good blob", cas.SHA256.Sum(good).Proto(), true)
	c.wantPresent("a good blob after bad ones", cas.SHA256.Sum(better).Proto(), true)
}

func batchMismatch(c *client) {
	b := fresh(1000)
	changed := bytes.Clone(b)
	changed[500] ^= 1
	for what, r := range map[string]*repb.BatchUpdateBlobsRequest_Request{
		"bytes of another hash": {Digest: cas.SHA256.Sum(b).Proto(), Data: changed},
		"too few bytes":         {Digest: cas.SHA256.Sum(b).Proto(), Data: b[:999]},
		"too many bytes":        {Digest: cas.SHA256.Sum(b).Proto(), Data: append(bytes.Clone(b), 0)},
		"no bytes":              {Digest: cas.SHA256.Sum(b).Proto()},
		"another size":          {Digest: &repb.Digest{Hash: cas.SHA256.Sum(b).Hash(), SizeBytes: 999}, Data: b},
	} {
		errs, err := c.update(r)
		c.wantCode("BatchUpdateBlobs with "+what+": the call", err, codes.OK)
		if err == nil {
			c.wantText("BatchUpdateBlobs with "+what, errs[0], []string{r.Digest.Hash}, codes.InvalidArgument)
		}
		c.wantPresent("after BatchUpdateBlobs with "+what, r.Digest, false)
	}
	c.wantPresent("the rejected bytes under their own digest", cas.SHA256.Sum(changed).Proto(), false)
}
