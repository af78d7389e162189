// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	grpcmeta "google.golang.org/grpc/metadata"
)

func readOffsets(c *client) {
	b, d := freshBlob(100_000)
	c.put(b)
	absent := absentDigest(1000)
	_, _, err := c.read(c.readName(absent), 0, 0)
	c.wantText("Read of an absent blob", err, []string{absent.Hash}, codes.NotFound)
	for _, off := range []int64{0, 1, 50_000, 99_999, 100_000} {
		got, _, err := c.read(c.readName(d), off, 0)
		expect.That(c, err == nil && bytes.Equal(got, b[off:]),
			"Read of 100,000 bytes from offset %d: got %s, %v, want %s", off, brief(got), err, brief(b[off:]))
	}
	for _, off := range []int64{100_001, 1 << 40, -1, -1 << 62} {
		got, _, err := c.read(c.readName(d), off, 0)
		c.wantCode(fmt.Sprintf("Read of 100,000 bytes from offset %d", off), err, codes.OutOfRange)
		expect.That(c, len(got) == 0, "Read from offset %d: got data %s, want none", off, brief(got))
	}
	_, _, err = c.read(c.readName(d), 0, -1)
	c.wantCode("Read with read_limit -1", err, codes.InvalidArgument, codes.OutOfRange)
	for _, name := range []string{"", "/", "blobs", "blobs/", "blobs/" + d.Hash, "blobs/" + d.Hash + "/", "blobs/" + d.Hash + "/x", "nothing/" + d.Hash + "/100000"} {
		_, _, err := c.read(name, 0, 0)
		c.wantCode(fmt.Sprintf("Read of the invalid name %q", name), err, codes.InvalidArgument, codes.NotFound, codes.Unimplemented)
	}
}

func readLimits(c *client) {
	b, d := freshBlob(3_000_000)
	c.put(b)
	for _, test := range []struct{ off, limit, want int64 }{
		{0, 1, 1},
		{0, 2_999_999, 2_999_999},
		{0, 3_000_000, 3_000_000},
		{0, 1 << 40, 3_000_000},
		{2_999_990, 100, 10},
		{1_500_000, 1_000_000, 1_000_000},
		{3_000_000, 5, 0},
		{7, math.MaxInt64, 2_999_993},
	} {
		got, _, err := c.read(c.readName(d), test.off, test.limit)
		if want := b[test.off : test.off+test.want]; err != nil || !bytes.Equal(got, want) {
			c.Errorf("Read of 3,000,000 bytes from offset %d with read_limit %d: got %s, %v, want %s", test.off, test.limit, brief(got), err, brief(want))
		}
	}
}

func readPieces(c *client) {
	const size = 9_000_000
	if c.server != nil {
		c = c.own(bazelrun.ServerConfig{NoJobs: true}) // to count its open files
	}
	b, d := freshBlob(size)
	c.put(b)
	got, largest, err := c.read(c.readName(d), 0, 0)
	if err != nil || !bytes.Equal(got, b) || largest > 4<<20 || c.ours && largest > 1<<20 {
		c.Errorf("Read of %d bytes: got %s in pieces of at most %d, %v", size, brief(got), largest, err)
	}
	open := func() int {
		files := must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.server.PID)))(c)
		return len(files)
	}
	before := 0
	if c.server != nil {
		before = open()
	}
	for range 100 {
		ctx, cancel := context.WithCancel(c.Context())
		r, err := c.bs.Read(ctx, &bspb.ReadRequest{ResourceName: c.readName(d)})
		if err == nil {
			_, err = r.Recv()
		}
		must.Be(c, err == nil, "Read: %v", err)
		cancel()
	}
	c.wantBlob("after 100 cancelled reads", c.readName(d), b)
	if c.server != nil {
		must.Hold(c.TB, "the files of cancelled reads closed", func() bool { return open() <= before+5 })
	}
}

