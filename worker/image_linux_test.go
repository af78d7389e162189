// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// A confining is a worker with a real sandbox and a disk store.
type confining struct {
	*Local
	t     testing.TB
	store *disk.Cache
	in    *cas.Instance
	dir   string // of the store
	why   error  // from NewStager
}

// newConfining returns a worker with its images in dir, and a store whose configuration is changed.
func newConfining(t testing.TB, dir string, budget int64, changes ...func(*disk.Config)) *confining {
	t.Helper()
	backend := namespace.New(namespace.Config{})
	t.Cleanup(func() { backend.Close() })
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	toolchain := must.Get(sandbox.HostToolchain())(t)
	at := filepath.Join(onDisk(t), "store")
	config := disk.Config{Dir: at, MaxBytes: 64 << 20}
	for _, change := range changes {
		change(&config)
	}
	store := must.Get(disk.Open(config))(t)
	t.Cleanup(func() { store.Close() })
	in := must.Get(store.Instance(""))(t)
	stager, why := NewStager(t.Context(), backend, tree.StagerConfig{Dir: dir, Budget: budget})
	t.Cleanup(func() { must.Succeed(t, stager.Close()) })
	return &confining{newLocal(Config{
		Name: "w", Instances: store.Instance, Backend: backend, Features: features, Stager: stager, Toolchain: toolchain,
	}), t, store, in, at, why}
}

// onDisk returns a directory that is not on a file system in memory.
func onDisk(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if !inMemory(t, dir) {
		return dir
	}
	dir, err := os.MkdirTemp("/var/tmp", "cloister-worker-")
	if err != nil {
		sandboxtest.Unavailable(t, "disk", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func inMemory(t testing.TB, dir string) bool {
	t.Helper()
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(dir, &st))
	return st.Type == unix.TMPFS_MAGIC
}

func (c *confining) blob(b []byte) *repb.Digest {
	c.t.Helper()
	return must.Get(cas.PutBytes(c.t.Context(), c.in.Store, cas.SHA256, b))(c.t).Proto()
}

func (c *confining) message(m proto.Message) *repb.Digest {
	c.t.Helper()
	return must.Get(cas.PutProto(c.t.Context(), c.in.Store, cas.SHA256, m))(c.t).Proto()
}

// action stores an action that is not cached.
func (c *confining) action(root *repb.Directory, args ...string) cas.Digest {
	c.t.Helper()
	return c.command(root, &repb.Command{Arguments: args})
}

// command is action with a whole Command.
func (c *confining) command(root *repb.Directory, command *repb.Command) cas.Digest {
	c.t.Helper()
	d := must.Get(cas.FromProto(cas.SHA256, c.message(&repb.Action{
		CommandDigest: c.message(command), InputRootDigest: c.message(root), DoNotCache: true,
	})))(c.t)
	return d
}

// shell runs a script in root, which declares outputs, and returns what it prints and how its inputs were staged.
func (c *confining) shell(script string, root *repb.Directory, outputs ...string) (string, *cloisterpb.Sandbox) {
	c.t.Helper()
	action := c.command(root, &repb.Command{Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: outputs})
	var text bytes.Buffer
	out := must.Get(c.Execute(c.t.Context(), &Task{Action: action, Stdout: &text, Stderr: &text}, func(Stage) {}))(c.t)
	var m cloisterpb.Execution
	must.Succeed(c.t, out.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m))
	expect.That(c.t, out.Result.ExitCode == 0, "exit code %d: %s", out.Result.ExitCode, text.String())
	return text.String(), m.Sandbox
}

// numbered returns a directory of n files.
func (c *confining) numbered(n int) *repb.Directory {
	d := &repb.Directory{}
	for i := range n {
		d.Files = append(d.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: c.blob(fmt.Append(nil, n, i))})
	}
	return d
}

