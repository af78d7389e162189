// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// streamRules are the rules 36 to 56.
var streamRules = []rule{
	{36, "stream", "upload names may have trailing segments", anything, writeNames},
	{37, "stream", "unusual upload names, and names that change", anything, unusualNames},
	{38, "stream", "writes start at 0 or at the reported offset", anything, writeOffsets},
	{39, "stream", "writes without finish_write are not stored", anything, finishWrite},
	{40, "stream", "a write returns the committed size", anything, committedSize},
	{41, "stream", "a present blob ends a write early and successfully", anything, presentEndsWrite},
	{42, "stream", "mismatched writes are rejected", anything, writeMismatch},
	{43, "stream", "compressed writes", zstdStreams, compressedWrite},
	{44, "stream", "compressed writes resume at compressed offsets", zstdStreams, compressedOffsets},
	{45, "stream", "unknown compressors, several frames, garbage, no data", zstdStreams, compressedOddities},
	{46, "stream", "QueryWriteStatus", anything, queryWrite},
	{47, "stream", "concurrent writers of one blob", anything, concurrentWrites},
	{48, "stream", "reads of absent blobs and from offsets", anything, readOffsets},
	{49, "stream", "reads end at their limit", anything, readLimits},
	{50, "stream", "every blob can be read with every compressor", zstdStreams, compressedRead},
	{51, "stream", "compressed reads have uncompressed offsets and no limits", zstdStreams, compressedReadOffsets},
	{52, "stream", "reads are split into messages and can be cancelled", anything, readPieces},
	{53, "stream", "a read during eviction is complete or fails", ownServer, readWhileEvicted},
	{54, "stream", "the resource name header must match", anything, resourceHeader},
	{55, "stream", "a blob of 5 GiB", anything, fiveGiB},
	{56, "stream", "a crash leaves no partial blobs", ownServer, crashWhileWriting},
}

// wantWritten checks that messages write all of b.
func (c *client) wantWritten(what string, b []byte, ms ...*bspb.WriteRequest) {
	c.Helper()
	r, err := c.write(ms...)
	if c.wantCode(what, err, codes.OK) && r.CommittedSize != int64(len(b)) {
		c.Errorf("%s: committed_size is %d, want %d", what, r.CommittedSize, len(b))
	}
	c.wantBlob("after "+what, c.readName(cas.SHA256.Sum(b).Proto()), b)
}

// wantRefused checks that messages for d are rejected and leave nothing.
func (c *client) wantRefused(what string, d *repb.Digest, ms []*bspb.WriteRequest, want ...codes.Code) {
	c.Helper()
	_, err := c.write(ms...)
	c.wantCode(what, err, want[0], want[1:]...)
	c.wantPresent("after "+what, d, false)
}

func writeNames(c *client) {
	for _, behind := range []string{"", "/a", "/src/main/a file.c", "/blobs/0/1", "/uploads/x"} {
		b, d := freshBlob(1000)
		what := fmt.Sprintf("Write to uploads/UUID/blobs/HASH/SIZE%s", behind)
		c.wantWritten(what, b, pieces(c.writeName(d)+behind, b, 400)...)
	}
	b := fresh(1000)
	f := repb.DigestFunction_BLAKE3
	if blake, ok := function(f); ok && slices.Contains(c.caps.GetCacheCapabilities().GetDigestFunctions(), f) {
		d := blake.Sum(b)
		_, err := c.write(pieces(c.resource("uploads/%s/blobs/blake3/%s/1000/behind", uuid(), d.Hash()), b, 400)...)
		c.wantCode("Write to uploads/UUID/blobs/blake3/HASH/SIZE/behind", err, codes.OK)
		c.wantBlob("after the write", c.resource("blobs/blake3/%s/1000", d.Hash()), b)
	}
}

