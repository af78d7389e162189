// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// kill: a violation of a kind of Spec.Kill ends every process of the run, and its call never returns. Others do not.
func kill(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	if !f.Kill {
		lacks(t, f, "namespaces", "it cannot kill a run at its first violation")
	}
	secret := filepath.Join(public(t), "secret")
	must.Succeed(t, os.WriteFile(secret, []byte("secret"), 0o644))
	const dial = "exec 3<>/dev/tcp/192.0.2.1/443"
	for _, c := range []struct {
		name, attempt string
		kill          []sandbox.EventKind
		event         sandbox.EventKind // that is recorded
		killed        bool
	}{
		{"connect", dial, []sandbox.EventKind{sandbox.EventConnect}, sandbox.EventConnect, true},
		{"connect, swallowed", "(" + dial + ") 2>/dev/null", []sandbox.EventKind{sandbox.EventConnect}, sandbox.EventConnect, true},
		{"lookup", "getent ahosts x.example.com", []sandbox.EventKind{sandbox.EventConnect}, sandbox.EventConnect, true},
		{"write", "echo x >/usr/x", []sandbox.EventKind{sandbox.EventConnect, sandbox.EventWrite}, sandbox.EventWrite, true},
		{"syscall", "unshare -U true", []sandbox.EventKind{sandbox.EventSyscall}, sandbox.EventSyscall, true},
		{"read", "cat " + secret, []sandbox.EventKind{sandbox.EventRead}, sandbox.EventRead, true},
		{"limit", "head -c 20000000 /dev/zero >big; sleep 300", []sandbox.EventKind{sandbox.EventLimit}, sandbox.EventLimit, true},
		{"another kind", dial, []sandbox.EventKind{sandbox.EventWrite, sandbox.EventSyscall}, sandbox.EventConnect, false},
		{"a cached module", "mkdir /usr/__pycache__", []sandbox.EventKind{sandbox.EventWrite}, sandbox.EventWrite, false},
		{"a missing program", "/no/such/program", []sandbox.EventKind{sandbox.EventExec}, sandbox.EventExec, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			mark := fmt.Sprintf("4%d.%d", os.Getpid(), time.Now().UnixNano()%1e9)
			r := Run{Bytes: 8 * mebibyte, Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/bin/bash", "-c", fmt.Sprintf(`(trap '' TERM HUP INT; setsid setsid sleep %[1]s) & setsid sleep %[1]s &
bash -c '%[2]s
echo after'
exit 0`, mark, c.attempt)}
				s.Kill, s.Limits.OutputBytes, s.Timeout = c.kill, 8*mebibyte, 10*time.Minute
				if c.event == sandbox.EventRead {
					s.Audit = sandbox.AuditFull
				}
			}}
			if c.event == sandbox.EventRead && !slices.Contains(f.Audits, sandbox.AuditFull) {
				lacks(t, f, "monitor", "this host cannot monitor what a run opens")
			}
			r.Do(t, b)
			res := r.Result
			if code := map[bool]int{true: 137}[c.killed]; res.ExitCode != code || res.KilledForViolation != c.killed || res.Stopped {
				t.Errorf("got exit code %d, killed for a violation %t, stopped %t; want %d, %t; events %v\n%s",
					res.ExitCode, res.KilledForViolation, res.Stopped, code, c.killed, res.Events, r.Stderr)
			}
			if after := strings.Contains(r.Stdout, "after"); after == c.killed {
				t.Errorf("the process continued after its attempt: %t", after)
			}
			if !slices.ContainsFunc(res.Events, func(e sandbox.Event) bool { return e.Kind == c.event }) {
				t.Errorf("got events %v, want one of kind %s", res.Events, c.event)
			}
			if alive := Running(t, mark); len(alive) > 0 {
				t.Errorf("still alive: %v", alive)
			}
		})
	}
}
