// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"bufio"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// litter leaves files, directories and links in every directory of out.
func litter(t *testing.T, out *os.Root) {
	t.Helper()
	var dirs []string
	must.Succeed(t, fs.WalkDir(out.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	}))
	for _, dir := range dirs {
		must.Succeed(t, out.Chmod(dir, 0o700)) // for an ordinary user
		must.Succeed(t, out.MkdirAll(path.Join(dir, "litter/deep"), 0o755))
		must.Succeed(t, out.WriteFile(path.Join(dir, "litter/deep/file"), []byte("left"), 0o644))
		must.Succeed(t, out.Symlink("litter", path.Join(dir, "link to litter")))
	}
}

// TestRestage: an exec root that is made from another one, with what a run left there, equals a new one.
func TestRestage(t *testing.T) {
	all := slices.DeleteFunc(shapes(t), func(s shape) bool { return strings.HasPrefix(s.name, "error_") })
	for i, from := range all {
		for _, to := range []shape{from, all[(i+1)%len(all)], all[(i+len(all)/2)%len(all)]} {
			store := castest.NewMemory()
			ws := newRoot(t)
			must.Succeed(t, ws.Mkdir("out", 0o700))
			out := must.Get(ws.OpenRoot("out"))(t)
			defer out.Close()
			old := plan(t, load(t, store, from.input), from.workdir, from.outputs, nil)
			must.Succeed(t, old.Restage(t.Context(), store, out, nil))
			litter(t, out)
			must.Succeed(t, tree.Lock(out))
			in := load(t, store, to.input)
			err := plan(t, in, to.workdir, to.outputs, nil).Restage(t.Context(), store, out, old)
			must.Be(t, err == nil, "%s, then %s: %v", from.name, to.name, err)
			fresh, staged := stage(t, store, in, to.workdir, to.outputs...)
			same(t, from.name+", then "+to.name, view(t, ws, &tree.Staged{}), view(t, fresh, staged))
			modes(t, ws, fresh)
		}
	}
}

// TestRestageKeepsWhatIsUnchanged: an unchanged input and the working directory stay the same files.
func TestRestageKeepsWhatIsUnchanged(t *testing.T) {
	store := castest.NewMemory()
	layout := func(text string) *tree.Layout {
		return plan(t, load(t, store, parse(t, "wd/same = same", "wd/other = "+text)), "wd", []string{"wd/o/x"}, nil)
	}
	out := newRoot(t)
	first := layout("1")
	must.Succeed(t, first.Restage(t.Context(), store, out, nil))
	before := map[string]fs.FileInfo{}
	for _, p := range []string{"wd", "wd/o", "wd/same"} {
		before[p] = must.Get(out.Lstat(p))(t)
	}
	must.Succeed(t, out.WriteFile("wd/o/x", []byte("output"), 0o644))
	must.Succeed(t, layout("2").Restage(t.Context(), store, out, first))
	for p, info := range before {
		expect.That(t, os.SameFile(info, must.Get(out.Lstat(p))(t)), "%s is another file", p)
	}
	expect.Equal(t, string(must.Get(out.ReadFile("wd/other"))(t)), "2")
	_, err := out.Lstat("wd/o/x")
	expect.Error(t, err, fs.ErrNotExist)
}

// TestLock: a process of another user that keeps directories open cannot change names in them.
func TestLock(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "only root can start a process of another user")
	}
	dir := must.Get(os.MkdirTemp("/tmp", "cloister-lock-"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must.Succeed(t, os.Chmod(dir, 0o777|fs.ModeSticky))
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c",
		`mkdir own && cd own && echo >file && echo ready && read line
		for c in "rm file" "mv file other" "mkdir new" "mkfifo pipe" "chmod 777 ." "mkdir ../new" "rm -r ../own"; do
			$c 2>/dev/null && echo "POSSIBLE: $c"
		done; echo done`)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	stdin := must.Get(cmd.StdinPipe())(t)
	stdout := bufio.NewReader(must.Get(cmd.StdoutPipe())(t))
	must.Succeed(t, cmd.Start())
	line := must.Get(stdout.ReadString('\n'))(t)
	must.Be(t, line == "ready\n", "got %q", line)
	out := must.Get(os.OpenRoot(dir))(t)
	defer out.Close()
	must.Succeed(t, tree.Lock(out))
	must.Get(io.WriteString(stdin, "go\n"))(t)
	rest := must.Get(io.ReadAll(stdout))(t)
	must.Succeed(t, cmd.Wait())
	expect.Equal(t, string(rest), "done\n")
	_, err := os.Stat(filepath.Join(dir, "own/file"))
	expect.That(t, err == nil, "the file is gone: %v", err)
}

// TestAllFiles: only files with Bazel's property are tools.
func TestAllFiles(t *testing.T) {
	store := castest.NewMemory()
	mark := &repb.NodeProperties{Properties: []*repb.NodeProperty{{Name: "other"}, {Name: "bazel_tool_input"}}}
	root := must.Get(cas.PutProto(t.Context(), store, cas.SHA256, &repb.Directory{Files: []*repb.FileNode{
		{Name: "input", Digest: empty, NodeProperties: &repb.NodeProperties{Properties: mark.Properties[:1]}},
		{Name: "tool", Digest: empty, NodeProperties: mark},
	}}))(t)
	in := must.Get(tree.Load(t.Context(), store, root))(t)
	tools := map[string]bool{}
	for f := range in.AllFiles() {
		tools[f.Path] = f.Tool
	}
	expect.That(t, len(tools) == 2 && tools["tool"] && !tools["input"], "got tools %v", tools)
}
