// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// A void is a store without cost, so that the benchmarks measure the server: all blobs are zeros, and Put discards its
// data.
type void struct{ missing bool }

func (v void) Open(_ context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	return io.NopCloser(io.LimitReader(zeros{}, d.Size()-off)), nil
}

func (v void) Put(_ context.Context, _ cas.Digest, r io.Reader) error {
	buf := make([]byte, 256<<10)
	for {
		if _, err := r.Read(buf); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (v void) Missing(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if v.missing {
		return ds, nil
	}
	return nil, nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// loopback serves v over TCP and returns a connection.
func loopback(b *testing.B, v void) *grpc.ClientConn {
	b.Helper()
	s := grpc.NewServer(append(ServerOptions(nil), Codec())...)
	Register(s, Config{Instances: func(name string) (*cas.Instance, error) {
		return &cas.Instance{Name: name, Store: v}, nil
	}})
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(b)
	go s.Serve(l)
	b.Cleanup(s.Stop)
	conn := grpctest.Dial(b, l.Addr().String())
	return conn
}

const streamed = 256 << 20 // bytes

// thin is the codec of a client with little cost: it sends encoded messages and only counts the bytes that it receives.
type thin struct{ encoding.CodecV2 }

func (c thin) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c thin) Unmarshal(data mem.BufferSlice, v any) error {
	if n, ok := v.(*int); ok {
		*n += data.Len()
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// thinStream starts a ByteStream call with the thin codec.
func thinStream(b *testing.B, conn *grpc.ClientConn, method string) grpc.ClientStream {
	b.Helper()
	s, err := conn.NewStream(b.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/google.bytestream.ByteStream/"+method, grpc.ForceCodecV2(thin{encoding.GetCodecV2("proto")}))
	must.Succeed(b, err)
	return s
}

func streamedDigest(b *testing.B) cas.Digest {
	b.Helper()
	d := must.Get(cas.NewDigest(cas.SHA256, cas.SHA256.Sum(nil).Hash(), streamed))(b)
	return d
}

func BenchmarkRead(b *testing.B) {
	conn := loopback(b, void{})
	req := &bspb.ReadRequest{ResourceName: streamedDigest(b).Resource()}
	b.SetBytes(streamed)
	b.ReportAllocs()
	for b.Loop() {
		s := thinStream(b, conn, "Read")
		must.Succeed(b, errors.Join(s.SendMsg(req), s.CloseSend()))
		n := 0
		for {
			if err := s.RecvMsg(&n); err == io.EOF {
				break
			} else if err != nil {
				b.Fatal(err)
			}
		}
		must.Be(b, n >= streamed, "got %d bytes", n)
	}
}

func BenchmarkWrite(b *testing.B) {
	conn := loopback(b, void{missing: true})
	for _, piece := range []int{16 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", piece>>10), func(b *testing.B) {
			name := "uploads/u/" + streamedDigest(b).Resource()
			var messages [][]byte
			for off := 0; off < streamed; off += piece {
				m := &bspb.WriteRequest{WriteOffset: int64(off), Data: make([]byte, piece), FinishWrite: off+piece == streamed}
				if off == 0 {
					m.ResourceName = name
				}
				encoded := must.Get(proto.Marshal(m))(b)
				messages = append(messages, encoded)
			}
			b.SetBytes(streamed)
			b.ReportAllocs()
			for b.Loop() {
				s := thinStream(b, conn, "Write")
				for _, m := range messages {
					must.Succeed(b, s.SendMsg(m))
				}
				must.Succeed(b, errors.Join(s.CloseSend(), s.RecvMsg(&bspb.WriteResponse{})))
			}
		})
	}
}

// BenchmarkFindMissing calls the service without a connection.
func BenchmarkFindMissing(b *testing.B) {
	const digests = 16_000
	req := &repb.FindMissingBlobsRequest{DigestFunction: repb.DigestFunction_SHA256}
	for i := range digests {
		req.BlobDigests = append(req.BlobDigests, cas.SHA256.Sum([]byte(fmt.Sprint(i))).Proto())
	}
	for _, missing := range []bool{false, true} {
		b.Run(fmt.Sprintf("missing=%v", missing), func(b *testing.B) {
			s := &storage{Config: Config{Instances: func(name string) (*cas.Instance, error) {
				return &cas.Instance{Name: name, Store: void{missing}}, nil
			}}}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.FindMissingBlobs(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(digests*b.N)/b.Elapsed().Seconds(), "digests/s")
		})
	}
}
