// SPDX-License-Identifier: Apache-2.0

package nested

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"sync"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A record holds what an action fetched.
type record struct {
	instance func() (*cas.Instance, error) // of the action

	mu  sync.Mutex
	set map[manifest.Fetched]bool // guarded by mu
}

// all returns what was fetched.
func (r *record) all() []manifest.Fetched {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]manifest.Fetched, 0, len(r.set))
	for f := range r.set {
		all = append(all, f)
	}
	return all
}

// add records that blob d or, with a sum, the result of action d is about to be sent. It fails if the record is full.
func (r *record) add(d cas.Digest, sum string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := manifest.Fetched{Digest: d, Sum: sum}
	if !r.set[f] && len(r.set) >= maxFetched {
		return status.Errorf(codes.ResourceExhausted, "the action has fetched %d blobs and results, which is the limit", maxFetched)
	}
	r.set[f] = true
	return nil
}

// answer records the contents of m, a response to req. It fails closed: contents that cannot be recorded are not sent.
func (r *record) answer(req, m any) error {
	switch m := m.(type) {
	case *repb.BatchReadBlobsResponse:
		return r.batch(req, m)
	case *repb.ActionResult:
		if q, ok := req.(*repb.GetActionResultRequest); ok { // others are uploads
			return r.named(q.DigestFunction, q.ActionDigest, resultSum(m, codes.OK))
		}
	case *longrunningpb.Operation:
		return r.executed(req, m)
	case *repb.GetTreeResponse:
		if q, ok := req.(*repb.GetTreeRequest); ok { // the digest determines all pages
			return r.named(q.DigestFunction, q.RootDigest, "")
		}
	case *repb.SplitBlobResponse:
		if q, ok := req.(*repb.SplitBlobRequest); ok {
			return r.named(q.DigestFunction, q.BlobDigest, "")
		}
	case *repb.GetChunkMappingResponse:
		if q, ok := req.(*repb.GetChunkMappingRequest); ok {
			return r.named(q.DigestFunction, q.BlobDigest, "")
		}
	default:
		if q, ok := req.(*bspb.ReadRequest); ok {
			return r.read(q.ResourceName)
		}
	}
	return nil
}

func (r *record) batch(req any, m *repb.BatchReadBlobsResponse) error {
	q, ok := req.(*repb.BatchReadBlobsRequest)
	if !ok {
		return errUnknown
	}
	for _, blob := range m.Responses {
		if codes.Code(blob.GetStatus().GetCode()) != codes.OK {
			continue
		}
		if err := r.named(q.DigestFunction, blob.Digest, ""); err != nil {
			return err
		}
	}
	return nil
}

// executed records the result in an operation of Execute.
func (r *record) executed(req any, o *longrunningpb.Operation) error {
	if o.GetResponse() == nil {
		return nil
	}
	q, ok := req.(*repb.ExecuteRequest)
	m := &repb.ExecuteResponse{}
	if !ok || o.GetResponse().UnmarshalTo(m) != nil {
		return errUnknown
	}
	return r.named(q.DigestFunction, q.ActionDigest, resultSum(m.Result, codes.Code(m.GetStatus().GetCode())))
}

// errUnknown refuses an answer that cannot be recorded.
var errUnknown = status.Error(codes.Internal, "a response to an action cannot be recorded")

// resultSum returns the SHA-256 of a result, without its metadata and inlined copies of blobs, and of a status that is
// not OK.
func resultSum(r *repb.ActionResult, code codes.Code) string {
	bare := &repb.ActionResult{}
	if r != nil {
		bare = proto.CloneOf(r)
	}
	bare.ExecutionMetadata = nil
	if bare.StdoutDigest != nil {
		bare.StdoutRaw = nil
	}
	if bare.StderrDigest != nil {
		bare.StderrRaw = nil
	}
	for _, f := range bare.OutputFiles {
		f.Contents = nil
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(bare)
	if err != nil {
		panic(err) // it was decoded or sent before
	}
	if code != codes.OK {
		b = append(b, code.String()...)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// named records a digest of a message.
func (r *record) named(fn repb.DigestFunction_Value, d *repb.Digest, sum string) error {
	in, err := r.instance()
	if err != nil {
		return err
	}
	of, err := in.FunctionOf(fn, d)
	if err != nil {
		return errUnknown
	}
	digest, err := cas.FromProto(of, d)
	if err != nil {
		return errUnknown
	}
	return r.add(digest, sum)
}

// read records the blob that a resource names.
func (r *record) read(resource string) error {
	segments := strings.Split(resource, "/")
	i := slices.IndexFunc(segments, func(s string) bool { return s == "blobs" || s == "compressed-blobs" })
	if i < 0 {
		return errUnknown
	}
	blob := segments[i+1:]
	if segments[i] == "compressed-blobs" {
		blob = blob[min(1, len(blob)):]
	}
	var fn repb.DigestFunction_Value // UNKNOWN if the name has none
	if len(blob) == 3 {
		fn = repb.DigestFunction_Value(repb.DigestFunction_Value_value[strings.ToUpper(blob[0])])
		blob = blob[1:]
	}
	if len(blob) != 2 {
		return errUnknown
	}
	size, err := strconv.ParseInt(blob[1], 10, 64)
	if err != nil {
		return errUnknown
	}
	return r.named(fn, &repb.Digest{Hash: blob[0], SizeBytes: size}, "")
}
