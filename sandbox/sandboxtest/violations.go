// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// violationScript tries what a run must not do.
const violationScript = `
exec 3<>/dev/tcp/192.0.2.1/443
exec 3<>/dev/tcp/192.0.2.1/443
echo x > /usr/x
echo x >> /in/file
rm -f /in/file
/no/such/program
unshare -U true
true`

// violating is a run of violationScript with an input.
func violating(a sandbox.Audit) Run {
	return Run{
		Setup: func(t testing.TB, ws *os.Root) { write(t, ws, "in-file", "original", 0o666) },
		Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/bin/bash", "-c", violationScript}
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in/file", Content: "x", Source: "in-file"})
			s.Audit = a
		},
	}
}

func violations(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	r := violating(sandbox.AuditViolations)
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
	}
	want := []sandbox.Event{
		{
			Kind: sandbox.EventConnect, Subject: "tcp 192.0.2.1:443", Syscall: "connect", Process: "bash", Count: 2,
			Endpoint: sandbox.Endpoint{Host: "192.0.2.1", Port: 443},
		},
		{Kind: sandbox.EventExec, Subject: "/no/such/program", Syscall: "execve", Process: "bash", Count: 1},
		{Kind: sandbox.EventSyscall, Subject: "unshare", Syscall: "unshare", Process: "unshare", Count: 1},
		{Kind: sandbox.EventWrite, Subject: "/in/file", Syscall: "openat", Process: "bash", Count: 1},
		{Kind: sandbox.EventWrite, Subject: "/in/file", Syscall: "unlinkat", Process: "rm", Count: 1},
		{Kind: sandbox.EventWrite, Subject: "/usr/x", Syscall: "openat", Process: "bash", Count: 1},
	}
	if !slices.Equal(r.Result.Events, want) {
		t.Errorf("got events:\n%v\nwant:\n%v", r.Result.Events, want)
	}
}

// flood: many violations of one kind do not hide the first of another.
func flood(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	r := run(t, b,
		bash("for i in /usr/__pycache__/{1..300} /usr/x{1..1500}; do : > $i; done 2>/dev/null; : < /dev/tcp/192.0.2.1/443; unshare -U true; true"))
	for _, kind := range []sandbox.EventKind{sandbox.EventWrite, sandbox.EventConnect, sandbox.EventSyscall} {
		if !slices.ContainsFunc(r.Result.Events, func(e sandbox.Event) bool { return e.Kind == kind }) {
			t.Errorf("no event of kind %s among %d, %d unrecorded", kind, len(r.Result.Events), r.Result.Unrecorded)
		}
	}
	if !slices.ContainsFunc(r.Result.Events, func(e sandbox.Event) bool { return strings.HasPrefix(e.Subject, "/usr/x") }) {
		t.Error("caches of Python hide writes that count as violations")
	}
	if len(r.Result.Events) > sandbox.MaxEvents || r.Result.Unrecorded < 500 {
		t.Errorf("%d events, %d unrecorded", len(r.Result.Events), r.Result.Unrecorded)
	}
}

// shared: resources that the kernel also counts for the sandbox's owner are limited.
func shared(t *testing.T, b sandbox.Backend) {
	r := run(t, b, bash("ulimit -i; ulimit -q; ulimit -e; ulimit -r"))
	if r.Stdout != "1024\n131072\n0\n0\n" {
		t.Errorf("pending signals, message queues, nice and real-time priority: got %q", r.Stdout)
	}
	if features(t, b).Kernel != "" {
		return // instances of inotify are those of the run's own kernel
	}
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		Unavailable(t, "namespaces", "the test makes system calls by python3")
	}
	r = run(t, b, Run{Spec: func(s *sandbox.Spec) {
		s.Args = []string{"/usr/bin/python3", "-c", `
import ctypes
libc = ctypes.CDLL(None)
print(sum(libc.inotify_init() >= 0 for _ in range(100)))`}
	}})
	if r.Stdout != "16\n" {
		t.Errorf("instances of inotify: got %q %s, want 16", r.Stdout, r.Stderr)
	}
}

func fullTemp(t *testing.T, b sandbox.Backend) {
	r := run(t, b, Run{Script: "head -c 20000000 /dev/zero > /tmp/big"})
	if e := r.Result.Exceeded; e == nil || e.Subject != "room in /tmp" || e.Limit != "16.0 MiB" || e.LimitValue != 16*mebibyte || e.Unit != "bytes" {
		t.Errorf("got %+v, events %v", e, r.Result.Events)
	}
	r = run(t, b, Run{Script: "head -c 16777216 /dev/zero > /tmp/big"})
	if r.Result.ExitCode != 0 || r.Result.Exceeded != nil || len(r.Result.Events) > 0 {
		t.Errorf("exactly the size: exit code %d, events %v", r.Result.ExitCode, r.Result.Events)
	}
}

// oracle: links in the input tree do not reach the host while the program is looked up.
func oracle(t *testing.T, b sandbox.Backend) {
	secret := filepath.Join(public(t), "secret")
	must.Succeed(t, os.WriteFile(secret, []byte("secret"), 0o600))
	for _, root := range []string{"/.host", "/.old", "/proc/1/root", "/proc/self/root/.host"} {
		r := run(t, b, Run{
			Setup: func(t testing.TB, ws *os.Root) {
				must.Succeed(t, ws.Symlink(root+secret, "out/x"))
			},
			Spec: func(s *sandbox.Spec) { s.Args = []string{"./x"} },
		})
		if r.Result.ExitCode != 127 || !strings.Contains(r.Stderr, "not found in the sandbox") {
			t.Errorf("through %s: exit code %d, %s", root, r.Result.ExitCode, r.Stderr)
		}
	}
}

