// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/source"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

const (
	// overhead is added to the limit of memory for gVisor itself: the sandbox's kernel, the gofer, runsc and the launcher.
	overhead = 64 << 20
	// A run has at most hostProcesses processes and threads on this host, and hostProcessesPerProcess more for each
	// process that it may have. gVisor needs about 33 and 2; a run that has taken it over gets no more than the limit.
	hostProcesses           = 512
	hostProcessesPerProcess = 8
	// maxProcesses keeps the product below the kernel's highest number of a process (PID_MAX_LIMIT).
	maxProcesses = 500_000
	// interval is how often a run's use is checked, as in package namespace.
	interval = 200 * time.Millisecond
	// endTime is how long a killed run may take to vanish.
	endTime = 30 * time.Second
	// outputTime is how long its diagnostics may stay open after the launcher, which ends last, has ended.
	outputTime = 5 * time.Second
	// maxDiagnostics bounds what is kept of the text that runsc and the launcher print.
	maxDiagnostics = 16 << 10
	// maxMessages is the number of messages to a guest: what it does, the word to start, and the request to end.
	maxMessages = 3
)

// Run runs spec.
func (b *backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := b.start(); err != nil {
		return nil, err
	}
	features := b.features()
	if err := features.Covers(spec); err != nil {
		return nil, err
	}
	if std.Terminal != nil {
		return nil, fmt.Errorf("%w: a run in gVisor cannot have a terminal", sandbox.ErrUnsupported)
	}
	if slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return in.Image != "" }) ||
		slices.ContainsFunc(spec.Lower, func(l sandbox.Lower) bool { return l.Image != "" }) {
		return nil, fmt.Errorf("%w: this backend mounts no images", sandbox.ErrSpec)
	}
	c, err := b.acquire()
	if err != nil {
		return nil, err
	}
	r := &run{b: b, spec: spec, cell: c, messages: make(chan []byte, maxMessages)}
	defer func() { b.release(c, r.alive) }()
	if err := r.limit(); err != nil {
		return nil, err
	}
	if err := r.start(std); err != nil {
		return nil, errors.Join(err, r.end())
	}
	return r.follow(ctx)
}

// A run is the worker's side of one run.
type run struct {
	b    *backend
	spec *sandbox.Spec
	cell *cell

	launcher *exec.Cmd
	life     *os.File           // the run ends when it is closed
	in       *os.File           // to the guest, which may not read it
	messages chan []byte        // for the guest; sending to it never blocks
	reports  chan zygote.Report // closed when the guest is gone
	diag     diagnostics

	serving sync.WaitGroup // goroutines that end with the run
	outputs []*os.File     // of the guest and the command
	copyErr [2]error
	alive   bool // the end of the processes was not seen

	noBytes, noFiles bool // the workspace was full at some time
}

// limit prepares the control group.
func (r *run) limit() error {
	if r.cell.group == nil {
		return nil
	}
	of := &r.spec.Limits
	l := cgroup.Limits{Memory: of.Memory, Processes: cgroup.Unlimited, MilliCPUs: of.MilliCPUs, DiskRate: of.DiskRate}
	if of.Processes != sandbox.Unlimited && r.b.groups.Capabilities().LimitProcesses {
		l.Processes = hostProcesses + min(of.Processes, maxProcesses)*hostProcessesPerProcess
	}
	if l.Memory != sandbox.Unlimited {
		l.Memory += overhead
	}
	if err := r.cell.group.Reset(l); err != nil {
		return fmt.Errorf("limits of the run: %w", err)
	}
	return nil
}