// varied returns a root with inputs of every kind.
func (c *confining) varied() *repb.Directory {
	long := strings.Repeat("n", 255)
	deep := &repb.Directory{Files: []*repb.FileNode{{Name: "bottom", Digest: c.blob([]byte("bottom"))}}}
	for range 60 {
		deep = &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: c.message(deep)}}}
	}
	wide := &repb.Directory{}
	for i := range 300 {
		wide.Files = append(wide.Files, &repb.FileNode{Name: fmt.Sprintf("f%03d", i), Digest: c.blob(fmt.Appendf(nil, "%d", i%7))})
	}
	odd := &repb.Directory{Files: []*repb.FileNode{
		{Name: "\t\n\\", Digest: c.blob([]byte("escaped"))},
		{Name: "!", Digest: c.blob([]byte("before the dot"))},
		{Name: "-", Digest: c.blob(bytes.Repeat([]byte("x"), 511))},
		{Name: "..-", Digest: c.blob(bytes.Repeat([]byte("x"), 512))},
		{Name: "..a", Digest: c.blob(bytes.Repeat([]byte("x"), 513))},
		{Name: ".a", Digest: c.blob(bytes.Repeat([]byte("x"), 4096))},
		{Name: "<&>\u2028\u00ff", Digest: c.blob(bytes.Repeat([]byte("x"), 4097))},
		{Name: "empty", Digest: c.blob(nil)},
		{Name: "large", Digest: c.blob(bytes.Repeat([]byte("l"), 200_000))},
		{Name: long, Digest: c.blob([]byte("#!/bin/sh\necho executed\n")), IsExecutable: true},
	}, Symlinks: []*repb.SymlinkNode{
		{Name: "~dangling", Target: strings.Repeat("t", 4000)},
		{Name: "~link", Target: "../wide/f000"},
	}, Directories: []*repb.DirectoryNode{{Name: "~none", Digest: c.message(&repb.Directory{})}}}
	return &repb.Directory{
		Files: []*repb.FileNode{{Name: "top", Digest: c.blob([]byte("top")), IsExecutable: true}},
		Directories: []*repb.DirectoryNode{
			{Name: "deep", Digest: c.message(deep)}, {Name: "odd", Digest: c.message(odd)}, {Name: "wide", Digest: c.message(wide)},
		},
		Symlinks: []*repb.SymlinkNode{{Name: "up", Target: "odd"}},
	}
}

// look prints what a program can observe of inputs and must not depend on how they are staged. The size and link count
// of a directory depend on the file system, and the time of a symlink cannot be set in a copy.
const look = `find . -type l -printf '%P %y %m %n %U:%G %s %l\0' -o -type d -printf '%P %y %m %U:%G %T@\0' \
	-o -printf '%P %y %m %n %U:%G %s %T@\0' | sort -z | tr '\0\n' '\n?'
find . -type f -print0 | sort -z | xargs -0 sha256sum -z | tr '\0\n' '\n?'
cat odd/~link && test -z "$(cat odd/empty)" && ./odd/n*
find . -type f -exec sh -c 'for f; do (echo x >>"$f") 2>/dev/null && echo "WRITTEN $f"; done; true' sh {} +`

// Inputs look the same from a new image, from a reused image and as copies.
func TestInputsLookTheSame(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "an ordinary user cannot mount an EROFS image")
	}
	c := newConfining(t, onDisk(t), 1<<30)
	if c.why != nil {
		sandboxtest.Unavailable(t, "namespaces", c.why)
	}
	root := c.varied()
	own, o := c.shell(look, root)
	c.shell(look, root)
	kept, k := c.shell(look, root)
	must.Be(t, o.Inputs == "image" && k.Inputs == "image", "staged inputs: got %v and %v, want images", o, k)
	c.Local.cfg.Stager = newLocal(Config{}).cfg.Stager
	copied, s := c.shell(look, root)
	must.Be(t, s.Inputs == "copy", "staged inputs: got %v, want copies", s)
	if strings.Contains(copied, "WRITTEN") || !strings.Contains(copied, "executed") || strings.Count(copied, "\n") < 600 {
		t.Errorf("unexpected copies:\n%s", copied)
	}
	for name, got := range map[string]string{"own": own, "kept": kept} {
		expect.Equal(t, got, copied, "%s image: %s", name, firstDifference(got, copied))
	}
}