func auditOff(t *testing.T, b sandbox.Backend) {
	r := violating(sandbox.AuditOff)
	r.Do(t, b)
	if len(r.Result.Events) > 0 || len(r.Result.Opened) > 0 {
		t.Errorf("got events %v, opened %v", r.Result.Events, r.Result.Opened)
	}
	if !strings.Contains(r.Stderr, "/usr/x") || strings.Count(r.Stderr, "192.0.2.1") < 2 {
		t.Errorf("the unmonitored run did not fail as expected: %s", r.Stderr)
	}
}

func auditFull(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditFull)
	secret := filepath.Join(public(t), "secret")
	must.Succeed(t, os.WriteFile(secret, []byte("secret"), 0o644))
	r := violating(sandbox.AuditFull)
	change := r.Spec
	r.Spec = func(s *sandbox.Spec) {
		change(s)
		s.Args = []string{
			"/bin/sh", "-c",
			"cat /in/file; cat " + secret + "; cat " + secret + ".absent; echo x > mine; cat mine",
		}
	}
	r.Do(t, b)
	missed := func(path string) bool {
		return slices.ContainsFunc(r.Result.Events, func(e sandbox.Event) bool {
			return e.Kind == sandbox.EventRead && e.Subject == path && e.Process == "cat" && e.Detail != ""
		})
	}
	if !missed(secret) || missed(secret+".absent") {
		t.Errorf("got events %v, want %s, which the host has, but not its missing neighbour", r.Result.Events, secret)
	}
	if !slices.Contains(r.Result.Opened, "/in/file") || slices.Contains(r.Result.Opened, "/build/mine") ||
		!slices.IsSorted(r.Result.Opened) {
		t.Errorf("opened: got %v", r.Result.Opened)
	}
}

// ordinary: common tools cause no events, or nobody would read them.
func ordinary(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct{ tool, script string }{
		{"sh", `echo x > /tmp/y; cat /tmp/y; mkdir -p a/b; ln -s b a/c; mv a/b a/d; rm -r a; test -w /usr;
			command -v no-such-program; true`},
		{"bash", `cat <<< x; diff <(echo a) <(echo a); x=$(mktemp); exec 5<>$x; echo y >&5; coproc cat; kill $!;
			echo e | tee /dev/stderr; : > /dev/null`},
		{"bash", `set -e; echo name > /proc/$$/comm; echo other > /proc/self/task/$$/comm;
			echo 500 > /proc/self/oom_score_adj; exit 0`},
		{"id", `id; whoami; hostname; date; uname -a; nproc; stat .; getent passwd build;
			getent hosts localhost; timeout 9 true; setsid true; sort /etc/passwd; df . ; true`},
		{"python3", `/usr/bin/python3 -c '
import json, os, socket, ssl, subprocess, sys, tempfile, threading, uuid, pwd, platform, multiprocessing
subprocess.run(["sh", "-c", "true"], check=True)
open(tempfile.mkdtemp() + "/x", "w").write("x")
print(uuid.uuid4(), pwd.getpwuid(1000), platform.platform(), os.cpu_count(), socket.getaddrinfo("localhost", 80))
if __name__ == "__main__":
    multiprocessing.get_context("fork").Pool(2).map(abs, [1, 2])
s = socket.create_server(("127.0.0.1", 0)); socket.create_connection(s.getsockname())'`},
		{"gcc", `printf 'int main(void){return 0;}' > a.c; gcc -O2 -g -MD -o a a.c && ./a && gcc -pipe -c a.c &&
			ld -r -o b.o a.o && ar rcs x.a b.o && ranlib x.a && strip a`},
		{"g++", `printf '#include <vector>\nint main(){return std::vector<int>(0).size();}' > a.cc;
			g++ -O1 -o a a.cc && ./a`},
		{"perl", `perl -MFile::Temp=tempfile -e 'my ($f) = tempfile(); print {$f} 1; system("true"); getpwuid(1000)'`},
		{"make", `printf 'all: a b\na b:\n\techo x > $@\n' > Makefile; make -j2 && make`},
		{"git", `git init -q x && cd x && echo x > f && git add f &&
			git -c user.name=a -c user.email=a@b commit -qm x && git gc -q && git clone -q . ../y && git status`},
		{"tar", `mkdir d; echo x > d/f; ln -s f d/l; tar czf d.tgz d && mkdir e && tar xzf d.tgz -C e && cp -a d g &&
			install -m 755 d/f i && touch -d 2001-01-01 i && sed -i s/x/y/ i && rm -r d`},
		{"node", `node -e 'require("fs").writeFileSync("a", "x"); require("child_process").execSync("true");
			new (require("worker_threads").Worker)("1", {eval: true})'`},
		{"java", `java -Xmx64m -version`},
	} {
		t.Run(c.tool, func(t *testing.T) {
			if _, err := os.Stat("/usr/bin/" + c.tool); err != nil {
				Tool(t, c.tool)
			}
			r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/bin/bash", "-c", c.script}
				s.Env = []string{"HOME=/tmp", "PATH=/usr/bin:/bin"}
				s.Temp[0].Bytes = 64 * mebibyte
			}})
			if r.Result.ExitCode != 0 || len(r.Result.Events) > 0 {
				t.Errorf("exit code %d, events %v\n%s", r.Result.ExitCode, r.Result.Events, r.Stderr)
			}
		})
	}
}
