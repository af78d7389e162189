// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// erofs returns an image with a directory "sub" that contains an executable "file": a superblock, three inodes, two
// blocks of names and one of data.
func erofs(text string) []byte {
	const block, inodes = 4096, 2048
	image := make([]byte, 4*block)
	le := binary.LittleEndian
	super := image[1024:]
	le.PutUint32(super, 0xe0f5e1e2)
	super[12] = 12 // bits of a block
	le.PutUint16(super[14:], inodes/32)
	le.PutUint64(super[16:], 3)
	le.PutUint32(super[36:], 4)
	inode := func(n, mode, links, size, at int) {
		i := image[inodes+32*n:]
		le.PutUint16(i[4:], uint16(mode))
		le.PutUint16(i[6:], uint16(links))
		le.PutUint32(i[8:], uint32(size))
		le.PutUint32(i[16:], uint32(at))
		le.PutUint32(i[20:], uint32(n+1))
	}
	directory := func(at, self, parent int, name string, kind byte) int {
		b := image[at*block:]
		for i, e := range []struct {
			nid    int
			offset int
			kind   byte
		}{{self, 36, 2}, {parent, 37, 2}, {self + 1, 39, kind}} {
			le.PutUint64(b[12*i:], uint64(inodes/32+e.nid))
			le.PutUint16(b[12*i+8:], uint16(e.offset))
			b[12*i+10] = e.kind
		}
		return 36 + copy(b[36:], "."+".."+name)
	}
	inode(0, unix.S_IFDIR|0o777, 3, directory(1, 0, 0, "sub", 2), 1)
	inode(1, unix.S_IFDIR|0o777, 2, directory(2, 1, 0, "file", 1), 2)
	inode(2, unix.S_IFREG|0o777, 1, copy(image[3*block:], text), 3)
	return image
}

// mountImage mounts an image that contains text.
func mountImage(t *testing.T, b *namespace.Backend, text string) sandbox.Mount {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "secret-name.erofs"))
	must.Succeed(t, err)
	defer f.Close()
	must.Get(f.Write(erofs(text)))(t)
	m, err := b.Mount(t.Context(), f, nil)
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	return m
}

func rootOnly(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "an ordinary user cannot mount an EROFS image")
	}
}

// TestImages: files in an image are readable and executable, immutable, and reveal nothing about the host.
func TestImages(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	b, _ := backend(t, namespace.Config{})
	one, two := mountImage(t, b, "#!/bin/sh\necho one\n"), mountImage(t, b, "#!/bin/sh\necho two\n")
	r := sandboxtest.Run{
		Script: `/one/sub/file && /build/in/two && cat /one/sub/file && grep -e /one -e /build/in /proc/self/mountinfo
exec 2>/dev/null
for f in /one/sub/file /build/in/two; do
	for try in "chmod 700 $f" "touch $f" "rm -f $f" "mv $f $f.x" "ln $f /build/x" "truncate -s 0 $f"; do $try && echo "CHANGED by $try"; done
	(echo x >> $f) && echo CHANGED
done
touch /one/new && echo CHANGED; mount -o remount,rw /one && echo CHANGED
/one/sub/file`,
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/one", Content: "x", Image: one.Name(), Source: "."},
				sandbox.Input{Target: "/build/in/two", Content: "x", Image: two.Name(), Source: "sub/file"})
		},
	}
	for range 3 { // the same mounts again
		r.Do(t, b)
		if !strings.HasPrefix(r.Stdout, "one\ntwo\n#!/bin/sh\necho one\n") || !strings.HasSuffix(r.Stdout, "\none\n") || strings.Contains(r.Stdout, "CHANGED") {
			t.Fatalf("got %s%s", r.Stdout, r.Stderr)
		}
		if n := strings.Count(r.Stdout, " - erofs /proc/self/fd/1000 ro"); n != 2 || strings.Contains(r.Stdout, "secret-name") {
			t.Errorf("the mount table tells more than it should:\n%s", r.Stdout)
		}
	}
	for _, m := range []sandbox.Mount{one, two} {
		expect.Error(t, m.Close(), nil)
		expect.Error(t, r.Try(t.Context(), t, b), sandbox.ErrSpec, "of an image that is closed")
	}
}

