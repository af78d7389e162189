// SPDX-License-Identifier: Apache-2.0

package archive_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/archive"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// describe lists what is below dir.
func describe(t *testing.T, dir string) string {
	t.Helper()
	var lines []string
	must.Succeed(t, filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		fi := must.Get(e.Info())(t)
		line := fmt.Sprintf("%v %s", fi.Mode(), strings.TrimPrefix(p, dir+"/"))
		switch fi.Mode().Type() {
		case 0:
			line += " " + string(must.Get(os.ReadFile(p))(t))
		case fs.ModeSymlink:
			line += " " + must.Get(os.Readlink(p))(t)
		}
		lines = append(lines, line)
		return nil
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func TestCopy(t *testing.T) {
	from := t.TempDir()
	must.Succeed(t, os.MkdirAll(from+"/d/sub", 0o755))
	must.Succeed(t, os.WriteFile(from+"/d/sub/program", []byte("x"), 0o755))
	must.Succeed(t, os.WriteFile(from+"/d/file", []byte("new"), 0o440))
	must.Succeed(t, os.Symlink("/etc/passwd", from+"/d/link"))
	must.Succeed(t, os.Chmod(from+"/d/sub", 0o555))
	t.Cleanup(func() { os.Chmod(from+"/d/sub", 0o755) })
	for _, c := range []struct {
		name, to string
		before   func(dir string) error
		want     string
	}{
		{"d/file", "copy", nil, "-r--r----- copy new"},
		{"d/file", "", nil, "-r--r----- file new"},
		{"d/file", "old", func(dir string) error { return os.WriteFile(dir+"/old", []byte("longer than new"), 0o444) }, "-r--r----- old new"},
		{"d", "", nil, "-r--r----- d/file new\n-rwxr-xr-x d/sub/program x\nLrwxrwxrwx d/link /etc/passwd\ndr-xr-xr-x d/sub\ndrwxr-xr-x d"},
		{"d", "e", nil, "-r--r----- e/file new\n-rwxr-xr-x e/sub/program x\nLrwxrwxrwx e/link /etc/passwd\ndr-xr-xr-x e/sub\ndrwxr-xr-x e"},
		{"d/.", "", nil, "-r--r----- file new\n-rwxr-xr-x sub/program x\nLrwxrwxrwx link /etc/passwd\ndr-xr-xr-x sub"},
		{"d/link", "copy", nil, "-rw-r--r-- copy " + string(must.Get(os.ReadFile("/etc/passwd"))(t))},
	} {
		to := t.TempDir()
		if c.before != nil {
			must.Succeed(t, c.before(to))
		}
		var b bytes.Buffer
		must.Succeed(t, archive.Pack(&b, from+"/"+c.name))
		expect.Error(t, archive.Unpack(&b, filepath.Join(to, c.to), archive.Base(c.name)), nil,
			"%s to %q", c.name, c.to)
		expect.Equal(t, describe(t, to), c.want, "%s to %q", c.name, c.to)
		_ = os.Chmod(to+"/d/sub", 0o755) // for the removal
		_ = os.Chmod(to+"/e/sub", 0o755)
		_ = os.Chmod(to+"/sub", 0o755)
	}
}

// A link that is replaced does not lead the copy elsewhere.
func TestCopyReplacesLinks(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	must.Succeed(t, os.WriteFile(from+"/f", []byte("new"), 0o644))
	must.Succeed(t, os.WriteFile(to+"/secret", []byte("kept"), 0o644))
	must.Succeed(t, os.Symlink("secret", to+"/f"))
	var b bytes.Buffer
	must.Succeed(t, archive.Pack(&b, from+"/f"))
	must.Succeed(t, archive.Unpack(&b, to+"/f", "f"))
	expect.Equal(t, describe(t, to), "-rw-r--r-- f new\n-rw-r--r-- secret kept")
}

// A hostile sender creates nothing outside the destination, and nothing but files, directories and links.
func TestForgedArchives(t *testing.T) {
	file := func(name string) *tar.Header { return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o6755} }
	dir := func(name string) *tar.Header { return &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755} }
	link := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	for _, c := range []struct {
		name    string
		entries []*tar.Header
	}{
		{"parent", []*tar.Header{file("../f")}},
		{"absolute", []*tar.Header{file("/f")}},
		{"below the top", []*tar.Header{file("a/f")}},
		{"top is a link", []*tar.Header{link(".", "/")}},
		{"another file", []*tar.Header{file(".bashrc")}},
		{"another directory", []*tar.Header{dir(".git")}},
		{"top again", []*tar.Header{dir("."), dir(".")}},
		{"sibling", []*tar.Header{dir("."), file("../e")}},
		{"dots", []*tar.Header{dir("."), file("a/../../f")}},
		{"through a link", []*tar.Header{dir("."), link("up", ".."), file("up/f")}},
		{"through an absolute link", []*tar.Header{dir("."), link("up", "/tmp"), file("up/f")}},
		{"device", []*tar.Header{dir("."), {Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}},
		{"hard link", []*tar.Header{dir("."), {Name: "f", Linkname: "/etc/passwd", Typeflag: tar.TypeLink}}},
		{"pipe", []*tar.Header{dir("."), {Name: "p", Typeflag: tar.TypeFifo}}},
		{"empty", nil},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range c.entries {
			must.Succeed(t, w.WriteHeader(h))
		}
		must.Succeed(t, w.Close())
		above := t.TempDir()
		to := filepath.Join(above, "to")
		must.Succeed(t, os.Mkdir(to, 0o755))
		expect.That(t, archive.Unpack(&b, to, "d") != nil, "%s: got no error", c.name)
		for line := range strings.Lines(describe(t, above)) {
			if f := strings.Fields(line); f[1] != "to" && !strings.HasPrefix(f[1], "to/d") || f[0][0] != 'd' && f[0][0] != 'L' {
				t.Errorf("%s: created %s", c.name, line)
			}
		}
	}
	linked := t.TempDir()
	must.Succeed(t, os.Mkdir(linked+"/to", 0o755))
	must.Succeed(t, os.Symlink("..", linked+"/to/d"))
	var top bytes.Buffer
	must.Succeed(t, archive.Pack(&top, linked))
	err := archive.Unpack(&top, linked+"/to", "d")
	expect.Message(t, err, "is a symbolic link", "a directory to where a link is")
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must.Succeed(t, w.WriteHeader(file(".")))
	must.Succeed(t, w.Close())
	to := t.TempDir()
	must.Succeed(t, archive.Unpack(&b, to, "f"))
	expect.Equal(t, describe(t, to), "-rwxr-xr-x f ", "set-user-ID")
}
