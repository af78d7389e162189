// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// tryOut finds what the groups can do by using one, unless their creation failed. Missing lists what is known to be
// missing.
func (h *Host) tryOut(failed error, missing []error, fix string) (*Host, error) {
	if failed != nil {
		return h.none(failed, fix)
	}
	g, err := h.New("try")
	if err != nil {
		return h.none(err, fix)
	}
	const some = 64 << 20
	if err := g.Reset(Limits{some, Unlimited, Unlimited, Unlimited}); err != nil {
		missing = append(missing, err)
	} else if got := g.value("memory", "memory.limit_in_bytes", "memory.max"); got != strconv.Itoa(some) {
		missing = append(missing, fmt.Errorf("the memory limit is %q after setting it to %d", got, some))
	} else {
		h.can.LimitMemory = true
	}
	// These are optional, so not missing.
	if g.Reset(Limits{Unlimited, Unlimited, 10, Unlimited}) == nil {
		h.can.LimitCPUs = strings.HasPrefix(g.value("cpu", "cpu.cfs_quota_us", "cpu.max"), "1000")
	}
	if g.Reset(Limits{Unlimited, Unlimited, Unlimited, some}) == nil {
		h.can.LimitDisks = strings.Contains(g.value("io", "", "io.max"), "rbps="+strconv.Itoa(some))
	}
	h.can.CountMemory = g.memoryPeak != nil
	h.can.CountIO = g.io != nil

	var unlimited error
	inThread(func() { unlimited, err = h.tryProcesses(g) })
	if unlimited != nil {
		missing = append(missing, unlimited)
	}
	if err := errors.Join(err, g.Remove()); err != nil {
		return h.none(err, fix)
	}
	if !h.can.LimitMemory && !h.can.LimitProcesses {
		return h.none(errors.Join(missing...), fix)
	}
	if !h.can.LimitMemory || !h.can.LimitProcesses {
		h.explain(errors.Join(missing...), fix)
	}
	return h, nil
}

// value returns a limit as the kernel reports it.
func (g *Group) value(controller, v1, v2 string) string {
	name := v2
	if g.mode == V1 {
		name = v1
	}
	b, err := os.ReadFile(filepath.Join(g.dirs[controller], name))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// tryProcesses starts processes in g. Unlimited is why their number cannot be limited.
func (h *Host) tryProcesses(g *Group) (unlimited, err error) {
	dir, tasks := g.Join()
	for _, t := range tasks {
		if _, err := t.WriteString("0"); err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
	}
	if unlimited = g.Reset(Limits{Unlimited, 1, Unlimited, Unlimited}); unlimited == nil {
		// No further process may start. The module cannot set a limit of zero.
		most := []byte(strconv.FormatInt(g.joined(), 10))
		if unlimited = os.WriteFile(filepath.Join(g.dirs["pids"], "pids.max"), most, 0); unlimited == nil {
			refused := start(dir)
			u, err := g.Sample()
			if h.can.LimitProcesses = refused != nil && u.ForksRefused > 0; !h.can.LimitProcesses {
				unlimited = fmt.Errorf("the limit of processes is not enforced: %w", errors.Join(refused, err))
			}
		}
	}
	if err := g.Reset(noLimits); err != nil {
		return unlimited, err
	}
	if err := start(dir); err != nil {
		return unlimited, fmt.Errorf("start a process in a group: %w", err)
	}
	// A thread's time is counted when it gives up the processor.
	if err := unix.Nanosleep(&unix.Timespec{Nsec: 1000}, nil); err != nil && err != unix.EINTR {
		return unlimited, err
	}
	u, err := g.Sample()
	h.can.CountCPU = u.User+u.System > 0
	return unlimited, err
}

// inThread calls f in a thread that ends soon after. It is never the main thread, which would stay.
func inThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			inThread(f)
			runtime.UnlockOSThread()
			return
		}
		f() // the thread ends with the goroutine that is locked to it
	}()
	<-done
}

// start starts a process in the group of version 2, or in that of this thread if dir is negative. Its program cannot
// exist, so it has ended when start returns.
func start(dir int) error {
	_, err := syscall.ForkExec("/dev/null/none", nil, &syscall.ProcAttr{
		Sys: &syscall.SysProcAttr{UseCgroupFD: dir >= 0, CgroupFD: dir},
	})
	if err == unix.ENOTDIR {
		return nil
	}
	return err
}
