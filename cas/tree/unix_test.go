// SPDX-License-Identifier: Apache-2.0

//go:build unix

package tree_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// listing returns the modes of everything below dir, and checks the modification times. For the targets of binds it
// shows only the type.
func listing(t *testing.T, ws *os.Root, dir string, over ...tree.Bind) string {
	var b strings.Builder
	must(t, fs.WalkDir(ws.FS(), dir, func(p string, e fs.DirEntry, err error) error {
		must(t, err)
		info, err := e.Info()
		must(t, err)
		if slices.ContainsFunc(over, func(b tree.Bind) bool { return p == path.Join(dir, b.Target) }) {
			fmt.Fprintf(&b, "bind %v %s\n", info.Mode().Type(), strings.TrimPrefix(p, dir))
			return nil
		}
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
	want := `drwxr-xr-x 
drwxr-xr-x /deep
dtrwxrwxrwx /deep/er
drwxrwxrwx /old
drwxrwxrwx /old/d
Lrwxrwxrwx /old/d/l
-rwxrwxrwx /old/d/x
-rw-rw-rw- /old/f
bind ---------- /old/kept
dtrwxrwxrwx /src
bind ---------- /src/a
bind d--------- /src/sub
bind ---------- /src/x
`
	if got := listing(t, ws, "out", s.Binds...); got != want {
		t.Errorf("out: got\n%s\nwant\n%s", got, want)
	}
	for target, want := range map[string]string{
		"src/a": "-r--r--r-- \n", "src/x": "-r-xr-xr-x \n",
		"src/sub": "dr-xr-xr-x \n-r--r--r-- /f\n-r-xr-xr-x /x\n",
	} {
		i := slices.IndexFunc(s.Binds, func(b tree.Bind) bool { return b.Target == target })
		if got := listing(t, ws, s.Binds[i].Source); got != want {
			t.Errorf("bind of %s: got\n%s\nwant\n%s", target, got, want)
		}
	}
}

// A run can leave a sparse file that takes days to read.
func TestCaptureEndsWithContext(t *testing.T) {
	out := execRoot(t, "hole = ")
	f, err := out.OpenFile("hole", os.O_WRONLY, 0)
	must(t, err)
	if err := f.Truncate(1 << 43); err != nil {
		sandboxtest.Unavailable(t, "disk", err)
	}
	must(t, f.Close())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	w := tree.OutputSpec{Paths: []string{"hole"}}
	_, err = tree.Capture(ctx, cas.NewBatch(castest.NewMemory()), cas.SHA256, out, w, &repb.ActionResult{})
	wantError(t, err, context.DeadlineExceeded, "")
}
