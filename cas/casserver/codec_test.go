// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"bytes"
	"io"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// encodings returns encoded WriteRequests, valid and invalid.
func encodings(t *testing.T) map[string][]byte {
	t.Helper()
	data := bytes.Repeat([]byte("0123456789"), 5000)
	whole, err := proto.Marshal(&bspb.WriteRequest{ResourceName: "uploads/u/blobs/x/1", WriteOffset: 1 << 40, FinishWrite: true, Data: data})
	must.Succeed(t, err)
	field := func(b []byte, n protowire.Number, v []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), v)
	}
	return map[string][]byte{
		"nothing":               nil,
		"whole":                 whole,
		"data first":            field(field(nil, dataField, data), 1, []byte("name")),
		"data twice":            field(field(nil, dataField, data), dataField, []byte("the last one wins")),
		"no data last":          field(field(nil, dataField, data), dataField, nil),
		"unknown field":         field(field(nil, 77, []byte("x")), dataField, data),
		"data as a number":      protowire.AppendVarint(protowire.AppendTag(nil, dataField, protowire.VarintType), 7),
		"name is not UTF-8":     field(field(nil, 1, []byte{0xff}), dataField, data),
		"truncated in the data": whole[:len(whole)/2],
		"truncated in a tag":    append(bytes.Clone(whole), 0x80),
		"field 0":               {0, 0},
		"end of group":          {0x0c},
	}
}

// The result must equal that of proto.Unmarshal, however many buffers the message has, and contain nothing of the
// previous message.
func TestWriteRequestEqualsMessage(t *testing.T) {
	for name, b := range encodings(t) {
		t.Run(name, func(t *testing.T) {
			var want bspb.WriteRequest
			wantErr := proto.Unmarshal(b, &want)
			parts := mem.BufferSlice{}
			for rest := b; len(rest) > 0; {
				n := min(len(rest), 16<<10)
				parts = append(parts, mem.SliceBuffer(rest[:n]))
				rest = rest[n:]
			}
			got := &writeRequest{}
			defer got.release()
			before := mem.BufferSlice{mem.SliceBuffer(encodings(t)["whole"])}
			for _, message := range []mem.BufferSlice{{mem.SliceBuffer(b)}, parts} {
				must.Succeed(t, newCodec().Unmarshal(before, got))
				got.release()
				err := newCodec().Unmarshal(message, got)
				expect.That(t, (err == nil) == (wantErr == nil),
					"in %d parts: got %v, want %v", len(message), err, wantErr)
				if err == nil && !proto.Equal(&want, &got.WriteRequest) {
					t.Errorf("in %d parts: got %.200v, want %.200v", len(message), &got.WriteRequest, &want)
				}
			}
		})
	}
}

// A countedPool counts returned buffers.
type countedPool struct{ back int }

func (p *countedPool) Get(n int) *[]byte { return new(make([]byte, n)) }
func (p *countedPool) Put(*[]byte)       { p.back++ }

// The data of a single buffer is not copied, and the buffer is returned exactly once.
func TestWriteRequestAliasesItsBuffer(t *testing.T) {
	b := encodings(t)["whole"]
	var pool countedPool
	m := &writeRequest{}
	for i := range 3 {
		message := mem.BufferSlice{mem.NewBuffer(&b, &pool)}
		must.Succeed(t, newCodec().Unmarshal(message, m))
		message.Free() // as gRPC does after Unmarshal
		if at := bytes.Index(b, m.Data); at < 0 || &b[at] != &m.Data[0] {
			t.Error("the data was copied")
		}
		expect.That(t, pool.back == i, "during message %d: got %d returned buffers", i, pool.back)
		m.release()
		m.release()
	}
	if pool.back != 3 || m.Data != nil {
		t.Errorf("got %d returned buffers and %d bytes of data, want 3 and 0", pool.back, len(m.Data))
	}
}

// A script is a stream of messages. It checks that the receiver holds no buffer while it waits.
type script struct {
	bspb.ByteStream_WriteServer
	t        *testing.T
	messages [][]byte
}

func (s *script) RecvMsg(v any) error {
	if v.(*writeRequest).encoded != nil {
		s.t.Error("the receiver holds a buffer while it waits")
	}
	b := s.messages[0]
	s.messages = s.messages[1:]
	return newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, v)
}

func TestUploadWaitsWithoutBuffer(t *testing.T) {
	s := &script{t: t}
	for i, text := range []string{"abc", "def", "ghi"} {
		b, err := proto.Marshal(&bspb.WriteRequest{WriteOffset: int64(3 * i), Data: []byte(text), FinishWrite: i == 2})
		must.Succeed(t, err)
		s.messages = append(s.messages, b)
	}
	u := &upload{stream: s, digest: cas.SHA256.Sum([]byte("abcdefghi"))}
	expect.Equal(t, string(must.Get(io.ReadAll(u))(t)), "abcdefghi")
}

func TestReadResponseEqualsMessage(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 1 << 14, maxData} {
		p := newReadResponse(n)
		for i := range p.Data {
			p.Data[i] = byte(i)
		}
		want := &bspb.ReadResponse{Data: bytes.Clone(p.Data)}
		encoded, err := newCodec().Marshal(p)
		if err != nil || len(want.Data) != n {
			t.Fatalf("%d bytes: got %d, %v", n, len(want.Data), err)
		}
		expect.That(t, n <= 0 || &encoded[0].ReadOnlyData()[encoded.Len()-1] == &p.Data[n-1],
			"%d bytes: the data was copied", n)
		var got bspb.ReadResponse
		if err := newCodec().Unmarshal(encoded, &got); err != nil || !proto.Equal(want, &got) {
			t.Errorf("%d bytes: another message, %v", n, err)
		}
		encoded.Free()
	}
}

func TestBuffersAreLongEnough(t *testing.T) {
	for range 3 {
		for _, n := range []int{0, 1, 32 << 10, 32<<10 + 1, 128 << 10, 1 << 20, 1<<20 + 1, 16 << 20} {
			b := buffers.Get(n)
			expect.That(t, len(*b) == n, "got %d bytes, want %d", len(*b), n)
			*b = (*b)[:n/2]
			buffers.Put(b)
		}
	}
}
