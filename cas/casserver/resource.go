// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
)

// A resource is what a ByteStream resource name says:
//
//	read:  [INSTANCE/]BLOBS/[FUNCTION/]HASH/SIZE
//	write: [INSTANCE/]uploads/UPLOAD/BLOBS/[FUNCTION/]HASH/SIZE[/ANYTHING]
//
// where BLOBS is blobs or compressed-blobs/COMPRESSOR, and INSTANCE may have several segments. HASH and SIZE are
// those of the blob uncompressed; whether they are a digest is for digest to say.
type resource struct {
	instance   string
	upload     string                    // of a write, and never empty
	compressor repb.Compressor_Value     // IDENTITY for blobs, else one that is served
	function   repb.DigestFunction_Value // UNKNOWN if the name does not state it
	hash       string
	size       int64
}

// digest returns the digest that the name states, of a function that in serves. A malformed one is cas.ErrInvalid.
func (r *resource) digest(in *cas.Instance) (cas.Digest, error) {
	return digest(in, r.function, &repb.Digest{Hash: r.hash, SizeBytes: r.size})
}

// maxHash is the length of the longest hash, of SHA512, in digits.
const maxHash = 128

// parseRead parses the name of a blob to read. A malformed name is cas.ErrInvalid.
func parseRead(name string) (resource, error) {
	segs := strings.Split(name, "/")
	i := slices.IndexFunc(segs, func(s string) bool { return s == "blobs" || s == "compressed-blobs" })
	if i < 0 {
		return resource{}, badName(name, "has no segment blobs")
	}
	return parse(name, segs[:i], "", segs[i:])
}

// parseWrite parses the name of an upload, whose own name may be any text but none. A malformed name is
// cas.ErrInvalid.
func parseWrite(name string) (resource, error) {
	segs := strings.Split(name, "/")
	i := slices.Index(segs, "uploads")
	if i < 0 || len(segs) < i+3 || segs[i+1] == "" {
		return resource{}, badName(name, "has no segments uploads/UUID/blobs")
	}
	return parse(name, segs[:i], segs[i+1], segs[i+2:])
}

// parse parses a name from the segments of its instance, its upload if it has one, and the segments from blobs on.
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
			return resource{}, fmt.Errorf("%w; so is every blob uncompressed, as blobs/HASH/SIZE", err)
		}
		blob = blob[1:]
	case kind == "compressed-blobs":
		return resource{}, badName(name, "does not have the form compressed-blobs/COMPRESSOR/HASH/SIZE")
	default:
		return resource{}, badName(name, "has no segment blobs after its upload")
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
		return resource{}, badName(name, "has a hash that is too long for any digest function")
	}
	r.size, err = strconv.ParseInt(blob[1], 10, 64)
	if err != nil || strconv.FormatInt(r.size, 10) != blob[1] {
		return resource{}, badName(name, "has a size that is no decimal number of bytes")
	}
	return r, nil
}

// compressed reports whether the data is.
func (r resource) compressed() bool { return r.compressor != repb.Compressor_IDENTITY }

func badName(name, fault string) error {
	return fmt.Errorf("%w resource name: %+.256q %s", cas.ErrInvalid, name, fault)
}
