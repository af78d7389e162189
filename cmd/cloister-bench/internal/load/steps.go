// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	rpcpb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// asked is how many digests are in one FindMissingBlobs.
const asked = 10_000

// A load makes calls, and returns what checks the answers and frees them, which is not to be called after
// an error.
type load func(ctx context.Context) (check func() error, err error)

// A step is one kind of load on one server, with its requests encoded.
type step struct {
	name  string
	unit  string // of what is counted
	count int64
	load  load // nil if the server does not serve it
}

// steps returns what a round does to the server: the same steps in the same order as to any other.
func (s *Server) steps(c *Config, x *content) ([]step, error) {
	var steps []step
	if c.Blobs > 0 {
		writes, reads, err := s.batches(x.batched)
		if err != nil {
			return nil, err
		}
		lookups, count, err := s.lookups(x, c.Lookups)
		if err != nil {
			return nil, err
		}
		steps = append(steps,
			step{"small batch write", "blobs", int64(c.Blobs), s.calls(c, writes)},
			step{"small batch read", "blobs", int64(c.Blobs), s.calls(c, reads)},
			step{"small stream write", "blobs", int64(c.Blobs), s.writes(c, x.streamed)},
			step{"small stream read", "blobs", int64(c.Blobs), s.reads(c, x.streamed)},
			step{"find missing", "digests", count, s.calls(c, lookups)},
		)
	}
	if c.Large > 0 {
		steps = append(steps,
			step{"large stream write", "bytes", c.Large, s.writes(c, x.large)},
			step{"large stream read", "bytes", c.Large, s.drain(x.large)},
		)
	}
	zipped := len(steps)
	if len(x.zipped) > 0 {
		steps = append(steps,
			step{"small zstd write", "blobs", int64(c.Blobs), s.writes(c, x.zipped)},
			step{"small zstd read", "blobs", int64(c.Blobs), s.reads(c, x.zipped)},
		)
	}
	if len(x.largeZipped) > 0 {
		steps = append(steps,
			step{"large zstd write", "bytes", c.Large, s.writes(c, x.largeZipped)},
			step{"large zstd read", "bytes", c.Large, s.drain(x.largeZipped)},
		)
	}
	for i := range steps[zipped:] {
		if !s.zstd {
			steps[zipped+i].load = nil
		}
	}
	return steps, nil
}

// verify reads all that a round has written, and compares it.
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

// A call is one that is no stream, and what its answer must be.
type call struct {
	method  string
	request message
	check   func(answer []byte) error
}

// calls returns the load of calls.
func (s *Server) calls(c *Config, calls []call) load {
	return func(ctx context.Context) (func() error, error) {
		replies := make([]reply, len(calls))
		err := each(ctx, c.Parallel, len(calls), func(ctx context.Context, i int) error {
			return s.conn.Invoke(ctx, calls[i].method, calls[i].request, &replies[i], raw)
		})
		return func() error {
			for i, call := range calls {
				answer := replies[i].bytes()
				replies[i].free()
				if err := call.check(answer); err != nil {
					return err
				}
			}
			return nil
		}, err
	}
}

// newCall returns the call of a method.
func newCall(method string, request proto.Message, check func(answer []byte) error) (call, error) {
	b, err := proto.Marshal(request)
	return call{method, message{b}, check}, err
}

// batches returns the calls that write blobs and those that read them, each as large as a message may be,
// and all about equally large.
func (s *Server) batches(bs []blob) (writes, reads []call, err error) {
	total, size := int64(len(bs)), int64(len(bs[0].data))
	most := max(1, min(s.batch/size, maxMessage/(size+entryBytes)))
	n := (total + most - 1) / most
	for part := range slices.Chunk(bs, int((total+n-1)/n)) {
		update := &repb.BatchUpdateBlobsRequest{InstanceName: s.instance}
		read := &repb.BatchReadBlobsRequest{InstanceName: s.instance}
		for _, b := range part {
			update.Requests = append(update.Requests, &repb.BatchUpdateBlobsRequest_Request{Digest: b.digest(), Data: b.data})
			read.Digests = append(read.Digests, b.digest())
		}
		w, err := newCall(repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName, update, func(b []byte) error {
			var m repb.BatchUpdateBlobsResponse
			if err := proto.Unmarshal(b, &m); err != nil {
				return err
			}
			return checkBatch(part, m.Responses, func(*repb.BatchUpdateBlobsResponse_Response, blob) bool { return true })
		})
		if err != nil {
			return nil, nil, err
		}
		r, err := newCall(repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName, read, func(b []byte) error {
			var m repb.BatchReadBlobsResponse
			if err := proto.Unmarshal(b, &m); err != nil {
				return err
			}
			return checkBatch(part, m.Responses, func(r *repb.BatchReadBlobsResponse_Response, b blob) bool { return bytes.Equal(r.Data, b.data) })
		})
		if err != nil {
			return nil, nil, err
		}
		writes, reads = append(writes, w), append(reads, r)
	}
	return writes, reads, nil
}

