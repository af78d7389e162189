// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/monitor"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// Run runs spec.
func (b *Backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	var lost error
	for range tries {
		res, err := b.try(ctx, spec, std)
		if !errors.Is(err, errLostSlot) {
			return res, err
		}
		b.lost.Add(1)
		lost = err
	}
	return nil, fmt.Errorf("%w; %d consecutive slots failed", lost, tries)
}

// tries is how many slots a run may lose before its command executes: the zygote or a slot may have died since it was
// last used. Once the command has executed there is no other try, since it may have changed its outputs.
const tries = 3

func (b *Backend) try(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	err := b.start() // which also finds what control groups can do
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	can := b.capabilities()
	features := b.features(can)
	if err := features.Covers(spec); err != nil {
		return nil, err
	}
	if err := checkCPUs(&spec.Conditions); err != nil {
		return nil, err
	}
	p, images := plan(spec, b.planOptions(spec, can, std.Terminal != nil))
	identify(p.Base, spec)
	s, err := b.acquire(p.Base)
	if err != nil {
		return nil, err
	}
	defer b.release(s, spec.Workspace)
	r := &run{backend: b, spec: spec, slot: s, source: b.config.Source, control: -1, init: -1}
	defer r.close()
	if err := s.awaitReady(); err != nil {
		return nil, b.explainLost(s, err)
	}
	if err := r.limit(can); err != nil {
		return nil, err
	}
	if err := r.start(b, p, images, std); err != nil {
		return nil, b.explainLost(s, err)
	}
	res, err := r.wait(ctx, can)
	if err != nil {
		s.base = nil // the slot may have failed to set it up
		if spec.Root != nil {
			s.drop() // its template may keep the root
		}
	}
	return res, err
}

// identify records in a base which files its sources are now: a template keeps them whatever happens to their names.
func identify(base *zygote.Base, spec *sandbox.Spec) {
	if spec.Root != nil {
		base.RootName += device(spec.Root.Image)
	}
	for i := range base.Ops {
		o := &base.Ops[i]
		var st unix.Stat_t
		if o.Kind == zygote.OpBind && unix.Stat(o.Source, &st) == nil { // the slot reports missing sources
			o.Device, o.Inode = uint64(st.Dev), uint64(st.Ino)
		}
	}
}

// A run is the worker's side of one run: descriptors and the goroutines that serve it.
type run struct {
	backend *Backend
	spec    *sandbox.Spec
	slot    *slot
	source  map[string]string // see Config
	slotFDs []int             // sent to the slot, then closed
	control int               // the worker's end
	reports *os.File          // the same
	init    int               // pidfd of pid 1, once the command has started
	copying sync.WaitGroup
	copyErr [2]error

	syscalls *monitor.Monitor // nil without monitoring
	proxy    *egressProxy     // nil without allowed endpoints

	mu       sync.Mutex
	exceeded *sandbox.Event // the limit for which the run was killed
	violated bool           // the run was killed for a violation
	noBytes  bool           // the workspace was full at some time
	noFiles  bool

	killed    syscall.Signal // with which another process killed pid 1
	fullTemps []string       // temporary directories that were full at the end

	unwritable []string // output directories that the run cannot write to
	missing    string   // what was not found, see zygote.Exited
}

