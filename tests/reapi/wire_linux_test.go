// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// writeName returns the resource name of a new upload of a blob, readName that of its download.
func (c *client) writeName(d *repb.Digest) string {
	return c.resource("uploads/%s/blobs/%s/%d", uuid(), d.GetHash(), d.GetSizeBytes())
}

func (c *client) readName(d *repb.Digest) string {
	return c.resource("blobs/%s/%d", d.GetHash(), d.GetSizeBytes())
}

// write sends messages as one Write, closes the stream and returns the answer. It stops sending when the server has
// answered.
func (c *client) write(ms ...*bspb.WriteRequest) (*bspb.WriteResponse, error) {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	w, err := c.bs.Write(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range ms {
		if err := w.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
	}
	return w.CloseAndRecv()
}

// pieces returns messages that write b under name with size bytes each.
func pieces(name string, b []byte, size int) []*bspb.WriteRequest {
	var ms []*bspb.WriteRequest
	for off := 0; off < len(b) || off == 0; off += size {
		end := min(off+size, len(b))
		ms = append(ms,
			&bspb.WriteRequest{ResourceName: name, WriteOffset: int64(off), Data: b[off:end], FinishWrite: end == len(b)})
	}
	return ms
}

// read returns the data of a Read and the size of its largest message.
func (c *client) read(name string, offset, limit int64) (b []byte, largest int, err error) {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	r, err := c.bs.Read(ctx, &bspb.ReadRequest{ResourceName: name, ReadOffset: offset, ReadLimit: limit})
	if err != nil {
		return nil, 0, err
	}
	for {
		m, err := r.Recv()
		if err == io.EOF {
			return b, largest, nil
		}
		if err != nil {
			return b, largest, err
		}
		b, largest = append(b, m.Data...), max(largest, len(m.Data))
	}
}

// wantBlob checks that the resource name reads as b.
func (c *client) wantBlob(what, name string, b []byte) {
	c.Helper()
	got, _, err := c.read(name, 0, 0)
	if err != nil || string(got) != string(b) {
		c.Errorf("%s: Read of %q: got %s, %v; want %s", what, name, brief(got), err, brief(b))
	}
}

// wantPresent checks whether FindMissingBlobs reports a blob present.
func (c *client) wantPresent(what string, d *repb.Digest, want bool) {
	c.Helper()
	missing, err := c.absent(c.Context(), d)
	if err != nil {
		c.Errorf("%s: FindMissingBlobs of %s: %v", what, name(d), err)
	} else if got := len(missing) == 0; got != want {
		c.Errorf("%s: FindMissingBlobs of %s: got present %t, want %t", what, name(d), got, want)
	}
}

// update calls BatchUpdateBlobs and returns the status of each request. Servers may answer in any order, and once for
// requests with the same digest.
func (c *client) update(reqs ...*repb.BatchUpdateBlobsRequest_Request) ([]error, error) {
	return c.updateAs(&repb.BatchUpdateBlobsRequest{InstanceName: c.instance, Requests: reqs})
}

func (c *client) updateAs(req *repb.BatchUpdateBlobsRequest) ([]error, error) {
	resp, err := c.cas.BatchUpdateBlobs(c.Context(), req)
	if err != nil {
		return nil, err
	}
	byName := map[string][]error{}
	for _, r := range resp.GetResponses() {
		byName[name(r.GetDigest())] = append(byName[name(r.GetDigest())], status.ErrorProto(r.GetStatus()))
	}
	errs := make([]error, len(req.Requests))
	for i, r := range req.Requests {
		switch of := byName[name(r.Digest)]; len(of) {
		case 0:
			errs[i] = status.Errorf(codes.Unknown, "reply without an entry for %s", name(r.Digest))
		case 1:
			errs[i] = of[0]
		default:
			errs[i], byName[name(r.Digest)] = of[0], of[1:]
		}
	}
	return errs, nil
}

// blob returns a request to upload b.
func blob(b []byte) *repb.BatchUpdateBlobsRequest_Request {
	return &repb.BatchUpdateBlobsRequest_Request{Digest: cas.SHA256.Sum(b).Proto(), Data: b}
}

// fetch calls BatchReadBlobs and returns the response for each digest in order.
func (c *client) fetch(req *repb.BatchReadBlobsRequest) ([]*repb.BatchReadBlobsResponse_Response, error) {
	req.InstanceName = c.instance
	resp, err := c.cas.BatchReadBlobs(c.Context(), req)
	if err != nil {
		return nil, err
	}
	byName := map[string]*repb.BatchReadBlobsResponse_Response{}
	for _, r := range resp.GetResponses() {
		byName[name(r.GetDigest())] = r
	}
	var rs []*repb.BatchReadBlobsResponse_Response
	for _, d := range req.Digests {
		r := byName[name(d)]
		if r == nil {
			r = &repb.BatchReadBlobsResponse_Response{
				Digest: d,
				Status: status.Newf(codes.Unknown, "reply without an entry for %s", name(d)).Proto(),
			}
		}
		rs = append(rs, r)
	}
	return rs, nil
}

// A method is an RPC that names a blob or an action by a digest. Its error is that of the call or of the digest.
type method struct {
	name  string
	has   bool // advertised by the server
	names bool // the digest is part of a resource name, which cannot express some malformed digests
	call  func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error
}

// unary returns the call of a method. Requests get the instance name and the digest function.
func unary[Q proto.Message, R any](
	c *client, request func(d *repb.Digest) Q, send func(context.Context, Q, ...grpc.CallOption) (R, error),
) func(string, repb.DigestFunction_Value, *repb.Digest) error {
	return func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
		m := request(d).ProtoReflect()
		m.Set(m.Descriptor().Fields().ByName("instance_name"), protoreflect.ValueOfString(instance))
		m.Set(m.Descriptor().Fields().ByName("digest_function"), protoreflect.ValueOfEnum(f.Number()))
		r, err := send(c.Context(), m.Interface().(Q))
		switch r := any(r).(type) {
		case *repb.BatchUpdateBlobsResponse:
			return only(r.GetResponses(), err)
		case *repb.BatchReadBlobsResponse:
			return only(r.GetResponses(), err)
		}
		return err
	}
}

