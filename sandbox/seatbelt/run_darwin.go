// SPDX-License-Identifier: Apache-2.0

package seatbelt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"golang.org/x/sys/unix"
)

// endTime is how long killed processes may take to vanish.
const endTime = 10 * time.Second

// A backend runs each command under a profile of its own.
type backend struct{ *placement.Host }

// New returns a backend. The caller closes it.
func New() sandbox.Backend { return &backend{placement.NewHost()} }

// Probe runs commands under profiles: one that writes where it may, and one that tries to write elsewhere.
func (b *backend) Probe(ctx context.Context) (sandbox.Features, error) {
	f := features()
	detail, err := b.probe(ctx)
	check := sandbox.Check{Name: "sandbox-exec", OK: err == nil, Detail: detail, Required: true}
	if err != nil {
		check.Detail, f.Tier = err.Error(), "none"
		err = preflight.Fail(preflight.SeatbeltProbe, "sandbox-exec: %w", err)
	}
	f.Checks = append([]sandbox.Check{check}, f.Checks...)
	return f, err
}

func (b *backend) probe(ctx context.Context) (string, error) {
	outside, err := os.MkdirTemp("", "cloister-probe-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(outside)
	tools, err := sandbox.HostToolchain()
	if err != nil {
		return "", err
	}
	spec := &sandbox.Spec{
		Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"}, Inputs: tools, Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}},
		Limits: sandbox.Limits{
			Memory: sandbox.Unlimited, CPU: sandbox.Unlimited, Processes: sandbox.Unlimited, OpenFiles: 256, OutputBytes: 1 << 20,
			OutputFiles: 10, MilliCPUs: sandbox.Unlimited, DiskRate: sandbox.Unlimited,
		},
		Audit: sandbox.AuditOff, Accept: Name, Timeout: 10 * time.Second,
	}
	forbidden := filepath.Join(outside, "file")
	spec.Args = []string{"/bin/sh", "-c", `echo inside > file || exit 10; (echo outside > "$0") 2> /dev/null && exit 11; exit 0`, forbidden}
	res, err := b.Run(ctx, spec, sandbox.Stdio{})
	if err != nil {
		return "", err
	}
	_, statErr := os.Stat(forbidden)
	if res.ExitCode != 0 || !errors.Is(statErr, os.ErrNotExist) {
		return "", fmt.Errorf("the probe ended with exit code %d, and the file that it must not write: %w", res.ExitCode, statErr)
	}
	return "a program wrote to its temporary directory and could not write elsewhere", nil
}

// Run runs spec.
func (b *backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	f := features()
	return b.Host.Run(ctx, &f, spec, std, func(placed *placement.Run, file string, res *sandbox.Result) error {
		return b.execute(ctx, spec, std, placed, file, res)
	})
}

func (b *backend) execute(
	ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, placed *placement.Run, file string, res *sandbox.Result,
) error {
	profile, err := b.File(Profile(placed, &spec.Network))
	if err != nil {
		return fmt.Errorf("profile of the run: %w", err)
	}
	defer os.Remove(profile)
	args, err := launch(spec, placed, profile, file)
	if err != nil {
		return err
	}
	prologue, status, err := os.Pipe()
	if err != nil {
		return err
	}
	defer prologue.Close()
	cmd := exec.Command("/bin/sh", args...) //nolint:noctx // follow ends it
	cmd.Env, cmd.Dir, cmd.ExtraFiles = []string{}, placed.Dir, []*os.File{status}
	stderr := &head{w: std.Stderr}
	cmd.Stdout, cmd.Stderr = std.Stdout, stderr
	if wire.SameWriter(std.Stdout, std.Stderr) {
		cmd.Stdout = stderr
	}
	if std.Stdin != nil {
		cmd.Stdin = std.Stdin
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = endTime // a process that was not counted may keep the output open
	err = cmd.Start()
	status.Close()
	switch {
	case errors.Is(err, unix.E2BIG):
		return placement.TooLong(file)
	case err != nil:
		return fmt.Errorf("start of the run: %w", err)
	}
	r := &run{
		backend: b, placed: placed, cmd: cmd, prologue: prologue, stderr: stderr,
		family: family{group: cmd.Process.Pid, known: map[int]int64{}},
	}
	return r.follow(ctx, res)
}

// A run is a running command.
type run struct {
	*backend
	placed   *placement.Run
	cmd      *exec.Cmd
	prologue *os.File // ends when the shell does
	stderr   *head
	family   family
}

// follow waits until the run has ended or must be killed, kills what is left of it, and completes res.
func (r *run) follow(ctx context.Context, res *sandbox.Result) error {
	exited := make(chan struct{})
	var waitErr error
	go func() {
		defer close(exited)
		waitErr = waitExit(r.cmd.Process.Pid)
	}()
	endErr := r.Await(ctx, r.placed, res, exited, r.count, r.terminate)
	res.End = time.Now()
	err := r.kill()
	<-exited
	err = errors.Join(err, waitErr, endErr)
	if e := r.cmd.Wait(); e != nil && !errors.As(e, new(*exec.ExitError)) {
		err = errors.Join(err, fmt.Errorf("copy the run's output: %w", e))
	}
	if err != nil {
		return err
	}
	prologue, err := io.ReadAll(r.prologue)
	if err == nil && !res.Stopped && res.Exceeded == nil {
		err = launchError(string(prologue), string(r.stderr.text))
	}
	if err != nil {
		return err
	}
	status := r.cmd.ProcessState.Sys().(syscall.WaitStatus)
	res.ExitCode = status.ExitStatus()
	if status.Signaled() {
		res.Signal, res.ExitCode = status.Signal(), 128+int(status.Signal())
	}
	res.Usage.User, res.Usage.System = r.cmd.ProcessState.UserTime(), r.cmd.ProcessState.SystemTime()
	if u, ok := r.cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		res.Usage.PeakRSS = u.Maxrss // in bytes, on this system
		res.Usage.VoluntarySwitches, res.Usage.InvoluntarySwitches = u.Nvcsw, u.Nivcsw
	}
	return nil
}

// count remembers the processes of the run, to know those that leave its group.
func (r *run) count() *sandbox.Event {
	_, _ = r.alive() // kill reports errors
	return nil
}

func (r *run) terminate() {
	pids, _ := r.alive() // kill reports errors
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGTERM)
	}
}

