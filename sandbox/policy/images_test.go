// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/policy"
)

// TestImages: the section is read as written, its canonical text is the same policy, and every setting changes the
// hash.
func TestImages(t *testing.T) {
	hashes := map[string]string{policy.Default().Hash(): "no section"}
	for _, c := range []struct {
		text string
		want policy.Images
	}{
		{"{}", policy.Images{}},
		{
			"{registries: [registry.example:5000, mirror.example/library/gcc]}",
			policy.Images{Registries: []string{"registry.example:5000", "mirror.example/library/gcc"}},
		},
		{"{max_size: 2GiB}", policy.Images{MaxBytes: 2 << 30}},
		{"{max_pull_time: 10m}", policy.Images{MaxPull: 10 * time.Minute}},
		{"{cache_unpinned: true}", policy.Images{CacheUnpinned: true}},
		{"{environment: false}", policy.Images{NoEnvironment: true}},
	} {
		p, err := policy.Parse("p.yaml", []byte("version: 1\nimages: "+c.text+"\n"))
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if got := p.Images(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, want %+v", c.text, got, c.want)
		}
		again, err := policy.Parse("again.yaml", []byte(p.Text()))
		if err != nil || !reflect.DeepEqual(again.Images(), c.want) || again.Hash() != p.Hash() {
			t.Errorf("%s: the canonical text is not the same policy: %v\n%s", c.text, err, p.Text())
		}
		if same := hashes[p.Hash()]; same != "" && c.text != "{}" {
			t.Errorf("%s: it has the hash of %s", c.text, same)
		}
		hashes[p.Hash()] = c.text
	}
}
