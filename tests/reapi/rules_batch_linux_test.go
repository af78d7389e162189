// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// batchTooLarge checks rule 27 with many small blobs; batchLimit uses two large ones.
func batchTooLarge(c *client) {
	if int64(c.batchBytes()) != c.caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes() {
		c.Skip("a max_batch_total_size_bytes of at most 64 MiB")
	}
	const each = 50_000
	var reqs []*repb.BatchUpdateBlobsRequest_Request
	for total := 0; total <= c.batchBytes(); total += each {
		reqs = append(reqs, blob(fresh(each)))
	}
	_, err := c.update(reqs...)
	c.wantText(fmt.Sprintf("BatchUpdateBlobs of %d blobs of %d bytes", len(reqs), each), err,
		[]string{fmt.Sprint(c.batchBytes())}, codes.InvalidArgument)
	errs, err := c.update(reqs[:len(reqs)-1]...)
	c.wantCode("BatchUpdateBlobs of all but one of them", first(errs, err), codes.OK)
}

func batchFull(c *client) {
	c = c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: "16MiB"})
	for round := 0; ; round++ {
		if round == 20 {
			c.Fatal("stored 60 MiB in a store of 16 MiB, want some rejected")
		}
		reqs := []*repb.BatchUpdateBlobsRequest_Request{blob(fresh(1 << 20)), blob(fresh(1 << 20)), blob(fresh(1 << 20))}
		errs, err := c.update(reqs...)
		if err != nil {
			c.Fatalf("BatchUpdateBlobs to a full store: the call: %v, want OK, with a status for each blob", err)
		}
		full := false
		for i, err := range errs {
			full = full || err != nil
			if err != nil {
				c.wantText("BatchUpdateBlobs to a full store", err, []string{reqs[i].Digest.Hash}, codes.ResourceExhausted)
			}
			c.wantPresent("blob that a full store answered with "+status.Code(err).String(), reqs[i].Digest, err == nil)
		}
		if full {
			return
		}
	}
}

func compressedBatch(c *client) {
	for _, v := range c.caps.GetCacheCapabilities().GetSupportedBatchUpdateCompressors() {
		if bombs[v] != nil {
			c.batchOf(v)
		}
	}
}

// batchOf checks rule 29 for a compressor.
func (c *client) batchOf(v repb.Compressor_Value) {
	packed := func(d *repb.Digest, data []byte) *repb.BatchUpdateBlobsRequest_Request {
		return &repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: data, Compressor: v}
	}
	digest := func(b []byte) *repb.Digest { return cas.SHA256.Sum(b).Proto() }
	a, b, plain := compressible(100_000), fresh(1000), fresh(1000)
	errs, err := c.update(packed(digest(a), compress(v, a)), blob(plain), packed(digest(b), compress(v, b)))
	c.wantCode(fmt.Sprintf("BatchUpdateBlobs of two blobs of %v and an uncompressed one", v), first(errs, err), codes.OK)
	for _, b := range [][]byte{a, b, plain} {
		c.wantBlob("after BatchUpdateBlobs of compressed blobs", c.readName(digest(b)), b)
	}
	b = compressible(50_000)
	whole := compress(v, b)
	corrupt := bytes.Clone(whole)
	corrupt[len(corrupt)/2] ^= 0xff
	bomb := bombs[v]()
	bad := map[string]*repb.BatchUpdateBlobsRequest_Request{
		"other bytes":                      packed(absentDigest(len(b)), whole),
		"the digest of what is compressed": packed(digest(whole), whole),
		"damaged data":                     packed(digest(b), corrupt),
		"half of the data":                 packed(digest(b), whole[:len(whole)/2]),
		"uncompressed data":                packed(digest(b), b),
		"trailing garbage":                 packed(digest(b), append(bytes.Clone(whole), "garbage"...)),
		"100 MiB in a frame for 10 bytes":  packed(absentDigest(10), bomb),
		"an unknown compressor":            {Digest: digest(b), Data: whole, Compressor: 77},
	}
	if c.ours {
		bad["no data"] = packed(digest(b), nil)
		errs, err := c.update(packed(digest(nil), compress(v, nil)))
		c.wantCode(fmt.Sprintf("BatchUpdateBlobs of the empty blob of %v", v), first(errs, err), codes.OK)
	}
	for what, r := range bad {
		what = fmt.Sprintf("%v, %s", v, what)
		errs, err := c.update(r, blob(fresh(10)))
		if !c.wantCode("BatchUpdateBlobs with "+what+": the call", err, codes.OK) {
			continue
		}
		c.wantCode("BatchUpdateBlobs with "+what, errs[0], codes.InvalidArgument)
		c.wantCode("BatchUpdateBlobs beside "+what, errs[1], codes.OK)
		c.wantPresent("after BatchUpdateBlobs with "+what, r.Digest, false)
	}
}

