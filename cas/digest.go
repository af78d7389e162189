// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// A Function is a digest function that Cloister serves. Its zero value is no function.
type Function uint8

// The functions served. Each is part of every key, so that equal hashes of different functions never
// name the same blob.
const (
	SHA256 Function = 1
)

// Functions lists the functions served, in the order in which they are advertised.
func Functions() []Function { return []Function{SHA256} }

// Proto returns the function's number in the API.
func (f Function) Proto() repb.DigestFunction_Value {
	if f == SHA256 {
		return repb.DigestFunction_SHA256
	}
	return repb.DigestFunction_UNKNOWN
}

// String returns the function's lower-case name, as it appears in paths.
func (f Function) String() string {
	if f == SHA256 {
		return "sha256"
	}
	return "unknown"
}

// New returns a hash of the function. It panics for the zero Function.
func (f Function) New() hash.Hash {
	if f == SHA256 {
		return sha256.New()
	}
	panic("cas: New of no digest function")
}

// hexLen is the length of a hash of the function in hexadecimal digits.
func (f Function) hexLen() int {
	if f == SHA256 {
		return 2 * sha256.Size
	}
	return 0
}

// Sum returns the digest of data.
func (f Function) Sum(data []byte) Digest {
	h := f.New()
	h.Write(data)
	return f.Digest(h, int64(len(data)))
}

// Digest returns the digest of the size bytes that h, a hash of f, has seen.
func (f Function) Digest(h hash.Hash, size int64) Digest {
	return Digest{fn: f, hash: hex.EncodeToString(h.Sum(nil)), size: size}
}

// FunctionOf returns the function of a request: the stated one, or, where v is UNKNOWN, the one that
// sample's hash has the length of; a nil sample means SHA-256. An unserved one is ErrInvalid.
func FunctionOf(v repb.DigestFunction_Value, sample *repb.Digest) (Function, error) {
	for _, f := range Functions() {
		switch {
		case v == f.Proto():
			return f, nil
		case v == repb.DigestFunction_UNKNOWN && (sample == nil || len(sample.Hash) == f.hexLen()):
			return f, nil
		}
	}
	if v == repb.DigestFunction_UNKNOWN {
		return 0, invalidf("digest function not stated, and no served function has hashes of %d digits as in %+.80q; served: %v",
			len(sample.GetHash()), sample.GetHash(), Functions())
	}
	return 0, invalidf("digest function %v is not served; served: %v", v, Functions())
}

// A Digest names a blob by function, hash and size. It is comparable, checked when made, and not
// valid as a zero value.
type Digest struct {
	fn   Function
	hash string // lower-case hexadecimal of the function's length
	size int64  // bytes, not negative
}

// hexDigit says which bytes are lower-case hexadecimal: looking it up is what makes a list of thousands of digests
// cheap to check.
var hexDigit = func() (is [256]bool) {
	for _, c := range []byte("0123456789abcdef") {
		is[c] = true
	}
	return is
}()

// NewDigest returns the digest of a hash in lower-case hexadecimal and a size in bytes, or
// ErrInvalid.
func NewDigest(f Function, hash string, size int64) (Digest, error) {
	if f.hexLen() == 0 {
		return Digest{}, invalidf("digest without a digest function")
	}
	if len(hash) != f.hexLen() {
		return Digest{}, invalidf("digest hash %+.80q has %d characters; %s needs %d", hash, len(hash), f, f.hexLen())
	}
	for i := range len(hash) {
		if !hexDigit[hash[i]] {
			return Digest{}, invalidf("digest hash %+.80q is not lower-case hexadecimal", hash)
		}
	}
	if size < 0 {
		return Digest{}, invalidf("digest %s has the negative size %d", hash, size)
	}
	return Digest{fn: f, hash: hash, size: size}, nil
}

// FromProto returns d as a Digest of f, or ErrInvalid; a nil d is ErrInvalid.
func FromProto(f Function, d *repb.Digest) (Digest, error) {
	if d == nil {
		return Digest{}, invalidf("digest is not set")
	}
	return NewDigest(f, d.Hash, d.SizeBytes)
}

// ParseDigest reads what String writes, or ErrInvalid. A text without a function is SHA-256.
func ParseDigest(s string) (Digest, error) {
	text, f := s, SHA256
	for _, g := range Functions() {
		if rest, ok := strings.CutPrefix(text, g.String()+":"); ok {
			text, f = rest, g
			break
		}
	}
	hash, size, ok := strings.Cut(text, "/")
	n, err := strconv.ParseInt(size, 10, 64)
	if !ok || err != nil {
		return Digest{}, invalidf("digest %+.80q of %d bytes is not of the form HASH/SIZE", s, len(s))
	}
	return NewDigest(f, hash, n)
}

// Function returns the digest function.
func (d Digest) Function() Function { return d.fn }

// Hash returns the hash in lower-case hexadecimal.
func (d Digest) Hash() string { return d.hash }

// Size returns the blob's size in bytes.
func (d Digest) Size() int64 { return d.size }

// IsZero reports whether d is the zero Digest, which names nothing.
func (d Digest) IsZero() bool { return d.fn == 0 }

// IsEmpty reports whether d names the empty blob of its function.
func (d Digest) IsEmpty() bool { return d.size == 0 && d.fn != 0 && d == d.fn.Sum(nil) }

// Proto returns d as a message of the API.
func (d Digest) Proto() *repb.Digest { return &repb.Digest{Hash: d.hash, SizeBytes: d.size} }

// String returns HASH/SIZE, with the function's name and a colon before it unless it is SHA-256.
func (d Digest) String() string {
	if d.IsZero() {
		return "no digest"
	}
	s := d.hash + "/" + strconv.FormatInt(d.size, 10)
	if d.fn != SHA256 {
		s = d.fn.String() + ":" + s
	}
	return s
}

// Resource returns the name by which the API speaks of the blob in a precondition failure:
// blobs/HASH/SIZE.
func (d Digest) Resource() string {
	return "blobs/" + d.hash + "/" + strconv.FormatInt(d.size, 10)
}

// MarshalProto returns the deterministic encoding of m and its digest.
func MarshalProto(f Function, m proto.Message) ([]byte, Digest, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, Digest{}, err
	}
	return b, f.Sum(b), nil
}
