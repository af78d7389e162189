// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestUndeclared(t *testing.T) {
	for _, c := range []struct {
		name    string
		workdir string
		outputs []string
		dirs    []string
		input   []string
		left    []string // by the run
		want    []string
	}{
		{"nothing", "", []string{"o/x", "d"}, nil, []string{"a = 1", "s/b = 1"}, []string{"o/x = 1", "d/y/z = 1"}, nil},
		{
			"files and links", "",
			[]string{"o/x"},
			nil,
			[]string{"a = 1"},
			[]string{"o/y = 1", "b -> a", "o/x = 1"},
			[]string{"b", "o/y"},
		},
		{
			"a directory is one path", "",
			[]string{"o/x"},
			nil,
			[]string{"a = 1"},
			[]string{"tmp/1 = ", "tmp/2/3 = "},
			[]string{"tmp/"},
		},
		{
			"around the working directory", "w/v",
			[]string{"o"},
			nil,
			[]string{"w/v/a = 1"},
			[]string{"w/v/b = 1", "w/c = 1"},
			[]string{"w/c", "w/v/b"},
		},
		{"a declared directory", "", nil, []string{"d"}, []string{"a = 1"}, []string{"d/x = 1"}, nil},
		{
			"an output in another", "",
			[]string{"d", "d/e/x"},
			nil,
			[]string{"a = 1"},
			[]string{"d/e/x = ", "d/e/y = ", "d/z = "},
			nil,
		},
		{"the whole root", "", []string{"."}, nil, []string{"a = 1"}, []string{"b = 1"}, nil},
		{"an output in the wrong place", "", []string{"o/x"}, nil, []string{"a = 1"}, []string{"x = 1"}, []string{"x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			store := castest.NewMemory()
			l := plan(t, load(t, store, parse(t, c.input...)), c.workdir, append(c.outputs, c.dirs...), c.dirs)
			ws := newRoot(t)
			s := must.Get(l.Stage(t.Context(), store, ws))(t)
			defer s.Release()
			out := must.Get(ws.OpenRoot("out"))(t)
			defer out.Close()
			for _, line := range c.left {
				leave(t, out, line)
			}
			got, more, err := l.Undeclared(out, 100)
			expect.That(t, err == nil && more == 0 && slices.Equal(got, c.want),
				"got %q and %d more, %v; want %q", got, more, err, c.want)
			if len(c.want) > 0 {
				if got, more, err := l.Undeclared(out, len(c.want)-1); err != nil || more != 1 ||
					len(got) != len(c.want)-1 {
					t.Errorf("with a lower limit: got %q and %d more, %v", got, more, err)
				}
			}
		})
	}
}

// leave creates one node, as a run would, in directories that may exist.
func leave(t testing.TB, out *os.Root, line string) {
	t.Helper()
	if p, target, ok := strings.Cut(line, " -> "); ok {
		must.Succeed(t, out.Symlink(target, p))
		return
	}
	p, content, _ := strings.Cut(line, " = ")
	must.Succeed(t, out.MkdirAll(filepath.Dir(p), 0o755))
	must.Succeed(t, out.WriteFile(p, []byte(content), 0o644))
}

func TestUndeclaredFollowsNoSymlink(t *testing.T) {
	store := castest.NewMemory()
	l := plan(t, load(t, store, parse(t, "a = 1")), "", []string{"o/p/x", "q/r/y"}, nil)
	out := newRoot(t)
	must.Succeed(t, out.MkdirAll("elsewhere/p", 0o755))
	must.Succeed(t, out.WriteFile("elsewhere/p/secret", nil, 0o644))
	must.Succeed(t, out.Symlink("elsewhere", "o"))
	must.Succeed(t, out.WriteFile("q", nil, 0o644))
	got, _, err := l.Undeclared(out, 10)
	if want := []string{"elsewhere/"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func TestUndeclaredReadsUnreadableDirectories(t *testing.T) {
	store := castest.NewMemory()
	l := plan(t, load(t, store, parse(t, "a = 1")), "", []string{"o/x"}, nil)
	out := newRoot(t)
	must.Succeed(t, out.Mkdir("o", 0o700))
	must.Succeed(t, out.WriteFile("o/y", nil, 0o600))
	must.Succeed(t, out.Chmod("o", 0))
	got, _, err := l.Undeclared(out, 10)
	if want := []string{"o/y"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func BenchmarkUndeclared(b *testing.B) {
	store := castest.NewMemory()
	var outputs []string
	for _, d := range []string{"bazel-out/k8/bin/pkg/_objs/lib", "bazel-out/k8/bin/pkg", "bazel-out/k8/testlogs/pkg"} {
		outputs = append(outputs, d+"/a.o", d+"/a.d")
	}
	l := plan(b, load(b, store, parse(b, "src/a.c = 1", "src/a.h = 1")), "", outputs, nil)
	ws := newRoot(b)
	s := must.Get(l.Stage(b.Context(), store, ws))(b)
	defer s.Release()
	out := must.Get(ws.OpenRoot("out"))(b)
	defer out.Close()
	for b.Loop() {
		if got, _, err := l.Undeclared(out, 100); err != nil || len(got) > 0 {
			b.Fatal(got, err)
		}
	}
}
