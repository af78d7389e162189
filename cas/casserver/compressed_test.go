// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// pack returns data as one compressed stream.
func pack(t testing.TB, c repb.Compressor_Value, data string) string {
	t.Helper()
	var b bytes.Buffer
	w := compress.NewWriter(c, &b)
	defer w.Release()
	must.Get(io.WriteString(w, data))(t)
	must.Succeed(t, w.Close())
	return b.String()
}

// compressedName returns the compressed resource name of a blob.
func compressedName(c repb.Compressor_Value, d cas.Digest) string {
	return "compressed-blobs/" + compress.Name(c) + strings.TrimPrefix(d.Resource(), "blobs")
}

// unpacked reads a blob compressed from an offset and decompresses it.
func (c *client) unpacked(ctx context.Context, by repb.Compressor_Value, d cas.Digest, off int64) (string, error) {
	b, err := c.read(ctx, &bspb.ReadRequest{ResourceName: compressedName(by, d), ReadOffset: off})
	if err != nil {
		return "", err
	}
	r := compress.NewReader(by, bytes.NewReader(b))
	defer r.Release()
	got, err := io.ReadAll(r)
	return string(got), err
}

// byEach runs test for each compressor.
func byEach(t *testing.T, test func(t *testing.T, by repb.Compressor_Value)) {
	for _, by := range compress.Compressors() {
		t.Run(compress.Name(by), func(t *testing.T) { test(t, by) })
	}
}

// The store need not read the data if it has the blob by then.
func TestRule043_ConcurrentlyStoredBlobEndsWriteEarly(t *testing.T) {
	m := castest.NewMemory()
	c := serve(t, casserver.Config{Instances: instances(incurious{m}, m)})
	by, data := repb.Compressor_ZSTD, noise(1000)
	n, err := c.write(t.Context(), message("uploads/u/"+compressedName(by, sum(data)), 0, pack(t, by, data), false))
	expect.That(t, err == nil && n == -1, "got %d, %v, want -1", n, err)
}

// An incurious store has every blob when Put is called.
type incurious struct{ cas.Store }

func (incurious) Put(context.Context, cas.Digest, io.Reader) error { return nil }

func TestRule044_CompressedUploadsStartAtZero(t *testing.T) {
	c := serve(t, casserver.Config{})
	by, data := repb.Compressor_ZSTD, noise(100_000)
	packed, name := pack(t, by, data), "uploads/u/"+compressedName(by, sum(data))
	query := func() *bspb.QueryWriteStatusResponse {
		return must.Get(c.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name}))(t)
	}
	_, err := c.write(t.Context(), message(name, 0, packed[:500], false))
	wantCode(t, err, codes.InvalidArgument, "500", "offset 0")
	if r := query(); r.Complete || r.CommittedSize != 0 {
		t.Errorf("got %v, want 0 and not complete", r)
	}
	// Neither the compressed nor the decompressed size is a valid offset.
	for _, off := range []int64{1, 500, 100_000, -1} {
		_, err := c.write(t.Context(), message(name, off, packed[500:], true))
		wantCode(t, err, codes.InvalidArgument, "write_offset", "offset 0")
	}
	// Later offsets count compressed bytes.
	for off, want := range map[int64]codes.Code{500: codes.OK, 499: codes.InvalidArgument, 501: codes.InvalidArgument, 0: codes.InvalidArgument} {
		c.memory(t, "").Delete(sum(data))
		_, err := c.write(t.Context(), message(name, 0, packed[:500], false), message("", off, packed[500:], true))
		wantCode(t, err, want)
		expect.Equal(t, c.has(t, sum(data)), want == codes.OK, "offset %d: present", off)
	}
	c.put(t, data)
	if r := query(); !r.Complete || r.CommittedSize != int64(len(data)) {
		t.Errorf("got %v, want %d and complete", r, len(data))
	}
}

func TestRule045_UnknownCompressorIsInvalid(t *testing.T) {
	c := serve(t, casserver.Config{})
	for _, compressor := range []string{"identity", "ZSTD", "nonsense", ""} {
		name := "compressed-blobs/" + compressor + "/" + sum("data").Hash() + "/4"
		_, err := c.write(t.Context(), message("uploads/u/"+name, 0, "data", true))
		wantCode(t, err, codes.InvalidArgument, compress.Names(), "blobs/HASH/SIZE")
		_, err = c.read(t.Context(), &bspb.ReadRequest{ResourceName: name})
		wantCode(t, err, codes.InvalidArgument, compress.Names(), "blobs/HASH/SIZE")
	}
}

