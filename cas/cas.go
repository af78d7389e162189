// SPDX-License-Identifier: Apache-2.0

// Package cas defines the content-addressable store and the action cache: digests, the Store and ActionCache
// interfaces, their errors, and helpers for any implementation. Its subdirectories hold the implementations.
//
// Eight digest functions exist side by side in each instance, because clients differ and do not always state theirs.
// The function is part of every Digest, so equal hashes of two functions are different blobs. If a client states no
// function, the hash length decides, and among functions of equal length the order of the instance. VSO and MURMUR3 are
// not supported: VSO has no clients, and MURMUR3 is not cryptographic, so anyone who may write could replace what
// others read.
package cas

import (
	"context"
	"io"
	"os"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A Store holds blobs. Its methods are safe for concurrent use. The empty blob is always present, without having been
// put (REAPI, ContentAddressableStorage). The zero Digest is ErrInvalid.
type Store interface {
	// Open returns the content of the blob from byte off to its end; the caller closes it. A read from 0 to the end
	// that does not match d fails with ErrCorrupt instead of io.EOF, or earlier. Open returns ErrNotFound for an
	// absent blob, and ErrRange unless 0 <= off <= d.Size().
	Open(ctx context.Context, d Digest, off int64) (io.ReadCloser, error)
	// Put stores the content of r as d, or fails and stores nothing. If d is present it need not read r. It returns
	// ErrMismatch if the content does not match d, and ErrFull if there is no room.
	Put(ctx context.Context, d Digest, r io.Reader) error
	// Missing returns the digests in ds that are absent, in order and without duplicates, and marks the others as
	// used. A store that evicts keeps each blob for the lease, a time its operator chooses, after it was last put,
	// opened or marked. It refuses a Put rather than break that promise.
	Missing(ctx context.Context, ds []Digest) ([]Digest, error)
}

// A Blob is the content of a small blob in memory, and its claimed digest.
type Blob struct {
	Digest Digest
	Data   []byte
}

// Check returns ErrMismatch unless the data matches the digest, and ErrInvalid for the zero Digest.
func (b Blob) Check() error {
	if err := CheckDigests(b.Digest); err != nil {
		return err
	}
	if got := b.Digest.fn.Sum(b.Data); got != b.Digest {
		return Mismatch(b.Digest, got)
	}
	return nil
}

// A Batcher is a Store that can store many small blobs at once.
type Batcher interface {
	// PutAll stores each blob as Put does, and returns an error or nil for each. Unlike Put it verifies the content of
	// blobs that are present. It does not retain the data.
	PutAll(ctx context.Context, blobs []Blob) []error
}

// A Fetcher is a Store in front of a remote one. It can copy many blobs into the local store at once.
type Fetcher interface {
	// Fetch copies the blobs in ds to the local store, so that Open of them is fast. It may return the digests of
	// absent blobs, without duplicates; an absent blob is not an error.
	Fetch(ctx context.Context, ds []Digest) (absent []Digest, err error)
}

// Fetch calls s.Fetch if s is a Fetcher. Otherwise it does nothing.
func Fetch(ctx context.Context, s Store, ds []Digest) error {
	if f, ok := As[Fetcher](s); ok && len(ds) > 0 {
		_, err := f.Fetch(ctx, ds)
		return err
	}
	return nil
}

// A PutChecker is a Store in front of a remote one.
type PutChecker interface {
	// MissingForPut is Missing for blobs that are about to be put. It does not query the remote store, because a Put
	// costs no more than the query, so it may list blobs that Missing does not.
	MissingForPut(ctx context.Context, ds []Digest) ([]Digest, error)
}

// MissingForPut calls s.MissingForPut if s is a PutChecker, otherwise s.Missing.
func MissingForPut(ctx context.Context, s Store, ds []Digest) ([]Digest, error) {
	if c, ok := As[PutChecker](s); ok {
		return c.MissingForPut(ctx, ds)
	}
	return s.Missing(ctx, ds)
}

// A Renewer is a Store that deletes blobs at an age, whether they are used or not, such as a bucket with a lifecycle
// rule.
type Renewer interface {
	// Lifetime returns the age at which a blob is deleted unless it is renewed; 0 means that no blob is deleted for its
	// age.
	Lifetime() time.Duration
	// Renew resets the age of those blobs in ds that are older than half of the lifetime. It returns the digests that
	// are absent or cannot be renewed, in order and without duplicates: they must be put again.
	Renew(ctx context.Context, ds []Digest) (absent []Digest, err error)
}

// A Filer is a Store that can expose a blob as a file on this host, so that a large input need not be copied.
type Filer interface {
	// File returns the path of a regular file that holds d and must not be changed. Its mode is 0755 if executable,
	// otherwise 0644. The file stays until release is called, unless it is found damaged. File returns ErrNotFound for
	// an absent blob.
	File(ctx context.Context, d Digest, executable bool) (path string, release func(), err error)
}

// A Locator is a Store that packs small blobs into large local files and reports their positions. The disk image of an
// input tree can then refer to them instead of holding copies.
type Locator interface {
	// Locate returns the positions of the blobs in ds, and marks them as used. Until Release, the content at these
	// positions stays in place and matches the digests, which were verified since the store was opened. Blobs that are
	// absent or not packed are not an error.
	Locate(ctx context.Context, ds []Digest) (Location, error)
}

// A Location holds the positions of packed blobs. Its methods are safe for concurrent use.
type Location interface {
	// Extents returns an extent for each digest passed to Locate, in the same order.
	Extents() []Extent
	// Files returns the files that extents refer to, open for reading. Release closes them.
	Files() []*os.File
	// Valid reports whether the extents are still correct. They are not if another process wrote to one of the files or
	// damage was found in one; the caller then calls Locate again.
	Valid() bool
	// Removed reports whether the store has removed one of the files, which then occupies space until Release.
	Removed() bool
	// Release releases the files. It may be called repeatedly.
	Release()
}

// An Extent is the position of a packed blob: Files()[File] holds it from byte Offset, followed by zeros up to the next
// multiple of ExtentAlign. Offset is a multiple of ExtentAlign.
type Extent struct {
	File   int32
	Offset int64
}

// Special values of Extent.File.
const (
	Unpacked = -1 // present, but not packed; the empty blob always is
	Absent   = -2
)

// ExtentAlign is the alignment of extents, in bytes.
const ExtentAlign = 512

// An ActionCache maps the digest of an action to its result. Its methods are safe for concurrent use. It does not check
// that the blobs of a result are present; LookupComplete does.
type ActionCache interface {
	// Lookup returns the result recorded for action, or ErrNotFound, and ErrInvalid for the zero Digest. The caller owns
	// the result.
	Lookup(ctx context.Context, action Digest) (*repb.ActionResult, error)
	// Record stores r as the result of action and replaces an earlier one. It returns the error of CheckRecord.
	Record(ctx context.Context, action Digest, r *repb.ActionResult) error
}

// An Instance is an isolated store and action cache: blobs put into one instance cannot be read from another (REAPI,
// instance_name).
type Instance struct {
	Name    string
	Store   Store       // required
	Actions ActionCache // nil if nothing looks up or records results
	// Functions are the digest functions that the instance serves; nil means all. If a request states none, the first
	// function whose hashes are as long as the request's applies.
	Functions []Function
	// Unstated lists those of Functions that the instance's clients are known to use without stating them. They take
	// precedence over Functions for requests that state no function.
	Unstated []Function
}

// Serves returns the digest functions of the instance. The caller must not modify the slice.
func (in *Instance) Serves() []Function {
	if in.Functions == nil {
		return allFunctions
	}
	return in.Functions
}

// FunctionOf returns the digest function of a request: v, or, if v is UNKNOWN, the first of Unstated and Functions
// whose hashes are as long as sample's. If sample is nil, too, it is the instance's first function. FunctionOf returns
// ErrInvalid for a function that the instance does not serve (REAPI, digest_function of every request).
func (in *Instance) FunctionOf(v repb.DigestFunction_Value, sample *repb.Digest) (Function, error) {
	if v == repb.DigestFunction_UNKNOWN && sample == nil {
		return in.Serves()[0], nil
	}
	if v == repb.DigestFunction_UNKNOWN {
		for _, f := range in.Unstated {
			if len(sample.GetHash()) == f.hexLen() {
				return f, nil
			}
		}
	}
	return functionOf(in.Serves(), v, sample.GetHash())
}

// functionOf returns the first function in served that is v or, if v is UNKNOWN, has hashes as long as hash.
func functionOf(served []Function, v repb.DigestFunction_Value, hash string) (Function, error) {
	for _, f := range served {
		if v == f.Proto() || v == repb.DigestFunction_UNKNOWN && len(hash) == f.hexLen() {
			return f, nil
		}
	}
	if v == repb.DigestFunction_UNKNOWN {
		return 0, invalidf("request has no digest function, and no served function has hashes of %d digits as in %+.80q; "+
			"served: %v", len(hash), hash, served)
	}
	return 0, invalidf("digest function %v is not served; served: %v", v, served)
}

// Instances returns the instance with this name, or ErrInvalid for an invalid name. It is safe for concurrent use.
// Instances with equal names share their content.
type Instances func(name string) (*Instance, error)
