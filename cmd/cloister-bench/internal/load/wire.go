// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// A message is an encoded request in parts, which are sent in order without being copied first.
type message [][]byte

// A reply is an encoded response as received. It holds memory until free is called.
type reply struct {
	parts mem.BufferSlice
}

// bytes returns the response in one piece.
func (r *reply) bytes() []byte { return r.parts.Materialize() }

func (r *reply) free() {
	r.parts.Free()
	r.parts = nil
}

// raw makes a call accept a message and return a reply.
var raw = grpc.ForceCodecV2(codec{})

// codec passes messages and replies to gRPC unchanged.
type codec struct{}

func (codec) Marshal(v any) (mem.BufferSlice, error) {
	m := v.(message)
	parts := make(mem.BufferSlice, len(m))
	for i, part := range m {
		parts[i] = mem.SliceBuffer(part)
	}
	return parts, nil
}

func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	v.(*reply).parts = data
	return nil
}

// Name returns the name of protobuf, the encoding of all messages.
func (codec) Name() string { return "proto" }

// dataField is the number of the field data in WriteRequest and ReadResponse.
const dataField = 10

// writeRequest encodes a ByteStream.WriteRequest for data at offset off.
func writeRequest(resource string, off int64, data []byte, last bool) message {
	var head []byte
	if off == 0 {
		head = protowire.AppendString(protowire.AppendTag(head, 1, protowire.BytesType), resource)
	} else {
		head = protowire.AppendVarint(protowire.AppendTag(head, 2, protowire.VarintType), uint64(off))
	}
	if last {
		head = protowire.AppendVarint(protowire.AppendTag(head, 3, protowire.VarintType), 1)
	}
	head = protowire.AppendTag(head, dataField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(data)))
	return message{head, data}
}

// readRequest encodes a ByteStream.ReadRequest for a whole resource.
func readRequest(resource string) message {
	return message{protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), resource)}
}

// dataSize returns the length of the data at the end of a ReadResponse.
func (r *reply) dataSize() (int, error) {
	total := r.parts.Len()
	if total == 0 {
		return 0, nil
	}
	var buf [1 + 10]byte // a tag of one byte, and a varint
	head := buf[:r.parts.CopyTo(buf[:])]
	field, kind, tag := protowire.ConsumeTag(head)
	if tag > 0 && field == dataField && kind == protowire.BytesType {
		if size, n := protowire.ConsumeVarint(head[tag:]); n > 0 && size == uint64(total-tag-n) {
			return int(size), nil
		}
	}
	return 0, errors.New("malformed ReadResponse")
}

// A replyReader reads the data of ReadResponses and frees them.
type replyReader struct {
	replies []reply
	rest    []byte
}

func (p *replyReader) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		if len(p.replies) == 0 {
			return 0, io.EOF
		}
		r := &p.replies[0]
		size, err := r.dataSize()
		if err != nil {
			return 0, err
		}
		whole := r.bytes()
		p.rest = whole[len(whole)-size:]
		r.free()
		p.replies = p.replies[1:]
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// compare checks that the data of replies is the blob, and frees the replies.
func (b *blob) compare(replies []reply) error {
	var r io.Reader = &replyReader{replies: replies}
	if b.zip != nil {
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return err
		}
		defer d.Close()
		r = d
	}
	want, got := b.data, make([]byte, 64<<10)
	for {
		n, err := r.Read(got)
		if !bytes.HasPrefix(want, got[:n]) {
			return fmt.Errorf("blob %s: the server sent other bytes than were written, within %d bytes from offset %d",
				b.resource(), n, len(b.data)-len(want))
		}
		want = want[n:]
		if err == io.EOF && len(want) == 0 {
			return nil
		} else if err == io.EOF {
			err = fmt.Errorf("the last %d bytes are missing", len(want))
		}
		if err != nil {
			return fmt.Errorf("blob %s: %w", b.resource(), err)
		}
	}
}
