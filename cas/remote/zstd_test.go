// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A packer is an in-memory server that uses zstd wherever possible and counts the bytes sent and received.
type packer struct {
	repb.UnimplementedCapabilitiesServer
	repb.UnimplementedContentAddressableStorageServer
	bspb.UnimplementedByteStreamServer
	*castest.Memory
	batches bool // also compress blobs in batches

	mu      sync.Mutex
	wire    int      // bytes of blobs
	names   []string // of reads and writes by ByteStream, with offsets
	breakAt int      // the first read breaks before this message, counted from 1

	committed func(sent, size int64) int64
	pack      func(b []byte) []byte
}

func (p *packer) GetCapabilities(context.Context, *repb.GetCapabilitiesRequest) (*repb.ServerCapabilities, error) {
	c := &repb.CacheCapabilities{
		SupportedCompressors: []repb.Compressor_Value{repb.Compressor_DEFLATE, repb.Compressor_ZSTD},
	}
	for _, f := range cas.Functions() {
		c.DigestFunctions = append(c.DigestFunctions, f.Proto())
	}
	if p.batches {
		c.SupportedBatchUpdateCompressors = c.SupportedCompressors
	}
	return &repb.ServerCapabilities{CacheCapabilities: c}, nil
}

// digestOf converts m, using the stated digest function or the one that its length implies.
func digestOf(v repb.DigestFunction_Value, m *repb.Digest) (cas.Digest, error) {
	f, err := (&cas.Instance{}).FunctionOf(v, m)
	if err != nil {
		return cas.Digest{}, err
	}
	return cas.FromProto(f, m)
}

func (p *packer) count(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wire += n
}

// unpack uses another decoder than the client.
func unpack(b []byte) ([]byte, error) {
	d, err := zstd.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return io.ReadAll(d)
}

func pack(b []byte) []byte {
	e, _ := zstd.NewWriter(nil)
	return e.EncodeAll(b, nil)
}

func (p *packer) FindMissingBlobs(ctx context.Context, req *repb.FindMissingBlobsRequest) (*repb.FindMissingBlobsResponse, error) {
	resp := &repb.FindMissingBlobsResponse{}
	for _, m := range req.BlobDigests {
		d, err := digestOf(req.DigestFunction, m)
		if err != nil {
			return nil, casstatus.Error(err)
		}
		if missing, err := p.Missing(ctx, []cas.Digest{d}); err != nil {
			return nil, casstatus.Error(err)
		} else if len(missing) > 0 {
			resp.MissingBlobDigests = append(resp.MissingBlobDigests, m)
		}
	}
	return resp, nil
}

func (p *packer) BatchUpdateBlobs(ctx context.Context, req *repb.BatchUpdateBlobsRequest) (*repb.BatchUpdateBlobsResponse, error) {
	resp := &repb.BatchUpdateBlobsResponse{}
	for _, r := range req.Requests {
		p.count(len(r.Data))
		d, err := digestOf(req.DigestFunction, r.Digest)
		if err == nil && r.Compressor == repb.Compressor_ZSTD && p.batches {
			r.Data, err = unpack(r.Data)
		} else if r.Compressor != repb.Compressor_IDENTITY {
			err = cas.ErrInvalid
		}
		if err == nil {
			err = p.Put(ctx, d, bytes.NewReader(r.Data))
		}
		resp.Responses = append(resp.Responses, &repb.BatchUpdateBlobsResponse_Response{Digest: r.Digest, Status: status.Convert(casstatus.Error(err)).Proto()})
	}
	return resp, nil
}

func (p *packer) BatchReadBlobs(ctx context.Context, req *repb.BatchReadBlobsRequest) (*repb.BatchReadBlobsResponse, error) {
	resp := &repb.BatchReadBlobsResponse{}
	for _, m := range req.Digests {
		r := &repb.BatchReadBlobsResponse_Response{Digest: m}
		d, err := digestOf(req.DigestFunction, m)
		if err == nil {
			r.Data, err = cas.ReadAll(ctx, p, d, d.Size())
		}
		if err == nil && slices.Contains(req.AcceptableCompressors, repb.Compressor_ZSTD) {
			r.Data, r.Compressor = p.pack(r.Data), repb.Compressor_ZSTD
		}
		p.count(len(r.Data))
		r.Status = status.Convert(casstatus.Error(err)).Proto()
		resp.Responses = append(resp.Responses, r)
	}
	return resp, nil
}

