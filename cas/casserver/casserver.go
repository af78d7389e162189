// SPDX-License-Identifier: Apache-2.0

// Package casserver serves the stores and action caches of cas.Instances by the Remote Execution API:
// Capabilities, ContentAddressableStorage, ByteStream and ActionCache. It decides nothing about who may
// call, and does not serve Execution.
//
// What it holds in memory for a call is bounded: one message of the request, a page of the reply, the window
// of a compressor, for GetTree the digests of the tree, and for calls about chunks those of a million chunks at
// most, and what is seen ahead of a cut. An upload is a stream from the client into Store.Put. Of one that breaks
// off, that Put is kept for ten minutes, and another stream may go on with it; this is the only state that the
// package has. A compressed one begins again at offset 0.
package casserver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"golang.org/x/sync/semaphore"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
)

const (
	// maxMessage is the largest message, in bytes, that every gRPC client accepts unless told
	// otherwise.
	maxMessage = 4 << 20
	// maxBatch is the default and the upper bound of Config.MaxBatchBytes: it leaves room for the
	// digests beside the data in a message that every client accepts.
	maxBatch = 4_000_000
	// maxReply bounds the messages whose size the server chooses: pages of GetTree and action
	// results with blobs inlined.
	maxReply = 3 << 20
)

// Config says what Register serves.
type Config struct {
	// Instances names the instances; it must be set.
	Instances cas.Instances
	// Execution is what GetCapabilities says of the Execution service; nil for a cache alone. Its
	// digest functions, those of the instance, and its priorities where it has none, are filled in.
	Execution *repb.ExecutionCapabilities
	// MaxBatchBytes is the most data of one batch. From 1 to 4,000,000; another value means
	// 4,000,000.
	MaxBatchBytes int64
	// MaxBlobBytes is the largest blob that may be uploaded, by any call; 0 means any.
	MaxBlobBytes int64
	// ReadOnlyActions refuses UpdateActionResult: results come from execution alone.
	ReadOnlyActions bool
	// Logs, if not nil, serve what ByteStream calls log streams.
	Logs Logs
	// Asked, if not nil, is told what GetActionResult answers: with what it found, or nil. It must neither wait nor
	// change that, and has it only until it returns. The context is that of the call.
	Asked func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult)
	// Uploaded, if not nil, is told in the same way what UpdateActionResult has recorded.
	Uploaded func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult)
	// Rights reports what the caller may do in an instance: have actions executed, and write results.
	// GetCapabilities tells him so (rules 5 and 6); it decides about no call. Nil: everybody may do both.
	Rights func(ctx context.Context, instance string) (execute, update bool)
}

// Register adds the four services to s. The caller calls stop when s has stopped, or is to stop, and before the
// stores are closed, which stay the caller's: it ends the uploads that are kept until their clients go on with them,
// and waits. From then on, uploads of more than a message are UNAVAILABLE.
func Register(s *grpc.Server, c Config) (stop func()) {
	if c.MaxBatchBytes < 1 || c.MaxBatchBytes > maxBatch {
		c.MaxBatchBytes = maxBatch
	}
	if c.MaxBlobBytes <= 0 {
		c.MaxBlobBytes = math.MaxInt64
	}
	repb.RegisterCapabilitiesServer(s, &capabilities{Config: c})
	u := newUploads(c.MaxBlobBytes)
	repb.RegisterContentAddressableStorageServer(s, &storage{Config: c, cuts: make(chan struct{}, maxCuts), uploads: u})
	bspb.RegisterByteStreamServer(s, &byteStream{Config: c, uploads: u, packing: semaphore.NewWeighted(packingBytes)})
	repb.RegisterActionCacheServer(s, &actionCache{Config: c})
	return u.close
}

// digest returns p as a digest of the function that a request to in states, or that p has the length of.
func digest(in *cas.Instance, f repb.DigestFunction_Value, p *repb.Digest) (cas.Digest, error) {
	fn, err := in.FunctionOf(f, p)
	if err != nil {
		return cas.Digest{}, err
	}
	return cas.FromProto(fn, p)
}

// checkSize returns cas.ErrInvalid for a blob that is larger than any that may be uploaded (rule 10).
func (c *Config) checkSize(d cas.Digest) error {
	if d.Size() > c.MaxBlobBytes {
		return fmt.Errorf("%w upload: blob %s is larger than the %d bytes of max_cas_blob_size_bytes",
			cas.ErrInvalid, d, c.MaxBlobBytes)
	}
	return nil
}

// explain says which blob err befell in which operation and, where the client or its operator can do
// something about it, what. It wraps err, and is nil if that is.
func explain(op string, d cas.Digest, err error) error {
	if err == nil {
		return nil
	}
	// Most errors of a store name the blob already; that is no part of its contract.
	if !strings.Contains(err.Error(), d.String()) {
		op += " " + d.String()
	}
	for _, row := range []struct {
		err    error
		advice string
	}{
		{cas.ErrNotFound, "upload it first"},
		{cas.ErrCorrupt, "upload it again"},
		{cas.ErrMismatch, "upload the bytes that the digest was computed from"},
		{cas.ErrFull, "upload again later; the store's operator can free disk space, raise --max-size or lower --lease"},
	} {
		if errors.Is(err, row.err) {
			return fmt.Errorf("%s: %w; %s", op, err, row.advice)
		}
	}
	return fmt.Errorf("%s: %w", op, err)
}
