// SPDX-License-Identifier: Apache-2.0

package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestLayersAreApplied: layers are applied as by container engines, and nothing leads out of the tree.
func TestLayersAreApplied(t *testing.T) {
	type layer = []tar.Header
	for _, c := range []struct {
		name   string
		layers []layer
		want   string
	}{
		{"no layers", nil, ""},
		{"an empty layer", []layer{{}}, ""},
		{
			"files and modes",
			[]layer{{dir("./"), dir("./etc/"), file("./etc/a", "1"), program("bin/b", "2")}},
			"bin/ bin/b*=2 etc/ etc/a=1",
		},
		{"absolute names", []layer{{file("/etc/a", "1"), file("//b", "2")}}, "etc/ etc/a=1 b=2"},
		{"a later layer replaces", []layer{{file("a", "1"), file("b", "1")}, {file("a", "2")}}, "a=2 b=1"},
		{"a later entry replaces", []layer{{file("a", "1"), file("a", "2")}}, "a=2"},
		{"directories merge", []layer{{file("d/a", "1")}, {dir("d"), file("d/b", "2")}}, "d/ d/a=1 d/b=2"},
		{"a file replaces a directory", []layer{{file("d/a", "1")}, {file("d", "2")}}, "d=2"},
		{"a directory replaces a file", []layer{{file("d", "1")}, {dir("d"), file("d/a", "2")}}, "d/ d/a=2"},
		{"a directory replaces a symlink", []layer{{symlink("l", "usr")}, {dir("l")}}, "l/"},
		{"a symlink replaces a directory", []layer{{file("d/a", "1")}, {symlink("d", "e")}}, "d->e"},

		{"a whiteout", []layer{{file("d/a", "1"), file("d/b", "2")}, {file("d/.wh.a", "")}}, "d/ d/b=2"},
		{"a whiteout of a directory", []layer{{file("d/e/a", "1")}, {file("d/.wh.e", "")}}, "d/"},
		{"a whiteout of nothing", []layer{{file("a", "1")}, {file("x/.wh.y", ""), file(".wh.z", "")}}, "a=1"},
		{"a whiteout before its replacement", []layer{{file("a/b", "1")}, {file(".wh.a", ""), file("a/c", "2")}}, "a/ a/c=2"},
		{"a whiteout after its replacement", []layer{{file("a/b", "1")}, {file("a/c", "2"), file(".wh.a", "")}}, "a/ a/c=2"},
		{"a whiteout keeps files of its layer", []layer{{file("a", "1")}, {file("a", "2"), file(".wh.a", "")}}, "a=2"},
		{
			"an opaque directory",
			[]layer{{file("d/a", "1"), file("d/e/b", "2")}, {dir("d"), file("d/.wh..wh..opq", ""), file("d/c", "3")}},
			"d/ d/c=3",
		},
		{
			"an opaque directory, marked last",
			[]layer{{file("d/a", "1"), file("d/e/b", "2")}, {file("d/e/c", "3"), file("d/.wh..wh..opq", "")}},
			"d/ d/e/ d/e/c=3",
		},
		{"an opaque root", []layer{{file("a", "1")}, {file(".wh..wh..opq", ""), file("b", "2")}}, "b=2"},
		{"an opaque directory that is absent", []layer{{file("a", "1")}, {file("d/.wh..wh..opq", "")}}, "a=1"},
		{"names of AUFS", []layer{{file(".wh..wh.aufs", ""), file(".wh..wh.plnk/1.2", "x"), file("a", "1")}}, "a=1"},
		{
			"a whiteout in a linked directory",
			[]layer{{file("usr/lib/a", "1"), symlink("lib", "usr/lib")}, {file("lib/.wh.a", "")}},
			"usr/ usr/lib/ lib->usr/lib",
		},

		{"a hard link", []layer{{program("a", "1"), hardLink("b", "a")}}, "a*=1 b*=1"},
		{
			"a hard link to an earlier layer",
			[]layer{{file("d/a", "1")}, {hardLink("b", "/d/a"), file("d/.wh.a", "")}},
			"d/ b=1",
		},
		{"a hard link to a symlink", []layer{{symlink("a", "x"), hardLink("b", "./a")}}, "a->x b->x"},
		{"a replaced hard link keeps the other", []layer{{file("a", "1"), hardLink("b", "a")}, {file("a", "2")}}, "a=2 b=1"},

		{
			"devices, pipes",
			[]layer{{special("dev/null", tar.TypeChar), special("sda", tar.TypeBlock), special("p", tar.TypeFifo), file("a", "1")}},
			"a=1",
		},
		{"a device hides a file", []layer{{file("a", "1"), file("b", "1")}, {special("a", tar.TypeChar)}}, "b=1"},
		{
			"symlinks stay as they are",
			[]layer{{symlink("a", "/etc/passwd"), symlink("b", "../../..")}},
			"a->/etc/passwd b->../../..",
		},

		{
			"a parent is a symlink",
			[]layer{{dir("usr/lib"), symlink("lib", "usr/lib")}, {file("lib/a", "1")}},
			"usr/ usr/lib/ usr/lib/a=1 lib->usr/lib",
		},
		{
			"a parent is an absolute symlink",
			[]layer{{symlink("d/lib", "/usr"), file("d/lib/a", "1")}},
			"d/ d/lib->/usr usr/ usr/a=1",
		},
		{
			"a parent is a symlink upwards",
			[]layer{{symlink("out", "../../../../etc"), file("out/passwd", "1")}},
			"etc/ etc/passwd=1 out->../../../../etc",
		},
		{
			"a chain of symlinks",
			[]layer{{symlink("a", "b/c"), symlink("b", "/d"), symlink("d/c", "../e"), file("a/f", "1")}},
			"d/ d/c->../e e/ e/f=1 a->b/c b->/d",
		},
		{"the last name is not followed", []layer{{symlink("a", "/etc/passwd"), file("a", "1")}}, "a=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var layers []v1.Layer
			for _, l := range c.layers {
				layers = append(layers, layerOf(t, archive(t, l...)))
			}
			cfg := config(t)
			expect.Equal(t, list(t, cfg.Store, must.Get(load(t, cfg, imageOf(t, layers...)))(t).Root), c.want)
		})
	}
}