// The answer must come as soon as there is too much data, although the client neither finishes nor closes. The store,
// which would read on, gets only one extra byte.
func TestRule045_BombsEndAtStatedSize(t *testing.T) {
	t.Parallel()
	byEach(t, func(t *testing.T, by repb.Compressor_Value) {
		m := castest.NewMemory()
		var read atomic.Int64
		c := serve(t, casserver.Config{Instances: instances(counting{greedy{m}, &read}, m)})
		stream := must.Get(c.Write(t.Context()))(t)
		bomb := pack(t, by, strings.Repeat("\x00", 64<<20))
		d := sum(strings.Repeat("\x00", 1000))
		must.Succeed(t, stream.Send(message("uploads/u/"+compressedName(by, d), 0, bomb[:len(bomb)-1], false)))
		wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), codes.InvalidArgument, "longer than the 1000 bytes")
		if m.Len() != 0 || read.Load() > 1001 {
			t.Errorf("%d blobs are stored, and %d bytes were read", m.Len(), read.Load())
		}
	})
}

// A counting store counts the bytes that it reads.
type counting struct {
	cas.Store
	n *atomic.Int64
}

func (s counting) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	return s.Store.Put(ctx, d, readerFunc(func(p []byte) (int, error) {
		n, err := r.Read(p)
		s.n.Add(int64(n))
		return n, err
	}))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// An endless store has one large blob that takes no memory, and calls a hook for each read.
type endless struct {
	cas.Store
	d      cas.Digest
	data   func() io.Reader // the blob is its beginning
	read   func(n int)
	closed func()
}

func (s *endless) Open(_ context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if d != s.d {
		return nil, cas.ErrNotFound
	}
	data := s.data()
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(readerFunc(func(p []byte) (int, error) {
		n, err := data.Read(p)
		s.read(n)
		return n, err
	}), d.Size()-off), closerFunc(s.closed)}, nil
}

func (s *endless) Missing(context.Context, []cas.Digest) ([]cas.Digest, error) {
	return []cas.Digest{s.d}, nil
}

// Put reads and discards the data.
func (s *endless) Put(_ context.Context, d cas.Digest, r io.Reader) error {
	h, n := d.Function().New(d.Size()), int64(0)
	buf := make([]byte, 64<<10)
	for {
		m, err := r.Read(buf)
		h.Write(buf[:m])
		s.read(m)
		if n += int64(m); err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	if got := d.Function().Digest(h, n); got != d {
		return cas.Mismatch(d, got)
	}
	return nil
}

type closerFunc func()

func (f closerFunc) Close() error {
	f()
	return nil
}

func zeros() io.Reader {
	return readerFunc(func(p []byte) (int, error) { clear(p); return len(p), nil })
}

func random() io.Reader { return rand.NewChaCha8([32]byte{}) }

// The memory of a call must not depend on the size of the blob: check the heap after each 16 MiB.
func TestRule055_CompressedBlobsTakeBoundedMemory(t *testing.T) {
	const bound = 32 << 20
	byEach(t, func(t *testing.T, by repb.Compressor_Value) {
		size := int64(256 << 20)
		if by != repb.Compressor_ZSTD {
			size /= 4 // the others are slow
		}
		h := cas.SHA256.New(size)
		must.Get(io.CopyN(h, random(), size))(t)
		d := cas.SHA256.Digest(h, size)
		var base runtime.MemStats
		for range 3 {
			runtime.GC() // the second collection empties the pools
		}
		runtime.ReadMemStats(&base)
		var most uint64
		var total atomic.Int64
		s := &endless{d: d, data: random, closed: func() {}, read: func(n int) {
			if before := total.Add(int64(n)) - int64(n); before>>24 != (before+int64(n))>>24 {
				var now runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&now)
				most = max(most, now.HeapAlloc-min(now.HeapAlloc, base.HeapAlloc))
			}
		}}
		c := serve(t, casserver.Config{Instances: instances(s, nil)})
		stream := must.Get(c.Read(t.Context(), &bspb.ReadRequest{ResourceName: compressedName(by, d)}))(t)
		r := compress.NewReader(by, &received{stream: stream})
		defer r.Release()
		if n, err := io.Copy(io.Discard, r); n != size || err != nil {
			t.Fatalf("read %d bytes, %v", n, err)
		}

		up := must.Get(c.Write(t.Context()))(t)
		out := &sent{stream: up, name: "uploads/u/" + compressedName(by, d)}
		w := compress.NewWriter(by, out)
		defer w.Release()
		must.Get(io.CopyN(w, random(), size))(t)
		must.Succeed(t, w.Close())
		must.Succeed(t, up.Send(message("", out.n, "", true)))
		if resp, err := up.CloseAndRecv(); err != nil || resp.CommittedSize != out.n {
			t.Fatalf("write: %v, %v", resp, err)
		}
		if total.Load() < 2*size || most > bound {
			t.Errorf("of %d bytes, up to %d were in memory, want at most %d", total.Load(), most, bound)
		}
		t.Logf("at most %d KiB", most>>10)
	})
}

