// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"io"
	"slices"

	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// resource prefixes a ByteStream resource name with the server's instance.
func (s *Server) resource(name string) string {
	if s.instance == "" {
		return name
	}
	return s.instance + "/" + name
}

// writes returns the load that writes each blob by a ByteStream.Write.
func (s *Server) writes(c *Config, bs []blob) load {
	streams := make([][]message, len(bs))
	for i, b := range bs {
		h := b.hash // as a UUID that no other upload has
		name := s.resource(fmt.Sprintf("uploads/%s-%s-%s-%s-%s/%s",
			h[:8], h[8:12], h[12:16], h[16:20], h[20:32], b.resource()))
		off := int64(0)
		for chunk := range slices.Chunk(b.wire(), int(c.Chunk)) {
			end := off + int64(len(chunk))
			streams[i] = append(streams[i], writeRequest(name, off, chunk, end == int64(len(b.wire()))))
			off = end
		}
	}
	return func(ctx context.Context) (func() error, error) {
		replies := make([]reply, len(bs))
		err := each(ctx, c.Parallel, len(bs), func(ctx context.Context, i int) error {
			return s.write(ctx, streams[i], &replies[i])
		})
		return func() error {
			for i := range bs {
				var m bspb.WriteResponse
				err := proto.Unmarshal(replies[i].bytes(), &m)
				replies[i].free()
				// For compressed blobs servers may report either size.
				if err == nil && bs[i].zip == nil && m.CommittedSize != int64(len(bs[i].data)) {
					err = fmt.Errorf("the server committed %d bytes", m.CommittedSize)
				}
				if err != nil {
					return fmt.Errorf("blob %s: %w", bs[i].resource(), err)
				}
			}
			return nil
		}, err
	}
}

// write sends the messages of one blob.
func (s *Server) write(ctx context.Context, messages []message, answer *reply) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const method = "/google.bytestream.ByteStream/Write"
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, method, raw)
	if err != nil {
		return err
	}
	for _, m := range messages {
		if err := stream.SendMsg(m); err == io.EOF {
			break // the server answered early
		} else if err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(answer)
}

// reads returns the load that reads each blob by a ByteStream.Read. The check compares the contents.
func (s *Server) reads(c *Config, bs []blob) load {
	requests := s.readRequests(bs)
	return func(ctx context.Context) (func() error, error) {
		replies := make([][]reply, len(bs))
		err := each(ctx, c.Parallel, len(bs), func(ctx context.Context, i int) (err error) {
			replies[i], err = s.readAll(ctx, requests[i])
			return err
		})
		return func() error {
			for i := range bs {
				if err := bs[i].compare(replies[i]); err != nil {
					return err
				}
			}
			return nil
		}, err
	}
}

// drain returns the load that reads blobs in order and discards them. It checks the sizes of uncompressed blobs.
func (s *Server) drain(bs []blob) load {
	requests := s.readRequests(bs)
	return func(ctx context.Context) (func() error, error) {
		sizes := make([]int, len(bs))
		for i := range bs {
			err := s.read(ctx, requests[i], func(r reply) error {
				n, err := r.dataSize()
				r.free()
				sizes[i] += n
				return err
			})
			if err != nil {
				return nil, err
			}
		}
		return func() error {
			for i, b := range bs {
				if b.zip == nil && sizes[i] != len(b.data) {
					return fmt.Errorf("blob %s: the server sent %d bytes", b.resource(), sizes[i])
				}
			}
			return nil
		}, nil
	}
}

// verify reads and compares everything that a round wrote.
func (s *Server) verify(ctx context.Context, c *Config, x *content) error {
	kinds := [][]blob{x.batched, x.streamed, x.large}
	if s.zstd {
		kinds = append(kinds, x.zipped, x.largeZipped)
	}
	for _, bs := range kinds {
		check, err := s.reads(c, bs)(ctx)
		if err != nil {
			return err
		}
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) readRequests(bs []blob) []message {
	requests := make([]message, len(bs))
	for i, b := range bs {
		requests[i] = readRequest(s.resource(b.resource()))
	}
	return requests
}

// readAll reads one blob.
func (s *Server) readAll(ctx context.Context, request message) (replies []reply, err error) {
	err = s.read(ctx, request, func(r reply) error {
		replies = append(replies, r)
		return nil
	})
	return replies, err
}

// read reads one blob and passes each reply to keep, which frees it.
func (s *Server) read(ctx context.Context, request message, keep func(reply) error) error {
	return receive(ctx, s.conn, "/google.bytestream.ByteStream/Read", request, keep)
}

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