// TestHostileLayersAreRefused: the error names the layer and the entry.
func TestHostileLayersAreRefused(t *testing.T) {
	good := archive(t, file("good", "1"))
	deep := strings.Repeat("d/", 999)
	var links []tar.Header
	for i := range 50 {
		links = append(links, symlink(fmt.Sprintf("l%d", i), fmt.Sprintf("l%d", i+1)))
	}
	var many []tar.Header
	for name := range strings.SplitSeq("abcefgh", "") {
		many = append(many, file(name+"/"+deep[:998]+"x", "1"))
	}
	var huge bytes.Buffer // only the header
	must.Succeed(t, tar.NewWriter(&huge).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "big", Size: 1 << 40}))
	for _, c := range []struct {
		name  string
		layer []byte
		kind  error
		want  string // in the message
	}{
		{"dots", archive(t, file("../a", "1")), image.ErrLayer, `entry "../a": the path contains ".."`},
		{"dots within", archive(t, file("a/../../b", "1")), image.ErrLayer, `the path contains ".."`},
		{"an absolute path with dots", archive(t, file("/../etc/passwd", "1")), image.ErrLayer, `the path contains ".."`},
		{
			"a hard link with dots", archive(t, hardLink("a", "../../etc/shadow")), image.ErrLayer,
			`entry "a": a hard link to "../../etc/shadow"`,
		},
		{
			"a hard link to nothing", archive(t, hardLink("a", "etc/shadow")), image.ErrLayer,
			`entry "a": the target "etc/shadow" of the hard link does not exist`,
		},
		{"a hard link to a directory", archive(t, dir("d"), hardLink("a", "d")), image.ErrLayer, "is a directory"},
		{"a hard link to itself", archive(t, hardLink("a", "a")), image.ErrLayer, "does not exist"},
		{"a hard link to the root", archive(t, hardLink("a", "/")), image.ErrLayer, "is a directory"},
		{"a file as root", archive(t, file(".", "1")), image.ErrLayer, "the root can only be a directory"},
		{
			"a file as parent", archive(t, file("a", "1"), file("a/b", "2")), image.ErrLayer,
			`entry "a/b": its parent "a" is not a directory`,
		},
		{
			"a loop of symlinks", archive(t, symlink("a", "b"), symlink("b", "a"), file("a/c", "1")), image.ErrLayer,
			"more than 40 symlinks",
		},
		{"a long chain of symlinks", archive(t, append(links, file("l0/x", "1"))...), image.ErrLayer, "more than 40 symlinks"},
		{
			"symlinks that take long", archive(t, symlink("a", strings.Repeat("./", 2000)), file("a/a/a/c", "1")),
			image.ErrLayer, "too long",
		},
		{
			"a bad name by a symlink", archive(t, symlink("a", strings.Repeat("x", 300)), file("a/b", "1")), image.ErrLayer,
			"longer than 255",
		},
		{"a long name", archive(t, file(strings.Repeat("x", 256), "1")), image.ErrLayer, "longer than 255"},
		{
			"a long path", archive(t, file(strings.Repeat(strings.Repeat("x", 200)+"/", 25)+"a", "1")), image.ErrLayer,
			"longer than 4000",
		},
		{"many directories", archive(t, file(deep+"d/d/a", "1")), image.ErrLayer, "1000 directories"},
		{
			"many directories by symlinks", archive(t, dir(deep), symlink("l", deep), file("l/a/b", "1")), image.ErrLayer,
			"1000 nested",
		},
		{"a name that is not UTF-8", archive(t, file("a\xff", "1")), image.ErrLayer, "not UTF-8"},
		{"a target that is not UTF-8", archive(t, symlink("a", "\xff")), image.ErrLayer, "1 to 4095 bytes of UTF-8"},
		{"a symlink to nothing", archive(t, symlink("a", "")), image.ErrLayer, "1 to 4095 bytes"},
		{"a whiteout of the parent", archive(t, file("d/.wh...", "")), image.ErrLayer, `it removes ".."`},
		{"a whiteout of nothing", archive(t, file("d/.wh.", "")), image.ErrLayer, `it removes ""`},
		{"a whiteout with contents", archive(t, file("d/.wh.x/a", "1")), image.ErrLayer, "marks a removal"},
		{"an unknown type", archive(t, special("a", 'Z')), image.ErrLayer, "unknown type"},
		{"a damaged archive", bytes.Repeat([]byte("x"), 1024), image.ErrLayer, "the archive is damaged"},
		{
			"a truncated file", archive(t, file("a", strings.Repeat("x", 2000)))[:1000], image.ErrLayer,
			`entry "a": the content is damaged`,
		},
		{
			"a truncated large file", archive(t, file("a", strings.Repeat("x", 5<<20)))[:1<<20], image.ErrLayer,
			`entry "a": the content is damaged`,
		},
		{
			"a file that is larger than everything", huge.Bytes(), image.ErrTooLarge,
			`entry "big": the files have more than 67108864 bytes`,
		},
		{"many bytes", archive(t, file("a", strings.Repeat("x", 80<<20))), image.ErrTooLarge, "more than 67108864 bytes"},
		{"many entries", archive(t, slicesOf(3001)...), image.ErrTooLarge, "more than 3000 entries"},
		{
			"many directories in few entries",
			archive(t, many...),
			image.ErrTooLarge, "more than 3000 entries",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := config(t)
			cfg.Limits = image.Limits{Bytes: 64 << 20, Entries: 3000}
			_, err := load(t, cfg, imageOf(t, layerOf(t, good), layerOf(t, c.layer)))
			if !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.want) ||
				!strings.Contains(fmt.Sprint(err), "layer 2 (sha256:") {
				t.Errorf("got  %v\nwant %q of layer 2 and an error of kind %q", err, c.want, c.kind)
			}
			expect.Equal(t, len(must.Get(os.ReadDir(cfg.Dir))(t)), 0, "temporary files are left")
		})
	}
}