// start starts the launcher.
func (r *run) start(std sandbox.Stdio) error {
	launch, guest, err := plan(r.spec, r.b.runsc, zygote.CommandUser(r.cell.number))
	if err != nil {
		return err
	}
	// theirs are closed here once the launcher has them: its stdin, and its other descriptors in their order.
	life, plan, theirs, err := r.pipes(std)
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	if err != nil {
		return err
	}
	defer plan.Close()
	r.life = life
	if r.spec.Workspace != "" {
		w, err := os.OpenFile(r.spec.Workspace, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return fmt.Errorf("workspace %s: %w", r.spec.Workspace, err)
		}
		theirs = append(theirs, w)
	}
	group, tasks, err := r.join(launch)
	if err != nil {
		return err
	}
	theirs = append(theirs, group...)
	launchText, err := json.Marshal(launch)
	if err != nil {
		return err
	}
	guestText, err := json.Marshal(guest)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // follow ends it
	cmd.Args, cmd.Env, cmd.Dir = []string{zygote.NameLauncher}, []string{}, "/"
	cmd.Stdin, cmd.Stderr, cmd.ExtraFiles = theirs[0], &r.diag, slices.Concat(theirs[1:], tasks)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Setsid: true}
	cmd.WaitDelay = outputTime
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the launcher: %w", err)
	}
	r.launcher = cmd
	r.messages <- guestText
	r.serving.Go(r.send)
	if _, err := plan.Write(launchText); err != nil { // the launcher reads it before anything else
		return fmt.Errorf("send the plan: %w", err)
	}
	return nil
}

// pipes makes the pipes between the worker, the launcher and the guest, and the run's streams. It returns the worker's
// end of the launcher's life and of its plan, and the other ends.
func (r *run) pipes(std sandbox.Stdio) (life, plan *os.File, theirs []*os.File, err error) {
	var ours [3]*os.File
	for i := range ours {
		read, write, err := os.Pipe()
		if err != nil {
			for _, f := range ours[:i] {
				f.Close()
			}
			return nil, nil, theirs, fmt.Errorf("pipe: %w", err)
		}
		theirs, ours[i] = append(theirs, read), write
	}
	life, plan, r.in = ours[0], ours[1], ours[2]
	out, outEnd, err := os.Pipe()
	if err == nil {
		theirs = append(theirs, outEnd)
		r.reports, r.outputs = make(chan zygote.Report), []*os.File{out}
		r.serving.Go(func() { r.receive(out) })
		var streams []*os.File
		streams, err = r.streams(std)
		theirs = append(theirs, streams...)
	}
	if err != nil {
		life.Close()
		plan.Close()
		return nil, nil, theirs, err
	}
	return life, plan, theirs, nil
}

// join returns the files through which the launcher enters the run's control group: one that the caller closes, or
// those that the group keeps.
func (r *run) join(launch *zygote.Launch) (closed, kept []*os.File, err error) {
	if r.cell.group == nil {
		return nil, nil, nil
	}
	dir, tasks := r.cell.group.Join()
	launch.Cgroup, launch.Tasks = dir >= 0, len(tasks)
	if dir < 0 {
		return nil, tasks, nil
	}
	fd, err := unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("control group: %w", err)
	}
	return []*os.File{os.NewFile(uintptr(fd), "control group")}, nil, nil
}

// streams returns the run's ends of its standard streams.
func (r *run) streams(std sandbox.Stdio) (theirs []*os.File, err error) {
	stdin, err := dupStdin(std.Stdin)
	if err != nil {
		return nil, fmt.Errorf("stdin: %w", err)
	}
	theirs = append(theirs, stdin)
	for i, w := range []io.Writer{std.Stdout, std.Stderr} {
		if w == nil {
			w = io.Discard
		}
		if i == 1 && wire.SameWriter(std.Stdout, std.Stderr) {
			fd, err := unix.FcntlInt(theirs[1].Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return theirs, fmt.Errorf("output pipe: %w", err)
			}
			theirs = append(theirs, os.NewFile(uintptr(fd), "stderr"))
			continue
		}
		ours, end, err := os.Pipe()
		if err != nil {
			return theirs, fmt.Errorf("output pipe: %w", err)
		}
		theirs, r.outputs = append(theirs, end), append(r.outputs, ours)
		r.serving.Go(func() {
			_, r.copyErr[i] = io.Copy(w, ours)
			// Later writers get SIGPIPE instead of waiting forever.
			ours.Close()
		})
	}
	return theirs, nil
}

