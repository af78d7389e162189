// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
		ms = append(ms, &bspb.WriteRequest{ResourceName: name, WriteOffset: int64(off), Data: b[off:end], FinishWrite: end == len(b)})
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

// executed executes an action. Its error is that of the call, with a nil response, or that of the response.
func (c *client) executed(req *repb.ExecuteRequest) (*repb.ExecuteResponse, error) {
	ctx, cancel := context.WithTimeout(c.Context(), 10*time.Minute)
	defer cancel()
	s, err := c.exec.Execute(ctx, req)
	if err != nil {
		return nil, err
	}
	op, err := last(s)
	if err != nil {
		return nil, err
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return nil, status.Errorf(codes.Unknown, "operation %v: %v", op, err)
	}
	return &r, status.ErrorProto(r.Status)
}

// A method is an RPC that names a blob or an action by a digest. Its error is that of the call or of the digest.
type method struct {
	name string
	call func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error
	// names reports that the digest is part of a resource name, which cannot express some malformed digests.
	names bool
}

// methods returns the methods of the server. A server that is not of this tree may leave some unimplemented; other
// rules check which.
func (c *client) methods() []method {
	ctx := c.Context()
	prefix := func(instance string) string {
		if instance == "" {
			return ""
		}
		return instance + "/"
	}
	// segment returns the digest function where a resource name must state it.
	segment := func(f repb.DigestFunction_Value) string {
		switch f {
		case repb.DigestFunction_BLAKE3:
			return "blake3/"
		case repb.DigestFunction_SHA256TREE:
			return "sha256tree/"
		}
		return ""
	}
	ms := []method{
		{name: "FindMissingBlobs", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.cas.FindMissingBlobs(ctx, &repb.FindMissingBlobsRequest{InstanceName: instance, DigestFunction: f, BlobDigests: []*repb.Digest{d}})
			return err
		}},
		{name: "BatchUpdateBlobs", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			r, err := c.cas.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{
				InstanceName: instance, DigestFunction: f,
				Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d, Data: []byte("x")}},
			})
			return only(r.GetResponses(), err)
		}},
		{name: "BatchReadBlobs", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			r, err := c.cas.BatchReadBlobs(ctx, &repb.BatchReadBlobsRequest{InstanceName: instance, DigestFunction: f, Digests: []*repb.Digest{d}})
			return only(r.GetResponses(), err)
		}},
		{name: "GetTree", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.getTree(&repb.GetTreeRequest{InstanceName: instance, DigestFunction: f, RootDigest: d})
			return err
		}},
		{name: "Read", names: true, call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, _, err := c.read(fmt.Sprintf("%sblobs/%s%s/%d", prefix(instance), segment(f), d.GetHash(), d.GetSizeBytes()), 0, 0)
			return err
		}},
		{name: "Write", names: true, call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.write(&bspb.WriteRequest{
				Data: []byte("x"), FinishWrite: true,
				ResourceName: fmt.Sprintf("%suploads/%s/blobs/%s%s/%d", prefix(instance), uuid(), segment(f), d.GetHash(), d.GetSizeBytes()),
			})
			return err
		}},
		{name: "QueryWriteStatus", names: true, call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.bs.QueryWriteStatus(ctx, &bspb.QueryWriteStatusRequest{
				ResourceName: fmt.Sprintf("%suploads/%s/blobs/%s%s/%d", prefix(instance), uuid(), segment(f), d.GetHash(), d.GetSizeBytes()),
			})
			return err
		}},
		{name: "GetActionResult", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.ac.GetActionResult(ctx, &repb.GetActionResultRequest{InstanceName: instance, DigestFunction: f, ActionDigest: d})
			return err
		}},
	}
	caps := c.caps.GetCacheCapabilities()
	if caps.GetActionCacheUpdateCapabilities().GetUpdateEnabled() {
		ms = append(ms, method{name: "UpdateActionResult", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.ac.UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
				InstanceName: instance, DigestFunction: f, ActionDigest: d,
				ActionResult: &repb.ActionResult{StdoutRaw: []byte("x")},
			})
			return err
		}})
	}
	if caps.GetSplitBlobSupport() && c.streamsMappings() {
		ms = append(ms, method{name: "GetChunkMapping", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.mapping(&repb.GetChunkMappingRequest{InstanceName: instance, DigestFunction: f, BlobDigest: d})
			return err
		}})
	}
	if caps.GetSpliceBlobSupport() && c.streamsMappings() {
		ms = append(ms, method{name: "RegisterChunkMapping", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			return c.register(&repb.RegisterChunkMappingRequest{InstanceName: instance, DigestFunction: f, BlobDigest: d, ChunkDigests: []*repb.Digest{d}})
		}})
	}
	if caps.GetSplitBlobSupport() && c.unaryMappings() {
		ms = append(ms, method{name: "SplitBlob", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.cas.SplitBlob(ctx, &repb.SplitBlobRequest{InstanceName: instance, DigestFunction: f, BlobDigest: d})
			return err
		}})
	}
	if caps.GetSpliceBlobSupport() && c.unaryMappings() {
		ms = append(ms, method{name: "SpliceBlob", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.cas.SpliceBlob(ctx, &repb.SpliceBlobRequest{InstanceName: instance, DigestFunction: f, BlobDigest: d, ChunkDigests: []*repb.Digest{d}})
			return err
		}})
	}
	if c.caps.GetExecutionCapabilities().GetExecEnabled() {
		ms = append(ms, method{name: "Execute", call: func(instance string, f repb.DigestFunction_Value, d *repb.Digest) error {
			_, err := c.executed(&repb.ExecuteRequest{InstanceName: instance, DigestFunction: f, ActionDigest: d})
			return err
		}})
	}
	if !c.ours {
		ms = slices.DeleteFunc(ms, func(m method) bool {
			return status.Code(m.call(c.instance, repb.DigestFunction_SHA256, absentDigest(100))) == codes.Unimplemented
		})
	}
	return ms
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
	s, err := c.cas.GetTree(c.Context(), req)
	return received(s, err)
}

// mapping returns the messages of GetChunkMapping.
func (c *client) mapping(req *repb.GetChunkMappingRequest) ([]*repb.GetChunkMappingResponse, error) {
	s, err := c.cas.GetChunkMapping(c.Context(), req)
	return received(s, err)
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