func unusualNames(c *client) {
	b, d := freshBlob(1000)
	for _, upload := range []string{"not-a-uuid", "1", strings.ToUpper(uuid()), "with spaces and \u00fc"} {
		b, d := freshBlob(1000)
		_, err := c.write(pieces(c.resource("uploads/%s/blobs/%s/1000", upload, d.Hash), b, 400)...)
		c.wantCode(fmt.Sprintf("Write to an upload named %q", upload), err, codes.OK, codes.InvalidArgument)
	}
	for _, name := range []string{
		c.resource("uploads//blobs/%s/1000", d.Hash), c.resource("uploads/blobs/%s/1000", d.Hash),
	} {
		_, err := c.write(pieces(name, b, 400)...)
		c.wantCode(fmt.Sprintf("Write to %q, without a UUID", name), err, codes.InvalidArgument, codes.OK)
	}
	for _, name := range []string{
		"", "/", "uploads", "uploads/", "uploads/x/blobs", "uploads/x/blobs/", "uploads/x/blobs//", "uploads/x/blobs/" + d.Hash,
		"uploads/x/blobs/" + d.Hash + "/", "uploads/x/blobs/" + d.Hash + "/1e3", "uploads/x/blobs/" + d.Hash + "/99999999999999999999",
		"uploads/x/nothing/" + d.Hash + "/1000", "uploads/x/compressed-blobs/" + d.Hash + "/1000", strings.Repeat("/", 3000),
	} {
		_, err := c.write(&bspb.WriteRequest{ResourceName: name, Data: b, FinishWrite: true})
		c.wantCode(fmt.Sprintf("Write to the invalid name %.60q", name), err, codes.InvalidArgument, codes.NotFound, codes.Unimplemented)
	}
	_, err := c.write()
	c.wantCode("Write without a message", err, codes.InvalidArgument, codes.Unknown, codes.OutOfRange, codes.Canceled)

	ms := pieces(c.writeName(d), b, 300)
	for _, m := range ms[1:] {
		m.ResourceName = ""
	}
	c.wantWritten("Write with the name only in the first message", b, ms...)
	b, d = freshBlob(1000)
	ms = pieces(c.writeName(d), b, 300)
	ms[2].ResourceName = c.writeName(d)
	c.wantRefused("Write with another name in the third message", d, ms, codes.InvalidArgument)
}

func writeOffsets(c *client) {
	for what, change := range map[string]func([]*bspb.WriteRequest) []*bspb.WriteRequest{
		"starts at offset 300": func(ms []*bspb.WriteRequest) []*bspb.WriteRequest { return ms[1:] },
		"has a gap":            func(ms []*bspb.WriteRequest) []*bspb.WriteRequest { return append(ms[:1:1], ms[2:]...) },
		"repeats data": func(ms []*bspb.WriteRequest) []*bspb.WriteRequest {
			return append(ms[:2:2], ms[1:]...)
		},
		"starts at offset -1": func(ms []*bspb.WriteRequest) []*bspb.WriteRequest {
			ms[0].WriteOffset = -1
			return ms
		},
		"starts after its end": func(ms []*bspb.WriteRequest) []*bspb.WriteRequest {
			ms[0].WriteOffset = 5000
			return ms
		},
		"has the largest offset": func(ms []*bspb.WriteRequest) []*bspb.WriteRequest {
			ms[1].WriteOffset = math.MaxInt64
			return ms
		},
	} {
		b, d := freshBlob(1000)
		c.wantRefused("Write that "+what, d, change(pieces(c.writeName(d), b, 300)), codes.InvalidArgument, codes.OutOfRange)
		c.wantWritten("Write after one that "+what, b, pieces(c.writeName(d), b, 300)...)
	}
}

