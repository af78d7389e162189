// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// A process is a running cloister.
type process struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed when it has ended and err is set
	err    error
	out    syncbuf.Buffer
	killed bool
}

// wantPrinted waits until the process has printed a text that many times.
func (p *process) wantPrinted(t *testing.T, text string, times int) {
	t.Helper()
	must.Hold(t, fmt.Sprintf("%q printed %d times", text, times), func() bool { return strings.Count(p.out.String(), text) >= times })
}

// confiner returns the path of cloister. It skips the test if cloister has no sandbox here.
func confiner(t *testing.T) string {
	t.Helper()
	program := must.Get(cloister())(t)
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	return program
}

// confining starts a cloister that needs the sandbox. It is stopped at the end of the test, and must succeed.
func confining(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(confiner(t), args...), ended: make(chan struct{})}
	p.cmd.Dir = "/"
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	must.Succeed(t, p.cmd.Start())
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			t.Logf("%v printed:\n%s", p.cmd.Args, &p.out)
		}
	})
	return p
}

// stop sends SIGTERM and checks that the process ends without an error. It may be called repeatedly.
func (p *process) stop(t *testing.T) {
	t.Helper()
	if p.killed {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("%v: %v", p.cmd.Args, p.err)
		}
	case <-time.After(time.Minute):
		p.kill()
		t.Errorf("%v did not end", p.cmd.Args)
	}
}

// kill kills the process and waits for its end.
func (p *process) kill() {
	p.killed = true
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.ended
}