// methods returns the methods of the server. A server that is not of this tree may leave some unimplemented; other
// rules check which.
func (c *client) methods() []method {
	blobName := func(instance string, f repb.DigestFunction_Value, d *repb.Digest, uploads string) string {
		name := fmt.Sprintf("%sblobs/%s%s/%d", uploads, segments[f], d.GetHash(), d.GetSizeBytes())
		return strings.TrimPrefix(instance+"/"+name, "/")
	}
	upload := func() string { return "uploads/" + uuid() + "/" }
	caps := c.caps.GetCacheCapabilities()
	split, splice := caps.GetSplitBlobSupport(), caps.GetSpliceBlobSupport()
	streamed, single := c.streamsMappings(), c.unaryMappings()
	all := []method{
		{name: "FindMissingBlobs", has: true, call: unary(c, func(d *repb.Digest) *repb.FindMissingBlobsRequest {
			return &repb.FindMissingBlobsRequest{BlobDigests: []*repb.Digest{d}}
		}, c.cas.FindMissingBlobs)},
		{name: "BatchUpdateBlobs", has: true, call: unary(c, func(d *repb.Digest) *repb.BatchUpdateBlobsRequest {
			x := &repb.BatchUpdateBlobsRequest_Request{Digest: d, Data: []byte("x")}
			return &repb.BatchUpdateBlobsRequest{Requests: []*repb.BatchUpdateBlobsRequest_Request{x}}
		}, c.cas.BatchUpdateBlobs)},
		{name: "BatchReadBlobs", has: true, call: unary(c, func(d *repb.Digest) *repb.BatchReadBlobsRequest {
			return &repb.BatchReadBlobsRequest{Digests: []*repb.Digest{d}}
		}, c.cas.BatchReadBlobs)},
		{name: "GetTree", has: true, call: unary(c, func(d *repb.Digest) *repb.GetTreeRequest {
			return &repb.GetTreeRequest{RootDigest: d}
		}, streaming(c.cas.GetTree))},
		{name: "Read", has: true, names: true, call: func(in string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, _, err := c.read(blobName(in, f, d, ""), 0, 0)
			return err
		}},
		{name: "Write", has: true, names: true, call: func(in string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.write(pieces(blobName(in, f, d, upload()), []byte("x"), 1)...)
			return err
		}},
		{
			name: "QueryWriteStatus", has: true, names: true,
			call: func(in string, f repb.DigestFunction_Value, d *repb.Digest) error {
				_, err := c.bs.QueryWriteStatus(c.Context(),
					&bspb.QueryWriteStatusRequest{ResourceName: blobName(in, f, d, upload())})
				return err
			},
		},
		{name: "GetActionResult", has: true, call: unary(c, func(d *repb.Digest) *repb.GetActionResultRequest {
			return &repb.GetActionResultRequest{ActionDigest: d}
		}, c.ac.GetActionResult)},
		{
			name: "UpdateActionResult", has: updates.met(c),
			call: unary(c, func(d *repb.Digest) *repb.UpdateActionResultRequest {
				return &repb.UpdateActionResultRequest{ActionDigest: d, ActionResult: &repb.ActionResult{StdoutRaw: []byte("x")}}
			}, c.ac.UpdateActionResult),
		},
		{name: "GetChunkMapping", has: split && streamed, call: unary(c, func(d *repb.Digest) *repb.GetChunkMappingRequest {
			return &repb.GetChunkMappingRequest{BlobDigest: d}
		}, streaming(c.cas.GetChunkMapping))},
		{name: "RegisterChunkMapping", has: splice &&
			streamed, call: unary(c, func(d *repb.Digest) *repb.RegisterChunkMappingRequest {
			return &repb.RegisterChunkMappingRequest{BlobDigest: d, ChunkDigests: []*repb.Digest{d}}
		}, func(_ context.Context, m *repb.RegisterChunkMappingRequest, _ ...grpc.CallOption) (any, error) {
			return nil, c.register(m)
		})},
		{name: "SplitBlob", has: split && single, call: unary(c, func(d *repb.Digest) *repb.SplitBlobRequest {
			return &repb.SplitBlobRequest{BlobDigest: d}
		}, c.cas.SplitBlob)},
		{name: "SpliceBlob", has: splice && single, call: unary(c, func(d *repb.Digest) *repb.SpliceBlobRequest {
			return &repb.SpliceBlobRequest{BlobDigest: d, ChunkDigests: []*repb.Digest{d}}
		}, c.cas.SpliceBlob)},
		{name: "Execute", has: execution.met(c), call: func(in string, f repb.DigestFunction_Value, d *repb.Digest) error {
			return c.request(d, func(r *repb.ExecuteRequest) { r.InstanceName, r.DigestFunction = in, f }).err
		}},
	}
	return slices.DeleteFunc(all, func(m method) bool {
		return !m.has || !c.ours &&
			status.Code(m.call(c.instance, repb.DigestFunction_SHA256, absentDigest(100))) == codes.Unimplemented
	})
}