// resource parses a ByteStream resource name.
func (p *packer) resource(name string) (d cas.Digest, packed bool, err error) {
	segs := strings.Split(name, "/")
	size, err := strconv.ParseInt(segs[len(segs)-1], 10, 64)
	if err != nil {
		return d, false, err
	}
	v := repb.DigestFunction_Value_value[strings.ToUpper(segs[len(segs)-3])]
	d, err = digestOf(repb.DigestFunction_Value(v), &repb.Digest{Hash: segs[len(segs)-2], SizeBytes: size})
	return d, strings.Contains(name, "compressed-blobs/zstd/"), err
}

func (p *packer) Read(req *bspb.ReadRequest, stream bspb.ByteStream_ReadServer) error {
	d, packed, err := p.resource(req.ResourceName)
	if err != nil {
		return casstatus.Error(err)
	}
	p.mu.Lock()
	first := len(p.names) == 0
	p.names = append(p.names, strings.SplitN(req.ResourceName, "/", 2)[0]+" "+strconv.FormatInt(req.ReadOffset, 10))
	p.mu.Unlock()
	b, err := cas.ReadAll(stream.Context(), p, d, d.Size())
	if err != nil {
		return casstatus.Error(err)
	}
	// Like some servers, ignore the offset of compressed reads.
	if packed {
		b = p.pack(b)
	} else {
		b = b[req.ReadOffset:]
	}
	n := 0
	for part := range slices.Chunk(b, 100_000) {
		if n++; first && n == p.breakAt {
			return status.Error(codes.Unavailable, "the server disconnects")
		}
		p.count(len(part))
		if err := stream.Send(&bspb.ReadResponse{Data: part}); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) Write(stream bspb.ByteStream_WriteServer) error {
	var b []byte
	name := ""
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.WriteOffset != int64(len(b)) {
			return status.Errorf(codes.InvalidArgument, "offset is %d, want %d", m.WriteOffset, len(b))
		}
		b = append(b, m.Data...)
		if name = m.ResourceName; m.FinishWrite {
			break
		}
	}
	p.count(len(b))
	sent := int64(len(b))
	d, packed, err := p.resource(name)
	if err == nil && packed {
		b, err = unpack(b)
	}
	if err == nil {
		err = p.Put(stream.Context(), d, bytes.NewReader(b))
	}
	if err != nil {
		return casstatus.Error(err)
	}
	return stream.SendAndClose(&bspb.WriteResponse{CommittedSize: p.committed(sent, d.Size())})
}

// servePacked returns a store of a server that uses zstd.
func servePacked(t *testing.T, batches bool) (*packer, *remote.Store) {
	t.Helper()
	p := &packer{Memory: castest.NewMemory(), batches: batches, pack: pack, committed: func(sent, _ int64) int64 { return sent }}
	s := &server{calls: map[string]int{}}
	listen(t, s, func(g *grpc.Server) {
		repb.RegisterCapabilitiesServer(g, p)
		repb.RegisterContentAddressableStorageServer(g, p)
		bspb.RegisterByteStreamServer(g, p)
	}, grpc.MaxSendMsgSize(1<<30))
	return p, s.dial(t, "")
}

func TestStoreOfCompressedBlobs(t *testing.T) {
	for _, batches := range []bool{false, true} {
		castest.TestStore(t, func(t *testing.T) cas.Store {
			_, s := servePacked(t, batches)
			return s
		})
	}
}

func TestBlobsAreSentCompressed(t *testing.T) {
	for _, batches := range []bool{false, true} {
		p, s := servePacked(t, batches)
		for _, size := range []int{10, 500_000, 10_000_000} {
			b := bytes.Repeat([]byte("compressible"), size/10)
			d := cas.SHA256.Sum(b)
			p.wire = 0
			must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
			plain := size == 10 || size == 500_000 && !batches
			if up := p.wire; plain != (up == len(b)) || !plain && up > len(b)/50 {
				t.Errorf("batches %v: sent %d bytes for %d", batches, up, len(b))
			}
			p.wire = 0
			expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), s, d, d.Size()))(t)), string(b))
			if down := p.wire; size > 10 && down > len(b)/50 {
				t.Errorf("received %d bytes for %d", down, len(b))
			}
		}
	}
}