func batchTwice(c *client) {
	b := fresh(1000)
	errs, err := c.update(blob(b), blob(fresh(10)), blob(b), blob(b))
	c.wantCode("BatchUpdateBlobs with one blob three times", first(errs, err), codes.OK)
	errs, err = c.update(blob(b))
	c.wantCode("BatchUpdateBlobs of a blob that is present", first(errs, err), codes.OK)
	c.wantBlob("after BatchUpdateBlobs with one blob three times", c.readName(cas.SHA256.Sum(b).Proto()), b)
}

func batchRead(c *client) {
	b, other := fresh(1000), fresh(10)
	present, absent, malformed := c.put(b), absentDigest(1000), &repb.Digest{Hash: "xyz", SizeBytes: 3}
	rs, err := c.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{present, absent, malformed, c.put(other), present}})
	if !c.wantCode("BatchReadBlobs of five digests, one absent, one malformed, one twice", err, codes.OK, codes.InvalidArgument) || err != nil {
		return
	}
	for i, want := range []codes.Code{codes.OK, codes.NotFound, codes.InvalidArgument, codes.OK, codes.OK} {
		c.wantCode(fmt.Sprintf("digest %d of 5", i+1), status.ErrorProto(rs[i].GetStatus()), want)
	}
	if string(rs[0].Data) != string(b) || string(rs[4].Data) != string(b) || string(rs[3].Data) != string(other) {
		c.Errorf("got data %s, %s, %s, want %s, %s, %s", brief(rs[0].Data), brief(rs[3].Data), brief(rs[4].Data), brief(b), brief(other), brief(b))
	}
	expect.That(c, len(rs[1].Data)+len(rs[2].Data) == 0, "got data for absent or malformed digests")
}

func batchReadTooLarge(c *client) {
	n := c.batchBytes()
	a, b, one := fresh(n/2), fresh(n-n/2), fresh(1)
	ds := []*repb.Digest{c.put(a), c.put(b), c.put(one)}
	rs, err := c.fetch(&repb.BatchReadBlobsRequest{Digests: ds[:2]})
	if err != nil || rs[0].Status.GetCode() != 0 || rs[1].Status.GetCode() != 0 || string(rs[0].Data) != string(a) || string(rs[1].Data) != string(b) {
		c.Errorf("BatchReadBlobs of %d bytes, as max_batch_total_size_bytes permits: got %d responses, %v", n, len(rs), err)
	}
	if int64(n) != c.caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes() {
		return
	}
	rs, err = c.fetch(&repb.BatchReadBlobsRequest{Digests: ds})
	if err == nil && !c.ours {
		for _, r := range rs {
			err = first([]error{status.ErrorProto(r.GetStatus())}, err)
		}
		c.wantCode(fmt.Sprintf("BatchReadBlobs of %d bytes: some blob", n+1), err, codes.ResourceExhausted)
		return
	}
	c.wantText(fmt.Sprintf("BatchReadBlobs of %d bytes, one too many", n+1), err, []string{fmt.Sprint(n)}, codes.InvalidArgument)
}

func acceptableCompressors(c *client) {
	b := compressible(100_000)
	d := c.put(b)
	for _, accept := range [][]repb.Compressor_Value{
		nil, {repb.Compressor_IDENTITY}, {repb.Compressor_ZSTD}, {repb.Compressor_DEFLATE}, {repb.Compressor_ZSTD, repb.Compressor_DEFLATE}, {88},
	} {
		rs, err := c.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{d, absentDigest(10)}, AcceptableCompressors: accept})
		if err != nil || rs[0].Status.GetCode() != 0 {
			c.Errorf("BatchReadBlobs with acceptable_compressors %v: %v", accept, only(rs, err))
			continue
		}
		permitted := rs[0].Compressor == repb.Compressor_IDENTITY
		for _, v := range accept {
			permitted = permitted || rs[0].Compressor == v
		}
		got, err := decompress(rs[0].Compressor, rs[0].Data)
		if !permitted || err != nil || string(got) != string(b) {
			c.Errorf("BatchReadBlobs with acceptable_compressors %v: got %v, which is %s, %v; want %s", accept, rs[0].Compressor, brief(got), err, brief(b))
		}
	}
}

// directory returns a Directory with one file, named after n, and subdirectories.
func directory(n string, subs ...*repb.Digest) *repb.Directory {
	dir := &repb.Directory{Files: []*repb.FileNode{{Name: "file-" + n, Digest: cas.SHA256.Sum(nil).Proto()}}}
	for i, d := range subs {
		dir.Directories = append(dir.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("sub-%06d", i), Digest: d})
	}
	return dir
}