// streaming makes a method with a stream of replies look like a unary one.
func streaming[Q, M any](
	open func(context.Context, Q, ...grpc.CallOption) (grpc.ServerStreamingClient[M], error),
) func(context.Context, Q, ...grpc.CallOption) ([]*M, error) {
	return func(ctx context.Context, q Q, _ ...grpc.CallOption) ([]*M, error) {
		s, err := open(ctx, q)
		return received(s, err)
	}
}

// only returns the error of the only entry of a batch.
func only[R interface{ GetStatus() *spb.Status }](rs []R, err error) error {
	if err == nil && len(rs) == 0 {
		return status.Error(codes.Unknown, "reply without an entry")
	}
	if err == nil {
		err = status.ErrorProto(rs[0].GetStatus())
	}
	return err
}

// getTree returns the pages of a tree.
func (c *client) getTree(req *repb.GetTreeRequest) ([]*repb.GetTreeResponse, error) {
	return streaming(c.cas.GetTree)(c.Context(), req)
}

// mapping returns the messages of GetChunkMapping.
func (c *client) mapping(req *repb.GetChunkMappingRequest) ([]*repb.GetChunkMappingResponse, error) {
	return streaming(c.cas.GetChunkMapping)(c.Context(), req)
}

// received returns the messages of a stream.
func received[M any](s interface{ Recv() (*M, error) }, err error) ([]*M, error) {
	if err != nil {
		return nil, err
	}
	var all []*M
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, m)
	}
}

// register sends messages as one RegisterChunkMapping.
func (c *client) register(ms ...*repb.RegisterChunkMappingRequest) error {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	s, err := c.cas.RegisterChunkMapping(ctx)
	if err != nil {
		return err
	}
	for _, m := range ms {
		if err := s.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
	}
	_, err = s.CloseAndRecv()
	return err
}

// name returns a digest, which may be malformed, for messages.
func name(d *repb.Digest) string { return fmt.Sprintf("%.80q/%d", d.GetHash(), d.GetSizeBytes()) }

// brief describes unexpected bytes in a message.
func brief(b []byte) string {
	if len(b) <= 40 {
		return fmt.Sprintf("%q", b)
	}
	return fmt.Sprintf("%d bytes (%s)", len(b), cas.SHA256.Sum(b).Hash()[:12])
}