func slicesOf(n int) (entries []tar.Header) {
	for i := range n {
		entries = append(entries, file(fmt.Sprint("f", i), ""))
	}
	return entries
}

// TestEqualImagesHaveEqualRoots: the root does not depend on how layers are divided, compressed, ordered and dated.
func TestEqualImagesHaveEqualRoots(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 6<<20/16)
	cfg := config(t)
	var want string
	for _, c := range []struct {
		name string
		im   v1.Image
	}{
		{"one layer", imageOf(t, layerOf(t, archive(t, file("a", "1"), file("d/b", big), file("d/c", "3"))))},
		{"another order", imageOf(t, layerOf(t, archive(t, dir("d"), file("d/c", "3"), file("d/b", big), file("a", "1"))))},
		{
			"two layers",
			imageOf(t, layerOf(t, archive(t, file("a", "1"), file("d/c", "0"))), layerOf(t, archive(t, file("d/c", "3"), file("d/b", big)))),
		},
		{"zstd", imageOf(t, layerOf(t, archive(t, file("a", "1"), file("d/b", big), file("d/c", "3")), zstdLayer))},
	} {
		got, err := load(t, cfg, c.im)
		must.Be(t, err == nil, "%s: %v", c.name, err)
		if want == "" {
			want = got.Root.String()
		}
		expect.Equal(t, got.Root.String(), want, "%s: root", c.name)
		if got.Files != 3 || got.Entries != 4 || got.Bytes != int64(len(big)+2) {
			t.Errorf("%s: got %d files of %d entries and %d bytes, want 3 of 4 and %d", c.name, got.Files, got.Entries,
				got.Bytes, len(big)+2)
		}
	}
}

// TestLoadEndsWithItsContext: the error is the cause of the context.
func TestLoadEndsWithItsContext(t *testing.T) {
	why := errors.New("no longer needed")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	c := image.Config{Store: castest.NewMemory(), Function: 1}
	expect.Error(t, expect.Err(image.Load(ctx, c, layoutOf(t, simple(t, "1")), "")), why)
}
