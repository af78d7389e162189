// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"io"

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

// receive makes a call that streams its replies, and passes each reply to keep, which frees it.
func receive(ctx context.Context, conn *grpc.ClientConn, method string, request message, keep func(reply) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method, raw)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		var r reply
		if err := stream.RecvMsg(&r); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := keep(r); err != nil {
			return err
		}
	}
}

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

// data passes the parts of the data of a ReadResponse to yield, and frees the reply.
func (r *reply) data(yield func(part []byte) error) error {
	defer r.free()
	total := r.parts.Len()
	if total == 0 {
		return nil
	}
	var buf [1 + 10]byte // a tag of one byte, and a varint
	head := buf[:r.parts.CopyTo(buf[:])]
	field, kind, tag := protowire.ConsumeTag(head)
	if tag < 0 || field != dataField || kind != protowire.BytesType {
		return errReadResponse
	}
	size, n := protowire.ConsumeVarint(head[tag:])
	if n < 0 || size != uint64(total-tag-n) {
		return errReadResponse
	}
	skip := tag + n
	for _, part := range r.parts {
		data := part.ReadOnlyData()
		from := min(skip, len(data))
		skip -= from
		if err := yield(data[from:]); err != nil {
			return err
		}
	}
	return nil
}

var errReadResponse = errors.New("malformed ReadResponse")
