// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	rpcpb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A load makes calls and checks the answers, unless the step does that later.
type load func(ctx context.Context) error

// A step is one kind of load for one server, with encoded requests.
type step struct {
	name  string
	unit  string // of count
	count int64
	load  load
	check func() error // of the answers after the clock has stopped, unless nil
}

// steps returns the steps of a round. They are the same for all servers.
func (s *Server) steps(c *Config, x *content) ([]step, error) {
	var steps []step
	if c.Blobs > 0 {
		writes, reads, err := s.batches(x.batched)
		if err != nil {
			return nil, err
		}
		blobs := int64(c.Blobs)
		steps = append(steps,
			s.calls("small batch write", "blobs", blobs, c.Parallel, writes),
			s.calls("small batch read", "blobs", blobs, c.Parallel, reads),
			step{"small stream write", "blobs", blobs, s.writes(c.Parallel, x.streamed), nil},
			step{"small stream read", "blobs", blobs, s.reads(c.Parallel, x.streamed), nil},
		)
	}
	if c.Blobs > 0 && c.Lookups > 0 {
		lookups, count, err := s.lookups(x, c.Lookups)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s.calls("find missing", "digests", count, c.Parallel, lookups))
	}
	if c.Large > 0 {
		steps = append(steps,
			step{"large stream write", "bytes", c.Large, s.writes(1, x.large), nil},
			step{"large stream read", "bytes", c.Large, s.reads(1, x.large), nil},
		)
	}
	if c.Large > 0 && c.Compressed {
		steps = append(steps, step{"large compressed read", "bytes", c.Large, s.compressedReads(1, x.large), nil})
	}
	return steps, nil
}

// A call is a unary call and the check of its answer.
type call struct {
	method  string
	request message
	check   func(answer []byte) error
}

func newCall[T any, M interface {
	*T
	proto.Message
}](method string, request proto.Message, check func(answer M) error) (call, error) {
	b, err := proto.Marshal(request)
	return call{method, message{b}, func(answer []byte) error {
		m := M(new(T))
		if err := proto.Unmarshal(answer, m); err != nil {
			return err
		}
		return check(m)
	}}, err
}

// calls returns a step of unary calls.
func (s *Server) calls(name, unit string, count int64, parallel int, calls []call) step {
	replies := make([]reply, len(calls))
	return step{name, unit, count, func(ctx context.Context) error {
		return each(ctx, parallel, len(calls), func(ctx context.Context, i int) error {
			return s.conn.Invoke(ctx, calls[i].method, calls[i].request, &replies[i], raw)
		})
	}, func() error {
		for i, call := range calls {
			answer := replies[i].bytes()
			replies[i].free()
			if err := call.check(answer); err != nil {
				return err
			}
		}
		return nil
	}}
}

// batches returns the calls that write blobs of equal size and those that read them. Batches are about equally large,
// and as few as message sizes permit.
func (s *Server) batches(bs []blob) (writes, reads []call, err error) {
	total, size := int64(len(bs)), int64(len(bs[0].data))
	most := max(1, min(s.batch/size, maxMessage/(size+entryBytes)))
	n := (total + most - 1) / most
	for part := range slices.Chunk(bs, int((total+n-1)/n)) {
		read := &repb.BatchReadBlobsRequest{InstanceName: s.instance}
		for _, b := range part {
			read.Digests = append(read.Digests, b.digest())
		}
		w, err := newCall(repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName, s.updateRequest(part),
			func(m *repb.BatchUpdateBlobsResponse) error { return checkUpdate(part, m) })
		if err != nil {
			return nil, nil, err
		}
		r, err := newCall(repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName, read,
			func(m *repb.BatchReadBlobsResponse) error {
				return checkBatch(part, m.Responses, func(r *repb.BatchReadBlobsResponse_Response, b blob) bool {
					return bytes.Equal(r.Data, b.data)
				})
			})
		if err != nil {
			return nil, nil, err
		}
		writes, reads = append(writes, w), append(reads, r)
	}
	return writes, reads, nil
}

func (s *Server) updateRequest(part []blob) *repb.BatchUpdateBlobsRequest {
	m := &repb.BatchUpdateBlobsRequest{InstanceName: s.instance}
	for _, b := range part {
		m.Requests = append(m.Requests, &repb.BatchUpdateBlobsRequest_Request{Digest: b.digest(), Data: b.data})
	}
	return m
}

func checkUpdate(part []blob, m *repb.BatchUpdateBlobsResponse) error {
	return checkBatch(part, m.Responses, func(*repb.BatchUpdateBlobsResponse_Response, blob) bool { return true })
}

// checkBatch checks that there is one successful and equal answer for each blob of part, in any order.
func checkBatch[A interface {
	GetDigest() *repb.Digest
	GetStatus() *rpcpb.Status
}](part []blob, answers []A, equal func(A, blob) bool) error {
	left := make(map[string]blob, len(part))
	for _, b := range part {
		left[b.hash] = b
	}
	for _, a := range answers {
		hash := a.GetDigest().GetHash()
		if err := status.FromProto(a.GetStatus()).Err(); err != nil {
			return fmt.Errorf("blob %s in a batch: %w", hash, err)
		}
		b, ok := left[hash]
		if !ok {
			return fmt.Errorf("the batch answer contains blob %q, which was not requested or appears twice", hash)
		}
		if !equal(a, b) {
			return b.explain(errors.New("the server sent other bytes than were written"))
		}
		delete(left, b.hash)
	}
	if len(left) > 0 {
		return fmt.Errorf("the batch answer lacks %d of %d blobs", len(left), len(part))
	}
	return nil
}

// lookups returns calls that look up about total digests, and the exact count. They repeat the same digests, of which
// the server lacks every second.
func (s *Server) lookups(x *content, total int) ([]call, int64, error) {
	digests := make([]*repb.Digest, 0, 2*len(x.batched))
	for i := range x.batched {
		digests = append(digests, x.batched[i].digest(), x.absent[i])
	}
	var calls []call
	for part := range slices.Chunk(digests, lookupsBatch) {
		absent := make(map[string]bool, len(part)/2)
		for i := 1; i < len(part); i += 2 {
			absent[part[i].Hash] = true
		}
		c, err := newCall(repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName,
			&repb.FindMissingBlobsRequest{InstanceName: s.instance, BlobDigests: part},
			func(m *repb.FindMissingBlobsResponse) error {
				for _, d := range m.MissingBlobDigests {
					if !absent[d.Hash] {
						return fmt.Errorf("blob %s was written, but is reported missing", d.Hash)
					}
				}
				if got, want := len(m.MissingBlobDigests), len(absent); got != want {
					return fmt.Errorf("%d blobs are reported missing, want %d", got, want)
				}
				return nil
			})
		if err != nil {
			return nil, 0, err
		}
		calls = append(calls, c)
	}
	times := max(1, total/len(digests))
	return slices.Repeat(calls, times), int64(times * len(digests)), nil
}

// each calls f with 0 to n-1, parallel calls at a time, and returns the first error, which cancels the other calls.
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
