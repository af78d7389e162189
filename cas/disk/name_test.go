// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var safe = regexp.MustCompile(`^@@?[a-z0-9_%-]*$`)

// FuzzEscape checks that file names are safe everywhere, and equal only for equal names.
func FuzzEscape(f *testing.F) {
	long := strings.Repeat("ab/", 80)
	for _, pair := range [][2]string{
		{"", "@"},
		{"a", "A"},
		{"a/b", "a%2fb"},
		{"..", "."},
		{"con", "CON"},
		{"a.", "a"},
		{"ä", "a\u0308"},
		{long + "a", long + "b"},
		{"\x00", "%00"},
		{escape(long), long},
	} {
		f.Add(pair[0], pair[1])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := escape(a), escape(b)
		expect.That(t, (x == y) == (a == b), "escape(%q) = %q, escape(%q) = %q", a, x, b, y)
		expect.That(t, safe.MatchString(x) && len(x) <= maxName && filepath.IsLocal(x),
			"escape(%q) = %q is not a safe file name", a, x)
		// They must differ even on file systems that fold case.
		expect.That(t, a == b || !strings.EqualFold(x, y),
			"escape(%q) = %q and escape(%q) = %q differ only in case", a, x, b, y)
	})
}

// FuzzParsePath checks that a path is invalid or is the path of its key.
func FuzzParsePath(f *testing.F) {
	c := &Cache{dir: "d"}
	c.instances.numbers, c.instances.byEscaped = map[string]uint16{}, map[string]uint16{}
	for _, name := range []string{"", "a/b", strings.Repeat("long/", 50)} {
		n := c.instances.add(name)
		for _, function := range cas.Functions() {
			p, err := c.pathBelow("files", keyOf(n, blob, function.Sum([]byte(name))))
			if err == nil {
				p, err = filepath.Rel("d/files", p)
			}
			must.Succeed(f, err)
			p = filepath.ToSlash(p)
			if k, ok := c.parsePath(p); !ok || k.Instance != n {
				f.Errorf("parsePath(%q) is no key, or one of instance %d", p, k.Instance)
			}
			for _, p := range []string{p, p + "0", strings.Replace(p, "-", "-+", 1), "x/" + p, strings.Replace(p, "@", "@@", 1), strings.ToUpper(p)} {
				f.Add(p)
			}
		}
	}
	f.Add("@/sha256//-0")
	f.Fuzz(func(t *testing.T, rel string) {
		k, ok := c.parsePath(rel)
		if !ok || strings.ContainsRune(rel, '\\') {
			return
		}
		got, err := c.pathBelow("files", k)
		expect.That(t, err == nil && filepath.ToSlash(got) == "d/files/"+rel,
			"parsePath(%q): the path of its key is %q, %v", rel, got, err)
	})
}

// TestKeyIdentifiesDigest covers all digest functions.
func TestKeyIdentifiesDigest(t *testing.T) {
	for _, f := range cas.Functions() {
		for _, b := range []string{"", "x"} {
			d := f.Sum([]byte(b))
			k, folded := keyOf(3, result, d), f.Size() > 32
			if got := digestOf(k); got != d && !folded || folded && !got.IsZero() {
				t.Errorf("%v: got %v, want %v", f, got, d)
			}
			expect.That(t, is(k, d) && !is(k, f.Sum([]byte("other"))), "%v: is accepts another digest", f)
		}
	}
	k := keyOf(0, blob, cas.SHA256.Sum(nil))
	k.Kind = 0xf0 | blob
	if d := digestOf(k); !d.IsZero() {
		t.Errorf("key without function: got %v", d)
	}
}

func TestChargeIsWholeBlocks(t *testing.T) {
	for size, want := range map[int64]int64{
		0: block, 1: block, block: block, block + 1: 2 * block, 1<<63 - 1: 1<<63 - 1, 1<<62 + 1: 1<<62 + block,
	} {
		expect.Equal(t, charge(size), want, "charge(%d)", size)
	}
}

// TestClassesOfAges: the classes have no gaps, and a width of at most a quarter of the age.
func TestClassesOfAges(t *testing.T) {
	for c := range classes - 1 {
		from, to := youngest(c), youngest(c+1)-1
		if class(from) != c || class(to) != c || to-from > from/4 {
			t.Errorf("class %d spans %d to %d, which are in classes %d and %d", c, from, to, class(from), class(to))
		}
	}
	expect.Equal(t, class(1<<32-1), classes-1, "class of the highest age")
}
