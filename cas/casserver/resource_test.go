// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

func TestResourceNames(t *testing.T) {
	d := cas.SHA256.Sum([]byte("data"))
	blob := d.Resource()
	for _, row := range []struct {
		name        string
		instance    string
		read, write bool // it is valid to read, to write
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
		{"compressed-blobs/zstd/" + d.Hash() + "/4", "", false, false},
		{"uploads/u/compressed-blobs/zstd/" + d.Hash() + "/4", "", false, false},
		{"compressed-blobs", "", false, false},
	} {
		for _, way := range []struct {
			verb  string
			parse func(string) (resource, error)
			valid bool
		}{
			{"read", parseRead, row.read},
			{"write", parseWrite, row.write},
		} {
			r, err := way.parse(row.name)
			var got cas.Digest
			if err == nil {
				got, err = r.digest(served)
			}
			switch {
			case way.valid && (err != nil || r.instance != row.instance || got != d):
				t.Errorf("%s %q: got %v, %v, %v, want %q, %v", way.verb, row.name, r, got, err, row.instance, d)
			case !way.valid && !errors.Is(err, cas.ErrInvalid):
				t.Errorf("%s %q: got %v, %v, want ErrInvalid", way.verb, row.name, got, err)
			}
		}
	}
}

// served is an instance with every digest function.
var served = &cas.Instance{}

// FuzzResourceName checks that whatever is accepted means the same when written out again, and that
// whatever is refused is the client's fault.
func FuzzResourceName(f *testing.F) {
	blob := cas.SHA256.Sum([]byte("data")).Resource()
	for _, name := range []string{
		blob, "a/b/" + blob, "uploads/u/" + blob, "a/uploads/u/" + blob + "/x", "uploads/u/compressed-blobs/zstd/" + blob[6:],
		"blobs/sha256/" + blob[6:], "blobs/blake3/" + blob[6:], "//", "uploads//blobs", "blobs",
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for prefix, parse := range map[string]func(string) (resource, error){"": parseRead, "uploads/u/": parseWrite} {
			r, err := parse(name)
			if err != nil {
				if !errors.Is(err, cas.ErrInvalid) {
					t.Errorf("%q: error %v is not ErrInvalid", name, err)
				}
				continue
			}
			if err := cas.CheckInstanceName(r.instance); err != nil {
				t.Errorf("%q: instance %q: %v", name, r.instance, err)
			}
			d, err := r.digest(served)
			if err != nil {
				if !errors.Is(err, cas.ErrInvalid) {
					t.Errorf("%q: error %v is not ErrInvalid", name, err)
				}
				continue
			}
			again := prefix + d.Resource()
			if r.instance != "" {
				again = r.instance + "/" + again
			}
			if got, err := parse(again); err != nil || got.instance != r.instance {
				t.Errorf("%q is %v, but %q is %v, %v", name, r, again, got, err)
			} else if same, err := got.digest(served); err != nil || same != d {
				t.Errorf("%q names %v, but %q names %v, %v", name, d, again, same, err)
			}
		}
	})
}
