// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

var safe = regexp.MustCompile(`^@@?[a-z0-9_%-]*$`)

// FuzzEscape tries pairs of names: a file name is safe everywhere, and equal only for equal names.
func FuzzEscape(f *testing.F) {
	long := strings.Repeat("ab/", 80)
	for _, pair := range [][2]string{
		{"", "@"}, {"a", "A"}, {"a/b", "a%2fb"}, {"..", "."}, {"con", "CON"}, {"a.", "a"}, {"ä", "a\u0308"},
		{long + "a", long + "b"}, {"\x00", "%00"}, {escape(long), long},
	} {
		f.Add(pair[0], pair[1])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := escape(a), escape(b)
		if (x == y) != (a == b) {
			t.Errorf("escape(%q) = %q, escape(%q) = %q", a, x, b, y)
		}
		if !safe.MatchString(x) || len(x) > maxName || !filepath.IsLocal(x) {
			t.Errorf("escape(%q) = %q is not a safe file name", a, x)
		}
		// Even file systems that fold case see two names.
		if a != b && strings.EqualFold(x, y) {
			t.Errorf("escape(%q) = %q and escape(%q) = %q differ in case only", a, x, b, y)
		}
	})
}

// FuzzParseKey: a path is either no key, or the very path of its key.
func FuzzParseKey(f *testing.F) {
	c := &Cache{dir: "d"}
	for _, name := range []string{"", "a/b"} {
		for k := range kinds {
			p, err := filepath.Rel("d/instances", c.path(key{escape(name), kind(k), cas.SHA256.Sum([]byte(name))}))
			if err != nil {
				f.Fatal(err)
			}
			p = filepath.ToSlash(p)
			if _, ok := parseKey(p); !ok {
				f.Errorf("parseKey(%q) is no key", p)
			}
			f.Add(p)
			f.Add(p + "0")
			f.Add(strings.Replace(p, "-", "-+", 1))
		}
	}
	f.Add("@/blobs/sha256//-0")
	f.Fuzz(func(t *testing.T, rel string) {
		k, ok := parseKey(rel)
		if !ok || strings.ContainsRune(rel, '\\') {
			return
		}
		if got := filepath.ToSlash(c.path(k)); got != "d/instances/"+rel {
			t.Errorf("parseKey(%q) has the path %q", rel, got)
		}
	})
}

func TestChargeIsWholeBlocks(t *testing.T) {
	for size, want := range map[int64]int64{
		0: block, 1: block, block: block, block + 1: 2 * block, 1<<63 - 1: 1<<63 - 1, 1<<62 + 1: 1<<62 + block,
	} {
		if got := charge(size); got != want {
			t.Errorf("charge(%d) = %d, want %d", size, got, want)
		}
	}
}