func TestCompressedDownloadResumes(t *testing.T) {
	p, s := servePacked(t, true)
	want, d := castest.Blob(1, 5<<20) // incompressible
	must.Succeed(t, p.Put(t.Context(), d, bytes.NewReader(want)))
	p.breakAt = 20
	got, err := cas.ReadAll(t.Context(), s, d, d.Size())
	expect.That(t, err == nil && bytes.Equal(got, want), "got %d bytes, %v", len(got), err)
	expect.That(t, len(p.names) == 2 && p.names[0] == "compressed-blobs 0" && strings.HasPrefix(p.names[1], "blobs 1"),
		"got reads %q, want the second one resumed uncompressed", p.names)
	// Partial reads are not compressed.
	p.names, p.breakAt = nil, 0
	r := must.Get(s.Open(t.Context(), d, 12345))(t)
	defer r.Close()
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want[12345:]) || !slices.Equal(p.names, []string{"blobs 12345"}) {
		t.Errorf("got %d bytes, %v, of %q", len(got), err, p.names)
	}
}

func TestDecompressionIsLimited(t *testing.T) {
	bomb := pack(make([]byte, 256<<20))
	frame := pack(bytes.Repeat([]byte("x"), 1<<20))
	for _, size := range []int{1000, 3 << 20} {
		p, s := servePacked(t, true)
		b, d := castest.Blob(1, size)
		must.Succeed(t, p.Put(t.Context(), d, bytes.NewReader(b)))
		for name, sent := range map[string][]byte{
			"256 MiB": bomb, "no frame": []byte("not compressed"), "nothing": {},
			"part of a frame": frame[:len(frame)-1], "two blobs": append(pack(b), pack(b)...),
			"one byte more": append(pack(b), pack([]byte("x"))...), "trailing garbage": append(pack(b), "garbage"...),
			"half a blob": pack(b[:size/2]),
		} {
			p.pack = func([]byte) []byte { return sent }
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			got, err := cas.ReadAll(t.Context(), s, d, d.Size())
			runtime.ReadMemStats(&after)
			expect.Error(t, err, cas.ErrCorrupt, "%s for %d: %d bytes", name, size, len(got))
			if n := after.TotalAlloc - before.TotalAlloc; n > 100<<20 {
				t.Errorf("%s for %d: it took %d MiB", name, size, n>>20)
			}
		}
		p.pack = pack // the pooled decoders must still work
		expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), s, d, d.Size()))(t)), string(b), "after bombs")
	}
}

// The committed size may be the compressed size, the blob size or -1.
func TestCommittedSize(t *testing.T) {
	p, s := servePacked(t, true)
	for i, c := range []struct {
		committed func(sent, size int64) int64
		ok        bool
	}{
		{func(sent, _ int64) int64 { return sent }, true},
		{func(_, size int64) int64 { return size }, true},
		{func(_, _ int64) int64 { return -1 }, true},
		{func(sent, _ int64) int64 { return sent - 1 }, false},
		{func(_, _ int64) int64 { return 0 }, false},
	} {
		p.committed = c.committed
		b, d := castest.Blob(byte(i), 3<<20)
		if err := s.Put(t.Context(), d, bytes.NewReader(b)); (err == nil) != c.ok {
			t.Errorf("answer %d: %v", i, err)
		}
	}
}

func TestPutAllBatchesAndDeduplicates(t *testing.T) {
	p, s := servePacked(t, false)
	var blobs []cas.Blob
	for i := range 5000 {
		b := strconv.AppendInt(nil, int64(i%4500), 10)
		blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
	}
	total := 0
	for i := range 10 {
		b, d := castest.Blob(byte(i), 900_000)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b}, cas.Blob{Digest: d, Data: b})
		total += len(b)
	}
	must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
	expect.That(t, p.Len() == 4510 && p.wire <= total+4500*4, "%d blobs came in %d bytes", p.Len(), p.wire)
}
