// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

func undeclared(t *testing.T, b sandbox.Backend) {
	secret := filepath.Join(public(t), "secret")
	must.Succeed(t, os.WriteFile(secret, []byte("secret"), 0o644))
	for _, p := range []string{
		secret, filepath.Dir(secret), "/home", "/var", "/sys", "/run", "/etc/shadow",
		"/etc/hostname", "/proc/1/root", "/proc/sys", "/proc/meminfo", "/.host", "/.workspace", "/dev/kmsg",
	} {
		if f := features(t, b); f.Kernel != "" && strings.HasPrefix(p, "/proc/") {
			continue // it describes the run's own kernel
		}
		r := run(t, b, Run{Script: "test -e " + p + " || test -L " + p})
		if r.Result.ExitCode != 1 {
			t.Errorf("%s exists in the sandbox", p)
		}
	}
}

func inputs(t *testing.T, b sandbox.Backend) {
	dir := public(t)
	file := filepath.Join(dir, "host-file")
	must.Succeed(t, os.WriteFile(file, []byte("original"), 0o666))
	// Everybody may write to it: only the mount protects it.
	must.Succeed(t, os.Chmod(file, 0o666))
	r := run(t, b, Run{
		Script: attack("/in/file") + attack("/in/dir/sub") + attack("/in/host"),
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "original", 0o666)
			must.Succeed(t, ws.Mkdir("in-dir", 0o777))
			must.Succeed(t, ws.Chmod("in-dir", 0o777))
			write(t, ws, "in-dir/sub", "original", 0o666)
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs,
				sandbox.Input{Target: "/in/file", Content: "x", Source: "in-file"},
				sandbox.Input{Target: "/in/dir", Content: "x", Source: "in-dir"},
				sandbox.Input{Target: "/in/host", Content: "x", Source: file})
		},
	})
	if strings.Contains(r.Stdout, "CHANGED") || strings.Count(r.Stdout, "held\n") != 3 {
		t.Errorf("inputs were changed:\n%s%s", r.Stdout, r.Stderr)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "original" {
		t.Errorf("the host's file holds %q (%v)", got, err)
	}
}

// attack returns a script that tries every way to change a file that contains "original", and prints "held" or
// "CHANGED".
func attack(file string) string {
	return fmt.Sprintf(`
f=%s
try() { if "$@" 2>/dev/null; then echo "CHANGED by $*"; fi; }
try sh -c "echo x >> $f"
try sh -c ": > $f"
try chmod 777 $f
try chmod u+w $f
try touch -d 1999-01-01 $f
try rm -f $f
try mv $f $f.moved
try mv -f /usr/bin/true $f
try cp -f /usr/bin/true $f
try dd if=/dev/zero of=$f conv=notrunc bs=1 count=1
try mount -o remount,rw $f
try umount $f
ln $f /build/hard$$ 2>/dev/null && echo x >> /build/hard$$
ln -s $f /build/soft$$ && { echo x >> /build/soft$$; } 2>/dev/null
rm -f /build/soft$$
case $(cat $f) in original) echo held;; *) echo "CHANGED content";; esac
`, file)
}

func inputInOutput(t *testing.T, b sandbox.Backend) {
	r := run(t, b, Run{
		Script: attack("/build/file") + attack("/build/dir/sub"),
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "original", 0o444)
			write(t, ws, "out/file", "", 0o444)
			for _, d := range []string{"in-dir", "out/dir"} {
				must.Succeed(t, ws.Mkdir(d, 0o755))
			}
			write(t, ws, "in-dir/sub", "original", 0o444)
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs,
				sandbox.Input{Target: "/build/file", Content: "x", Source: "in-file"},
				sandbox.Input{Target: "/build/dir", Content: "x", Source: "in-dir"})
		},
	})
	if strings.Contains(r.Stdout, "CHANGED") || strings.Count(r.Stdout, "held\n") != 2 {
		t.Errorf("inputs were changed:\n%s%s", r.Stdout, r.Stderr)
	}
}

func writable(t *testing.T, b sandbox.Backend) {
	for _, dir := range []string{"/", "/usr", "/usr/bin", "/bin", "/etc", "/dev", "/proc", "/lib"} {
		r := run(t, b, Run{Script: "touch " + dir + "/new || mkdir " + dir + "/newdir"})
		if r.Result.ExitCode == 0 {
			t.Errorf("%s is writable", dir)
		}
	}
	for _, dir := range []string{"/build", "/tmp", "/dev/shm"} {
		shell(t, b, "touch "+dir+"/new && mkdir "+dir+"/newdir && mv "+dir+"/new "+dir+"/newdir/")
	}
	for _, script := range []string{"mknod /build/null c 1 3", "mknod /tmp/null c 1 3"} {
		r := run(t, b, Run{Script: script})
		if r.Result.ExitCode == 0 {
			t.Errorf("%s succeeded", script)
		}
	}
}

func outputs(t *testing.T, b sandbox.Backend) {
	run(t, b, Run{
		Script: "mkdir -p a/b && echo result > a/b/c && ln -s nowhere a/link && chmod 000 a/b/c",
		Check: func(t testing.TB, out *os.Root, _ string) {
			must.Succeed(t, out.Chmod("a/b/c", 0o400))
			if got, err := out.ReadFile("a/b/c"); err != nil || string(got) != "result\n" {
				t.Errorf("a/b/c: got %q, %v", got, err)
			}
			if got, err := out.Readlink("a/link"); err != nil || got != "nowhere" {
				t.Errorf("a/link: got %q, %v", got, err)
			}
		},
	})
}

func temp(t *testing.T, b sandbox.Backend) {
	shell(t, b, "echo state > /tmp/left; echo state > /dev/shm/left")
	if got := shell(t, b, "ls -A /tmp /dev/shm /build"); strings.Contains(got, "left") {
		t.Errorf("a run left something for the next: %s", got)
	}
	r := run(t, b, Run{Script: "head -c 20000000 /dev/zero > /tmp/big"})
	if r.Result.ExitCode == 0 {
		t.Error("/tmp took more than its 16 MiB")
	}
}

func linkedTarget(t *testing.T, b sandbox.Backend) {
	r := Run{
		Script: "true",
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "x", 0o444)
			must.Succeed(t, ws.Symlink("/usr", "out/link"))
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/build/link/sub/file", Content: "x", Source: "in-file"})
		},
	}
	if err := r.Try(t.Context(), t, b); err == nil {
		t.Error("an input was mounted through a link in the tree")
	}
}

// public returns a temporary directory that an unprivileged user could reach if it were visible.
func public(t *testing.T) string {
	t.Helper()
	return must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
}

// write writes a file with exactly this mode.
func write(t testing.TB, root *os.Root, name, text string, mode os.FileMode) {
	t.Helper()
	must.Succeed(t, root.WriteFile(name, []byte(text), 0o600))
	must.Succeed(t, root.Chmod(name, mode))
}
