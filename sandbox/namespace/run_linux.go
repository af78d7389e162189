// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/witness"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// Run performs spec.
func (b *Backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	// Twice, since the zygote may have died since the slot was last used.
	for range 2 {
		res, err := b.try(ctx, spec, std)
		if !errors.Is(err, errLostSlot) {
			return res, err
		}
	}
	return nil, errLostSlot
}

func (b *Backend) try(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s, err := b.take()
	if err != nil {
		return nil, err
	}
	defer b.give(s, spec.Workspace)
	can := b.can()
	features := b.enforced(can)
	if err := features.Covers(spec); err != nil {
		return nil, err
	}
	r := &run{spec: spec, slot: s, source: b.config.Source, control: -1, init: -1}
	defer r.close()
	if err := r.limit(can); err != nil {
		return nil, err
	}
	if err := r.open(plan(spec, b.conditions(spec, can, std.Terminal != nil)), std); err != nil {
		return nil, err
	}
	if err := b.launch(s, r.theirs); err != nil {
		return nil, err
	}
	r.handOver()
	return r.watch(ctx)
}

// A run is the worker's side of one run: descriptors, and the goroutines that serve it.
type run struct {
	spec    *sandbox.Spec
	slot    *slot
	source  map[string]string // see Config
	theirs  []int             // sent to the zygote, in the order of its protocol
	control int               // the worker's end
	init    int               // of pid 1, as soon as the command has started
	copying sync.WaitGroup
	copyErr [2]error

	recorder *witness.Recorder // nil while nobody watches
	gate     *gate             // nil without exceptions of the network

	mu       sync.Mutex
	exceeded *sandbox.Event // the limit for which the run was killed
	noBytes  bool           // left in the workspace, at some time
	noFiles  bool

	fullTemps []string // temporary directories that had no room left at the end
}

// open makes everything that the zygote is handed.
func (r *run) open(p *zygote.Plan, std sandbox.Stdio) error {
	if r.slot.group != nil {
		dir, _ := r.slot.group.Join()
		p.Cgroup = dir >= 0
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("plan", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	r.theirs = append(r.theirs, fd)
	for n := 0; n < len(text); {
		m, err := unix.Write(fd, text[n:])
		if err != nil {
			return fmt.Errorf("plan: %w", err)
		}
		n += m
	}
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	r.control = sv[0]
	r.theirs = append(r.theirs, sv[1])
	if err := r.streams(std); err != nil {
		return err
	}
	if p.Workspace {
		fd, err := unix.Open(r.spec.Workspace, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("workspace %s: %w", r.spec.Workspace, err)
		}
		r.theirs = append(r.theirs, fd)
	}
	if p.Cgroup {
		dir, _ := r.slot.group.Join()
		fd, err := unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("control group: %w", err)
		}
		r.theirs = append(r.theirs, fd)
	}
	return nil
}

// streams makes the run's standard streams: an empty stdin and two pipes, or a terminal.
func (r *run) streams(std sandbox.Stdio) error {
	if std.Terminal != nil {
		for range 3 {
			fd, err := unix.FcntlInt(std.Terminal.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("terminal: %w", err)
			}
			r.theirs = append(r.theirs, fd)
		}
		return nil
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	r.theirs = append(r.theirs, null)
	for i, w := range []io.Writer{std.Stdout, std.Stderr} {
		if w == nil {
			w = io.Discard
		}
		ours, theirs, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("output pipe: %w", err)
		}
		// A descriptor of its own for the zygote: Fd would make the file blocking.
		fd, err := unix.FcntlInt(theirs.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		theirs.Close()
		if err != nil {
			ours.Close()
			return fmt.Errorf("output pipe: %w", err)
		}
		r.theirs = append(r.theirs, fd)
		r.copying.Go(func() {
			_, r.copyErr[i] = io.Copy(w, ours)
			// Whoever writes on learns it by SIGPIPE rather than waits for ever.
			ours.Close()
		})
	}
	return nil
}

// handOver closes what the zygote has now.
func (r *run) handOver() {
	for _, fd := range r.theirs {
		unix.Close(fd)
	}
	r.theirs = nil
}

// close ends what is left, and waits for the copying goroutines.
func (r *run) close() {
	r.handOver()
	for _, fd := range []int{r.control, r.init} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if r.recorder != nil {
		r.recorder.Stop()
	}
	if r.gate != nil {
		r.gate.close()
	}
	r.copying.Wait()
}

// watch follows the run to its end. When ctx ends, or the command has executed for the spec's timeout, it
// stops the run: SIGTERM, grace, and the end of init, with which everything ends.
func (r *run) watch(ctx context.Context) (*sandbox.Result, error) {
	p := &progress{started: make(chan struct{}), exited: make(chan struct{}), reaped: make(chan struct{})}
	var stopping sync.WaitGroup
	stopping.Go(func() { r.stop(ctx, p) })
	stopping.Go(func() { r.monitor(p) })
	res, err := r.follow(p)
	if err != nil {
		r.die()
	}
	close(p.reaped)
	stopping.Wait()
	r.copying.Wait()
	if err != nil {
		return nil, err
	}
	res.Stopped = p.told
	if res.Start.IsZero() {
		if !res.Stopped {
			return nil, errors.New("the run ended before its command started")
		}
		res.Start = res.End
	}
	if err := errors.Join(r.copyErr[:]...); err != nil {
		return nil, fmt.Errorf("copy the run's output: %w", err)
	}
	return res, r.account(res)
}

// A progress is how far a run has come; each channel is closed when it has come there.
type progress struct {
	started, exited, reaped chan struct{}
	told                    bool // to end, before it exited by itself; written before reaped is waited for
}

// stop tells the run to end when it is time to, and makes sure that it does.
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
			return // the kernel is killing what remains; nothing makes that faster
		case <-p.reaped:
			return
		case <-timeout:
		case <-ctx.Done():
		}
		break
	}
	select {
	case <-p.exited:
		return // at the same moment: by itself
	default:
	}
	p.told = true
	if r.spec.Grace > 0 {
		_ = zygote.Send(r.control, []byte(zygote.WordTerm))
		select {
		case <-p.exited:
			return
		case <-p.reaped:
			return
		case <-time.After(r.spec.Grace):
		}
	}
	_ = zygote.Send(r.control, []byte(zygote.WordKill))
}