// dupStdin returns a copy of the pipe, or an empty file.
func dupStdin(pipe *os.File) (*os.File, error) {
	if pipe == nil {
		// The host's /dev/null would be a device of the host inside; an ended pipe is as empty.
		read, write, err := os.Pipe()
		if err == nil {
			write.Close()
		}
		return read, err
	}
	fd, err := unix.FcntlInt(pipe.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	return os.NewFile(uintptr(fd), "stdin"), err
}

// send sends the messages to the guest, which may be gone, until end closes them and the pipe.
func (r *run) send() {
	for text := range r.messages {
		_, _ = r.in.Write(append(text, '\n'))
	}
}

// receive passes the guest's reports on. They come from inside, so a malformed one only ends the run.
func (r *run) receive(out *os.File) {
	defer out.Close()
	defer close(r.reports)
	in := json.NewDecoder(io.LimitReader(out, 1<<20))
	for {
		var rep zygote.Report
		if in.Decode(&rep) != nil {
			return
		}
		r.reports <- rep
	}
}

// end kills the run and waits until every process of it is dead. After an error some may live, so it closes the pipes
// that they could keep open.
func (r *run) end() error {
	for _, f := range []*os.File{r.life, r.in} {
		if f != nil {
			f.Close()
		}
	}
	close(r.messages)
	err := r.reap()
	if err != nil {
		r.alive, err = true, fmt.Errorf("%w; its users and its control group are not used again", err)
		for _, f := range r.outputs {
			f.Close()
		}
	}
	if r.reports != nil {
		go func() {
			for range r.reports {
			}
		}()
	}
	r.serving.Wait()
	return err
}

// reap waits for the launcher, which exits after every other process of the run.
func (r *run) reap() error {
	if r.launcher == nil {
		return nil
	}
	late := time.AfterFunc(endTime, func() { _ = r.launcher.Process.Kill() })
	err := r.launcher.Wait()
	switch ws, ok := r.launcher.ProcessState.Sys().(syscall.WaitStatus); {
	case !late.Stop():
		return fmt.Errorf("the run did not end within %v of its kill: %w", endTime, err)
	case ok && ws.Signaled():
		return fmt.Errorf("the launcher was killed (%w), and did not wait for the end of the run", err)
	case errors.Is(err, exec.ErrWaitDelay):
		return errors.New("a process of the run outlived its launcher")
	}
	return nil
}

// A diagnostics keeps the beginning of what is written to it.
type diagnostics struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (d *diagnostics) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.text.Write(p[:min(len(p), maxDiagnostics-min(d.text.Len(), maxDiagnostics))])
	return len(p), nil
}

func (d *diagnostics) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.TrimSpace(d.text.String())
}

// explain returns why the run never started.
func (r *run) explain(failed string) error {
	var root *os.Root
	if w := r.b.workspace(r.spec.Workspace); w != nil {
		root = w.root
	}
	text := failed
	if more := r.diag.String(); more != "" {
		text = strings.TrimPrefix(text+": "+more, ": ")
	}
	return source.Explain(r.spec, root, text)
}

// outputLimits returns the limits of the Spec, or those of the workspace where they are lower.
func (r *run) outputLimits() zygote.WorkspaceSize {
	limits := zygote.WorkspaceSize{Bytes: r.spec.Limits.OutputBytes, Files: r.spec.Limits.OutputFiles}
	if w := r.b.workspace(r.spec.Workspace); w != nil {
		limits.Bytes, limits.Files = limit.Lower(limits.Bytes, w.room.Bytes), limit.Lower(limits.Files, w.room.Files)
	}
	return limits
}
