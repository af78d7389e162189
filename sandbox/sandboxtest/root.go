// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// rootPrograms are the programs in a root of CopyPrograms that the cases use.
var rootPrograms = []string{
	"sh", "cat", "chmod", "chown", "chroot", "cp", "echo", "id", "ls", "mkdir", "mv", "readlink", "rm", "stat", "touch", "xargs",
}

// library matches a path in the output of ldd(1).
var library = regexp.MustCompile(`/\S+`)

var number = regexp.MustCompile(`^[0-9]+$`)

// CopyPrograms copies programs of this host into the directory bin of root, with the dynamic linker and the libraries
// that they need at the paths where they look for them. So they run where nothing else of the host exists.
func CopyPrograms(t testing.TB, root *os.Root, programs ...string) {
	t.Helper()
	Tool(t, "ldd")
	add := func(from, to string) {
		if _, err := root.Lstat(to); err == nil {
			return
		}
		text := must.Get(os.ReadFile(from))(t)
		must.Succeed(t, root.MkdirAll(path.Dir(to), 0o755))
		write(t, root, to, string(text), 0o755)
	}
	for _, name := range programs {
		program := ""
		for _, dir := range []string{"/usr/bin", "/bin", "/usr/sbin", "/sbin"} {
			if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil && program == "" {
				program = p
			}
		}
		if program == "" {
			Unavailable(t, "tools", name+" is not installed")
		}
		add(program, "bin/"+name)
		list, err := exec.CommandContext(t.Context(), "ldd", program).Output()
		if err != nil {
			t.Fatalf("ldd %s: %v", program, err)
		}
		for _, lib := range library.FindAllString(string(list), -1) {
			add(lib, strings.TrimPrefix(filepath.Clean(lib), "/"))
		}
	}
}

// newRoot returns a root file system in a workspace of its own: programs, what every run mounts, and a file.
func newRoot(t testing.TB, b sandbox.Backend) (*sandbox.Root, sandbox.Workspace) {
	t.Helper()
	w := must.Get(b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited))(t)
	t.Cleanup(func() { w.Close() })
	fillRoot(t, w.Root(), "root")
	return &sandbox.Root{Content: "a root", Image: w.Name(), Source: "root"}, w
}

// fillRoot makes a root file system in the directory dir of a workspace.
func fillRoot(t testing.TB, ws *os.Root, dir string) {
	t.Helper()
	for _, d := range []string{"", "dev", "proc", "tmp", "build", "etc", "data"} {
		must.Succeed(t, ws.MkdirAll(path.Join(dir, d), 0o755))
	}
	root := must.Get(ws.OpenRoot(dir))(t)
	defer root.Close()
	CopyPrograms(t, root, rootPrograms...)
	write(t, root, "data/file", "file of the root\n", 0o644)
	write(t, root, "etc/hosts", "", 0o644)
	write(t, root, "etc/resolv.conf", "nameserver 192.0.2.53\n", 0o644)
}

// inRoot is a run of a script in a root file system.
func inRoot(r *sandbox.Root, script string) Run {
	return Run{Script: script, Spec: func(s *sandbox.Spec) {
		s.Root, s.Inputs, s.Env = r, nil, []string{"PATH=/bin"}
	}}
}

// hasRoots reports whether the backend has root file systems and user 0. One that does not must refuse them.
func hasRoots(t *testing.T, b sandbox.Backend) bool {
	t.Helper()
	f := features(t, b)
	if f.Root && f.Superuser {
		return true
	}
	root, _ := newRoot(t, b)
	own, zero := inRoot(root, "true"), Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Superuser = true }}
	for what, r := range map[string]*Run{"a root file system": &own, "user 0": &zero} {
		if err := r.Try(t.Context(), t, b); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("a run with %s: got %v, want ErrUnsupported", what, err)
		}
	}
	return false
}

