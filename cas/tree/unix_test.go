// SPDX-License-Identifier: Apache-2.0

//go:build unix

package tree_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// listing returns the modes of everything below dir, and checks the modification times.
func listing(t *testing.T, ws *os.Root, dir string) string {
	var b strings.Builder
	must.Succeed(t, fs.WalkDir(ws.FS(), dir, func(p string, e fs.DirEntry, err error) error {
		must.Succeed(t, err)
		info := must.Get(e.Info())(t)
		fmt.Fprintf(&b, "%v %s\n", info.Mode(), strings.TrimPrefix(p, dir))
		if got := info.ModTime().Unix(); got != 1_000_000_000 && info.Mode().Type() != fs.ModeSymlink {
			t.Errorf("%s: got modification time %d, want 1000000000", p, got)
		}
		return nil
	}))
	return b.String()
}

// Rules 99 to 101.
func TestStageModesAndTimes(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077)) // must have no effect
	store := castest.NewMemory()
	in := load(t, store, parse(t, "src/a = 1", "src/x *= 2", "src/sub/f = 3", "src/sub/x *= 3", "old/f = 4",
		"old/d/x *= 5", "old/d/l -> x", "old/kept = 6"))
	ws, s := stage(t, store, in, "src", "src/out", "old/f", "old/d", "deep/er/out")
	expect.That(t, len(s.Binds)+len(s.Lower) == 0, "got binds %v, lower %v, want none", s.Binds, s.Lower)
	want := `dtrwxrwxrwx 
dtrwxrwxrwx /deep
dtrwxrwxrwx /deep/er
dtrwxrwxrwx /old
drwxrwxrwx /old/d
Lrwxrwxrwx /old/d/l
-rwxrwxrwx /old/d/x
-rw-rw-rw- /old/f
-rw-r--r-- /old/kept
dtrwxrwxrwx /src
-rw-r--r-- /src/a
dtrwxrwxrwx /src/sub
-rw-r--r-- /src/sub/f
-rwxr-xr-x /src/sub/x
-rwxr-xr-x /src/x
`
	expect.Equal(t, listing(t, ws, "out"), want, "out")
	l := plan(t, in, "src", []string{"src/out", "old/f", "old/d", "deep/er/out"}, nil)
	expect.Slices(t, l.Owned(), []string{"old/d", "old/f"}, "owned")
	ws = newRoot(t)
	s = must.Get(l.Layered().Stage(t.Context(), store, ws))(t)
	if want := []tree.Lower{{Source: "in"}}; len(s.Binds) > 0 || !slices.Equal(s.Lower, want) {
		t.Errorf("layered: got binds %v, lower %v, want %v", s.Binds, s.Lower, want)
	}
	for dir, want := range map[string]string{
		"in": `dtrwxrwxrwx 
dtrwxrwxrwx /deep
dtrwxrwxrwx /deep/er
dtrwxrwxrwx /old
-rw-r--r-- /old/kept
dtrwxrwxrwx /src
-rw-r--r-- /src/a
dtrwxrwxrwx /src/sub
-rw-r--r-- /src/sub/f
-rwxr-xr-x /src/sub/x
-rwxr-xr-x /src/x
`,
		"out": `dtrwxrwxrwx 
dtrwxrwxrwx /deep
dtrwxrwxrwx /deep/er
dtrwxrwxrwx /old
drwxrwxrwx /old/d
Lrwxrwxrwx /old/d/l
-rwxrwxrwx /old/d/x
-rw-rw-rw- /old/f
dtrwxrwxrwx /src
dtrwxrwxrwx /src/sub
`,
	} {
		expect.Equal(t, listing(t, ws, dir), want, "layered %s", dir)
	}
}

// A run can leave a sparse file that takes days to read.
func TestCaptureEndsWithContext(t *testing.T) {
	out := execRoot(t, "hole = ")
	f := must.Get(out.OpenFile("hole", os.O_WRONLY, 0))(t)
	if err := f.Truncate(1 << 43); err != nil {
		sandboxtest.Unavailable(t, "disk", err)
	}
	must.Succeed(t, f.Close())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	w := tree.OutputSpec{Paths: []string{"hole"}}
	_, err := tree.Capture(ctx, cas.NewBatch(castest.NewMemory()), cas.SHA256, out, w, &repb.ActionResult{})
	wantError(t, err, context.DeadlineExceeded, "")
}
