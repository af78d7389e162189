// SPDX-License-Identifier: Apache-2.0

// Package cas says what a blob is named and what a store of blobs must do. It holds the vocabulary of
// the content-addressable store and of the action cache, and no implementation: those are its
// subdirectories.
package cas

import (
	"context"
	"io"
	"os"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A Store holds blobs. Its methods are safe for concurrent use. The empty blob is always present,
// without having been put (REAPI, ContentAddressableStorage).
type Store interface {
	// Open returns the blob from byte off, 0 to d.Size() inclusive, to its end; the caller closes
	// it. A read from 0 to the end that does not match d fails with ErrCorrupt no later than where
	// io.EOF would have stood. An absent blob is ErrNotFound, an off outside the blob ErrRange.
	Open(ctx context.Context, d Digest, off int64) (io.ReadCloser, error)
	// Put stores the bytes of r as d, or fails and stores nothing. It need not read r if d is
	// present. Bytes that are not d are ErrMismatch; no room is ErrFull.
	Put(ctx context.Context, d Digest, r io.Reader) error
	// Missing returns those of ds that are absent, in order and each once, and marks the rest as
	// used. A store that evicts keeps what was put, opened or marked for as long as its operator has
	// promised, the lease, and refuses a Put rather than break that.
	Missing(ctx context.Context, ds []Digest) ([]Digest, error)
}

// A Blob is the content of a small blob, in memory, and the name under which it is offered.
type Blob struct {
	Digest Digest
	Data   []byte
}

// A Batcher is an optional ability of a Store: to store many small blobs for the price of a few.
type Batcher interface {
	// PutAll stores each of blobs as Put would, near each other, and returns an error for each, nil
	// where it is stored. Unlike Put it looks at the bytes of every blob, also where that is present.
	// The data is the caller's again when it returns.
	PutAll(ctx context.Context, blobs []Blob) []error
}

// A Fetcher is an optional ability of a Store whose blobs are far away: to bring many near in few calls.
type Fetcher interface {
	// Fetch brings those of ds near that are not, so that Open of them is cheap. One that is absent
	// is no error: it is among those returned, each once, or Open will say so.
	Fetch(ctx context.Context, ds []Digest) (absent []Digest, err error)
}

// Fetch is s.Fetch if s is a Fetcher, and else nothing.
func Fetch(ctx context.Context, s Store, ds []Digest) error {
	if f, ok := As[Fetcher](s); ok && len(ds) > 0 {
		_, err := f.Fetch(ctx, ds)
		return err
	}
	return nil
}

// A Filer is an optional ability of a Store: to show a blob as a file of this host, so that a large
// input need not be copied.
type Filer interface {
	// File returns the path of a regular file that holds d, with mode 0555 if executable and 0444
	// if not. Nobody may write to it; it stays until release is called, unless it is found damaged. An
	// absent blob is ErrNotFound.
	File(ctx context.Context, d Digest, executable bool) (path string, release func(), err error)
}

// A Locator is an optional ability of a Store that keeps many small blobs in few files of this host: to say
// where, so that the image of a tree can point at them instead of holding copies.
type Locator interface {
	// Locate says where each of ds lies, and marks all as used. What it says holds until Release: the
	// bytes there are those of the blob, compared with its digest since the store was opened, and are
	// neither moved nor overwritten. It is no error that a blob is absent, or has a file of its own.
	Locate(ctx context.Context, ds []Digest) (Location, error)
}

// A Location is where blobs lie. Its methods are safe for concurrent use.
type Location interface {
	// Extents are in the order of the digests asked for.
	Extents() []Extent
	// Files are what extents lie in, open for reading, and the placement's: closed by Release.
	Files() []*os.File
	// Valid reports whether what Place said still holds. It does not if somebody else has written to one of
	// the files, or damage was found in one; then Place must be asked again.
	Valid() bool
	// Release gives the files back. It may be called again.
	Release()
}

// An Extent is where a blob lies: the bytes of the blob from Offset on in Files()[File], followed by zeros up to the
// next multiple of ExtentAlign, of which Offset is one. A File of Elsewhere says that the blob is not packed but
// present, Absent that it is absent; the empty blob is Elsewhere.
type Extent struct {
	File   int32
	Offset int64
}

// Values of Extent.File besides indexes.
const (
	Unpacked = -1
	Absent   = -2
)

// ExtentAlign is the alignment of extents, in bytes.
const ExtentAlign = 512

// An ActionCache maps the digest of an action to its result. Its methods are safe for concurrent
// use. It does not check that the blobs of a result are present: that is Closure's business.
type ActionCache interface {
	// Lookup returns the result recorded for action, or ErrNotFound. The caller owns the result.
	Lookup(ctx context.Context, action Digest) (*repb.ActionResult, error)
	// Record replaces what was recorded for action.
	Record(ctx context.Context, action Digest, r *repb.ActionResult) error
}

// An Instance is one isolated pair of a store and an action cache: what is put into one instance
// cannot be read in another (REAPI, instance_name).
type Instance struct {
	Name    string
	Store   Store
	Actions ActionCache
	// Functions are the digest functions that the instance serves. Where a client states none, the first is meant
	// that has hashes of the length of its digest. Nil is all of Functions().
	Functions []Function
}

// Serves returns the digest functions of the instance; the caller may not change them.
func (in *Instance) Serves() []Function {
	if in.Functions == nil {
		return allFunctions
	}
	return in.Functions
}

// FunctionOf returns the function of a request to the instance: the stated one, or, where v is UNKNOWN, the first that
// has hashes as long as sample's; a nil sample means the first of all. One that is not served is ErrInvalid (REAPI,
// digest_function of every request).
func (in *Instance) FunctionOf(v repb.DigestFunction_Value, sample *repb.Digest) (Function, error) {
	if v == repb.DigestFunction_UNKNOWN && sample == nil {
		return in.Serves()[0], nil
	}
	return functionOf(in.Serves(), v, sample.GetHash())
}

// functionOf returns the first of served that is v, or that has hashes as long as hash where v is UNKNOWN.
func functionOf(served []Function, v repb.DigestFunction_Value, hash string) (Function, error) {
	for _, f := range served {
		if v == f.Proto() || v == repb.DigestFunction_UNKNOWN && len(hash) == f.hexLen() {
			return f, nil
		}
	}
	if v == repb.DigestFunction_UNKNOWN {
		return 0, invalidf("digest function not stated, and no served function has hashes of %d digits as in %+.80q; served: %v",
			len(hash), hash, served)
	}
	return 0, invalidf("digest function %v is not served; served: %v", v, served)
}

// Instances returns the instance of a name. It fails with ErrInvalid for a name that no instance may
// have. It is safe for concurrent use, and equal names share one content.
type Instances func(name string) (*Instance, error)