// ownRoot: a run in a root file system finds what that contains and nothing of the host, and cannot change it.
func ownRoot(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	if !hasRoots(t, b) {
		return
	}
	root, _ := newRoot(t, b)
	r := run(t, b, inRoot(root, `ls -d /*; ls /etc /dev; cat /data/file /etc/hosts /etc/resolv.conf; readlink /proc/self; ls -d /usr/share /home /var`))
	before, after, _ := strings.Cut(r.Stdout, "file of the root\n127.0.0.1 localhost cloister\n::1 localhost cloister\nnameserver 127.0.0.1\n")
	for _, p := range []string{"passwd", "group", "ld.so.cache", "kmsg", "ptmx"} {
		if slices.Contains(strings.Fields(before), p) {
			t.Errorf("the root has %s of the host:\n%s", p, before)
		}
	}
	for _, want := range []string{"/build\n", "/data\n", "/proc\n", "/tmp\n", "hosts\n", "null\n", "urandom\n", "shm\n"} {
		if !strings.Contains(before, want) {
			t.Errorf("got\n%swant %s in it", before, want)
		}
	}
	if pid := strings.TrimSpace(after); !number.MatchString(pid) {
		t.Errorf("/proc/self and host directories: got %q, want a number\n%s", pid, r.Stderr)
	}

	t.Run("cannot be changed", func(t *testing.T) {
		r := run(t, b, inRoot(root, `for f in /new /bin/cat /data/new /etc/passwd /etc/hosts /dev/new /proc/new /lib/new; do
			(echo x > $f) 2>/dev/null && echo wrote $f; done
			rm -f /data/file && echo removed; mv /data /moved && echo moved; chmod 777 /data && echo chmod; mkdir /build/../d && echo mkdir
			touch /data/file && echo touched; cat /data/file; echo ok > /build/f; echo ok > /tmp/f; echo ok > /dev/shm/f; cat /build/f /tmp/f /dev/shm/f`))
		if r.Stdout != "file of the root\nok\nok\nok\n" {
			t.Errorf("got %q\n%s", r.Stdout, r.Stderr)
		}
		if slices.Contains(f.Audits, sandbox.AuditViolations) {
			for _, p := range []string{"/new", "/bin/cat", "/data/file", "/etc/passwd"} {
				if !slices.ContainsFunc(r.Result.Events, func(e sandbox.Event) bool { return e.Kind == sandbox.EventWrite && e.Subject == p }) {
					t.Errorf("the attempt to write %s is no event: %v", p, r.Result.Events)
				}
			}
		}
	})
	for _, user := range []string{"user 1000", "user 0"} {
		t.Run("no way leads to the host's, as "+user, func(t *testing.T) {
			r := inRoot(root, wayOut)
			spec := r.Spec
			r.Spec = func(s *sandbox.Spec) { spec(s); s.Superuser = user == "user 0" }
			r.Do(t, b)
			checkNoWayOut(t, &r)
		})
	}
	t.Run("ends with the run", func(t *testing.T) {
		other, w := newRoot(t, b)
		write(t, w.Root(), "root/data/file", "another root\n", 0o644)
		for _, c := range []struct {
			run  Run
			want string
		}{
			{inRoot(root, "cat /data/file"), "file of the root\n"},
			{inRoot(root, "cat /data/file"), "file of the root\n"},
			{inRoot(other, "cat /data/file"), "another root\n"},
			{Run{Script: "ls /data 2>/dev/null; ls -d /usr/bin"}, "/usr/bin\n"},
			{inRoot(other, "cat /data/file"), "another root\n"},
		} {
			if r := run(t, b, c.run); r.Stdout != c.want {
				t.Errorf("got %q, want %q\n%s", r.Stdout, c.want, r.Stderr)
			}
		}
		must.Succeed(t, w.Close())
		again := inRoot(other, "cat /data/file")
		if err := again.Try(t.Context(), t, b); err == nil {
			t.Errorf("a run in a closed root file system: got %q, want an error", again.Stdout)
		}
		if r := run(t, b, Run{Script: "ls -d /usr/bin"}); r.Stdout != "/usr/bin\n" {
			t.Errorf("the next run: got %q\n%s", r.Stdout, r.Stderr)
		}
	})
	t.Run("nothing is created in it", func(t *testing.T) {
		r := inRoot(root, "true")
		spec := r.Spec
		r.Spec = func(s *sandbox.Spec) {
			spec(s)
			s.Temp = append(s.Temp, sandbox.Temp{Target: "/absent", Bytes: 1 << 20})
		}
		if err := r.Try(t.Context(), t, b); err == nil || !strings.Contains(err.Error(), "/absent") || !strings.Contains(err.Error(), "lacks it") {
			t.Errorf("a target that the root lacks: got %v", err)
		}
	})
	t.Run("an absent program is explained", func(t *testing.T) {
		r := inRoot(root, "")
		spec := r.Spec
		r.Spec = func(s *sandbox.Spec) { spec(s); s.Args = []string{"gcc"} }
		r.Do(t, b)
		if r.Result.ExitCode != 127 || !slices.ContainsFunc(r.Result.Events, func(e sandbox.Event) bool {
			return e.Kind == sandbox.EventExec && strings.Contains(e.Detail, "root file system")
		}) {
			t.Errorf("got exit code %d and %v", r.Result.ExitCode, r.Result.Events)
		}
	})
}

// wayOut tries to reach the root of the host, and prints what it finds and its mounts.
const wayOut = `ls -d /../usr/share /../../../../etc/passwd /proc/self/root/usr/share /proc/self/root/../etc/passwd /build/../../usr/share
	for p in /proc/[0-9]*; do ls -d $p/root/usr/share $p/cwd/../../usr/share $p/root/etc/passwd; done
	for fd in /proc/self/fd/*; do ls -d $fd/../usr/share $fd/usr/share $fd/../../../etc/passwd; done
	chroot . /bin/ls -d /usr/share; chroot /proc/1/root /bin/ls -d /usr/share
	mkdir /build/old && cd /build/old && chroot /build/old /bin/ls; ls -d ../../../usr/share
	echo mounts; cat /proc/self/mountinfo`