// alive returns the processes of the run that were ever seen and are alive.
func (r *run) alive() ([]int, error) {
	entries, err := unix.SysctlKinfoProcSlice("kern.proc.all")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	table := make([]process, 0, len(entries))
	for i := range entries {
		e := &entries[i]
		if e.Proc.P_stat == zombie {
			continue
		}
		start := e.Proc.P_starttime
		table = append(table, process{int(e.Proc.P_pid), int(e.Eproc.Ppid), int(e.Eproc.Pgid), start.Sec*1_000_000 + int64(start.Usec)})
	}
	return r.family.update(table), nil
}

// waitExit waits until the process has ended, but leaves it to Wait: until then its ID remains that of the group.
func waitExit(pid int) error {
	queue, err := unix.Kqueue()
	if err != nil {
		return fmt.Errorf("kqueue: %w", err)
	}
	defer unix.Close(queue)
	change := make([]unix.Kevent_t, 1)
	unix.SetKevent(&change[0], pid, unix.EVFILT_PROC, unix.EV_ADD|unix.EV_ONESHOT)
	change[0].Fflags = unix.NOTE_EXIT
	for {
		_, err := unix.Kevent(queue, change, make([]unix.Kevent_t, 1), nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err == nil || errors.Is(err, unix.ESRCH): // it has already ended
			return nil
		default:
			return fmt.Errorf("kevent: %w", err)
		}
	}
}

// zombie is SZOMB of sys/proc.h.
const zombie = 5

// kill kills the processes of the run until none is left.
func (r *run) kill() error {
	for deadline := time.Now().Add(endTime); ; time.Sleep(5 * time.Millisecond) {
		pids, err := r.alive()
		if err != nil {
			return errors.Join(err, unix.Kill(-r.family.group, unix.SIGKILL))
		}
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of the run did not end within %v of their kill", len(pids), endTime)
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}
