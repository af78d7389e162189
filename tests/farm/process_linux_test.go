// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// stopTime limits how long a process may take to stop.
const stopTime = 3 * time.Minute

// A process is a running program on a machine. All its descendants have its tag.
type process struct {
	name  string
	tag   int
	pid   int
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended and err is set
	err   error
}

// start starts a program, which ends with the test at the latest.
func (m *machine) start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{name: m.name, tag: unusedTag(), ended: make(chan struct{})}
	const setTag = `echo "$0" > /proc/self/timerslack_ns && exec "$@"`
	p.cmd = exec.Command("/bin/sh", append([]string{"-c", setTag, strconv.Itoa(p.tag), name}, args...)...)
	p.cmd.Dir = "/"
	p.cmd.Env = []string{"HOME=/nonexistent", "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin"}
	p.cmd.Stdout = &lineLogger{t: t, name: m.name}
	p.cmd.Stderr = p.cmd.Stdout
	p.cmd.WaitDelay = time.Second // for descendants that keep its output open
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		defer close(p.ended)
		// The thread that starts it is its parent, and must not end before it.
		p.err = m.inside(func() error {
			err := p.cmd.Start()
			started <- err
			if err != nil {
				return err
			}
			return p.cmd.Wait()
		})
		select {
		case started <- p.err: // the namespace could not be entered
		default:
		}
	}()
	must.Succeed(t, <-started)
	p.pid = p.cmd.Process.Pid
	t.Cleanup(func() {
		defer p.sweep()
		if p.alive() {
			must.Succeed(t, p.stop())
		}
	})
	return p
}

// alive reports whether the process runs.
func (p *process) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// kill kills the process, but not its descendants, and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.ended
}

// stop sends SIGTERM and waits for the end. It fails if the process does, or must be killed.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("%s ended: %w", p.name, p.err)
		}
		return nil
	case <-time.After(stopTime):
		p.kill()
		return fmt.Errorf("%s did not stop within %v and was killed", p.name, stopTime)
	}
}

// wantAllEnd calls end, which ends the process, and checks that its descendants end soon afterwards.
func (p *process) wantAllEnd(t *testing.T, end func()) {
	t.Helper()
	if n := len(tagged(p.tag)); n < 3 {
		t.Errorf("%s: %d processes have its tag, want at least 3: its own, a zygote and slots", p.name, n)
	}
	end()
	expect.That(t, !p.alive(), "%s runs, want it to have ended", p.name)
	if left := p.left(time.Minute); len(left) > 0 {
		t.Errorf("%s has ended, but descendants are alive: %s", p.name, strings.Join(left, "; "))
	}
}

// left waits for the end of all processes with the tag, and describes those alive at the time limit.
func (p *process) left(limit time.Duration) []string {
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		if left := tagged(p.tag); len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

// sweep kills the process and its descendants.
func (p *process) sweep() {
	for _, q := range processes() {
		if q.tag() == p.tag {
			_ = syscall.Kill(q.pid, syscall.SIGKILL) // fails only if it has ended
		}
	}
	<-p.ended
}

// unusedTag returns a tag that no process of this host has.
func unusedTag() int {
	used := map[int]bool{}
	for _, p := range processes() {
		used[p.tag()] = true
	}
	for {
		if tag := 50_001 + rand.IntN(1000); !used[tag] { // the default is 50,000
			return tag
		}
	}
}

// tagged describes the live processes with a tag.
func tagged(tag int) []string {
	var all []string
	for _, p := range processes() {
		if p.tag() == tag && p.alive() {
			cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
			all = append(all, fmt.Sprintf("%d %.120q", p.pid, strings.ReplaceAll(string(cmdline), "\x00", " ")))
		}
	}
	return all
}

// A lineLogger logs each line written to it, with a name.
type lineLogger struct {
	t    *testing.T
	name string

	mu   sync.Mutex
	rest string // guarded by mu; the unfinished last line
}

func (l *lineLogger) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest += string(p)
	for {
		line, rest, ok := strings.Cut(l.rest, "\n")
		if !ok {
			return len(p), nil
		}
		l.rest = rest
		l.t.Logf("%s: %s", l.name, line)
	}
}