// follow reads reports until the run is reaped.
func (r *run) follow(p *progress) (*sandbox.Result, error) {
	var res sandbox.Result
	var lost error
	for {
		packet, fds, err := zygote.Receive(r.control)
		if errors.Is(err, zygote.ErrTruncated) {
			// Without what came it cannot go on; it is followed to its end all the same.
			lost = fmt.Errorf("follow the run: %w", err)
			_ = zygote.Send(r.control, []byte(zygote.WordKill))
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("the zygote died during the run: %w", err)
		}
		var rep zygote.Report
		if err := json.Unmarshal(packet, &rep); err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("report of the run: %w", err)
		}
		switch {
		case rep.Watching && len(fds) == 1:
			r.recorder = witness.Watch(fds[0], view(r.spec, r.source))
		case rep.Listening && len(fds) == len(r.spec.Network.Allow):
			r.gate = openGate(fds, r.spec.Network.Allow)
		case rep.Failed != "":
			return nil, fmt.Errorf("start of the run: %s", rep.Failed)
		case rep.Started != 0:
			if len(fds) == 1 {
				r.init = fds[0]
			}
			res.Start = time.Unix(0, rep.Started)
			close(p.started)
		case rep.Exited != nil:
			res.End = time.Unix(0, rep.Exited.At)
			res.ExitCode = rep.Exited.Code
			if s := rep.Exited.Signal; s != 0 {
				res.Signal, res.ExitCode = syscall.Signal(s), 128+s
			}
			if res.End.Before(res.Start) {
				res.Start = res.End // who saw it start looked at the clock too late
			}
			close(p.exited)
		case rep.Reaped != nil:
			if res.End.IsZero() { // init was told to end, and the command with it, perhaps before its start
				res.End = time.Now()
				res.Signal, res.ExitCode = syscall.SIGKILL, 128+int(syscall.SIGKILL)
			}
			res.Usage = sandbox.Usage{
				User:    time.Duration(rep.Reaped.UserNS),
				System:  time.Duration(rep.Reaped.SystemNS),
				PeakRSS: rep.Reaped.PeakRSS,
				// Blocks are of 512 bytes (getrusage(2)).
				ReadBytes:           rep.Reaped.ReadBlocks * 512,
				WrittenBytes:        rep.Reaped.Written * 512,
				VoluntarySwitches:   rep.Reaped.Voluntary,
				InvoluntarySwitches: rep.Reaped.Involuntary,
				PacketsRefused:      rep.Reaped.NoRoute,
			}
			r.fullTemps = rep.Reaped.Full
			return &res, lost
		}
	}
}

// die ends a run that cannot be followed any more, and waits for its end: pid 1 has let go of control, and ends when
// everything in its pid namespace has.
func (r *run) die() {
	_ = unix.Shutdown(r.control, unix.SHUT_RDWR) // of a socket it is no error to have ended already
	for r.init >= 0 {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(r.init), Events: unix.POLLIN}}, answerTime*1000)
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
