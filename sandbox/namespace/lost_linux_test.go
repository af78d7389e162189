// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// oneSlot returns a backend with one slot whose prepared pid 1 waits for a run like first, and both processes.
func oneSlot(t *testing.T, first *sandbox.Spec) (b *namespace.Backend, slot, one int) {
	t.Helper()
	b, _ = backend(t, namespace.Config{})
	must.Get(b.Run(t.Context(), first, sandbox.Stdio{}))(t)
	must.Hold(t, "a pid 1 waits for a run", func() bool { slot, one = waiting(t, b); return one > 0 })
	return b, slot, one
}

// waiting returns the process of a backend's only slot and its prepared pid 1, 0 if it has none.
func waiting(t *testing.T, b *namespace.Backend) (slot, one int) {
	t.Helper()
	slots := slotProcesses(t, b)
	if len(slots) != 1 {
		return 0, 0
	}
	ready := children(t, slots[0])
	if len(ready) != 1 || ready[0].state != "S" {
		return slots[0], 0
	}
	return slots[0], ready[0].pid
}

// An end is what Run returned.
type end struct {
	res *sandbox.Result
	err error
}

func kill(t *testing.T, pid int, signal syscall.Signal) {
	t.Helper()
	must.Succeed(t, syscall.Kill(pid, signal))
}

// TestSlotKilledBetweenRuns: whatever the killed slot was doing, the next run gets another, monitored or not.
func TestSlotKilledBetweenRuns(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	for i := range 30 {
		r := sandboxtest.Run{Script: "exit 3", Spec: func(s *sandbox.Spec) {
			if i%2 == 1 {
				s.Audit = sandbox.AuditOff
			}
		}}
		for _, pid := range slotProcesses(t, b) {
			time.Sleep(time.Duration(i) * 100 * time.Microsecond)
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have been about to end
		}
		r.Do(t, b)
		expect.That(t, r.Result.ExitCode == 3, "run %d: got %+v", i, r.Result)
	}
}

// TestSlotKilledWithARunUnread: another slot executes a run that the killed one had not begun.
func TestSlotKilledWithARunUnread(t *testing.T) {
	t.Parallel()
	s := script("echo begun; exit 3")
	b, _, _ := oneSlot(t, s)
	for range 100 {
		var slot, one int
		must.Hold(t, "a pid 1 waits for a run", func() bool { slot, one = waiting(t, b); return one > 0 })
		kill(t, slot, syscall.SIGSTOP)
		var said strings.Builder
		ended := make(chan end, 1)
		go func() {
			res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: &said})
			ended <- end{res, err}
		}()
		time.Sleep(20 * time.Millisecond) // enough for the run to be handed over, some time
		kill(t, slot, syscall.SIGKILL)
		if e := <-ended; e.err != nil || e.res.ExitCode != 3 || said.String() != "begun\n" {
			t.Fatalf("got %+v, %q, %v", e.res, &said, e.err)
		}
		if b.Lost() > 0 {
			return
		}
	}
	t.Error("no slot was killed with a run")
}

// TestBegunRunIsNotMadeAgain: a command whose start its slot missed is not executed a second time, monitored or not.
func TestBegunRunIsNotMadeAgain(t *testing.T) {
	t.Parallel()
	for _, audit := range []sandbox.Audit{sandbox.AuditViolations, sandbox.AuditOff} {
		s := script("echo begun; exec sleep 60")
		s.Audit, s.Timeout = audit, 20*time.Second
		first := *s
		first.Args = []string{"/bin/true"}
		b, slot, one := oneSlot(t, &first)
		// The slot waits for what pid 1 does, until it cannot see that either.
		kill(t, one, syscall.SIGSTOP)
		said := make(chan struct{})
		times := 0
		ended := make(chan end, 1)
		go func() {
			res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: writer(func() {
				if times++; times == 1 {
					close(said)
				}
			})})
			ended <- end{res, err}
		}()
		if !must.Poll(time.Minute, func() bool { return waitsIn(slot, "pipe_read") }) {
			kill(t, slot, syscall.SIGKILL)
			<-ended
			sandboxtest.Unavailable(t, "namespaces", "this kernel does not say where a process waits")
		}
		kill(t, slot, syscall.SIGSTOP)
		kill(t, one, syscall.SIGCONT)
		select {
		case <-said:
		case <-time.After(time.Minute):
			t.Errorf("audit %q: the command does not begin", audit)
		}
		kill(t, slot, syscall.SIGKILL)
		e := <-ended
		if e.err == nil || !strings.Contains(e.err.Error(), "after the command had started: it was killed by signal 9 (SIGKILL)") {
			t.Errorf("audit %q: got %+v, %v", audit, e.res, e.err)
		}
		expect.That(t, times == 1 && b.Lost() == 0, "audit %q: the command was executed %d times", audit, times)
	}
}

// waitsIn reports whether a thread of a process waits in a kernel function (proc_pid_wchan(5)).
func waitsIn(pid int, function string) bool {
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", pid))
	return slices.ContainsFunc(names, func(name string) bool {
		text, _ := os.ReadFile(name)
		return strings.Contains(string(text), function)
	})
}

