// SPDX-License-Identifier: Apache-2.0

package assetservice

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// TestMalformedRequestsAreRefused, including those of BuildStream, which checks for the services without URIs.
func TestMalformedRequestsAreRefused(t *testing.T) {
	f := newFixture(t, t.TempDir())
	d := f.put(cas.SHA256, []byte("x"))
	many := func(n int) (qs []*assetpb.Qualifier) {
		for i := range n {
			qs = append(qs, qualifiers(fmt.Sprint(i), "")...)
		}
		return qs
	}
	uri := []string{"u"}
	invalidTime := &timestamppb.Timestamp{Seconds: 1 << 60}
	for what, req := range map[string]*assetpb.PushBlobRequest{
		"no URIs":             {BlobDigest: d},
		"an empty URI":        {BlobDigest: d, Uris: []string{"u", ""}},
		"too many URIs":       {BlobDigest: d, Uris: slices.Repeat(uri, maxURIs+1)},
		"too long a URI":      {BlobDigest: d, Uris: []string{strings.Repeat("u", maxURIBytes+1)}},
		"too many qualifiers": {BlobDigest: d, Uris: uri, Qualifiers: many(maxQualifiers + 1)},
		"too long a value": {
			BlobDigest: d, Uris: uri, Qualifiers: qualifiers("q", strings.Repeat("v", maxQualifierBytes)),
		},
		"no qualifier name":   {BlobDigest: d, Uris: uri, Qualifiers: qualifiers("", "v")},
		"a qualifier twice":   {BlobDigest: d, Uris: uri, Qualifiers: qualifiers("a", "1", "a", "2")},
		"a reserved instance": {BlobDigest: d, Uris: uri, InstanceName: "main/blobs"},
		"a digest function":   {BlobDigest: d, Uris: uri, DigestFunction: repb.DigestFunction_VSO},
		"no digest":           {Uris: uri},
		"a malformed digest":  {Uris: uri, BlobDigest: &repb.Digest{Hash: strings.Repeat("X", 64)}},
		"a negative size":     {Uris: uri, BlobDigest: &repb.Digest{Hash: d.Hash, SizeBytes: -1}},
		"an invalid time":     {BlobDigest: d, Uris: uri, ExpireAt: invalidTime},
		"too many references": {
			BlobDigest: d, Uris: uri, ReferencesBlobs: slices.Repeat([]*repb.Digest{d}, maxReferences+1),
		},
		"a malformed reference": {BlobDigest: d, Uris: uri, ReferencesBlobs: []*repb.Digest{
			{Hash: "../../etc/passwd"},
		}},
	} {
		if req.InstanceName == "" {
			req.InstanceName = "main"
		}
		_, err := f.PushBlob(t.Context(), req)
		expectCode(t, "push "+what, err, codes.InvalidArgument)
		_, err = f.PushDirectory(t.Context(), &assetpb.PushDirectoryRequest{
			InstanceName: req.InstanceName, Uris: req.Uris, Qualifiers: req.Qualifiers, RootDirectoryDigest: req.BlobDigest,
			ExpireAt: req.ExpireAt, ReferencesBlobs: req.ReferencesBlobs, DigestFunction: req.DigestFunction,
		})
		expectCode(t, "push directory "+what, err, codes.InvalidArgument)
		code := codes.InvalidArgument
		if strings.Contains(what, "digest") && !strings.Contains(what, "function") || strings.Contains(what, "size") ||
			strings.Contains(what, "reference") {
			code = codes.NotFound // what is wrong exists only in a push, and nothing was pushed
		}
		_, err = f.FetchBlob(t.Context(), &assetpb.FetchBlobRequest{
			InstanceName: req.InstanceName, Uris: req.Uris, Qualifiers: req.Qualifiers,
			OldestContentAccepted: req.ExpireAt, DigestFunction: req.DigestFunction,
		})
		expectCode(t, "fetch "+what, err, code)
		_, err = f.FetchDirectory(t.Context(), &assetpb.FetchDirectoryRequest{
			InstanceName: req.InstanceName, Uris: req.Uris, Qualifiers: req.Qualifiers,
			OldestContentAccepted: req.ExpireAt, DigestFunction: req.DigestFunction,
		})
		expectCode(t, "fetch directory "+what, err, code)
	}
	// The largest request that is accepted can be fetched.
	long := make([]string, maxURIs)
	for i := range long {
		long[i] = fmt.Sprintf("%0*d", maxURIBytes, i)
	}
	f.push(&assetpb.PushBlobRequest{
		Uris: long, Qualifiers: many(maxQualifiers), BlobDigest: d,
		ReferencesBlobs: slices.Repeat([]*repb.Digest{d}, maxReferences),
	})
	must.Get(f.FetchBlob(t.Context(), &assetpb.FetchBlobRequest{
		InstanceName: "main", Uris: long, Qualifiers: many(maxQualifiers),
	}))(t)
}

// TestBlobsAreFoundByChecksum if no other qualifier may select something else.
func TestBlobsAreFoundByChecksum(t *testing.T) {
	f := newFixture(t, t.TempDir())
	d := f.put(cas.SHA256, []byte("archive"))
	sri := func(hash string) string {
		return "sha256-" + base64.StdEncoding.EncodeToString(must.Get(hex.DecodeString(hash))(t))
	}
	checksum := sri(d.Hash)
	for _, test := range []struct {
		what  string
		found bool
		qs    []*assetpb.Qualifier
		f     repb.DigestFunction_Value
	}{
		{"its checksum", true, qualifiers("checksum.sri", checksum), 0},
		{"several", true, qualifiers("checksum.sri", "sha512-AAAA  "+checksum+"?x"), 0},
		{"headers", true, qualifiers("http_header:Accept", "x", "checksum.sri", checksum, "http_header_url:0:A", "y"), 0},
		{"another function", false, qualifiers("checksum.sri", checksum), repb.DigestFunction_BLAKE3},
		{"an id", false, qualifiers("checksum.sri", checksum, "bazel.canonical_id", "x"), 0},
		{"a subdirectory", false, qualifiers("directory", "d", "checksum.sri", checksum), 0},
		{"an absent blob", false, qualifiers("checksum.sri", sri(cas.SHA256.Sum([]byte("absent")).Hash())), 0},
		{"a short checksum", false, qualifiers("checksum.sri", "sha256-AAAA"), 0},
		{"a malformed checksum", false, qualifiers("checksum.sri", checksum[:20]+"/../*"), 0},
		{"no checksum", false, nil, 0},
	} {
		req := &assetpb.FetchBlobRequest{
			InstanceName: "main", Uris: []string{"https://example.com/a.tar"}, Qualifiers: test.qs, DigestFunction: test.f,
		}
		m, err := f.FetchBlob(t.Context(), req)
		if !test.found {
			expectCode(t, test.what, err, codes.NotFound)
		} else if err != nil || m.Uri != req.Uris[0] || !proto.Equal(m.BlobDigest, d) {
			t.Errorf("%s: got %v, %v, want %v", test.what, m, err, d)
		}
		req.InstanceName = "other"
		_, err = f.FetchBlob(t.Context(), req)
		expectCode(t, test.what+" in another instance", err, codes.NotFound)
	}
}
