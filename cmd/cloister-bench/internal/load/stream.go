// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// chunkBytes is the size of a message of a write.
const chunkBytes = 1 << 20

// resource returns the ByteStream resource name of a blob below directories, which end in a slash.
func (s *Server) resource(dir, hash string, size int64) string {
	if s.instance != "" {
		dir = s.instance + "/" + dir
	}
	return fmt.Sprintf("%sblobs/%s/%d", dir, hash, size)
}

// writes returns the load that writes each blob by a ByteStream.Write.
func (s *Server) writes(parallel int, bs []blob) load {
	streams := make([][]message, len(bs))
	for i, b := range bs {
		h := b.hash // as a UUID that no other upload has
		dir := fmt.Sprintf("uploads/%s-%s-%s-%s-%s/", h[:8], h[8:12], h[12:16], h[16:20], h[20:32])
		name, off, size := s.resource(dir, h, int64(len(b.data))), 0, len(b.data)
		for chunk := range slices.Chunk(b.data, chunkBytes) {
			end := off + len(chunk)
			streams[i] = append(streams[i], writeRequest(name, int64(off), chunk, end == size))
			off = end
		}
	}
	return func(ctx context.Context) error {
		return each(ctx, parallel, len(bs), func(ctx context.Context, i int) error {
			size, err := s.write(ctx, streams[i])
			if err == nil && size != int64(len(bs[i].data)) {
				err = fmt.Errorf("the server committed %d bytes", size)
			}
			return bs[i].explain(err)
		})
	}
}

// explain names the blob in an error.
func (b *blob) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("blob %s/%d: %w", b.hash, len(b.data), err)
}

// write sends the messages of one blob, and returns the committed size.
func (s *Server) write(ctx context.Context, messages []message) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const method = "/google.bytestream.ByteStream/Write"
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, method, raw)
	if err != nil {
		return 0, err
	}
	for _, m := range messages {
		if err := stream.SendMsg(m); err == io.EOF {
			break // the server answered early
		} else if err != nil {
			return 0, err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return 0, err
	}
	var r reply
	if err := stream.RecvMsg(&r); err != nil {
		return 0, err
	}
	defer r.free()
	var m bspb.WriteResponse
	err = proto.Unmarshal(r.bytes(), &m)
	return m.CommittedSize, err
}

// reads returns the load that reads each blob by a ByteStream.Read, and compares the contents.
func (s *Server) reads(parallel int, bs []blob) load {
	return func(ctx context.Context) error {
		return each(ctx, parallel, len(bs), func(ctx context.Context, i int) error {
			rest := bs[i].data
			err := s.read(ctx, bs[i].hash, int64(len(rest)), func(part []byte) error {
				if !bytes.HasPrefix(rest, part) {
					return fmt.Errorf("the server sent other bytes than were written, within %d bytes from offset %d",
						len(part), len(bs[i].data)-len(rest))
				}
				rest = rest[len(part):]
				return nil
			})
			if err == nil && len(rest) > 0 {
				err = fmt.Errorf("the last %d bytes are missing", len(rest))
			}
			return bs[i].explain(err)
		})
	}
}

// compressedReads returns the load that reads each blob by a ByteStream.Read of its Zstandard form, decompresses it, and
// compares the contents.
func (s *Server) compressedReads(parallel int, bs []blob) load {
	return func(ctx context.Context) error {
		return each(ctx, parallel, len(bs), func(ctx context.Context, i int) error {
			b := bs[i]
			r, w := io.Pipe()
			go func() {
				name := strings.Replace(s.resource("compressed-", b.hash, int64(len(b.data))), "/"+b.hash, "/zstd/"+b.hash, 1)
				w.CloseWithError(receive(ctx, s.conn, "/google.bytestream.ByteStream/Read", readRequest(name), func(r reply) error {
					return r.data(func(part []byte) error { _, err := w.Write(part); return err })
				}))
			}()
			defer r.Close() // ends the goroutine
			d, err := zstd.NewReader(r)
			if err != nil {
				return err
			}
			defer d.Close()
			part := make([]byte, chunkBytes)
			for rest := b.data; ; {
				n, err := io.ReadFull(d, part)
				if !bytes.HasPrefix(rest, part[:n]) {
					return b.explain(errors.New("the server sent other bytes than were written"))
				}
				rest = rest[n:]
				switch {
				case err == nil:
				case err != io.EOF && err != io.ErrUnexpectedEOF:
					return b.explain(err)
				case len(rest) > 0:
					return b.explain(fmt.Errorf("the last %d bytes are missing", len(rest)))
				default:
					return nil
				}
			}
		})
	}
}

// read reads one blob and passes its parts to yield.
func (s *Server) read(ctx context.Context, hash string, size int64, yield func(part []byte) error) error {
	request := readRequest(s.resource("", hash, size))
	return receive(ctx, s.conn, "/google.bytestream.ByteStream/Read", request, func(r reply) error { return r.data(yield) })
}