func readWhileEvicted(c *client) {
	c = c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: "16MiB", Args: []string{"--lease", "0"}})
	const size = 6 << 20
	whole, failed, evicted := 0, 0, 0
	for range 5 {
		b, d := freshBlob(size)
		c.put(b)
		r := must.Get(c.bs.Read(c.Context(), &bspb.ReadRequest{ResourceName: c.readName(d)}))(c)
		m := must.Get(r.Recv())(c)
		got := bytes.Clone(m.Data)
		for range 10 {
			c.put(fresh(3 << 20))
		}
		missing, lookup := c.absent(c.Context(), d)
		if lookup != nil {
			c.Fatal(lookup)
		}
		evicted += len(missing)
		var err error
		for err == nil {
			if m, err = r.Recv(); err == nil {
				got = append(got, m.Data...)
			}
		}
		switch {
		case err == io.EOF && bytes.Equal(got, b):
			whole++
		case err == io.EOF:
			c.Errorf("complete Read of a blob evicted meanwhile: got %s, want %s", brief(got), brief(b))
		case bytes.HasPrefix(b, got):
			failed++
		default:
			c.Errorf("Read of a blob evicted meanwhile: got other bytes and %v", err)
		}
	}
	expect.That(c, evicted != 0, "no blob was evicted while it was read, want at least one of 5")
	c.Logf("%d blobs were evicted while they were read; %d reads were complete, %d failed", evicted, whole, failed)
}

func resourceHeader(c *client) {
	const header = "build.bazel.remote.execution.v2.resource-name"
	b, d := freshBlob(1000)
	with := func(value string) context.Context {
		return grpcmeta.AppendToOutgoingContext(c.Context(), header, value)
	}
	write := func(value, name string) error {
		w, err := c.bs.Write(with(value))
		if err != nil {
			return err
		}
		if err := w.Send(pieces(name, b, 1000)[0]); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		_, err = w.CloseAndRecv()
		return err
	}
	name := c.writeName(d)
	c.wantCode("Write with another resource name in the header", write(c.writeName(absentDigest(5)), name), codes.InvalidArgument)
	c.wantCode("Write with an empty header", write("", name), codes.InvalidArgument, codes.OK)
	if c.ours {
		c.wantPresent("after these writes", d, false)
	}
	c.wantCode("Write with the resource name in the header", write(name, name), codes.OK)
	read := func(value, name string) error {
		r, err := c.bs.Read(with(value), &bspb.ReadRequest{ResourceName: name})
		_, err = received(r, err)
		return err
	}
	c.wantCode("Read with the resource name in the header", read(c.readName(d), c.readName(d)), codes.OK)
	c.wantCode("Read with another resource name in the header", read(c.readName(absentDigest(5)), c.readName(d)), codes.InvalidArgument)
	_, err := c.bs.QueryWriteStatus(with("other"), &bspb.QueryWriteStatusRequest{ResourceName: name})
	c.wantCode("QueryWriteStatus with another resource name in the header", err, codes.InvalidArgument)
}

// A long is a blob of any size, generated on demand: equal random blocks, each with its offset at the start.
type long struct {
	block []byte
	size  int64
}

func newLong(seed [32]byte, size int64) *long {
	l := &long{make([]byte, 1<<20), size}
	rand.NewChaCha8(seed).Read(l.block)
	return l
}

// at returns the bytes from off, a multiple of the block size, to the end of the block. They are valid until the next
// call.
func (l *long) at(off int64) []byte {
	binary.LittleEndian.PutUint64(l.block, uint64(off))
	return l.block[:min(int64(len(l.block)), l.size-off)]
}

