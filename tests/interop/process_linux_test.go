// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// A process is a running cloister.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed once it has ended, after err is set and all is said
	err   error
	said  output
	gone  bool // the test has ended it by kill
}

// An output keeps what a process prints.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// wantSaid waits until the process has printed a text so many times.
func (p *process) wantSaid(t *testing.T, text string, times int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); strings.Count(p.said.String(), text) < times; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it does not say %q for the time number %d", text, times)
		}
	}
}

// confining starts cloister with arguments, to run commands in the sandbox. When the test ends it is told to end, and
// fails the test if it does not, or with an error.
func confining(t *testing.T, args ...string) *process {
	t.Helper()
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	p := &process{cmd: exec.Command(program, args...), ended: make(chan struct{})}
	p.cmd.Dir = "/"
	p.cmd.Stdout, p.cmd.Stderr = &p.said, &p.said
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			t.Logf("%v said:\n%s", p.cmd.Args, &p.said)
		}
	})
	return p
}

// stop tells it to end, waits until it has, and fails the test if it has not or with an error. It may have been called
// before.
func (p *process) stop(t *testing.T) {
	t.Helper()
	if p.gone {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // the only error is that it has ended
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("%v: %v", p.cmd.Args, p.err)
		}
	case <-time.After(30 * time.Second):
		p.kill()
		t.Errorf("%v does not end", p.cmd.Args)
	}
}

// kill ends it as a crash would, and waits until it has ended.
func (p *process) kill() {
	p.gone = true
	_ = p.cmd.Process.Kill() // the only error is that it has ended
	<-p.ended
}