// inPages counts the Directories in the pages by the name of their file, and returns the size of the largest page.
func inPages(pages []*repb.GetTreeResponse) (times map[string]int, largest int) {
	times = map[string]int{}
	for _, p := range pages {
		largest = max(largest, len(p.GetDirectories()))
		for _, d := range p.GetDirectories() {
			n := ""
			if len(d.GetFiles()) > 0 {
				n = d.Files[0].GetName()
			}
			times[n]++
		}
	}
	return times, largest
}

func getTree(c *client) {
	salt := uuid()
	shared := c.putProto(directory(salt + "-shared"))
	a := c.putProto(directory(salt+"-a", shared))
	b := c.putProto(directory(salt+"-b", shared, absentDigest(80)))
	root := c.putProto(directory(salt+"-root", a, b))
	want := []string{salt + "-root", salt + "-a", salt + "-b", salt + "-shared"}
	req := &repb.GetTreeRequest{InstanceName: c.instance, RootDigest: root}
	all := func(what string, pages []*repb.GetTreeResponse) {
		times, _ := inPages(pages)
		for _, n := range want {
			got := times["file-"+n]
			delete(times, "file-"+n)
			switch {
			case got == 1, n == want[3] && got == 2 && !c.ours:
			default:
				c.Errorf("%s: Directory %s is sent %d times, want once", what, n[len(salt):], got)
			}
		}
		expect.That(c, len(times) == 0, "%s: got Directories that are not in the tree: %v", what, times)
	}
	pages, err := c.getTree(req)
	c.wantCode("GetTree with an absent descendant", err, codes.OK)
	all("GetTree with an absent descendant", pages)

	_, err = c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, RootDigest: absentDigest(100)})
	c.wantCode("GetTree of an absent root", err, codes.NotFound)

	req.PageSize = 1
	pages, err = c.getTree(req)
	c.wantCode("GetTree with page_size 1", err, codes.OK)
	if _, largest := inPages(pages); largest > 1 {
		c.Errorf("GetTree with page_size 1: a page has %d Directories", largest)
	}
	all("GetTree with page_size 1", pages)
	if len(pages) < 2 || pages[1].GetNextPageToken() == "" {
		c.Fatalf("GetTree with page_size 1: %d pages, want one for each Directory, with next_page_token in all but the last", len(pages))
	}
	again := proto.CloneOf(req)
	again.PageToken = pages[1].NextPageToken
	rest, err := c.getTree(again)
	c.wantCode("GetTree from a page_token", err, codes.OK)
	all("GetTree from a page_token, with the pages before it", append(pages[:2:2], rest...))

	again.PageToken = "no such token"
	_, err = c.getTree(again)
	c.wantCode("GetTree from an invalid page_token", err, codes.InvalidArgument)
	again.RootDigest, again.PageToken = c.putProto(directory(salt+"-other")), pages[1].NextPageToken
	_, err = c.getTree(again)
	c.wantCode("GetTree from a page_token of another tree", err, codes.InvalidArgument, codes.OK) // other servers use numbers
	_, err = c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, RootDigest: root, PageSize: -1})
	c.wantCode("GetTree with page_size -1", err, codes.InvalidArgument, codes.OK)
}

func largeTree(c *client) {
	const breadth, depth = 316, 10_000 // 316 times 316 Directories, and a chain of 10,000
	salt := uuid()
	var leaves, inner, chain []*repb.Directory
	for i := range breadth * breadth {
		leaves = append(leaves, directory(fmt.Sprintf("%s-%d", salt, i)))
	}
	ds := c.putAll(encode(c, leaves))
	for i := range breadth {
		inner = append(inner, directory(fmt.Sprintf("%s-inner-%d", salt, i), ds[i*breadth:(i+1)*breadth]...))
	}
	top := c.putAll(encode(c, inner))
	for i := range depth {
		dir := directory(fmt.Sprintf("%s-deep-%d", salt, i))
		if i > 0 {
			_, parent := encoded(c, chain[i-1])
			dir = directory(fmt.Sprintf("%s-deep-%d", salt, i), parent)
		}
		chain = append(chain, dir)
	}
	deep := c.putAll(encode(c, chain))
	root := c.putProto(directory(salt+"-root", append(top, deep[depth-1])...))
	// A message above 4 MiB would fail the call.
	s, err := c.cas.GetTree(c.Context(), &repb.GetTreeRequest{InstanceName: c.instance, RootDigest: root})
	pages, err := received(s, err)
	times, largest := inPages(pages)
	if want := breadth*breadth + breadth + depth + 1; err != nil || len(times) != want {
		c.Errorf("GetTree of %d Directories: got %d of them, %v", want, len(times), err)
	}
	c.Logf("%d Directories in %d messages, at most %d in one", len(times), len(pages), largest)
}
