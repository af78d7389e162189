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
)

// stopTime bounds how long a process may take to end that was told to: a guard against one that hangs.
const stopTime = 60 * time.Second

// A process is a program that runs on a machine. What it starts, and what that starts, has its brand, wherever it goes.
type process struct {
	name  string
	brand int
	pid   int
	cmd   *exec.Cmd
	ended chan struct{} // closed once it has, after err is set
	err   error
}

// start starts a program, which ends with the test at the latest.
func (m *machine) start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{name: m.name, brand: unusedBrand(), ended: make(chan struct{})}
	const branded = `echo "$0" > /proc/self/oom_score_adj && exec "$@"`
	p.cmd = exec.Command("/bin/sh", append([]string{"-c", branded, strconv.Itoa(p.brand), name}, args...)...)
	p.cmd.Dir = "/"
	p.cmd.Env = []string{"HOME=/nonexistent", "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin"}
	p.cmd.Stdout = &lines{t: t, name: m.name}
	p.cmd.Stderr = p.cmd.Stdout
	p.cmd.WaitDelay = time.Second // for whoever outlives it, and could go on writing
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		defer close(p.ended)
		// The thread that starts it is its parent, and lasts as long.
		p.err = m.inside(func() error {
			err := p.cmd.Start()
			started <- err
			if err != nil {
				return err
			}
			return p.cmd.Wait()
		})
		select {
		case started <- p.err: // the network could not be entered
		default:
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	p.pid = p.cmd.Process.Pid
	t.Cleanup(func() {
		if p.alive() {
			if err := p.stop(); err != nil {
				t.Error(err)
			}
		}
		p.sweep()
	})
	return p
}

// alive reports whether it has not ended.
func (p *process) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// kill ends the process, and that alone, and waits until it has ended.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // the only error is that it has ended
	<-p.ended
}

// stop tells it to end and waits until it has. It returns an error if it ends with one, or has to be killed.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // as above
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("%s ended: %w", p.name, p.err)
		}
		return nil
	case <-time.After(stopTime):
		p.kill()
		return fmt.Errorf("%s did not end in %v and was killed", p.name, stopTime)
	}
}

// wantAllEnd calls end, which ends the process, and checks that soon afterwards nothing is alive that it has started.
func (p *process) wantAllEnd(t *testing.T, end func()) {
	t.Helper()
	if n := len(marked(p.brand)); n < 3 {
		t.Errorf("%s: %d processes have its brand, want its own, a zygote, and slots", p.name, n)
	}
	end()
	if p.alive() {
		t.Errorf("%s has not ended", p.name)
	}
	if left := p.left(20 * time.Second); len(left) > 0 {
		t.Errorf("%s has ended, and of what it has started these are alive: %s", p.name, strings.Join(left, "; "))
	}
}

// left describes what is alive, of all that has its brand, when none is or the time is up.
func (p *process) left(limit time.Duration) []string {
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		if left := marked(p.brand); len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

// sweep ends it, and what was left behind.
func (p *process) sweep() {
	for _, q := range processes() {
		if q.brand() == p.brand {
			_ = syscall.Kill(q.pid, syscall.SIGKILL) // the only error is that it has ended
		}
	}
	<-p.ended
}

// unusedBrand returns a brand that no process of this host has.
func unusedBrand() int {
	used := map[int]bool{}
	for _, p := range processes() {
		used[p.brand()] = true
	}
	for {
		if brand := 500 + rand.IntN(500); !used[brand] {
			return brand
		}
	}
}

// marked describes the processes that have a brand and are alive.
func marked(brand int) []string {
	var all []string
	for _, p := range processes() {
		if p.brand() == brand && p.alive() {
			cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
			all = append(all, fmt.Sprintf("%d %.120q", p.pid, strings.ReplaceAll(string(cmdline), "\x00", " ")))
		}
	}
	return all
}

// A lines logs what is written to it, a line at a time with a name.
type lines struct {
	t    *testing.T
	name string

	mu   sync.Mutex
	rest string // guarded by mu; what came after the last end of line
}

func (l *lines) Write(p []byte) (int, error) {
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