// TestListingsDoNotDependOnTheCache: an action finds names in the same order and the same link counts, whether its
// subtrees are cached or not, and images serve it although the paths of cached subtrees are long.
func TestListingsDoNotDependOnTheCache(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "an ordinary user cannot mount an EROFS image")
	}
	const list = "find . ! -name . -prune -printf '%f %y %n\n'; ls -U pkg b/sub; stat -c '%n %h' . pkg b b/sub x"
	c := newConfining(t, onDisk(t), 1<<30)
	if c.why != nil {
		sandboxtest.Unavailable(t, "namespaces", c.why)
	}
	below := c.numbered(20)
	below.Directories = []*repb.DirectoryNode{{Name: "sub", Digest: c.message(c.numbered(10))}}
	root := func(changed string) *repb.Directory {
		long := c.numbered(30) // is cached with its parents, of which only the inner ones stay the same
		for i := range 30 {
			long = &repb.Directory{Directories: []*repb.DirectoryNode{{Name: strings.Repeat("long", 5), Digest: c.message(long)}}}
			if i > 2 {
				long.Files = []*repb.FileNode{{Name: "changed", Digest: c.blob([]byte(changed))}}
			}
		}
		return &repb.Directory{
			Files: []*repb.FileNode{
				{Name: "a.txt", Digest: c.blob([]byte(changed))}, {Name: "m.txt", Digest: c.blob([]byte("m"))}, {Name: "z.txt", Digest: c.blob([]byte("z"))},
			},
			Directories: []*repb.DirectoryNode{{Name: "b", Digest: c.message(below)}, {Name: "long", Digest: c.message(long)}, {Name: "x", Digest: c.message(c.numbered(9))}},
		}
	}
	var first string
	for i := range 4 {
		got, s := c.shell(list, root(fmt.Sprint(max(i-1, 0))), "n/out", "pkg/out", "m.txt") // the second caches the first
		must.Be(t, s.GetInputs() == "image",
			"run %d: inputs: got %q, %s, want images", i, s.GetInputs(), s.GetInputsReason())
		if i == 0 {
			first = got
		}
		expect.Equal(t, got, first, "run %d: %s", i, firstDifference(got, first))
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d: got %.300q, want %.300q", i, g[i], w[i])
		}
	}
	return fmt.Sprintf("got %d lines, want %d", len(g), len(w))
}

// unprivilegedUser is a user ID that owns nothing.
const unprivilegedUser = 63210

func TestMetadataExplainsStaging(t *testing.T) {
	check := func(t *testing.T, c *confining, inputs, reason string) {
		t.Helper()
		_, s := c.shell("cat wide/* top odd/large >/dev/null", c.varied())
		if s.Inputs != inputs || !strings.Contains(s.InputsReason, reason) || (s.InputsReason == "") != (inputs == "image") {
			t.Errorf("got inputs %q, reason %q, want %s, %q", s.Inputs, s.InputsReason, inputs, reason)
		}
		if (c.why == nil) != (inputs == "image") || c.why != nil && c.why.Error() != s.InputsReason {
			t.Errorf("got %v from NewStager, %q in the metadata", c.why, s.InputsReason)
		}
	}
	if os.Geteuid() != 0 {
		check(t, newConfining(t, onDisk(t), 0), "copy", "an ordinary user cannot mount an EROFS image")
		return
	}
	t.Run("image", func(t *testing.T) {
		c := newConfining(t, onDisk(t), 0)
		if c.why != nil {
			sandboxtest.Unavailable(t, "namespaces", c.why)
		}
		check(t, c, "image", "")
	})
	t.Run("directory in memory", func(t *testing.T) {
		dir, err := os.MkdirTemp("/dev/shm", "cloister-worker-")
		if err != nil || !inMemory(t, dir) {
			sandboxtest.Unavailable(t, "tmpfs", "/dev/shm is not a tmpfs")
		}
		defer os.RemoveAll(dir)
		check(t, newConfining(t, dir, 0), "copy", "erofs")
	})
	t.Run("ordinary user", func(t *testing.T) {
		asOrdinaryUser(t, strings.Split(t.Name(), "/")[0])
	})
}

