// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/compress"
)

// A resource is a parsed ByteStream resource name:
//
//	read:  [INSTANCE/]BLOBS/[FUNCTION/]HASH/SIZE
//	write: [INSTANCE/]uploads/UPLOAD/BLOBS/[FUNCTION/]HASH/SIZE[/ANYTHING]
//
// where BLOBS is blobs or compressed-blobs/COMPRESSOR, and INSTANCE may have several segments. HASH and SIZE describe
// the uncompressed blob; the method digest validates them.
type resource struct {
	instance   string
	upload     string                    // nonempty for a write, empty for a read
	compressor repb.Compressor_Value     // IDENTITY for blobs
	function   repb.DigestFunction_Value // UNKNOWN if the name has none
	hash       string
	size       int64
}

// digest returns the digest of the blob. A malformed one, or a function that in does not serve, is cas.ErrInvalid.
func (r *resource) digest(in *cas.Instance) (cas.Digest, error) {
	return digest(in, r.function, &repb.Digest{Hash: r.hash, SizeBytes: r.size})
}

// maxHash is the length of the longest hash, SHA512, in hexadecimal digits.
const maxHash = 128

// parseRead parses the resource name of a read. A malformed name is cas.ErrInvalid.
func parseRead(name string) (resource, error) {
	segs := strings.Split(name, "/")
	i := slices.IndexFunc(segs, func(s string) bool { return s == "blobs" || s == "compressed-blobs" })
	if i < 0 {
		return resource{}, badName(name, "has no segment blobs")
	}
	return parse(name, segs[:i], "", segs[i:])
}

// parseWrite parses the resource name of a write. The upload ID may be any nonempty segment. A malformed name is
// cas.ErrInvalid.
func parseWrite(name string) (resource, error) {
	segs := strings.Split(name, "/")
	i := slices.Index(segs, "uploads")
	if i < 0 || len(segs) < i+3 || segs[i+1] == "" {
		return resource{}, badName(name, "has no segments uploads/UUID/blobs")
	}
	return parse(name, segs[:i], segs[i+1], segs[i+2:])
}

// parse parses a name split into the instance, the upload ID (empty for a read) and the segments from BLOBS on.
func parse(name string, instance []string, upload string, blob []string) (resource, error) {
	r := resource{instance: strings.Join(instance, "/"), upload: upload}
	if len(instance) > 0 && r.instance == "" {
		return resource{}, badName(name, "begins with a slash")
	}
	err := cas.CheckInstanceName(r.instance)
	if err != nil {
		return resource{}, err
	}
	kind, blob := blob[0], blob[1:]
	switch {
	case kind == "blobs":
	case kind == "compressed-blobs" && len(blob) > 0:
		if r.compressor, err = compress.Parse(blob[0]); err != nil {
			return resource{}, fmt.Errorf("%w; every blob is also available uncompressed as blobs/HASH/SIZE", err)
		}
		blob = blob[1:]
	case kind == "compressed-blobs":
		return resource{}, badName(name, "does not have the form compressed-blobs/COMPRESSOR/HASH/SIZE")
	default:
		return resource{}, badName(name, "has no segment blobs after the upload ID")
	}
	if len(blob) > 0 && blob[0] == strings.ToLower(blob[0]) {
		if v := repb.DigestFunction_Value_value[strings.ToUpper(blob[0])]; v != 0 {
			r.function, blob = repb.DigestFunction_Value(v), blob[1:]
		}
	}
	if len(blob) < 2 || len(blob) > 2 && upload == "" {
		return resource{}, badName(name, "does not have the form blobs/HASH/SIZE")
	}
	if r.hash = blob[0]; len(r.hash) > maxHash {
		return resource{}, badName(name, "has a hash longer than that of any digest function")
	}
	r.size, err = strconv.ParseInt(blob[1], 10, 64)
	if err != nil || strconv.FormatInt(r.size, 10) != blob[1] {
		return resource{}, badName(name, "has a size that is not a decimal number")
	}
	return r, nil
}

// compressed reports whether the data of the resource is compressed.
func (r resource) compressed() bool { return r.compressor != repb.Compressor_IDENTITY }

func badName(name, fault string) error {
	return fmt.Errorf("%w resource name: %+.256q %s", cas.ErrInvalid, name, fault)
}