func finishWrite(c *client) {
	const size, arrived = 100_000, 60_000
	for _, whole := range []bool{false, true} {
		b, d := freshBlob(size)
		name := c.writeName(d)
		ms := pieces(name, b, 20_000)
		ms[len(ms)-1].FinishWrite = false
		part := ms
		if !whole {
			part = ms[:arrived/20_000]
		}
		// The server may choose the result of the call.
		r, err := c.write(part...)
		if c.wantPresent("after a Write without finish_write", d, false); err == nil && r.CommittedSize > size {
			c.Errorf("Write of %d bytes without finish_write: got committed_size %d", size, r.CommittedSize)
		}
		q, err := c.bs.QueryWriteStatus(c.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
		c.wantCode("QueryWriteStatus after a Write without finish_write", err, codes.OK, codes.NotFound)
		n := q.GetCommittedSize()
		if want := int64(len(part) * 20_000); q.GetComplete() || n > want || c.ours && n != want {
			c.Errorf("QueryWriteStatus without finish_write: want committed_size %d and not complete, got %v", want, q)
			continue
		}
		rest := []*bspb.WriteRequest{{ResourceName: name, WriteOffset: n, Data: b[n:], FinishWrite: true}}
		c.wantWritten(fmt.Sprintf("Write resumed at %d", n), b, rest...)
	}
	// The client cancels the stream.
	b, d := freshBlob(size)
	ctx, cancel := context.WithCancel(c.Context())
	w, err := c.bs.Write(ctx)
	if err == nil {
		err = w.Send(pieces(c.writeName(d), b, size/2)[0])
	}
	expect.Error(c, err, nil, "Write")
	cancel()
	c.wantPresent("after a cancelled Write", d, false)

	b, d = freshBlob(1000)
	ms := append(pieces(c.writeName(d), b, 500), &bspb.WriteRequest{WriteOffset: 1000, Data: []byte("more"), FinishWrite: true})
	_, err = c.write(ms...)
	// A server that answers at finish_write does not see what follows.
	if code := status.Code(err); code != codes.OK && code != codes.InvalidArgument {
		c.Errorf("Write with data after finish_write: got %v, want INVALID_ARGUMENT, or OK without them", err)
	}
	if got, _, err := c.read(c.readName(d), 0, 0); err == nil && !bytes.Equal(got, b) {
		c.Errorf("after a Write with data after finish_write: got %s, want %s, or none", brief(got), brief(b))
	}
	b, d = freshBlob(1000)
	early := pieces(c.writeName(d), b, 500)[:1]
	early[0].FinishWrite = true
	c.wantRefused("Write with finish_write after half the bytes", d, early, codes.InvalidArgument)
}

func committedSize(c *client) {
	for _, size := range []int{0, 1, 1000, 1<<20 + 1} {
		b := fresh(size)
		c.wantWritten(fmt.Sprintf("Write of %d bytes", size), b, pieces(c.writeName(cas.SHA256.Sum(b).Proto()), b, 64<<10)...)
	}
	b, d := freshBlob(1000)
	name := c.writeName(d)
	c.wantWritten("Write with an empty message in the middle and a separate finish_write", b,
		&bspb.WriteRequest{ResourceName: name, Data: b[:400]}, &bspb.WriteRequest{WriteOffset: 400},
		&bspb.WriteRequest{WriteOffset: 400, Data: b[400:]}, &bspb.WriteRequest{WriteOffset: 1000, FinishWrite: true})
}

func presentEndsWrite(c *client) {
	b, d := freshBlob(4 << 20)
	c.put(b)
	c.wantWritten("complete Write of a present blob", b, pieces(c.writeName(d), b, 16<<10)...)
	if c.ours {
		ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
		defer cancel()
		w, err := c.bs.Write(ctx)
		if err == nil {
			err = w.Send(pieces(c.writeName(d), b, 1000)[0])
		}
		r := &bspb.WriteResponse{}
		if err == nil {
			err = w.RecvMsg(r) // without closing our side
		}
		if err != nil || r.CommittedSize != d.SizeBytes {
			c.Errorf("the first message of a present blob: got committed_size %d, %v, want %d at once", r.CommittedSize, err, d.SizeBytes)
		}
	}
	// The blob arrives by another upload during the write.
	b, d = freshBlob(2 << 20)
	w := must.Get(c.bs.Write(c.Context()))(c)
	ms := pieces(c.writeName(d), b, 256<<10)
	for i, m := range ms {
		if i == len(ms)/2 {
			c.wantWritten("concurrent Write", b, pieces(c.writeName(d), b, 1<<20)...)
		}
		if err := w.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			c.Fatal(err)
		}
	}
	r, err := w.CloseAndRecv()
	if err != nil || r.CommittedSize != d.SizeBytes {
		c.Errorf("Write of a blob that another upload stored: got committed_size %d, %v, want %d", r.GetCommittedSize(), err, d.SizeBytes)
	}
}

