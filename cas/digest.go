// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/internal/sha256tree"
	"github.com/zeebo/blake3"
	"google.golang.org/protobuf/proto"
)

// A Function is a digest function that Cloister serves. The zero value is invalid: Sum and Digest return the zero
// Digest for it, and functions that store or read a blob return ErrInvalid.
type Function uint8

// The digest functions. Equal hashes of different functions name different blobs. Stores persist these numbers, so a
// new function takes the next one.
const (
	SHA256 Function = 1 + iota
	SHA1
	MD5
	SHA384
	SHA512
	SHA256TREE
	BLAKE3
	GITSHA1
)

// functions describes each function.
var functions = [...]struct {
	name  string // of the API, in lower case
	proto repb.DigestFunction_Value
	bytes int // length of a hash
	// named means that resource names include the name. Otherwise the length of the hash identifies the function.
	named bool
	new   func() hash.Hash
}{
	SHA256:     {"sha256", repb.DigestFunction_SHA256, sha256.Size, false, sha256.New},
	SHA1:       {"sha1", repb.DigestFunction_SHA1, sha1.Size, false, sha1.New},
	MD5:        {"md5", repb.DigestFunction_MD5, md5.Size, false, md5.New},
	SHA384:     {"sha384", repb.DigestFunction_SHA384, sha512.Size384, false, sha512.New384},
	SHA512:     {"sha512", repb.DigestFunction_SHA512, sha512.Size, false, sha512.New},
	SHA256TREE: {"sha256tree", repb.DigestFunction_SHA256TREE, sha256tree.Size, true, sha256tree.New},
	BLAKE3:     {"blake3", repb.DigestFunction_BLAKE3, 32, true, func() hash.Hash { return blake3.New() }},
	GITSHA1:    {"gitsha1", repb.DigestFunction_GITSHA1, sha1.Size, true, nil}, // see New
}

// Functions lists all functions, in the order in which servers advertise them.
func Functions() []Function {
	fs := make([]Function, 0, len(functions)-1)
	for f := SHA256; int(f) < len(functions); f++ {
		fs = append(fs, f)
	}
	return fs
}

// allFunctions is a shared, read-only copy of Functions.
var allFunctions = Functions()

// Proto returns the function's number in the API.
func (f Function) Proto() repb.DigestFunction_Value { return functions[f].proto }

// String returns the function's lower-case name, as it appears in paths.
func (f Function) String() string {
	if f == 0 {
		return "unknown"
	}
	return functions[f].name
}

// Size returns the length of a hash of the function in bytes.
func (f Function) Size() int { return functions[f].bytes }

// named reports whether ByteStream resource names include the function, as in blobs/FUNCTION/HASH/SIZE. For older
// functions the length of the hash identifies it.
func (f Function) named() bool { return functions[f].named }

// New returns a hash for size bytes of input. Only GITSHA1 depends on size. New panics for the zero Function.
func (f Function) New(size int64) hash.Hash {
	if f == GITSHA1 {
		return newGitSHA1(size)
	}
	return functions[f].new()
}

// hexLen returns the length of a hash in hexadecimal digits.
func (f Function) hexLen() int { return 2 * functions[f].bytes }

// Sum returns the digest of data.
func (f Function) Sum(data []byte) Digest {
	if f == 0 {
		return Digest{}
	}
	h := f.New(int64(len(data)))
	h.Write(data)
	return f.Digest(h, int64(len(data)))
}

// SumSeeker returns the digest of the content of r from start to end, and rewinds r.
func (f Function) SumSeeker(r io.ReadSeeker) (Digest, error) {
	if f == 0 {
		return Digest{}, errNoFunction
	}
	size, err := r.Seek(0, io.SeekEnd)
	if err != nil {
		return Digest{}, err
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return Digest{}, err
	}
	h := f.New(size)
	n, err := io.Copy(h, r)
	if err != nil {
		return Digest{}, err
	}
	_, err = r.Seek(0, io.SeekStart)
	return f.Digest(h, n), err
}

// Digest returns the digest of the size bytes written to h, a hash of f. If h was made for another size, no content has
// this digest.
func (f Function) Digest(h hash.Hash, size int64) Digest {
	return Digest{fn: f, hash: hex.EncodeToString(h.Sum(nil)), size: size}
}

// ParseFunction returns the function with this lower-case name, or ErrInvalid.
func ParseFunction(name string) (Function, error) {
	for _, f := range allFunctions {
		if f.String() == name {
			return f, nil
		}
	}
	return 0, invalidf("digest function %+.80q is not served; served: %v", name, allFunctions)
}

// gitSHA1 is SHA-1 of Git's blob header and the blob (REAPI, DigestFunction.GITSHA1).
type gitSHA1 struct {
	hash.Hash
	header []byte
}

