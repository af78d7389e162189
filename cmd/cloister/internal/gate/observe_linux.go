// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/proctree"
	"github.com/cloister-build/cloister/sandbox"
	"golang.org/x/sys/unix"
)

// sampling is the interval between two lists of sockets.
const sampling = 100 * time.Millisecond

// observe runs a step without a sandbox, in a directory of its own. It also returns the record of the observer. No
// other step may run, because every new descendant of this process counts as part of this one.
func (g *gate) observe(ctx context.Context, s *step, r *stepReport, src *source, std sandbox.Stdio) (*sandbox.Result, []byte, error) {
	for _, e := range s.hosts {
		if _, err := netip.ParseAddr(e.host); err != nil && !e.expired(g.today) {
			return nil, nil, fmt.Errorf("%s shows only addresses and cannot check the exception for %s", g.observer.program, e.host)
		}
	}
	dir := filepath.Join(g.dir, "step-"+s.id)
	files, temp, trace := filepath.Join(dir, "files"), filepath.Join(dir, "tmp"), filepath.Join(dir, "trace")
	if err := os.MkdirAll(temp, 0o755); err != nil {
		return nil, nil, err
	}
	defer func() { _ = localworker.RemoveAll(dir) }() // what it leaves, the gate reports
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	_, sum, err := src.copyTo(root, "files")
	if err != nil {
		return nil, nil, fmt.Errorf("inputs: %w", err)
	}
	r.Inputs = src.describe(sum)
	args := append([]string{"/bin/sh", "-c", `exec "$@"`, "sh"}, s.command...) // the shell searches the PATH of the step
	if g.observer == strace {
		args = slices.Concat([]string{"strace"}, straceFlags, []string{trace}, args)
	}
	limited, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	cmd := exec.CommandContext(limited, args[0], args[1:]...)
	cmd.Dir, cmd.Env = files, sandbox.Environment(s.environment(src, "HOME="+temp, "TMPDIR="+temp)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = std.Stdout, std.Stderr, grace
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	o := newObservation(s, s.endpoints(g.today), dir)
	result := &sandbox.Result{}
	record, err := g.runObserved(context.WithoutCancel(ctx), cmd, o, result)
	if cmd.ProcessState == nil {
		return nil, nil, err
	}
	if g.observer == strace {
		var unread error
		if record, unread = o.readTrace(trace); unread == nil && cmd.ProcessState.Exited() && !o.exited {
			unread = errCut
		}
		err = errors.Join(err, unread)
	}
	err = errors.Join(err, o.failed)
	result.Events, result.Executed, r.Message = o.events(), slices.Sorted(maps.Keys(o.executed)), o.blind
	return result, record, err
}

// runObserved runs a command and ends all processes that it leaves. It returns what ss listed meanwhile.
func (g *gate) runObserved(ctx context.Context, cmd *exec.Cmd, o *observation, result *sandbox.Result) (listed []byte, err error) {
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("adopt orphans: %w", err)
	}
	before, err := proctree.Of(os.Getpid())
	if err != nil {
		return nil, err
	}
	cmd.Cancel = func() error {
		result.Stopped = true
		left, err := since(before)
		for _, p := range left {
			if p.Name != g.observer.program { // which follows them to their end
				_ = syscall.Kill(p.PID, syscall.SIGTERM) // it may have ended
			}
		}
		return err
	}
	result.Start = time.Now()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited, all := make(chan struct{}), make(chan []byte, 1)
	go func() {
		var text []byte
		for last := g.observer != ss; !last; {
			select {
			case <-exited:
				last = true // processes that it left may still listen
			case <-time.After(sampling):
			}
			text = append(text, o.sample(ctx, before)...)
		}
		all <- text
	}()
	_ = cmd.Wait() // its state says how it ended, and a process that it left may hold the output
	result.End = time.Now()
	if result.ExitCode = cmd.ProcessState.ExitCode(); result.ExitCode < 0 {
		result.ExitCode = 128 + int(cmd.ProcessState.Sys().(syscall.WaitStatus).Signal())
	}
	close(exited)
	listed = <-all
	return listed, g.endAll(before)
}

// since returns the descendants of this process that are not among before.
func since(before []proctree.Process) ([]proctree.Process, error) {
	all, err := proctree.Of(os.Getpid())
	return slices.DeleteFunc(all, func(p proctree.Process) bool {
		return slices.ContainsFunc(before, func(b proctree.Process) bool { return b.PID == p.PID })
	}), err
}

// sample lists sockets of new processes.
func (o *observation) sample(ctx context.Context, before []proctree.Process) string {
	ours, err := since(before)
	if err != nil {
		o.failed = fmt.Errorf("not observed: list processes: %w", err)
		return ""
	}
	text, err := exec.CommandContext(ctx, ss.program, ssFlags...).Output()
	if err != nil {
		o.failed = fmt.Errorf("not observed: ss: %w", err)
		return ""
	}
	later, err := since(before) // a listed process may have begun or ended meanwhile
	if err != nil {
		o.failed = fmt.Errorf("not observed: list processes: %w", err)
		return ""
	}
	ours = append(ours, later...)
	return o.list(string(text), func(pid string) bool {
		return slices.ContainsFunc(ours, func(p proctree.Process) bool { return strconv.Itoa(p.PID) == pid })
	})
}

// endAll kills all new processes. strace gets time to end after the others. If listing processes fails, for example
// because of too many open files, endAll retries for a minute.
func (g *gate) endAll(before []proctree.Process) error {
	began := time.Now()
	for {
		left, err := since(before)
		waited := time.Since(began)
		switch {
		case err == nil && len(left) == 0:
			return nil
		case err != nil && waited > time.Minute:
			return fmt.Errorf("end the processes of the step: %w", err)
		case waited > time.Minute:
			return fmt.Errorf("process %d (%s) of the step survives SIGKILL", left[0].PID, left[0].Name)
		}
		for _, p := range left {
			if g.observer != strace || p.Name != strace.program || waited > grace {
				_ = syscall.Kill(p.PID, syscall.SIGKILL) // it may have ended
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// readTrace reads the output of strace and returns its beginning.
func (o *observation) readTrace(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var kept logBuffer
	err = o.trace(io.TeeReader(f, &kept))
	return kept.Bytes(), err
}