// TestLargeInputsAreNotCopied checks that an input of 64 MiB is the store's file itself, whether the other inputs are
// copied or in an image.
func TestLargeInputsAreNotCopied(t *testing.T) {
	c := newConfining(t, onDisk(t), 0, func(d *disk.Config) { d.MaxBytes = 256 << 20 })
	content := make([]byte, 64<<20)
	large := c.blob(content)
	filer, _ := cas.As[cas.Filer](c.in.Store)
	path, release, err := filer.File(t.Context(), must.Get(cas.FromProto(cas.SHA256, large))(t), false)
	must.Succeed(t, err)
	release()
	expect.Text(t, path, filepath.Join(c.dir, "files"), "file of the store")
	var stored unix.Stat_t
	must.Succeed(t, unix.Stat(path, &stored))
	few := &repb.Directory{Files: []*repb.FileNode{{Name: "large", Digest: large}}}
	many := c.numbered(2 * copyUpTo)
	many.Files = append(many.Files, few.Files[0])
	image := "image"
	if c.why != nil {
		image = "copy"
	}
	for _, root := range []struct {
		form string
		dir  *repb.Directory
	}{{"copy", few}, {image, many}} {
		got, box := c.shell("stat -c '%d %i %s' large", root.dir)
		expect.Equal(t, box.Inputs, root.form, "staging of the other inputs")
		expect.Equal(t, got, fmt.Sprintln(stored.Dev, stored.Ino, len(content)), "device, inode and size of the input")
	}
	if os.Geteuid() == 0 {
		t.Run("ordinary user", func(t *testing.T) { asOrdinaryUser(t, strings.Split(t.Name(), "/")[0]) })
	}
}

// TestChangeableInputsAreReported: on a kernel without overlays for an ordinary user, an action can change its copies of
// the inputs, and its result reports that. The store does not change.
func TestChangeableInputsAreReported(t *testing.T) {
	if os.Geteuid() != unprivilegedUser {
		asOrdinaryUser(t, t.Name())
		return
	}
	must.Succeed(t, denyOverlays())
	c := newConfining(t, onDisk(t), 0)
	root := &repb.Directory{Files: []*repb.FileNode{{Name: "input", Digest: c.blob([]byte("as stored\n"))}}}
	for range 2 {
		text, box := c.shell("cat input; echo changed > input; cat input", root)
		expect.Equal(t, text, "as stored\nchanged\n", "output of the action")
		expect.That(t, slices.Contains(box.NotEnforced, "unchangeable inputs"), "metadata: got %q, want the inputs", box.NotEnforced)
	}
}

// denyOverlays makes the kernel refuse overlays to this process and its children, as old kernels do. It refuses
// fsconfig with flags and descriptors, which only overlayfs uses here.
func denyOverlays() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	equal := func(value uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: value}
	}
	filter := []unix.SockFilter{
		load(0), equal(unix.SYS_FSCONFIG, 0, 4), // the number of the call, and its second argument
		load(24), equal(unix.FSCONFIG_SET_FLAG, 1, 0), equal(unix.FSCONFIG_SET_FD, 0, 1),
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENODEV)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog)))
	switch {
	case errno != 0:
		return errno
	case thread != 0:
		return fmt.Errorf("thread %d does not take the filter", thread)
	}
	return nil
}

// asOrdinaryUser runs the test of that name as a user that owns nothing, in another process.
func asOrdinaryUser(t *testing.T, name string) {
	t.Helper()
	self := must.Get(os.Executable())(t)
	dir := must.Get(os.MkdirTemp("", "cloister-unprivileged-"))(t)
	defer os.RemoveAll(dir)
	program, err := os.ReadFile(self)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "worker.test"), program, 0o755)
	}
	must.Succeed(t, err)
	if err := os.Chown(dir, unprivilegedUser, unprivilegedUser); err != nil {
		sandboxtest.Unavailable(t, "unprivileged", err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "worker.test"), "-test.run=^"+name+"$", "-test.v")
	cmd.Dir = dir
	// An ordinary user has no control groups.
	require := strings.NewReplacer("unprivileged", "namespaces", "limits", "").Replace(os.Getenv("CLOISTER_REQUIRE"))
	cmd.Env = []string{"TMPDIR=" + dir, "HOME=" + dir, "PATH=/usr/bin:/bin", "CLOISTER_REQUIRE=" + require}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivilegedUser, Gid: unprivilegedUser}}
	text, err := cmd.CombinedOutput()
	switch {
	case strings.Contains(string(text), "--- SKIP"):
		sandboxtest.Unavailable(t, "unprivileged", "an ordinary user has no sandbox here")
	case err != nil || !strings.Contains(string(text), "--- PASS"):
		t.Errorf("as user %d: %v\n%s", unprivilegedUser, err, text)
	}
}

