// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// A resource is what a ByteStream resource name says:
//
//	read:  [INSTANCE/]blobs/[FUNCTION/]HASH/SIZE
//	write: [INSTANCE/]uploads/UPLOAD/blobs/[FUNCTION/]HASH/SIZE[/ANYTHING]
//
// INSTANCE may have several segments. Where compressed-blobs/COMPRESSOR stands for blobs, the name is
// refused: no compressor is served.
type resource struct {
	instance string
	function repb.DigestFunction_Value // UNKNOWN if the name does not state it
	hash     string
	size     int64
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
	return parse(name, segs[:i], segs[i:], false)
}

// parseWrite parses the name of an upload. The name of the upload itself is of no consequence, since
// none is kept, but must be there. A malformed name is cas.ErrInvalid.
func parseWrite(name string) (resource, error) {
	segs := strings.Split(name, "/")
	i := slices.Index(segs, "uploads")
	if i < 0 || len(segs) < i+3 || segs[i+1] == "" {
		return resource{}, badName(name, "has no segments uploads/UUID/blobs")
	}
	return parse(name, segs[:i], segs[i+2:], true)
}

// parse parses a name from the segments of its instance and those from blobs on.
func parse(name string, instance, blob []string, trailing bool) (resource, error) {
	r := resource{instance: strings.Join(instance, "/")}
	if len(instance) > 0 && r.instance == "" {
		return resource{}, badName(name, "begins with a slash")
	}
	if err := cas.CheckInstanceName(r.instance); err != nil {
		return resource{}, err
	}
	switch blob[0] {
	case "blobs":
		blob = blob[1:]
	case "compressed-blobs":
		return resource{}, badName(name, "names a compressor, and none is served; use blobs/HASH/SIZE")
	default:
		return resource{}, badName(name, "has no segment blobs after its upload")
	}
	if len(blob) > 0 {
		if v := repb.DigestFunction_Value_value[strings.ToUpper(blob[0])]; v != 0 {
			r.function, blob = repb.DigestFunction_Value(v), blob[1:]
		}
	}
	if len(blob) < 2 || len(blob) > 2 && !trailing {
		return resource{}, badName(name, "does not have the form blobs/HASH/SIZE")
	}
	if len(blob[0]) > maxHash {
		return resource{}, badName(name, "has a hash that is too long for any digest function")
	}
	size, err := strconv.ParseInt(blob[1], 10, 64)
	if err != nil || strconv.FormatInt(size, 10) != blob[1] {
		return resource{}, badName(name, "has a size that is no decimal number of bytes")
	}
	r.hash, r.size = blob[0], size
	return r, nil
}

func badName(name, fault string) error {
	return fmt.Errorf("%w resource name: %+.256q %s", cas.ErrInvalid, name, fault)
}
