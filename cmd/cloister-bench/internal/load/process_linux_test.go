// SPDX-License-Identifier: Apache-2.0

package load

import (
	"crypto/sha256"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// TestUsage compares what /proc says of this process with what the kernel tells it.
func TestUsage(t *testing.T) {
	var sum [32]byte
	for range 1_000_000 { // more than a tick
		sum = sha256.Sum256(sum[:])
	}
	self := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			t.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := self()
	u, err := usageOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// User and system time are rounded each.
	if after := self(); u.cpu < before-2*tick || u.cpu > after+2*tick {
		t.Errorf("CPU time is %v, want %v to %v", u.cpu, before, after)
	}
	if before < 3*tick {
		t.Errorf("this process has used %v only, which shows nothing", before)
	}
	if u.anonymous < 1<<20 || u.peak < u.anonymous {
		t.Errorf("%d bytes are resident at most, %d of no file now", u.peak, u.anonymous)
	}
}

// TestFamilies has a child and a grandchild of this process work, while they live and when they have ended.
func TestFamilies(t *testing.T) {
	// The shell says when its child has ended, works itself, and waits.
	c := exec.Command("/bin/sh", "-c", `busy='i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'
		/bin/sh -c "$busy"; eval "$busy"; echo ready; read line`)
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	pids := []int{os.Getpid()}
	livingBefore, endedBefore, err := families(pids)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	living, ended, err := families(pids)
	if err != nil {
		t.Fatal(err)
	}
	_, ofChild, err := families([]int{c.Process.Pid})
	if err != nil {
		t.Fatal(err)
	}
	if living-livingBefore < tick || ofChild < tick || ended-endedBefore < ofChild {
		t.Errorf("living %v, ended %v, of the child's %v", living-livingBefore, ended-endedBefore, ofChild)
	}
	in.Close()
	if err := c.Wait(); err == nil {
		t.Fatal("the shell has read a line")
	}
	_, endedAfter, err := families(pids)
	if err != nil {
		t.Fatal(err)
	}
	if endedAfter-ended < tick {
		t.Errorf("a child has ended, and %v are added", endedAfter-ended)
	}
	if l, e, err := families(nil); l != 0 || e != 0 || err != nil {
		t.Errorf("nobody has used %v and %v, %v", l, e, err)
	}
}

func TestMachineIsBusyWithThisProcess(t *testing.T) {
	before, err := machineCPU()
	if err != nil {
		t.Fatal(err)
	}
	self, _ := ownCPU()
	var sum [32]byte
	for range 1_000_000 {
		sum = sha256.Sum256(sum[:])
	}
	after, err := machineCPU()
	if err != nil {
		t.Fatal(err)
	}
	now, _ := ownCPU()
	if now-self < 3*tick || after-before < now-self-3*tick {
		t.Errorf("this process was busy for %v, the machine for %v", now-self, after-before)
	}
}