// checkNoWayOut checks what wayOut printed.
func checkNoWayOut(t *testing.T, r *Run) {
	t.Helper()
	found, mounts, ok := strings.Cut(r.Stdout, "mounts\n")
	if found != "" || !ok {
		t.Errorf("it found %q\n%s", found, r.Stderr)
	}
	at := map[string]int{} // mounts by mount point
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		at[f[4]]++
		top, _, _ := strings.Cut(strings.TrimPrefix(f[4], "/"), "/")
		if !slices.Contains([]string{"", "build", "dev", "etc", "proc", "tmp"}, top) {
			t.Errorf("an unexpected mount: %s", line)
		}
	}
	if at["/"] != 1 || at["/dev"] != 1 || at["/proc"] != 1 || at["/tmp"] != 1 {
		t.Errorf("mounts: got\n%s\nwant one each at /, /dev, /proc and /tmp", mounts)
	}
}

// outputRoot: an output can be the root file system, over inputs that cannot be changed.
func outputRoot(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	if !hasRoots(t, b) {
		return
	}
	if !f.Lower {
		Unavailable(t, "namespaces", "this kernel cannot mount an overlay over inputs")
	}
	r := Run{
		Script: `cd /; mkdir /install && echo new > /install/file && echo new > /data/new; cat /data/file
			(echo x > /data/file) 2>/dev/null && echo wrote; rm -f /data/file 2>/dev/null && echo removed
			(echo x > /etc/hosts) 2>/dev/null && echo wrote hosts; (echo x > /dev/new) 2>/dev/null && echo wrote dev; ls -d /usr/bin 2>/dev/null`,
		Setup: func(t testing.TB, ws *os.Root) {
			fillRoot(t, ws, "in")
			err := fs.WalkDir(ws.FS(), "in", func(p string, d fs.DirEntry, err error) error {
				if err != nil || !d.IsDir() {
					return err
				}
				if err := ws.MkdirAll("out"+strings.TrimPrefix(p, "in"), 0o777); err != nil {
					return err
				}
				if err := ws.Chmod("out"+strings.TrimPrefix(p, "in"), 0o777|fs.ModeSticky); err != nil {
					return err
				}
				return ws.Chmod(p, 0o777|fs.ModeSticky)
			})
			must.Succeed(t, err)
		},
		Spec: func(s *sandbox.Spec) {
			s.Dir, s.Inputs, s.Env = "/data", nil, []string{"PATH=/bin"}
			s.Outputs = []sandbox.Output{{Target: "/", Source: "out"}}
			s.Lower = []sandbox.Lower{{Target: "/", Content: "x", Source: "in"}}
		},
		Check: func(t testing.TB, out *os.Root, _ string) {
			for _, p := range []string{"install/file", "data/new"} {
				if text, err := out.ReadFile(p); string(text) != "new\n" {
					t.Errorf("%s: got %q, %v", p, text, err)
				}
			}
			if _, err := out.Lstat("data/file"); err == nil {
				t.Error("an input was copied")
			}
		},
	}
	r.Do(t, b)
	if r.Stdout != "file of the root\n" {
		t.Errorf("got %q\n%s", r.Stdout, r.Stderr)
	}
	r.Script, r.Check = wayOut, nil
	r.Do(t, b)
	checkNoWayOut(t, &r)
}

// superuser: a run can be user 0, which gives it no right.
func superuser(t *testing.T, b sandbox.Backend) {
	if !hasRoots(t, b) {
		return
	}
	root, _ := newRoot(t, b)
	for _, c := range []struct {
		name string
		run  Run
	}{{"in a root", inRoot(root, "")}, {"on the host", Run{}}} {
		t.Run(c.name, func(t *testing.T) {
			c.run.Script = `id -u; id -g; cat /proc/self/status | while read key value; do case $key in Cap*) echo $value;; esac; done | xargs
				echo x > /build/f && chown 1000 /build/f && echo chown; chroot /build /bin/true && echo chroot
				touch /bin/x && echo wrote; mkdir /x && echo mkdir; stat -c %u /build/f`
			spec := c.run.Spec
			c.run.Spec = func(s *sandbox.Spec) {
				if spec != nil {
					spec(s)
				}
				s.Superuser = true
			}
			c.run.Do(t, b)
			none := strings.Repeat(" 0000000000000000", 5)[1:]
			if want := "0\n0\n" + none + "\n0\n"; c.run.Stdout != want {
				t.Errorf("got %q, want %q\n%s", c.run.Stdout, want, c.run.Stderr)
			}
		})
	}
	if got := shell(t, b, "id -u"); got != "1000\n" {
		t.Errorf("the next run has user %q", got)
	}
}