// hash returns the SHA-256 of the whole blob.
func (l *long) hash() string {
	h := sha256.New()
	for off := int64(0); off < l.size; off += int64(len(l.block)) {
		h.Write(l.at(off))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// fiveGiB checks rule 55. Only the server holds the whole blob.
func fiveGiB(c *client) {
	const size = 5<<30 + 3
	if limit := c.caps.GetCacheCapabilities().GetMaxCasBlobSizeBytes(); c.server == nil && limit > 0 && limit < size {
		c.Skipf("a max_cas_blob_size_bytes of 5 GiB: it is %d", limit)
	}
	if c.server != nil {
		c = c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: "11GiB"}) // a blob may take half of it
	}
	// A constant saves a third of the time on our own, empty store.
	seed, d := [32]byte([]byte("five gibibytes and three bytes..")), &repb.Digest{SizeBytes: size}
	d.Hash = "f0bb1c2ace0ac3b020417c1b42150039cb1cf204e1c19d36510675cf456e7cb0"
	if c.server == nil {
		seed = [32]byte(fresh(32))
		d.Hash = newLong(seed, size).hash()
	}
	l := newLong(seed, size)
	began := time.Now()

	name := c.writeName(d)
	w := must.Get(c.bs.Write(c.Context()))(c)
	for off := int64(0); off < size; off += int64(len(l.block)) {
		b := l.at(off)
		m := &bspb.WriteRequest{ResourceName: name, WriteOffset: off, Data: b, FinishWrite: off+int64(len(b)) == size}
		if err := w.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			c.Fatal(err)
		}
	}
	resp, err := w.CloseAndRecv()
	must.Be(c, err == nil && resp.CommittedSize == size,
		"Write of %d bytes: got committed_size %d, %v", int64(size), resp.GetCommittedSize(), err)
	c.wantPresent("after a Write of 5 GiB", d, true)
	if q, err := c.bs.QueryWriteStatus(c.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name}); err != nil || q.CommittedSize != size || !q.Complete {
		c.Errorf("QueryWriteStatus after a Write of 5 GiB: got %v, %v", q, err)
	}
	written := time.Now()

	r := must.Get(c.bs.Read(c.Context(), &bspb.ReadRequest{ResourceName: c.readName(d)}))(c)
	var off int64
	var rest []byte // of the current block
	for {
		m, err := r.Recv()
		if err == io.EOF {
			break
		}
		must.Be(c, err == nil, "Read of 5 GiB, after %d bytes: %v", off, err)
		for data := m.Data; len(data) > 0; {
			if len(rest) == 0 && off < size {
				rest = l.at(off)
			}
			n := min(len(rest), len(data))
			must.Be(c, n != 0 && bytes.Equal(data[:n], rest[:n]),
				"Read of 5 GiB: wrong or extra bytes at offset %d", off)
			data, rest, off = data[n:], rest[n:], off+int64(n)
		}
	}
	expect.Equal(c, off, size, "Read of %d bytes", int64(size))
	tail := bytes.Clone(l.at(size - 3)) // the last block has only three bytes
	if got, _, err := c.read(c.readName(d), size-3, 0); err != nil || !bytes.Equal(got, tail) {
		c.Errorf("Read of the last 3 bytes of 5 GiB: got %s, %v, want %s", brief(got), err, brief(tail))
	}
	c.Logf("written in %.1f s, read in %.1f s", written.Sub(began).Seconds(), time.Since(written).Seconds())
	if c.server != nil {
		const bound = 512 << 20
		n := peak(c.TB, c.server.PID)
		if c.Logf("the server had at most %d MiB of memory", n>>20); n > bound {
			c.Errorf("the server had %d MiB of memory, want at most %d", n>>20, bound>>20)
		}
	}
}

func crashWhileWriting(c *client) {
	cfg := bazelrun.ServerConfig{Dir: filepath.Join(c.TempDir(), "store"), NoJobs: true}
	before := c.own(cfg)
	type part struct {
		d *repb.Digest
		b []byte
	}
	var parts []part
	kept := fresh(200_000)
	before.put(kept)
	for _, size := range []int{1000, 100_000, 2 << 20, 20 << 20} {
		b := fresh(size)
		w := must.Get(before.bs.Write(before.Context()))(c)
		d := cas.SHA256.Sum(b).Proto()
		ms := pieces(before.writeName(d), b, max(100, size/20))
		for _, m := range ms[:len(ms)-1] {
			must.Succeed(c, w.Send(m))
		}
		parts = append(parts, part{d, b})
	}
	before.kill()
	after := c.own(cfg)
	after.wantBlob("a blob acknowledged before the crash", after.readName(cas.SHA256.Sum(kept).Proto()), kept)
	for _, p := range parts {
		what := fmt.Sprintf("%d bytes partly written before the crash", len(p.b))
		after.wantPresent(what, p.d, false)
		_, _, err := after.read(after.readName(p.d), 0, 0)
		after.wantCode("Read of "+what, err, codes.NotFound)
		after.wantWritten("Write of "+what, p.b, pieces(after.writeName(p.d), p.b, 1<<20)...)
	}
}