func writeMismatch(c *client) {
	b, d := freshBlob(100_000)
	changed := bytes.Clone(b)
	changed[50_000] ^= 1
	_, err := c.write(pieces(c.writeName(d), changed, 16<<10)...)
	c.wantText("Write of other bytes", err, []string{d.Hash, cas.SHA256.Sum(changed).Hash()}, codes.InvalidArgument)
	c.wantPresent("after Write of other bytes", d, false)
	c.wantPresent("the other bytes under their own digest", cas.SHA256.Sum(changed).Proto(), false)
	short := &repb.Digest{Hash: d.Hash, SizeBytes: d.SizeBytes + 5}
	c.wantRefused("Write of too few bytes", short, pieces(c.writeName(short), b, 16<<10), codes.InvalidArgument)

	// Too much data must be rejected early.
	small := absentDigest(1000)
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	w := must.Get(c.bs.Write(ctx))(c)
	var sent int64
	const enough = 64 << 20
	for sent < enough {
		m := &bspb.WriteRequest{WriteOffset: sent, Data: b[:64<<10]}
		if sent == 0 {
			m.ResourceName = c.writeName(small)
		}
		if err := w.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			c.Fatal(err)
		}
		sent += int64(len(m.Data))
	}
	_, err = w.CloseAndRecv()
	c.wantText("Write of too many bytes", err, []string{small.Hash}, codes.InvalidArgument, codes.OutOfRange)
	expect.That(c, sent < enough, "Write of too many bytes: the server accepted %d bytes for a blob of 1000", sent)
	c.wantPresent("after Write of too many bytes", small, false)
}

func queryWrite(c *client) {
	query := func(name string) (*bspb.QueryWriteStatusResponse, error) {
		return c.bs.QueryWriteStatus(c.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
	}
	b, d := freshBlob(5000)
	q, err := query(c.writeName(d))
	c.wantCode("QueryWriteStatus of an unknown upload", err, codes.NotFound, codes.OK)
	expect.That(c, !q.GetComplete() && q.GetCommittedSize() == 0, "QueryWriteStatus of an unknown upload: got %v", q)
	name := c.writeName(d)
	c.wantWritten("Write", b, pieces(name, b, 1000)...)
	names := []string{name}
	if c.ours {
		names = append(names, c.writeName(d), c.writeName(d)+"/behind")
	}
	for _, name := range names {
		q, err := query(name)
		expect.That(c, err == nil && q.GetComplete() && q.GetCommittedSize() == 5000,
			"QueryWriteStatus of a blob that is present: got %v, %v, want complete with 5000", q, err)
	}
	_, err = query("not an upload name")
	c.wantCode("QueryWriteStatus of an invalid name", err, codes.InvalidArgument, codes.NotFound)
}

func concurrentWrites(c *client) {
	b, d := freshBlob(3 << 20)
	// writers writes b under each name concurrently.
	writers := func(names ...string) []error {
		errs := make([]error, len(names))
		var all sync.WaitGroup
		for i, name := range names {
			all.Go(func() {
				var r *bspb.WriteResponse
				if r, errs[i] = c.write(pieces(name, b, 64<<10)...); errs[i] == nil && r.CommittedSize != d.SizeBytes {
					errs[i] = status.Errorf(codes.Unknown, "committed_size is %d, want %d", r.CommittedSize, d.SizeBytes)
				}
			})
		}
		all.Wait()
		return errs
	}
	var names []string
	for range 8 {
		names = append(names, c.writeName(d))
	}
	c.wantCode("8 concurrent uploads of one blob", first(writers(names...), nil), codes.OK)
	c.wantBlob("after 8 concurrent uploads of one blob", c.readName(d), b)

	b, d = freshBlob(3 << 20)
	name := c.writeName(d)
	succeeded := 0
	for _, err := range writers(name, name, name, name) {
		switch status.Code(err) {
		case codes.OK:
			succeeded++
		case codes.Aborted, codes.InvalidArgument:
		default:
			c.Errorf("4 concurrent writers of one upload: got %v, want OK, ABORTED or INVALID_ARGUMENT", err)
		}
	}
	if got, _, err := c.read(c.readName(d), 0, 0); succeeded > 0 && err != nil || err == nil && !bytes.Equal(got, b) {
		c.Errorf("after 4 writers of one upload with %d successes: got %s, %v", succeeded, brief(got), err)
	}
	c.wantWritten("Write after 4 writers of one upload", b, pieces(c.writeName(d), b, 64<<10)...)
}
