// SPDX-License-Identifier: Apache-2.0

package load

import (
	"crypto/sha256"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestUsage compares /proc with getrusage.
func TestUsage(t *testing.T) {
	var sum [32]byte
	for range 1_000_000 { // more than a tick
		sum = sha256.Sum256(sum[:])
	}
	self := func() time.Duration {
		var r syscall.Rusage
		must.Succeed(t, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := self()
	u := must.Get(usageOf(os.Getpid()))(t)
	// User and system time are rounded separately.
	if after := self(); u.cpu < before-2*tick || u.cpu > after+2*tick {
		t.Errorf("got CPU time %v, want %v to %v", u.cpu, before, after)
	}
	expect.That(t, before >= 3*tick,
		"this process used only %v, want at least %v for a meaningful comparison", before, 3*tick)
	expect.That(t, u.peak >= 1<<20 && u.peak <= 1<<40, "got peak memory %d, want 1 MiB to 1 TiB", u.peak)
}

// TestTreeCPU lets a child and a grandchild of this process work, and reads their CPU time before and after their exit.
func TestTreeCPU(t *testing.T) {
	// The shell works after its child has exited, reports that, and waits.
	c := exec.Command("/bin/sh", "-c", `busy='i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'
		/bin/sh -c "$busy"; eval "$busy"; echo ready; read line`)
	in := must.Get(c.StdinPipe())(t)
	out := must.Get(c.StdoutPipe())(t)
	pids := []int{os.Getpid()}
	liveBefore, exitedBefore, err := treeCPU(pids)
	must.Succeed(t, err)
	must.Succeed(t, c.Start())
	must.Get(out.Read(make([]byte, 10)))(t)
	live, exited, err := treeCPU(pids)
	must.Succeed(t, err)
	_, ofChild, err := treeCPU([]int{c.Process.Pid})
	must.Succeed(t, err)
	if live-liveBefore < tick || ofChild < tick || exited-exitedBefore < ofChild {
		t.Errorf("got live %v, exited %v, exited below the child %v, want at least a tick each",
			live-liveBefore, exited-exitedBefore, ofChild)
	}
	in.Close()
	if err := c.Wait(); err == nil {
		t.Fatal("the shell read a line from a closed pipe")
	}
	_, exitedAfter, err := treeCPU(pids)
	must.Succeed(t, err)
	expect.That(t, exitedAfter-exited >= tick,
		"the exit of the child added %v, want at least a tick", exitedAfter-exited)
	if l, e, err := treeCPU(nil); l != 0 || e != 0 || err != nil {
		t.Errorf("no processes: got %v, %v, %v, want nothing", l, e, err)
	}
}

// TestSettleWaitsForIdleProcesses lets a process work for a while before it waits.
func TestSettleWaitsForIdleProcesses(t *testing.T) {
	c := exec.Command("/bin/sh", "-c", `i=0; while [ $i -lt 5000000 ]; do i=$((i+1)); done; echo done; read line`)
	in := must.Get(c.StdinPipe())(t)
	out := must.Get(os.CreateTemp(t.TempDir(), "out"))(t)
	defer out.Close()
	c.Stdout = out
	must.Succeed(t, c.Start())
	defer func() {
		in.Close()
		_ = c.Wait() // it read no line
	}()
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, c.Process.Pid, -20) // only root may; a process that gets no time looks idle
	s := &Server{pids: []int{c.Process.Pid}}
	var b []byte
	var err error
	for range 3 { // of which each takes a second if the process looks idle, so the process works for longer
		must.Succeed(t, settle(t.Context(), true, []*Server{s}))
		if b, err = os.ReadFile(out.Name()); err != nil || string(b) == "done\n" {
			break
		}
	}
	expect.That(t, err == nil && string(b) == "done\n", "got %q, %v while the process was busy, want done", b, err)
}

func TestMachineCPUIncludesThisProcess(t *testing.T) {
	before := must.Get(machineCPU())(t)
	self, _ := ownCPU()
	var sum [32]byte
	for range 1_000_000 {
		sum = sha256.Sum256(sum[:])
	}
	after := must.Get(machineCPU())(t)
	now, _ := ownCPU()
	if now-self < 3*tick || after-before < now-self-3*tick {
		t.Errorf("got %v for this process and %v for the machine, want at least %v and no less for the machine",
			now-self, after-before, 3*tick)
	}
}