// TestManyImages: as many as fit into one packet, and no more.
func TestManyImages(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	b, _ := backend(t, namespace.Config{})
	var names []string
	for range zygote.MaxImages + 1 {
		m := mountImage(t, b, "#!/bin/sh\n")
		defer m.Close()
		names = append(names, m.Name())
	}
	run := func(n int) (string, error) {
		r := sandboxtest.Run{
			Script: "cat /build/i/*/sub/file | wc -l",
			Spec: func(s *sandbox.Spec) {
				for i, name := range names[:n] {
					s.Inputs = append(s.Inputs, sandbox.Input{Target: fmt.Sprintf("/build/i/%d", i), Content: "x", Image: name, Source: "."})
				}
				s.Env = append([]string{"LONG=" + strings.Repeat("x", 100<<10)}, s.Env...) // one descriptor more
			},
		}
		err := r.Try(t.Context(), t, b)
		return r.Stdout, err
	}
	expect.Equal(t, must.Get(run(zygote.MaxImages))(t), fmt.Sprintln(zygote.MaxImages), "%d images", zygote.MaxImages)
	expect.Error(t, expect.Err(run(zygote.MaxImages+1)), sandbox.ErrSpec, "%d images", zygote.MaxImages+1)
}

// attachedVariable makes TestBackend test a backend as on kernels before Linux 6.15.
const attachedVariable = "CLOISTER_TEST_ATTACHED"

// TestBackendAttached is the contract on kernels before Linux 6.15, as far as later ones can imitate them. Such kernels
// mount inputs in another way, on which limits, time, signals and sockets do not depend.
func TestBackendAttached(t *testing.T) {
	t.Parallel()
	backend(t, namespace.Config{})
	const independent = "LimitsAreEnforced|LimitsOfOneRunDoNotOutliveIt|UsageIsOfTheWholeRun|SharedCountersAreBounded|" +
		"TimeoutCountsExecutionOnly|StopAtAnyMomentEndsSoon|StopTermsThenKills|KillEndsTheRunAtItsFirstViolation|" +
		"ManyViolationsHideNoOther|OrdinaryActionsAreNoViolations|EmptyLoopbackIsReported|ListenIsForbiddenUnlessPermitted"
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestBackend$",
		"-test.skip=^TestBackend$/^("+independent+")$", "-test.v")
	cmd.Env = append(os.Environ(), attachedVariable+"=yes")
	out, err := cmd.CombinedOutput()
	expect.That(t, err == nil && strings.Contains(string(out), "--- PASS: TestBackend/OutputsOverInputs "),
		"%v\n%s", err, out)
}

// TestImagesAttached: images that only one run could use are refused.
func TestImagesAttached(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	b := namespace.NewAttached(namespace.Config{})
	defer b.Close()
	f := must.Get(os.Create(filepath.Join(t.TempDir(), "image")))(t)
	defer f.Close()
	must.Get(f.Write(erofs("")))(t)
	expect.Error(t, expect.Err(b.Mount(t.Context(), f, nil)), sandbox.ErrUnsupported)
}

// sharedVariable makes the test binary a worker on a host with shared mounts, as systemd sets them up.
const sharedVariable = "CLOISTER_TEST_SHARED"

// beShared is that worker, in its own mount namespace: it mounts an input inside an output while the host mounts
// something in the input.
func beShared(t testing.TB, dir string) {
	for _, flags := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		must.Succeed(t, unix.Mount("", "/", "", unix.MS_REC|flags, ""))
	}
	b := namespace.New(namespace.Config{})
	defer b.Close()
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "in", "below"), 0o755))
	r := sandboxtest.Run{
		Script: "cat /proc/self/mountinfo; echo ready; read x < /build/go; touch /build/in/below/x /in/below/x 2>/dev/null && echo CHANGED; cat /proc/self/mountinfo",
		Spec: func(s *sandbox.Spec) {
			for _, target := range []string{"/build/in", "/in"} {
				s.Inputs = append(s.Inputs, sandbox.Input{Target: target, Content: "x", Source: filepath.Join(dir, "in")})
			}
			s.Args[2] = strings.Replace(s.Args[2], "read x < /build/go", "while ! test -e /in/below/mounted -o -e /in/go; do sleep 0.02; done", 1)
		},
	}
	go func() {
		must.Poll(time.Minute, func() bool { return len(sandboxtest.Running(t, "/in/below/mounted")) > 0 })
		err := unix.Mount("late", filepath.Join(dir, "in", "below"), "tmpfs", 0, "mode=0777")
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "in", "go"), nil, 0o644)
		}
		expect.Error(t, err, nil)
	}()
	r.Do(t, b)
	for _, word := range []string{"CHANGED", " master:", " shared:", " propagate_from:", "- tmpfs late"} {
		expect.That(t, !strings.Contains(r.Stdout, word), "%q is in\n%s", word, r.Stdout)
	}
}

// TestHostsMountsDoNotArrive: mounts that the host makes during a run do not appear in its inputs, where they would be
// writable.
func TestHostsMountsDoNotArrive(t *testing.T) {
	t.Parallel()
	if dir := os.Getenv(sharedVariable); dir != "" {
		beShared(t, dir)
		return
	}
	rootOnly(t)
	backend(t, namespace.Config{})
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestHostsMountsDoNotArrive$", "-test.timeout=15m")
	cmd.Env = append(os.Environ(), sharedVariable+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