func newGitSHA1(size int64) hash.Hash {
	h := &gitSHA1{sha1.New(), fmt.Appendf(nil, "blob %d\x00", size)}
	h.Write(h.header)
	return h
}

// Reset implements hash.Hash, for an input of the same size.
func (h *gitSHA1) Reset() {
	h.Hash.Reset()
	h.Write(h.header)
}

// A Digest names a blob by function, hash and size. It is comparable and valid except for its zero value, which names
// nothing: functions that store or read a blob return ErrInvalid for it. In text and JSON it has the form of String,
// and the zero Digest is the empty text.
type Digest struct {
	fn   Function
	hash string // lower-case hexadecimal of the function's length
	size int64  // bytes, not negative
}

// hexDigit reports whether a byte is a lower-case hexadecimal digit. A table makes long lists of digests cheap to
// check.
var hexDigit = func() (is [256]bool) {
	for _, c := range []byte("0123456789abcdef") {
		is[c] = true
	}
	return is
}()

// NewDigest returns the digest with this lower-case hexadecimal hash and size in bytes, or ErrInvalid.
func NewDigest(f Function, hash string, size int64) (Digest, error) {
	if f.hexLen() == 0 {
		return Digest{}, errNoFunction
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

// errNoFunction is ErrInvalid for the zero Function.
var errNoFunction = invalidf("digest without a digest function")

// FromProto returns d as a Digest of f, or ErrInvalid, also if d is nil.
func FromProto(f Function, d *repb.Digest) (Digest, error) {
	if d == nil {
		return Digest{}, invalidf("digest is not set")
	}
	return NewDigest(f, d.Hash, d.SizeBytes)
}

// ParseDigest parses the result of String, or returns ErrInvalid. Without a name, the function is the first with
// hashes of that length.
func ParseDigest(s string) (Digest, error) {
	text, f := s, SHA256
	if name, rest, ok := strings.Cut(s, ":"); ok {
		var err error
		if f, err = ParseFunction(name); err != nil {
			return Digest{}, err
		}
		text = rest
	}
	hash, size, ok := strings.Cut(text, "/")
	n, err := strconv.ParseInt(size, 10, 64)
	if !ok || err != nil || strconv.FormatInt(n, 10) != size {
		return Digest{}, invalidf("digest %+.80q of %d bytes is not of the form HASH/SIZE", s, len(s))
	}
	if text == s {
		if of, err := functionOf(allFunctions, 0, hash); err == nil {
			f = of
		}
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
func (d Digest) IsEmpty() bool { return d.size == 0 && d.fn != 0 && d.hash == emptyHashes[d.fn] }

// emptyHashes holds the hash of the empty blob by function.
var emptyHashes = func() (of [len(functions)]string) {
	for _, f := range allFunctions {
		of[f] = f.Sum(nil).hash
	}
	return of
}()

// Proto returns d as an API message.
func (d Digest) Proto() *repb.Digest { return &repb.Digest{Hash: d.hash, SizeBytes: d.size} }

// String returns HASH/SIZE, or FUNCTION:HASH/SIZE if the length of the hash does not identify the function.
func (d Digest) String() string {
	if d.IsZero() {
		return "no digest"
	}
	s := d.hash + "/" + strconv.FormatInt(d.size, 10)
	if d.fn.named() {
		s = d.fn.String() + ":" + s
	}
	return s
}

// MarshalText implements encoding.TextMarshaler.
func (d Digest) MarshalText() ([]byte, error) {
	if d.IsZero() {
		return nil, nil
	}
	return []byte(d.String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler. It accepts what ParseDigest accepts, and the empty text.
func (d *Digest) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*d = Digest{}
		return nil
	}
	parsed, err := ParseDigest(string(text))
	if err == nil {
		*d = parsed
	}
	return err
}

// CheckDigests returns ErrInvalid if one of ds is the zero Digest. Stores call it first.
func CheckDigests(ds ...Digest) error {
	for _, d := range ds {
		if d.IsZero() {
			return invalidf("digest is not set")
		}
	}
	return nil
}

// Resource returns blobs/[FUNCTION/]HASH/SIZE, the name of the blob in precondition failures and at the end of resource
// names.
func (d Digest) Resource() string {
	s := d.hash + "/" + strconv.FormatInt(d.size, 10)
	if d.fn.named() {
		s = d.fn.String() + "/" + s
	}
	return "blobs/" + s
}

// MarshalProto returns the deterministic encoding of m and its digest.
func MarshalProto(f Function, m proto.Message) ([]byte, Digest, error) {
	if f == 0 {
		return nil, Digest{}, errNoFunction
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, Digest{}, err
	}
	return b, f.Sum(b), nil
}
