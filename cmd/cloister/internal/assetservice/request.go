// SPDX-License-Identifier: Apache-2.0

package assetservice

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"

	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Limits of one request. The store limits the number of assets.
const (
	maxURIs           = 64
	maxURIBytes       = 8 << 10
	maxQualifiers     = 64
	maxQualifierBytes = 16 << 10 // of name and value
	maxReferences     = 1024     // which bounds the entries of the action cache that a fetch reads
)

// A request is any of the four requests.
type request interface {
	GetInstanceName() string
	GetUris() []string
	GetQualifiers() []*assetpb.Qualifier
	GetDigestFunction() repb.DigestFunction_Value
}

type fetchRequest interface {
	request
	GetOldestContentAccepted() *timestamppb.Timestamp
}

type pushRequest interface {
	request
	GetExpireAt() *timestamppb.Timestamp
	GetReferencesBlobs() []*repb.Digest
	GetReferencesDirectories() []*repb.Digest
}

// check returns the instance of a request, or cas.ErrInvalid for a malformed or too large request.
func (s *server) check(req request) (*cas.Instance, error) {
	in, err := s.Instances(req.GetInstanceName())
	if err != nil {
		return nil, err
	}
	invalid := func(format string, args ...any) (*cas.Instance, error) {
		return nil, fmt.Errorf("%w request: "+format, append([]any{cas.ErrInvalid}, args...)...)
	}
	uris, qualifiers := req.GetUris(), req.GetQualifiers()
	if len(uris) == 0 || len(uris) > maxURIs {
		return invalid("%d URIs: send 1 to %d", len(uris), maxURIs)
	}
	for _, u := range uris {
		if u == "" || len(u) > maxURIBytes {
			return invalid("a URI has %d bytes; the limits are 1 and %d", len(u), maxURIBytes)
		}
	}
	if len(qualifiers) > maxQualifiers {
		return invalid("%d qualifiers, limit %d", len(qualifiers), maxQualifiers)
	}
	seen := map[string]bool{}
	for _, q := range qualifiers {
		switch name, n := q.GetName(), len(q.GetName())+len(q.GetValue()); {
		case name == "":
			return invalid("a qualifier has no name")
		case n > maxQualifierBytes:
			return invalid("qualifier %+.80q has %d bytes, limit %d", name, n, maxQualifierBytes)
		case seen[name]:
			return invalid("qualifier %+.80q occurs twice", name)
		default:
			seen[name] = true
		}
	}
	if r, ok := req.(fetchRequest); ok && r.GetOldestContentAccepted() != nil {
		err = r.GetOldestContentAccepted().CheckValid()
	}
	if r, ok := req.(pushRequest); ok && r.GetExpireAt() != nil {
		err = r.GetExpireAt().CheckValid()
	}
	if err != nil {
		return invalid("%v", err)
	}
	return in, nil
}

// stored returns the blob of the store that the qualifiers of a request identify by its SHA-256, or nil. Other
// qualifiers may select other content or, as bazel.canonical_id does, demand that this URI was the source.
func (s *server) stored(
	ctx context.Context, in *cas.Instance, f cas.Function, kind string, req fetchRequest,
) (*asset, error) {
	var sum string
	for _, q := range req.GetQualifiers() {
		switch {
		case q.Name == "checksum.sri":
			sum = sha256Of(q.Value)
		case strings.HasPrefix(q.Name, "http_header:"), strings.HasPrefix(q.Name, "http_header_url:"):
			// These are for the origin.
		default:
			return nil, nil
		}
	}
	if sum == "" || f != cas.SHA256 || kind != blob {
		return nil, nil
	}
	found, err := s.Index.Find(ctx, &cloisterpb.FindRequest{
		InstanceName: in.Name, Prefix: f.String() + ":" + sum + "/", Limit: 1,
	})
	if err != nil || len(found.Digests) == 0 {
		return nil, err
	}
	d, err := cas.ParseDigest(found.Digests[0])
	if err != nil {
		return nil, err
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{d}) // which renews the lease
	if err != nil || len(missing) > 0 {
		return nil, err
	}
	return &asset{uri: req.GetUris()[0], digest: d}, nil
}

// sha256Of returns the first SHA-256 in a list of Subresource Integrity checksums, in hexadecimal, or "".
func sha256Of(checksums string) string {
	for c := range strings.FieldsSeq(checksums) {
		text, ok := strings.CutPrefix(c, "sha256-")
		text, _, _ = strings.Cut(text, "?") // options
		sum, err := base64.StdEncoding.DecodeString(text)
		if ok && err == nil && len(sum) == cas.SHA256.Size() {
			return hex.EncodeToString(sum)
		}
	}
	return ""
}
