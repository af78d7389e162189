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

// A message is an encoded request, in parts that are sent one after the other without being copied first.
type message [][]byte

// A reply is an encoded response as it was received, kept until free is called.
type reply struct {
	parts mem.BufferSlice
}

// bytes returns the response in one piece.
func (r *reply) bytes() []byte { return r.parts.Materialize() }

func (r *reply) free() {
	r.parts.Free()
	r.parts = nil
}

// raw has a call take a message and return a reply.
var raw = grpc.ForceCodecV2(codec{})

// codec hands messages and replies to gRPC as they are.
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

// Name is that of the usual encoding, which it is.
func (codec) Name() string { return "proto" }

// dataField is the number of the field data, of a WriteRequest and of a ReadResponse.
const dataField = 10

// writeRequest returns the message of a ByteStream.Write that has data at offset off.
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

// dataSize returns how many bytes of data a ReadResponse ends with.
func (r *reply) dataSize() (int, error) {
	total := r.parts.Len()
	if total == 0 {
		return 0, nil
	}
	var buf [1 + 10]byte // a tag of one byte, and a number
	head := buf[:r.parts.CopyTo(buf[:])]
	field, kind, tag := protowire.ConsumeTag(head)
	if tag > 0 && field == dataField && kind == protowire.BytesType {
		if size, n := protowire.ConsumeVarint(head[tag:]); n > 0 && size == uint64(total-tag-n) {
			return int(size), nil
		}
	}
	return 0, errors.New("a ReadResponse is malformed")
}

// pieces reads the data of ReadResponses and frees them.
type pieces struct {
	replies []reply
	rest    []byte
}

func (p *pieces) Read(b []byte) (int, error) {
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

// compare frees replies and returns nil if their data are the blob.
func (b *blob) compare(replies []reply) error {
	var r io.Reader = &pieces{replies: replies}
	if b.zip != nil {
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return err
		}
		defer d.Close()
		r = d
	}
	want, piece := b.data, make([]byte, 64<<10)
	for {
		n, err := r.Read(piece)
		if !bytes.HasPrefix(want, piece[:n]) {
			return fmt.Errorf("blob %s: the server sends other bytes than were written, from byte %d on or somewhat later",
				b.resource(), len(b.data)-len(want))
		}
		want = want[n:]
		if err == io.EOF && len(want) == 0 {
			return nil
		} else if err == io.EOF {
			err = fmt.Errorf("%d bytes are absent at the end", len(want))
		}
		if err != nil {
			return fmt.Errorf("blob %s: %w", b.resource(), err)
		}
	}
}