// start hands the run to its slot.
func (r *run) start(b *Backend, p *zygote.Plan, images []string, std sandbox.Stdio) error {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	r.slotFDs = append(r.slotFDs, sv[1])
	// Only this end is non-blocking: waiting for it must not occupy a thread.
	if err := unix.SetNonblock(sv[0], true); err != nil {
		unix.Close(sv[0])
		return fmt.Errorf("control socket: %w", err)
	}
	r.control = sv[0]
	r.reports = os.NewFile(uintptr(r.control), "control")
	if err := r.streams(std); err != nil {
		return err
	}
	streams := r.slotFDs[1:]
	var more []int
	if p.Workspace {
		fd, err := unix.Open(r.spec.Workspace, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("workspace %s: %w", r.spec.Workspace, err)
		}
		r.slotFDs = append(r.slotFDs, fd)
		more = append(more, fd)
	}
	if len(images) > zygote.MaxImages {
		return fmt.Errorf("%w: the run has %d images, more than %d", sandbox.ErrSpec, len(images), zygote.MaxImages)
	}
	for _, name := range images {
		if m, ok := b.images.Load(name); ok {
			more = append(more, m.(*image).fd)
			continue
		}
		fd, err := b.openRoot(r.spec, name)
		if err != nil {
			return err
		}
		r.slotFDs = append(r.slotFDs, fd)
		more = append(more, fd)
	}
	users, err := b.userNamespace(r.slot, p)
	if err != nil {
		return err
	}
	if users >= 0 {
		defer unix.Close(users)
		more = append(more, users)
	}
	if err := r.slot.launch(p, sv[1], streams, more); err != nil {
		return err
	}
	r.handOver()
	return nil
}

