// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"sync"

	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that ours wraps
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// dataField is the number of the field data in ReadResponse and WriteRequest.
const dataField protowire.Number = 10

// codec is gRPC's protobuf codec without copies of the data of ByteStream and without clearing buffers that are then
// overwritten. With other codecs, readResponse and writeRequest behave like the messages they embed.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if p, ok := v.(*readResponse); ok {
		return mem.BufferSlice{mem.NewBuffer(p.encoded, buffers)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*writeRequest); ok {
		return m.decode(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// A readResponse is an encoded ReadResponse. Sending it hands its buffer to gRPC.
type readResponse struct {
	bspb.ReadResponse
	encoded *[]byte
}

// newReadResponse returns a readResponse with n bytes of data for the caller to fill.
func newReadResponse(n int) *readResponse {
	p := &readResponse{encoded: buffers.Get(n + headSize)}
	head := protowire.AppendVarint(protowire.AppendTag((*p.encoded)[:0], dataField, protowire.BytesType), uint64(n))
	*p.encoded = (*p.encoded)[:len(head)+n]
	p.Data = (*p.encoded)[len(head):]
	return p
}

// headSize is the largest encoding of what precedes the data in a readResponse: a tag and a length.
const headSize = 1 + 10

// A writeRequest is a WriteRequest whose data aliases the received message. Release it before receiving into it again.
type writeRequest struct {
	bspb.WriteRequest
	encoded mem.Buffer // nil if released
}

// decode is proto.Unmarshal without copying the data.
func (m *writeRequest) decode(message mem.BufferSlice) error {
	m.encoded = message.MaterializeToBuffer(buffers)
	var data, others []byte
	for b := m.encoded.ReadOnlyData(); len(b) > 0; {
		num, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if num == dataField && typ == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(b)
			data, _ = protowire.ConsumeBytes(b[tag:])
		} else {
			others = append(others, b[:n]...)
		}
		b = b[n:]
	}
	err := proto.Unmarshal(others, &m.WriteRequest)
	m.Data = data
	return err
}

// release returns the buffer to its pool.
func (m *writeRequest) release() {
	if m.encoded != nil {
		m.encoded.Free()
		m.encoded, m.Data = nil, nil
	}
}

// buffers pools buffers of the most frequent sizes. Unlike gRPC's pool it does not clear them on reuse: users overwrite
// them completely.
var buffers = &bufferPool{}

// A bufferPool is a mem.BufferPool. It does not keep buffers larger than all bufferSizes.
type bufferPool struct{ pools [len(bufferSizes)]sync.Pool }

var bufferSizes = [...]int{32 << 10, 128 << 10, maxData + headSize}

// Get implements mem.BufferPool.
func (p *bufferPool) Get(n int) *[]byte {
	for i, size := range bufferSizes {
		if n > size {
			continue
		}
		b, ok := p.pools[i].Get().(*[]byte)
		if !ok {
			return new(make([]byte, n, size))
		}
		*b = (*b)[:n]
		return b
	}
	return new(make([]byte, n))
}

// Put implements mem.BufferPool.
func (p *bufferPool) Put(b *[]byte) {
	for i, size := range bufferSizes {
		if cap(*b) == size {
			p.pools[i].Put(b)
			return // b may already be in use again
		}
	}
}
