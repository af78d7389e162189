// SPDX-License-Identifier: Apache-2.0

// Package casserver serves the stores and action caches of a cas.Instances through the Remote Execution API:
// Capabilities, ContentAddressableStorage, ByteStream and ActionCache. It neither authorizes callers nor serves
// Execution.
//
// Memory per call is bounded: one request message, one page of the reply and the window of a compressor, which share
// 1 GiB; for GetTree the digests of the tree; for chunking calls the digests of up to a million chunks and the
// lookahead of the chunking function; 16 MiB for an upload while the client's digest function is unknown. Other uploads
// stream from the client into Store.Put. When its stream breaks, that Put waits up to ten minutes for another stream to
// resume it; these uploads are the only state of the package. Compressed uploads cannot be resumed: they restart at
// offset 0.
//
// Keeping the Put open needs no second copy of the bytes, no format for partial blobs and no second way into a store.
// Resuming a compressed upload would require the state of its decompressor. A second stream of an upload supersedes the
// first, whose connection is usually lost without the server knowing yet.
package casserver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
)

const (
	// maxMessage is gRPC's default limit for received messages in bytes, which every client accepts.
	maxMessage = 4 << 20
	// maxBatch limits the data of one batch. It leaves room for the digests in a message of maxMessage bytes.
	maxBatch = 4_000_000
	// maxReply limits messages whose size the server chooses: pages of GetTree and action results with inlined blobs.
	maxReply = 3 << 20
)

// Config configures Register.
type Config struct {
	// Instances returns the instances to serve; required.
	Instances cas.Instances
	// Execution is what GetCapabilities reports about the Execution service; nil for a cache without execution.
	// Register fills in the digest functions of the instance and, if unset, the priorities.
	Execution *repb.ExecutionCapabilities
	// MaxBlobBytes limits the size of uploaded blobs; 0 means no limit.
	MaxBlobBytes int64
	// StreamIdle is the time after which a streaming call of several messages ends if its client neither sends nor
	// receives data; 0 means a minute. While other calls wait for memory, compressed streams end after a sixth of it.
	// Log streams are exempt.
	StreamIdle time.Duration
	// Logs, if not nil, serves the log streams of ByteStream.
	Logs Logs
	// FullHint, if not nil, returns advice for the operator about a limit that a store on this machine has reached.
	// Error messages to clients contain it.
	FullHint func(cas.Limit) string
	// OnLookup, if not nil, is called with each result that GetActionResult returns, or nil if there is none. It must
	// not block, modify the result or retain it.
	OnLookup func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult)
	// OnUpdate, if not nil, is called with each result that UpdateActionResult records, under the same conditions.
	OnUpdate func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult)
	// Unstated, if not nil, is called when a client has uploaded a blob without a digest function, its content matches
	// f, f is not in Instance.Unstated, and the instance has several functions with hashes of that length. If Unstated
	// returns nil, the blob is stored under f, and Instances should return an instance with f in Unstated from then on.
	// An error is returned to the client; it reports that the instance uses another function for such requests.
	// Unstated must not block.
	Unstated func(ctx context.Context, instance string, f cas.Function) error
	// Rights reports whether the caller may execute actions and update results in an instance. GetCapabilities reports
	// it (rules 5 and 6); no call is rejected because of it. Nil permits both.
	Rights func(ctx context.Context, instance string) (execute, update bool)
}

// Register adds the four services to s. Call stop while or after s stops and before closing the stores, which remain
// the caller's: it ends interrupted uploads and waits for them. From then on, uploads of more than one message fail
// with UNAVAILABLE. Register returns an error if s or Config.Instances is nil.
func Register(s grpc.ServiceRegistrar, c Config) (stop func(), err error) {
	switch {
	case s == nil:
		return nil, errors.New("casserver: Register needs a gRPC server")
	case c.Instances == nil:
		return nil, errors.New("casserver: Config.Instances is nil")
	}
	c.Instances = complete(c.Instances)
	if c.MaxBlobBytes <= 0 {
		c.MaxBlobBytes = math.MaxInt64
	}
	if c.StreamIdle <= 0 {
		c.StreamIdle = defaultStreamIdle
	}
	u, memory := newUploads(c.MaxBlobBytes, c.StreamIdle), newMemoryPool(c.StreamIdle)
	repb.RegisterCapabilitiesServer(s, &capabilities{Config: c})
	repb.RegisterContentAddressableStorageServer(s, &storage{
		Config: c, uploads: u, memory: memory,
		chunkings: newLimiter(maxChunkings, maxCallerChunkings), trees: newLimiter(maxTrees, maxCallerTrees),
	})
	s.RegisterService(&byteStreamDesc, &byteStream{
		Config: c, uploads: u, memory: memory,
		deciding: semaphore.NewWeighted(maxDecidingMemory), forked: semaphore.NewWeighted(maxForked),
	})
	repb.RegisterActionCacheServer(s, &actionCache{Config: c})
	return u.close, nil
}

// complete returns the instances of next, and an error for one that lacks a field which calls use.
func complete(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		switch {
		case err != nil:
			return nil, err
		case in == nil:
			return nil, errors.New("casserver: Config.Instances returned neither an instance nor an error")
		case in.Store == nil:
			return nil, fmt.Errorf("casserver: instance %q has no Store", name)
		}
		return in, nil
	}
}

// digest converts p, using the digest function f of the request or, if f is UNKNOWN, the one its length implies.
func digest(in *cas.Instance, f repb.DigestFunction_Value, p *repb.Digest) (cas.Digest, error) {
	fn, err := in.FunctionOf(f, p)
	if err != nil {
		return cas.Digest{}, err
	}
	return cas.FromProto(fn, p)
}

// checkSize returns cas.ErrInvalid for a blob above the size limit (rule 10).
func (c *Config) checkSize(d cas.Digest) error {
	if d.Size() > c.MaxBlobBytes {
		return fmt.Errorf("%w upload: blob %s is larger than max_cas_blob_size_bytes, %d bytes",
			cas.ErrInvalid, d, c.MaxBlobBytes)
	}
	return nil
}

// explain adds the operation, the blob and advice for the client to err. It wraps err and returns nil for nil.
func (c *Config) explain(op string, d cas.Digest, err error) error {
	if err == nil {
		return nil
	}
	// Most stores name the blob in their errors, but the contract does not require it.
	if !strings.Contains(err.Error(), d.String()) {
		op += " " + d.String()
	}
	full := "upload again later"
	if f, ok := errors.AsType[*cas.FullError](err); ok && c.FullHint != nil {
		full += "; the operator can " + c.FullHint(f.Limit)
	}
	for _, row := range []struct {
		err    error
		advice string
	}{
		{cas.ErrNotFound, "upload it first"},
		{cas.ErrCorrupt, "upload it again"},
		{cas.ErrMismatch, "upload the bytes that the digest was computed from"},
		{cas.ErrFull, full},
		{cas.ErrUnwritable, "upload again later"},
	} {
		if errors.Is(err, row.err) {
			return fmt.Errorf("%s: %w; %s", op, err, row.advice)
		}
	}
	return fmt.Errorf("%s: %w", op, err)
}
