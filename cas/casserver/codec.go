// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"sync"

	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec of which ours is made
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// dataField is the number of the field data, of a ReadResponse as of a WriteRequest.
const dataField protowire.Number = 10

// A codec is gRPC's codec of protobuf, which spares the data of ByteStream a copy either way, and the clearing
// of buffers that are then written. Under another codec a piece and an incoming are the messages that they hold.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if p, ok := v.(*piece); ok {
		return mem.BufferSlice{mem.NewBuffer(p.encoded, buffers)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*incoming); ok {
		return m.decode(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// A piece is a ReadResponse in a buffer of its own, which is gRPC's once it is sent.
type piece struct {
	bspb.ReadResponse
	encoded *[]byte
}

// newPiece returns a piece of n bytes of data, for the caller to write.
func newPiece(n int) *piece {
	p := &piece{encoded: buffers.Get(n + pieceHead)}
	head := protowire.AppendVarint(protowire.AppendTag((*p.encoded)[:0], dataField, protowire.BytesType), uint64(n))
	*p.encoded = (*p.encoded)[:len(head)+n]
	p.Data = (*p.encoded)[len(head):]
	return p
}

// pieceHead is the most that stands before the data of an encoded piece: a tag and a length.
const pieceHead = 1 + 10

// An incoming is a WriteRequest whose data is that of the message as it was received, until it is released. It
// must be released before the next is received into it.
type incoming struct {
	bspb.WriteRequest
	encoded mem.Buffer // nil if there is none
}

// decode is proto.Unmarshal, but for copying the data.
func (m *incoming) decode(message mem.BufferSlice) error {
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

// release gives the buffer back.
func (m *incoming) release() {
	if m.encoded != nil {
		m.encoded.Free()
		m.encoded, m.Data = nil, nil
	}
}

// buffers are of the sizes in which clients and we send most data. Unlike those of gRPC they are not cleared
// before they are used again: whoever takes one writes all of it.
var buffers = &bufferPool{}

// A bufferPool is a mem.BufferPool. One larger than all bufferSizes is not kept.
type bufferPool struct{ pools [len(bufferSizes)]sync.Pool }

var bufferSizes = [...]int{32 << 10, 128 << 10, pieceBytes + pieceHead}

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
			return // b may be another's now
		}
	}
}
