// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// initMain is pid 1 of one run. When it exits, however that comes about, the kernel kills every other
// process of its pid namespace before it is reaped.
func initMain() {
	// no_new_privs and the blocked signals belong to a thread and are inherited from the one that forks.
	runtime.LockOSThread()
	unix.CloseOnExec(initPlan)
	unix.CloseOnExec(initControl)
	unix.CloseOnExec(initWorkspace)

	// Runtime threads take process ids; the command's is nearly always the same if the kernel lets us
	// say which comes next (ns_last_pid, a file of checkpoint and restore). Where it does not, or where a
	// thread comes in between, it is some other small number, which no promise depends on.
	lastPID, _ := unix.Open("/proc/sys/kernel/ns_last_pid", unix.O_WRONLY|unix.O_CLOEXEC, 0)

	fail := func(err error) {
		report(initControl, Report{Failed: fmt.Sprintf("%.2000s", err)}) // a packet has room for that
		os.Exit(1)
	}
	if len(os.Args) != 3 {
		fail(errors.New("init was started without its arguments"))
	}
	if err := resetSignals(); err != nil {
		fail(err)
	}
	uid, err := strconv.Atoi(os.Args[1])
	if err != nil {
		fail(err)
	}
	rootless := os.Args[2] == "true"
	var plan Plan
	if err := readPlan(initPlan, &plan); err != nil {
		fail(fmt.Errorf("read plan: %w", err))
	}
	// Before most else, so that its thread has a process id below the command's.
	var term terminator
	go obey(&term)
	if err := name(plan.Loopback); err != nil {
		fail(err)
	}
	if err := makeRoot(&plan); err != nil {
		fail(err)
	}
	if err := restrict(uid); err != nil {
		fail(err)
	}
	// Taken before the start, so that no time of the command is missing.
	started := Report{Started: time.Now().UnixNano()}
	pid, err := startCommand(&plan, uid, rootless, lastPID)
	if err != nil {
		var no *cannotExec
		if !errors.As(err, &no) {
			fail(err)
		}
		fmt.Fprintf(os.Stderr, "cloister: %v\n", no)
		report(initControl, started)
		report(initControl, Report{Exited: &Exited{Code: no.code, At: time.Now().UnixNano()}})
		return
	}
	term.start()
	report(initControl, started)
	report(initControl, Report{Exited: reap(pid)})
}

// readPlan reads the plan from its start, wherever other holders of the descriptor stand.
func readPlan(fd int, into *Plan) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	b := make([]byte, st.Size)
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		if err != nil || m == 0 {
			return fmt.Errorf("short plan: %d of %d bytes: %w", n, len(b), err)
		}
		n += m
	}
	return json.Unmarshal(b, into)
}

// obey does what the worker says. When the worker is gone it ends the run.
func obey(term *terminator) {
	for {
		word, _, err := Receive(initControl)
		if err != nil || string(word) == WordKill {
			os.Exit(1)
		}
		if string(word) == WordTerm {
			term.tell()
		}
	}
}

// A terminator tells every process of the run once that it is to end, whether the word comes before, while or
// after the command is started.
type terminator struct {
	mu            sync.Mutex
	told, started bool
}

// tell is called when the word comes.
func (t *terminator) tell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.told = true
	t.send()
}

// start is called when the command has been started.
func (t *terminator) start() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started = true
	t.send()
}

func (t *terminator) send() {
	if t.told && t.started {
		// From pid 1, -1 is every process of the namespace but pid 1.
		_ = unix.Kill(-1, unix.SIGTERM)
	}
}

// reap waits for orphans and for the command, and returns how the command ended.
func reap(command int) *Exited {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			// The command cannot be waited for, which cannot happen while it is our child.
			return &Exited{Signal: int(unix.SIGKILL), At: time.Now().UnixNano()}
		}
		if pid != command || !ws.Exited() && !ws.Signaled() {
			continue
		}
		e := &Exited{At: time.Now().UnixNano()}
		if ws.Signaled() {
			e.Signal = int(ws.Signal())
		} else {
			e.Code = ws.ExitStatus()
		}
		return e
	}
}
