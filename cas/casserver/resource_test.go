// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestResourceNames(t *testing.T) {
	d := cas.SHA256.Sum([]byte("data"))
	blob := d.Resource()
	for _, row := range []struct {
		name        string
		instance    string
		read, write bool // whether it is valid
	}{
		{blob, "", true, false},
		{"a/" + blob, "a", true, false},
		{"a/b/c/" + blob, "a/b/c", true, false},
		{"uploads/u/" + blob, "", false, true},
		{"a/b/uploads/u/" + blob, "a/b", false, true},
		{"uploads/u/" + blob + "/", "", false, true},
		{"uploads/u/" + blob + "/x/y", "", false, true},
		{"uploads/blobs/" + blob, "", false, true},
		{"blobs/sha256/" + d.Hash() + "/4", "", true, false},
		{"", "", false, false},
		{"/", "", false, false},
		{"blobs", "", false, false},
		{"blobs/", "", false, false},
		{"blobs//4", "", false, false},
		{"/" + blob, "", false, false},
		{"a//b/" + blob, "", false, false},
		{blob + "/", "", false, false},
		{blob + "/x", "", false, false},
		{"operations/" + blob, "", false, false},
		{"blobs/" + blob, "", false, false},
		{"a/uploads/b/" + blob, "a", false, true},
		{"a/blobs/b/uploads/u/" + blob, "", false, false},
		{"uploads", "", false, false},
		{"uploads/", "", false, false},
		{"uploads/u", "", false, false},
		{"uploads/u/", "", false, false},
		{"uploads/u/blobs", "", false, false},
		{"uploads//" + blob, "", false, false},
		{"uploads/u/x/" + blob, "", false, false},
		{"blobs/" + d.Hash(), "", false, false},
		{"blobs/" + d.Hash() + "/", "", false, false},
		{"blobs/" + d.Hash() + "/04", "", false, false},
		{"blobs/" + d.Hash() + "/+4", "", false, false},
		{"blobs/" + d.Hash() + "/-4", "", false, false},
		{"blobs/" + d.Hash() + "/4.0", "", false, false},
		{"blobs/" + d.Hash() + "/99999999999999999999", "", false, false},
		{"blobs/" + strings.ToUpper(d.Hash()) + "/4", "", false, false},
		{"blobs/murmur3/" + d.Hash() + "/4", "", false, false},
		{"blobs/unknown/" + d.Hash() + "/4", "", false, false},
		{"blobs/SHA256/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs/zstd/" + d.Hash() + "/4", "", true, false},
		{"a/compressed-blobs/deflate/" + d.Hash() + "/4", "a", true, false},
		{"compressed-blobs/brotli/sha256/" + d.Hash() + "/4", "", true, false},
		{"uploads/u/compressed-blobs/zstd/" + d.Hash() + "/4", "", false, true},
		{"a/b/uploads/u/compressed-blobs/brotli/sha256/" + d.Hash() + "/4/x/y", "a/b", false, true},
		{"compressed-blobs", "", false, false},
		{"compressed-blobs/", "", false, false},
		{"compressed-blobs/zstd", "", false, false},
		{"compressed-blobs/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs/ZSTD/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs/identity/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs/zstd/zstd/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs/sha256/zstd/" + d.Hash() + "/4", "", false, false},
		{"uploads/u/compressed-blobs", "", false, false},
	} {
		for _, way := range []struct {
			verb  string
			parse func(string) (resource, error)
			valid bool
		}{
			{"read", parseRead, row.read},
			{"write", parseWrite, row.write},
		} {
			got, err := way.parse(row.name)
			var gotDigest cas.Digest
			if err == nil {
				gotDigest, err = got.digest(served)
			}
			switch {
			case way.valid && (err != nil || got.instance != row.instance || gotDigest != d || (got.upload == "") != (way.verb == "read")):
				t.Errorf("%s %q: got %+v, %v, want %q, %v", way.verb, row.name, got, err, row.instance, d)
			case !way.valid && !errors.Is(err, cas.ErrInvalid):
				t.Errorf("%s %q: got %v, %v, want ErrInvalid", way.verb, row.name, got, err)
			}
		}
	}
}

// served is an instance with every digest function.
var served = &cas.Instance{}

// String returns the resource name of r.
func (r resource) String() string {
	var segs []string
	if r.instance != "" {
		segs = append(segs, r.instance)
	}
	if r.upload != "" {
		segs = append(segs, "uploads", r.upload)
	}
	if r.compressed() {
		segs = append(segs, "compressed-blobs", compress.Name(r.compressor))
	} else {
		segs = append(segs, "blobs")
	}
	return strings.Join(segs, "/") + "/" + tail(r)
}

// tail returns the name of r after blobs or the compressor.
func tail(r resource) string {
	text := r.hash + "/" + strconv.FormatInt(r.size, 10)
	if r.function != repb.DigestFunction_UNKNOWN {
		text = strings.ToLower(r.function.String()) + "/" + text
	}
	return text
}

// FuzzResourceName checks that accepted names round-trip and that rejected ones are ErrInvalid.
func FuzzResourceName(f *testing.F) {
	blob := cas.SHA256.Sum([]byte("data")).Resource()
	for _, name := range []string{
		blob, "a/b/" + blob, "uploads/u/" + blob, "a/uploads/u/" + blob + "/x", "uploads/u/compressed-blobs/zstd/" + blob[6:],
		"blobs/sha256/" + blob[6:], "blobs/blake3/" + blob[6:], "//", "uploads//blobs", "blobs", "compressed-blobs/brotli/" + blob[6:],
		"a/uploads/blobs/compressed-blobs/deflate/sha256/" + blob[6:] + "/blobs/uploads", "compressed-blobs//" + blob[6:],
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, parse := range []func(string) (resource, error){parseRead, parseWrite} {
			r, err := parse(name)
			if err != nil {
				expect.That(t, errors.Is(err, cas.ErrInvalid), "%q: error %v is not ErrInvalid", name, err)
				continue
			}
			if d, err := r.digest(served); err != nil && !errors.Is(err, cas.ErrInvalid) {
				t.Errorf("%q: error %v is not ErrInvalid", name, err)
			} else if err == nil {
				again, err := parse(strings.TrimSuffix(r.String(), tail(r)) + strings.TrimPrefix(d.Resource(), "blobs/"))
				if same, _ := again.digest(served); err != nil || same != d {
					t.Errorf("%q names %v, but its resource name names %v, %v", name, d, same, err)
				}
			}
			expect.Error(t, cas.CheckInstanceName(r.instance), nil, "%q: instance %q", name, r.instance)
			if got, err := parse(r.String()); got != r || err != nil {
				t.Errorf("%q parses as %+v, but %q as %+v, %v", name, r, r, got, err)
			}
			if text := r.String(); text != name && !strings.HasPrefix(name, text+"/") {
				t.Errorf("%q is printed as %q", name, text)
			}
		}
	})
}