// Concurrent actions with the same mounted directory do not share locks.
func TestLocksOnInputsAreNotShared(t *testing.T) {
	sandboxtest.Tool(t, "python3")
	c := newConfining(t, onDisk(t), 64<<20)
	if c.why != nil {
		sandboxtest.Unavailable(t, "namespaces", c.why)
	}
	dir := &repb.Directory{}
	for i := range 30 {
		content := c.blob(fmt.Appendf(nil, "%d", i))
		dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: content})
	}
	root := &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: c.message(dir)}}}
	for i := range 3 { // from the second run on, the directory stays mounted
		c.shell(fmt.Sprintf("true %d", i), root)
	}
	const lock = `
import fcntl, time
f = open("d/f01")
try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("locked", flush=True)
except OSError:
    print("taken", flush=True)
time.sleep(60)
`
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var runs sync.WaitGroup
	results := make(chan string, 2)
	for range 2 {
		action := c.action(root, "/usr/bin/env", "python3", "-c", lock)
		runs.Go(func() {
			report := lineWriter(func(line string) { results <- line })
			_, err := c.Execute(ctx, &Task{Action: action, Stdout: report}, func(Stage) {})
			if ctx.Err() == nil {
				results <- fmt.Sprint("ended: ", err)
			}
		})
	}
	for range 2 { // both keep running
		expect.Equal(t, <-results, "locked\n", "locked")
	}
	cancel()
	runs.Wait()
}

// A lineWriter calls a function with everything written.
type lineWriter func(text string)

func (w lineWriter) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

// If another process writes to a segment during a run, the result is discarded and the client is asked to retry.
func TestResultOfChangedInputsIsDiscarded(t *testing.T) {
	c := newConfining(t, onDisk(t), 0)
	if c.why != nil {
		sandboxtest.Unavailable(t, "namespaces", c.why)
	}
	root := &repb.Directory{}
	for i := range 30 {
		root.Files = append(root.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: c.blob(fmt.Appendf(nil, "%d", i))})
	}
	action, err := cas.FromProto(cas.SHA256, c.message(&repb.Action{
		CommandDigest:   c.message(&repb.Command{Arguments: []string{"/bin/sh", "-c", "echo ready; sleep 0.5; cat f*"}}),
		InputRootDigest: c.message(root),
	}))
	must.Succeed(t, err)
	overwrite := sync.OnceFunc(func() {
		segments, err := filepath.Glob(filepath.Join(c.dir, "segments", "*.data"))
		expect.That(t, err == nil && len(segments) != 0, "segments %v, %v", segments, err)
		for _, name := range segments {
			// Write the same byte: the write itself counts.
			f, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				t.Error(err)
				return
			}
			b := make([]byte, 1)
			if _, err = f.ReadAt(b, 0); err == nil {
				_, err = f.WriteAt(b, 0)
			}
			expect.Error(t, errors.Join(err, f.Close()), nil)
		}
	})
	_, err = c.Execute(t.Context(), &Task{Action: action, Stdout: lineWriter(func(string) { overwrite() })}, func(Stage) {})
	var f *Fault
	expect.That(t, errors.As(err, &f) && f.Kind == FaultUnavailable && strings.Contains(err.Error(), "run it again"),
		"got %v, want an advice to run the action again", err)
	expect.Error(t, expect.Err(c.in.Actions.Lookup(t.Context(), action)), cas.ErrNotFound, "no cached result")
	out, err := c.Execute(t.Context(), &Task{Action: action}, func(Stage) {})
	expect.That(t, err == nil && !out.Cached && out.Result.ExitCode == 0, "second run: got %v, %v", out, err)
}
