// SPDX-License-Identifier: Apache-2.0

package jobobject

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
	"golang.org/x/sys/windows"
)

const (
	// endTime is how long killed processes may take to vanish, and outputs to be read.
	endTime = 10 * time.Second
	// exitKilled is the exit code of killed processes.
	exitKilled = 128 + int(syscall.SIGKILL)
)

// A process is the first process of a job.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended
}

// start starts a program in the job. It executes nothing before it belongs to the job, and nothing at all unless
// resume.
func (j *job) start(file string, args, env []string, dir string, std sandbox.Stdio, resume bool) (*process, error) {
	token, err := restrictedToken()
	if err != nil {
		return nil, fmt.Errorf("restricted token: %w", err)
	}
	defer token.Close()
	cmd := exec.Command(file) //nolint:noctx // follow ends it
	cmd.Args, cmd.Env, cmd.Dir, cmd.WaitDelay = args, env, dir, endTime
	if env == nil {
		cmd.Env = []string{} // nil means that of the worker
	}
	cmd.Stdout, cmd.Stderr = std.Stdout, std.Stderr
	if std.Stdin != nil {
		cmd.Stdin = std.Stdin
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Token: syscall.Token(token), CreationFlags: windows.CREATE_SUSPENDED | windows.CREATE_NEW_PROCESS_GROUP, HideWindow: true,
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd, make(chan struct{})}
	err = j.adopt(p, resume)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, err
	}
	return p, nil
}

// adopt puts the suspended process into the job.
func (j *job) adopt(p *process, resume bool) error {
	pid := uint32(p.cmd.Process.Pid)
	h, err := windows.OpenProcess(windows.PROCESS_SET_QUOTA|windows.PROCESS_TERMINATE|windows.SYNCHRONIZE, false, pid)
	if err != nil {
		return fmt.Errorf("open the process: %w", err)
	}
	err = windows.AssignProcessToJobObject(j.handle, h)
	if err == nil && resume {
		err = resumeProcess(pid)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("put the process into the job: %w", err), windows.CloseHandle(h))
	}
	go func() {
		defer close(p.exited)
		defer func() { _ = windows.CloseHandle(h) }()
		_, _ = windows.WaitForSingleObject(h, windows.INFINITE)
	}()
	return nil
}

// A run is a running command.
type run struct {
	*backend
	limits  *sandbox.Limits
	placed  *placement.Run
	job     *job
	process *process

	fullProcesses int // how often the limit of processes was hit
}

// follow waits until the run has ended or must be killed, kills what is left of it, and completes res. Windows has no
// SIGTERM, so the grace period is not used.
func (r *run) follow(ctx context.Context, res *sandbox.Result) error {
	endErr := r.Await(ctx, r.placed, res, r.process.exited, r.exceeded, nil)
	res.End = time.Now()
	if err := r.job.kill(); err != nil {
		return errors.Join(endErr, err)
	}
	<-r.process.exited
	if err := r.process.cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		endErr = errors.Join(endErr, fmt.Errorf("copy the run's output: %w", err))
	}
	used, err := r.job.usage()
	if err = errors.Join(endErr, err); err != nil {
		return err
	}
	if e := r.exceeded(); res.Exceeded == nil {
		res.Exceeded = e
	}
	if r.fullProcesses > 0 {
		e := limit.Event(sandbox.LimitProcesses, r.limits.Processes, r.limits.Processes)
		e.Count = r.fullProcesses
		res.Events = append(res.Events, *e)
	}
	res.ExitCode = r.process.cmd.ProcessState.ExitCode()
	if res.ExitCode == exitKilled && (res.Stopped || res.Exceeded != nil) {
		res.Signal = syscall.SIGKILL
	}
	res.Usage.User, res.Usage.System, res.Usage.Measured.CPU = used.user, used.kernel, true
	res.Usage.PeakRSS = used.peakProcess
	res.Usage.PeakMemory, res.Usage.Measured.PeakMemory = used.peakMemory, used.peakMemory > 0
	return nil
}

// exceeded returns the event for a limit of the job that the run has reached, or nil.
func (r *run) exceeded() *sandbox.Event {
	memory, processes := r.job.messages()
	r.fullProcesses += processes
	used, err := r.job.usage()
	switch l := r.limits; {
	case err != nil: // follow reports it
		return nil
	case memory:
		return limit.Event(sandbox.LimitMemory, max(used.peakMemory, l.Memory), l.Memory)
	case l.CPU != sandbox.Unlimited && used.user+used.kernel >= l.CPU:
		return limit.Event(sandbox.LimitCPU, int64(used.user+used.kernel), int64(l.CPU))
	}
	return nil
}