// stdin adds the run's stdin: a pipe, or nothing to read.
func (r *run) stdin(pipe *os.File) error {
	var fd int
	var err error
	if pipe != nil {
		fd, err = unix.FcntlInt(pipe.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	} else {
		fd, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return fmt.Errorf("stdin: %w", err)
	}
	r.slotFDs = append(r.slotFDs, fd)
	return nil
}

// streams creates the run's standard streams: stdin and two pipes, or a terminal.
func (r *run) streams(std sandbox.Stdio) error {
	if std.Terminal != nil {
		for range 3 {
			fd, err := unix.FcntlInt(std.Terminal.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("terminal: %w", err)
			}
			r.slotFDs = append(r.slotFDs, fd)
		}
		return nil
	}
	if err := r.stdin(std.Stdin); err != nil {
		return err
	}
	for i, w := range []io.Writer{std.Stdout, std.Stderr} {
		if w == nil {
			w = io.Discard
		}
		if i == 1 && wire.SameWriter(std.Stdout, std.Stderr) {
			fd, err := unix.FcntlInt(uintptr(r.slotFDs[len(r.slotFDs)-1]), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("output pipe: %w", err)
			}
			r.slotFDs = append(r.slotFDs, fd)
			continue
		}
		ours, theirs, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("output pipe: %w", err)
		}
		// Duplicated, since Fd would make the file blocking.
		fd, err := unix.FcntlInt(theirs.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		theirs.Close()
		if err != nil {
			ours.Close()
			return fmt.Errorf("output pipe: %w", err)
		}
		r.slotFDs = append(r.slotFDs, fd)
		r.copying.Go(func() {
			_, r.copyErr[i] = io.Copy(w, ours)
			// Later writers get SIGPIPE instead of waiting forever.
			ours.Close()
		})
	}
	return nil
}

// handOver closes what the slot has received.
func (r *run) handOver() {
	for _, fd := range r.slotFDs {
		unix.Close(fd)
	}
	r.slotFDs = nil
}

// close ends what is left of the run and waits for its goroutines.
func (r *run) close() {
	r.handOver()
	r.unfollow()
	if r.init >= 0 {
		unix.Close(r.init)
	}
	if r.proxy != nil {
		r.proxy.close()
	}
	r.copying.Wait()
}

// unfollow stops the syscall monitor, and drops unread reports with their descriptors.
func (r *run) unfollow() {
	if r.syscalls != nil {
		r.syscalls.Stop() // it uses control
	}
	if r.reports != nil {
		r.reports.Close()
	}
}

// wait follows the run to its end. When ctx ends or the timeout expires it stops the run: SIGTERM, grace period,
// SIGKILL for pid 1 and with it for everything.
func (r *run) wait(ctx context.Context, can cgroup.Capabilities) (*sandbox.Result, error) {
	p := &progress{started: make(chan struct{}), exited: make(chan struct{}), reaped: make(chan struct{})}
	var stopping sync.WaitGroup
	stopping.Go(func() { r.stop(ctx, p) })
	stopping.Go(func() { r.enforceLimits(p) })
	res, err := r.follow(p)
	if err != nil {
		r.abort()
	}
	close(p.reaped)
	stopping.Wait()
	if err != nil {
		// An unread report may hold the listener, and a command waits for the listener's answers.
		r.unfollow()
	}
	r.copying.Wait()
	if err != nil {
		return nil, err
	}
	res.Stopped = p.stopped
	if res.Start.IsZero() {
		if !res.Stopped {
			return nil, errors.New("the run ended before its command started")
		}
		res.Start = res.End
	}
	if err := errors.Join(r.copyErr[:]...); err != nil {
		return nil, fmt.Errorf("copy the run's output: %w", err)
	}
	if err := r.account(res, can); err != nil {
		return res, err
	}
	if r.killed != 0 && !res.Stopped && res.Exceeded == nil {
		return nil, fmt.Errorf("pid 1 of the run was killed by another process (%s)", unix.SignalName(r.killed))
	}
	return res, nil
}

// A progress is how far a run has come; each channel is closed at its stage.
type progress struct {
	started, exited, reaped chan struct{}
	stopped                 bool // before it exited by itself; read after the goroutine has ended
}

// withMonotonic returns a time that another process has just read, in nanoseconds of Unix time, with a reading of this
// process's monotonic clock: setting the clock does not change how long a run took.
func withMonotonic(unix int64) time.Time {
	now := time.Now()
	return now.Add(time.Duration(unix - now.UnixNano()))
}

// stop stops the run when it is time to.
func (r *run) stop(ctx context.Context, p *progress) {
	var timeout <-chan time.Time
	for started := p.started; ; {
		select {
		case <-started:
			started = nil
			if r.spec.Timeout > 0 {
				timer := time.NewTimer(r.spec.Timeout)
				defer timer.Stop()
				timeout = timer.C
			}
			continue
		case <-p.exited:
			return // the kernel is already killing the rest
		case <-p.reaped:
			return
		case <-timeout:
		case <-ctx.Done():
		}
		break
	}
	select {
	case <-p.exited:
		return // it exited by itself at the same moment
	default:
	}
	p.stopped = true
	if r.spec.Grace > 0 && zygote.Send(r.control, []byte(zygote.WordTerm)) == nil {
		select {
		case <-p.exited:
			return
		case <-p.reaped:
			return
		case <-time.After(r.spec.Grace):
		}
	}
	r.kill()
}

// kill ends the run: pid 1 exits when no more messages can come. Unlike a message of its own, which needs memory and
// room in a queue, this cannot be lost. The slot's reports still arrive.
func (r *run) kill() {
	_ = unix.Shutdown(r.control, unix.SHUT_WR) // fails only if nobody is left
}

// receive returns the next report and its descriptors.
func (r *run) receive() (packet []byte, fds []int, err error) {
	raw, err := r.reports.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	waited := raw.Read(func(fd uintptr) bool {
		packet, fds, err = zygote.Receive(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	return packet, fds, cmp.Or(waited, err)
}

// follow reads reports until the run is reaped.
func (r *run) follow(p *progress) (*sandbox.Result, error) {
	var res sandbox.Result
	var lost error
	begun := false // the command may have executed
	for {
		packet, fds, err := r.receive()
		if errors.Is(err, zygote.ErrTruncated) {
			// The run cannot continue without it, but is followed to its end.
			lost, begun = fmt.Errorf("follow the run: %w", err), true
			r.kill()
			continue
		}
		if errors.Is(err, os.ErrClosed) {
			return nil, errors.Join(lost, r.lostControl(begun))
		}
		if err != nil {
			return nil, fmt.Errorf("follow the run: %w", err)
		}
		rep, err := zygote.DecodeReport(packet)
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("report %q of the run: %w", packet, err)
		}
		switch {
		case rep.Ready:
			begun = true
			if len(fds) == 1 {
				r.syscalls = monitor.Start(fds[0], r.monitorConfig())
			}
		case rep.Listening && len(fds) == len(r.spec.Network.Allow):
			r.proxy = startProxy(fds, r.spec.Network.Allow)
		case rep.Resolving && len(fds) == 2:
			r.slot.setResolver(os.NewFile(uintptr(fds[0]), "resolver"), os.NewFile(uintptr(fds[1]), "sockets"))
		case rep.Unwritable != nil:
			r.unwritable = rep.Unwritable
		case rep.Failed != "":
			return nil, r.explainFailure(rep.Failed)
		case rep.Lost != "":
			return nil, fmt.Errorf("%w: %s", errLostSlot, rep.Lost)
		case rep.Started != 0:
			begun = true
			if len(fds) == 1 {
				r.init = fds[0]
			}
			res.Start = withMonotonic(rep.Started)
			close(p.started)
		case rep.Exited != nil:
			res.End = withMonotonic(rep.Exited.At)
			res.ExitCode, r.missing = rep.Exited.Code, rep.Exited.Missing
			if s := rep.Exited.Signal; s != 0 {
				res.Signal, res.ExitCode = syscall.Signal(s), 128+s
			}
			if res.End.Before(res.Start) {
				res.Start = res.End // its start was read from the clock too late
			}
			close(p.exited)
		case rep.Reaped != nil:
			if res.End.IsZero() { // pid 1 was killed with the command, perhaps before its start
				res.End = time.Now()
				r.killed = syscall.Signal(rep.Reaped.Killed)
				res.Signal, res.ExitCode = syscall.SIGKILL, 128+int(syscall.SIGKILL)
			}
			res.Usage = usage(rep.Reaped)
			r.fullTemps, res.Released = rep.Reaped.Full, rep.Reaped.Released == 1
			return &res, lost
		}
	}
}

func usage(r *zygote.Reaped) sandbox.Usage {
	return sandbox.Usage{
		User: time.Duration(r.UserNS), System: time.Duration(r.SystemNS), PeakRSS: r.PeakRSS,
		// Blocks have 512 bytes (getrusage(2)).
		ReadBytes: r.ReadBlocks * 512, WrittenBytes: r.Written * 512,
		VoluntarySwitches: r.Voluntary, InvoluntarySwitches: r.Involuntary,
	}
}

// lostControl returns why control closed before the run ended: errLostSlot if the command has not executed. Pid 1 and
// the command, which held control as well, are dead or dying, so it never will.
func (r *run) lostControl(begun bool) error {
	var why string
	packet, _, err := zygote.Receive(r.slot.sock)
	switch {
	case err == nil && len(packet) > 1:
		why = "it reports: " + string(packet[1:]) // it will be ready
	case err == nil:
		r.slot.ready = true
		why = "it dropped the run and is alive"
	case isGone(err):
		r.slot.drop()
		why = r.backend.slotEnd(r.slot)
	default:
		r.slot.drop()
		why = "it does not answer: " + err.Error()
	}
	if !begun {
		return fmt.Errorf("%w: %s", errLostSlot, why)
	}
	if errors.Is(r.backend.ready(), sandbox.ErrClosed) {
		return fmt.Errorf("%w, with every run in it", sandbox.ErrClosed)
	}
	return fmt.Errorf("the sandbox slot died after the command had started: %s", why)
}

// abort ends a run that can no longer be followed and waits for its end: pid 1 loses control, and is dead when
// everything in its pid namespace is.
func (r *run) abort() {
	_ = unix.Shutdown(r.control, unix.SHUT_RDWR) // it may have ended already
	for r.init >= 0 {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(r.init), Events: unix.POLLIN}}, answerSeconds*1000)
		if err != unix.EINTR {
			return
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