// received reads the data of a Read stream.
type received struct {
	stream bspb.ByteStream_ReadClient
	rest   []byte
}

func (r *received) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		m, err := r.stream.Recv()
		if err != nil {
			return 0, err
		}
		r.rest = m.Data
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// sent writes the data of a Write stream.
type sent struct {
	stream bspb.ByteStream_WriteClient
	name   string
	n      int64
}

func (s *sent) Write(b []byte) (int, error) {
	err := s.stream.Send(message(s.name, s.n, string(b), false))
	s.n += int64(len(b))
	return len(b), err
}

// Highly compressible data is rarely sent, so cancellation must be noticed without sending.
func TestRule052_CancelOfCompressedReadClosesBlob(t *testing.T) {
	byEach(t, func(t *testing.T, by repb.Compressor_Value) {
		const size = 1 << 50
		d := must.Get(cas.NewDigest(cas.SHA256, sum("x").Hash(), size))(t)
		begun, closed := make(chan struct{}), make(chan struct{})
		began := sync.OnceFunc(func() { close(begun) })
		s := &endless{d: d, data: zeros, read: func(int) { began() }, closed: func() { close(closed) }}
		c := serve(t, casserver.Config{Instances: instances(s, nil)})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		must.Get(c.Read(ctx, &bspb.ReadRequest{ResourceName: compressedName(by, d)}))(t)
		<-begun
		cancel()
		<-closed
	})
}

// A peak store records the maximum number of concurrent Puts.
type peak struct {
	cas.Store
	began     chan struct{}
	now, most atomic.Int64
}

func (p *peak) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	n := p.now.Add(1)
	defer p.now.Add(-1)
	for most := p.most.Load(); n > most && !p.most.CompareAndSwap(most, n); most = p.most.Load() {
	}
	p.began <- struct{}{}
	return p.Store.Put(ctx, d, r)
}

// Uploads that reserve much memory and then send nothing delay neither other callers nor other calls of their caller:
// one caller gets half of the memory, 16 windows of 32 MiB, and silent streams lose it when others wait.
func TestSilentStreamsYieldTheirMemory(t *testing.T) {
	t.Parallel()
	const idle = 18 * time.Second
	m := castest.NewMemory()
	store := &peak{Store: m, began: make(chan struct{}, 1000)}
	c := serveWith(t, casserver.Config{Instances: instances(store, m), StreamIdle: idle}, callers()...)
	data := noise(1 << 20)
	z := repb.Compressor_ZSTD
	present, err := cas.PutBytes(t.Context(), m, cas.SHA256, []byte(data))
	must.Succeed(t, err)
	var frame bytes.Buffer
	e, err := zstd.NewWriter(&frame, zstd.WithWindowSize(compress.MaxWindow), zstd.WithSingleSegment(false))
	must.Succeed(t, err)
	if _, err := e.Write([]byte("beginning")); err != nil || e.Flush() != nil {
		t.Fatal(err)
	}
	const held = 1 << 29 / compress.MaxWindow // they yield after a sixth of idle
	var streams []bspb.ByteStream_WriteClient
	for i := range 40 {
		name := fmt.Sprintf("uploads/u%d/%s", i, compressedName(z, sum(fmt.Sprint("beginning and end", i))))
		streams = append(streams, c.open(t.Context(), t, message(name, 0, frame.String(), false)))
		if i < held {
			<-store.began
		}
	}
	for _, caller := range []string{"other", ""} {
		ctx := as(t.Context(), caller)
		if got, err := c.unpacked(ctx, z, present, 0); err != nil || got != data {
			t.Errorf("caller %q: read %d bytes, %v", caller, len(got), err)
		}
		text := "text of " + caller
		if _, err := c.write(ctx, message("uploads/u/"+compressedName(z, sum(text)), 0, pack(t, z, text), true)); err != nil {
			t.Errorf("caller %q: write: %v", caller, err)
		}
		r, err := c.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{Requests: []*repb.BatchUpdateBlobsRequest_Request{{
			Digest: sum("brotli" + caller).Proto(), Compressor: repb.Compressor_BROTLI,
			Data: []byte(pack(t, repb.Compressor_BROTLI, "brotli"+caller)),
		}}})
		expect.That(t, err == nil && r.Responses[0].Status.GetCode() == 0,
			"caller %q: batch: %v, %v", caller, r, err)
	}
	err = streams[0].RecvMsg(&bspb.WriteResponse{})
	if wantCode(t, err, codes.ResourceExhausted, "silent for 3s", "retry"); len(status.Convert(err).Details()) != 1 {
		t.Errorf("got details %v, want RetryInfo", status.Convert(err).Details())
	}
	// One upload of each caller ran beside the silent ones.
	if n := store.most.Load(); n > held+1 {
		t.Errorf("%d uploads had memory at the same time, want at most %d", n, held+1)
	}
}