// checkBatch returns nil if answers says of each blob of part, in any order, that all is well, and good agrees.
func checkBatch[A interface {
	GetDigest() *repb.Digest
	GetStatus() *rpcpb.Status
}](part []blob, answers []A, good func(A, blob) bool) error {
	left := make(map[string]blob, len(part))
	for _, b := range part {
		left[b.hash] = b
	}
	for _, a := range answers {
		if err := status.FromProto(a.GetStatus()).Err(); err != nil {
			return fmt.Errorf("blob %s of a batch: %w", a.GetDigest().GetHash(), err)
		}
		b, asked := left[a.GetDigest().GetHash()]
		if !asked {
			return fmt.Errorf("the answer to a batch has the blob %q, which was not asked for or is there twice", a.GetDigest().GetHash())
		}
		if !good(a, b) {
			return fmt.Errorf("blob %s: the server sends other bytes than were written", b.resource())
		}
		delete(left, b.hash)
	}
	if len(left) > 0 {
		return fmt.Errorf("the answer to a batch lacks %d of %d blobs", len(left), len(part))
	}
	return nil
}

// lookups returns calls that ask for about total digests, and for how many they do: over and over for the
// same ones, every second of which the server does not have.
func (s *Server) lookups(x *content, total int) ([]call, int64, error) {
	digests := make([]*repb.Digest, 0, 2*len(x.batched))
	for i := range x.batched {
		digests = append(digests, x.batched[i].digest(), x.absent[i])
	}
	var calls []call
	count := 0
	for part := range slices.Chunk(digests, asked) {
		absent := make(map[string]bool, len(part)/2)
		for i := 1; i < len(part); i += 2 {
			absent[part[i].Hash] = true
		}
		c, err := newCall(repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName,
			&repb.FindMissingBlobsRequest{InstanceName: s.instance, BlobDigests: part},
			func(b []byte) error {
				var m repb.FindMissingBlobsResponse
				if err := proto.Unmarshal(b, &m); err != nil {
					return err
				}
				wrong := slices.IndexFunc(m.MissingBlobDigests, func(d *repb.Digest) bool { return !absent[d.Hash] })
				if wrong >= 0 {
					return fmt.Errorf("blob %s was written and is called missing", m.MissingBlobDigests[wrong].Hash)
				}
				if len(m.MissingBlobDigests) != len(absent) {
					return fmt.Errorf("%d blobs are called missing, where %d are", len(m.MissingBlobDigests), len(absent))
				}
				return nil
			})
		if err != nil {
			return nil, 0, err
		}
		calls = append(calls, c)
		count += len(part)
	}
	times := max(1, total/count)
	return slices.Repeat(calls, times), int64(times * count), nil
}

// resource returns the name of a resource of ByteStream in the server's instance.
func (s *Server) resource(rest string) string {
	if s.instance == "" {
		return rest
	}
	return s.instance + "/" + rest
}

// writes returns the load of writing blobs by a ByteStream.Write each.
func (s *Server) writes(c *Config, bs []blob) load {
	streams := make([][]message, len(bs))
	for i, b := range bs {
		// Any UUID will do that no other upload has.
		name := s.resource(fmt.Sprintf("uploads/%s-%s-%s-%s-%s/%s", b.hash[:8], b.hash[8:12], b.hash[12:16], b.hash[16:20], b.hash[20:32], b.resource()))
		off := int64(0)
		for piece := range slices.Chunk(b.sent(), int(c.Chunk)) {
			end := off + int64(len(piece))
			streams[i] = append(streams[i], writeRequest(name, off, piece, end == int64(len(b.sent()))))
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
				// Of what is compressed a server may count one or the other.
				if err == nil && bs[i].zip == nil && m.CommittedSize != int64(len(bs[i].data)) {
					err = fmt.Errorf("the server has committed %d bytes", m.CommittedSize)
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
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, "/google.bytestream.ByteStream/Write", raw)
	if err != nil {
		return err
	}
	for _, m := range messages {
		// A server may have said by now what it has to say.
		if err := stream.SendMsg(m); err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(answer)
}

// reads returns the load of reading blobs by a ByteStream.Read each. The check compares them.
func (s *Server) reads(c *Config, bs []blob) load {
	requests, err := s.readRequests(bs)
	return func(ctx context.Context) (func() error, error) {
		if err != nil {
			return nil, err
		}
		replies := make([][]reply, len(bs))
		err := each(ctx, c.Parallel, len(bs), func(ctx context.Context, i int) error {
			return s.read(ctx, requests[i], func(r reply) error {
				replies[i] = append(replies[i], r)
				return nil
			})
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

// drain returns the load of reading blobs one after the other without keeping them: what is checked is
// their size, unless they are compressed.
func (s *Server) drain(bs []blob) load {
	requests, err := s.readRequests(bs)
	return func(ctx context.Context) (func() error, error) {
		if err != nil {
			return nil, err
		}
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
					return fmt.Errorf("blob %s: the server sends %d bytes", b.resource(), sizes[i])
				}
			}
			return nil
		}, nil
	}
}

func (s *Server) readRequests(bs []blob) ([]message, error) {
	requests := make([]message, len(bs))
	for i, b := range bs {
		var err error
		if requests[i], err = s.readRequest(b.resource()); err != nil {
			return nil, err
		}
	}
	return requests, nil
}

func (s *Server) readRequest(resource string) (message, error) {
	m, err := proto.Marshal(&bspb.ReadRequest{ResourceName: s.resource(resource)})
	return message{m}, err
}

// read reads one blob, and gives each of its pieces to keep, which frees it.
func (s *Server) read(ctx context.Context, request message, keep func(reply) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/google.bytestream.ByteStream/Read", raw)
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

// each calls f with 0 to n-1, parallel of them at once, and returns the first error, after which the
// contexts of the others end.
func each(ctx context.Context, parallel, n int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var group sync.WaitGroup
	for range min(parallel, n) {
		group.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1) - 1)
				if i >= n {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	group.Wait()
	return context.Cause(ctx)
}