// TestPidOneKilledBeforeItsRun: the run has not begun, and the slot prepares another pid 1.
func TestPidOneKilledBeforeItsRun(t *testing.T) {
	t.Parallel()
	s := script("exit 3")
	b, slot, one := oneSlot(t, s)
	kill(t, one, syscall.SIGKILL)
	must.Hold(t, "pid 1 ends", func() bool {
		left := children(t, slot)
		return len(left) == 1 && left[0].state == "Z"
	})
	res, err := b.Run(t.Context(), s, sandbox.Stdio{})
	if err != nil || res.ExitCode != 3 || b.Lost() != 1 {
		t.Errorf("got %+v, %v after the run was lost %d times, want once", res, err, b.Lost())
	}
	if slots := slotProcesses(t, b); len(slots) != 1 || slots[0] != slot {
		t.Errorf("got slots %v, want %d", slots, slot)
	}
}

// TestPidOneKilledDuringItsRun: the command dies through no fault of its own, so Run returns an error.
func TestPidOneKilledDuringItsRun(t *testing.T) {
	t.Parallel()
	s := script("true")
	b, _, one := oneSlot(t, s)
	s.Args, s.Timeout = []string{"/bin/sleep", "60"}, 30*time.Second
	ended := make(chan end, 1)
	go func() {
		res, err := b.Run(t.Context(), s, sandbox.Stdio{})
		ended <- end{res, err}
	}()
	must.Hold(t, "the command is there", func() bool { return len(children(t, one)) == 1 && children(t, one)[0].name == "sleep" })
	kill(t, one, syscall.SIGKILL)
	if e := <-ended; e.err == nil || !strings.Contains(e.err.Error(), "pid 1 of the run was killed by another process (SIGKILL)") {
		t.Errorf("got %+v, %v", e.res, e.err)
	}
	expect.That(t, b.Lost() == 0, "a run that had begun was tried again")
}

// TestSlotSaysWhyItLostARun: a slot out of descriptors reports that and stays usable.
func TestSlotSaysWhyItLostARun(t *testing.T) {
	t.Parallel()
	s := script("exit 3")
	b, slot, _ := oneSlot(t, s)
	var before unix.Rlimit
	must.Succeed(t, unix.Prlimit(slot, unix.RLIMIT_NOFILE, nil, &before))
	must.Succeed(t, unix.Prlimit(slot, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: before.Max}, nil))
	res, err := b.Run(t.Context(), s, sandbox.Stdio{})
	if err == nil || !strings.Contains(err.Error(), "it reports: receive a run: too many open files to receive a descriptor") {
		t.Errorf("got %+v, %v", res, err)
	}
	if b.Lost() != 3 {
		t.Errorf("the run was tried %d times, want 3", b.Lost())
	}
	must.Succeed(t, unix.Prlimit(slot, unix.RLIMIT_NOFILE, &before, nil))
	res, err = b.Run(t.Context(), s, sandbox.Stdio{})
	if slots := slotProcesses(t, b); err != nil || res.ExitCode != 3 || len(slots) != 1 || slots[0] != slot {
		t.Errorf("got %+v, %v, and slots %v, want %d", res, err, slots, slot)
	}
}

// TestEndedRunOutlivesItsSlot: a slot that dies after the end of a run does not fail the run; one that reports an error
// does.
func TestEndedRunOutlivesItsSlot(t *testing.T) {
	t.Parallel()
	pair := func() (ours, theirs int) {
		sv := must.Get(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))(t)
		return sv[0], sv[1]
	}
	for _, said := range [][]string{nil, {"."}} {
		ours, theirs := pair()
		for _, packet := range said {
			must.Succeed(t, zygote.Send(theirs, []byte(packet)))
		}
		unix.Close(theirs)
		if n, known, err := namespace.LeaveNetwork(ours); n != 0 || known || err != nil {
			t.Errorf("of a slot that said %q and died: got %d, known %t, %v", said, n, known, err)
		}
	}
	ours, theirs := pair()
	defer unix.Close(theirs)
	must.Succeed(t, errors.Join(zygote.Send(theirs, []byte(".")), zygote.Send(theirs, []byte(".no room"))))
	if _, _, err := namespace.LeaveNetwork(ours); err == nil || err.Error() != "network of the run: no room" {
		t.Errorf("of a slot that cannot: got %v", err)
	}
}

// TestStopIsNotLost: a run whose socket takes no more messages is stopped nevertheless, at once.
func TestStopIsNotLost(t *testing.T) {
	t.Parallel()
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must.Succeed(t, err)
	defer unix.Close(sv[0])
	defer unix.Close(sv[1])
	must.Succeed(t, unix.SetNonblock(sv[0], true))
	for err == nil {
		err = zygote.Send(sv[0], []byte(zygote.WordTerm))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	namespace.Stop(ctx, sv[0])
	for err = unix.SetNonblock(sv[1], true); err == nil; {
		_, _, err = zygote.Receive(sv[1])
	}
	expect.That(t, errors.Is(err, os.ErrClosed), "pid 1 reads %v after what was sent, want the end", err)
}