// A client that sends or receives nothing for too long loses its stream. An uncompressed upload keeps what was sent.
func TestIdleStreamsEnd(t *testing.T) {
	d := must.Get(cas.NewDigest(cas.SHA256, sum("x").Hash(), 1<<30))(t)
	closed := make(chan struct{}, 2)
	s := &endless{d: d, data: random, read: func(int) {}, closed: func() { closed <- struct{}{} }}
	c := serve(t, casserver.Config{Instances: instances(s, nil), StreamIdle: 100 * time.Millisecond})
	for _, name := range []string{d.Resource(), compressedName(repb.Compressor_ZSTD, d)} {
		stream, err := c.Read(t.Context(), &bspb.ReadRequest{ResourceName: name})
		must.Succeed(t, err)
		<-closed
		for err == nil {
			_, err = stream.Recv()
		}
		wantCode(t, err, codes.Unavailable, "silent for 100ms", "retry")
	}
	c = serve(t, casserver.Config{StreamIdle: 100 * time.Millisecond})
	text := noise(10_000)
	for name, data := range map[string]string{
		uploadName(text): text, "uploads/v/" + compressedName(repb.Compressor_ZSTD, sum(text)): pack(t, repb.Compressor_ZSTD, text),
	} {
		stream := c.open(t.Context(), t, message(name, 0, data[:5000], false))
		wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), codes.Unavailable, "silent for 100ms", "retry")
	}
	c.waitKept(t, uploadName(text), 5000)
}

// FuzzCompressedWrite checks that only data that matches the digest is stored, and that the store gets at most one byte
// more than the size of the blob.
func FuzzCompressedWrite(f *testing.F) {
	for i, by := range compress.Compressors() {
		for _, data := range []string{"x", strings.Repeat("text ", 100)} {
			good := pack(f, by, data)
			f.Add(uint8(i), []byte(data), []byte(good), uint8(len(good)/2))
			f.Add(uint8(i), []byte(data), []byte(good+good), uint8(0))
			f.Add(uint8(i), []byte(data), []byte(good+"garbage"), uint8(255))
			f.Add(uint8(i), []byte(data), []byte(good[:len(good)-1]), uint8(1))
			f.Add(uint8(i), []byte(data), []byte(pack(f, by, data+"more")), uint8(9))
		}
	}
	f.Fuzz(func(t *testing.T, kind uint8, data, packed []byte, cut uint8) {
		all := compress.Compressors()
		by := all[int(kind)%len(all)]
		m := castest.NewMemory()
		var read atomic.Int64
		c := serve(t, casserver.Config{Instances: instances(counting{m, &read}, m)})
		d := sum(string(data))
		at := min(int(cut), len(packed))
		n, err := c.write(t.Context(), message("uploads/u/"+compressedName(by, d), 0, string(packed[:at]), false),
			message("", int64(at), string(packed[at:]), true))
		expect.That(t, read.Load() <= d.Size()+1, "the store got %d bytes for a blob of %d", read.Load(), d.Size())
		if d.IsEmpty() {
			return // the empty blob is always present
		}
		got, decodeErr := compress.Decode(by, packed, d.Size())
		right := decodeErr == nil && bytes.Equal(got, data)
		if right && (err != nil || n != int64(len(packed)) || m.Len() != 1) {
			t.Errorf("got %d, %v, and %d blobs are stored", n, err, m.Len())
		}
		if !right {
			wantCode(t, err, codes.InvalidArgument)
			expect.That(t, m.Len() == 0, "stored: %v", m.Digests())
		}
	})
}
