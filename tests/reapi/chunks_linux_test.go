// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// TestRule013_RunningServerSupportsChunks checks the advertised chunking methods on a running server.
func TestRule013_RunningServerSupportsChunks(t *testing.T) {
	c := serve(t)
	caps, err := repb.NewCapabilitiesClient(c.conn).GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	cc := caps.CacheCapabilities
	if !cc.SplitBlobSupport || !cc.SpliceBlobSupport || cc.FastCdc_2020Params == nil || cc.RepMaxCdcParams == nil {
		t.Fatalf("got split %v, splice %v, parameters %v and %v, want all", cc.SplitBlobSupport, cc.SpliceBlobSupport, cc.FastCdc_2020Params, cc.RepMaxCdcParams)
	}
	data := make([]byte, 5<<20)
	if _, err := io.ReadFull(rand.NewChaCha8([32]byte{}), data); err != nil {
		t.Fatal(err)
	}
	blobs := repb.NewContentAddressableStorageClient(c.conn)
	chunks := func(d *repb.Digest) []*repb.Digest {
		t.Helper()
		stream, err := blobs.GetChunkMapping(t.Context(), &repb.GetChunkMappingRequest{BlobDigest: d})
		if err != nil {
			t.Fatal(err)
		}
		var all []*repb.Digest
		for {
			m, err := stream.Recv()
			if err == io.EOF {
				return all
			} else if err != nil {
				t.Fatal(err)
			}
			all = append(all, m.ChunkDigests...)
		}
	}
	first := c.put(data)
	pieces := chunks(first)
	if len(pieces) < 3 {
		t.Fatalf("got %d chunks of %d bytes, want at least 3", len(pieces), len(data))
	}
	head := pieces[0].SizeBytes
	twice := append(bytes.Clone(data), data[:head]...)
	second := cas.SHA256.Sum(twice).Proto()
	if _, err := blobs.SpliceBlob(t.Context(), &repb.SpliceBlobRequest{BlobDigest: second, ChunkDigests: append(pieces, pieces[0])}); err != nil {
		t.Fatal(err)
	}
	if got := c.get(second); got != string(twice) {
		t.Errorf("spliced blob: read %d bytes, want %d", len(got), len(twice))
	}
}
