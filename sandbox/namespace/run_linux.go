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
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// A Backend runs commands in namespaces through one zygote, which it starts when it is first needed
// and again if it died.
type Backend struct {
	config   Config
	rootless bool

	mu     sync.Mutex
	sock   int // of the zygote; -1 while there is none
	proc   *os.Process
	closed bool
}

// New returns a backend. The caller closes it.
func New(c Config) *Backend {
	return &Backend{config: c, rootless: !ownsUsers(), sock: -1}
}

// Close ends the zygote and every run.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.drop()
	return nil
}

// drop forgets the zygote. Its runs die with it. b.mu is held.
func (b *Backend) drop() {
	if b.sock < 0 {
		return
	}
	unix.Close(b.sock)
	b.proc.Kill()
	b.proc.Wait()
	b.sock = -1
}

// start starts the zygote if there is none.
func (b *Backend) start() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.startLocked()
}

func (b *Backend) startLocked() error {
	if b.closed {
		return errors.New("the sandbox is closed")
	}
	if b.sock >= 0 {
		return nil
	}
	proc, sock, err := startZygote(b.rootless)
	if err != nil {
		return err
	}
	b.proc, b.sock = proc, sock
	return nil
}

// request sends one packet to the zygote and, if answer, returns the descriptor of its reply.
func (b *Backend) request(req []byte, answer bool, fds ...int) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Twice, since a failure may be how one learns that the zygote died.
	var err error
	for range 2 {
		if err := b.startLocked(); err != nil {
			return -1, err
		}
		err = zygote.Send(b.sock, req, fds...)
		if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			// It lives, and with it every other run: only this request failed.
			return -1, fmt.Errorf("zygote: %w", err)
		}
		var text []byte
		var got []int
		if err == nil && answer {
			text, got, err = zygote.Receive(b.sock)
		}
		switch {
		case errors.Is(err, zygote.ErrTruncated):
			return -1, err
		case err != nil:
			b.drop()
		case !answer:
			return -1, nil
		case len(text) > 1:
			return -1, fmt.Errorf("zygote: %s", text[1:])
		case len(got) != 1:
			return -1, errors.New("zygote: an answer without its descriptor")
		default:
			return got[0], nil
		}
	}
	return -1, fmt.Errorf("the zygote does not answer: %w", err)
}

// Workspace returns a new detached tmpfs.
func (b *Backend) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	fd, err := b.request([]byte{zygote.ReqWorkspace}, true)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	w := &workspace{mount: os.NewFile(uintptr(fd), "workspace")}
	if w.root, err = os.OpenRoot(w.Name()); err != nil {
		w.mount.Close()
		return nil, fmt.Errorf("workspace: %w", err)
	}
	return w, nil
}

// A workspace is a detached mount: it has no path but those of the descriptors that hold it.
type workspace struct {
	mount *os.File
	root  *os.Root
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return fmt.Sprintf("/proc/self/fd/%d", w.mount.Fd()) }
func (w *workspace) Close() error   { return errors.Join(w.root.Close(), w.mount.Close()) }

// Run performs spec.
func (b *Backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r := &run{}
	defer r.close()
	if err := r.open(spec, std); err != nil {
		return nil, err
	}
	if _, err := b.request([]byte{zygote.ReqRun}, false, r.theirs...); err != nil {
		return nil, err
	}
	r.handOver()
	return r.watch(ctx, spec)
}

// A run is the worker's side of one run: descriptors, and the goroutines that copy its output.
type run struct {
	theirs  []int // sent to the zygote, in the order of its protocol
	control int   // the worker's end
	copying sync.WaitGroup
	copyErr [2]error
}

// open makes everything that the zygote is handed.
func (r *run) open(spec *sandbox.Spec, std sandbox.Stdio) error {
	r.control = -1
	text, err := json.Marshal(plan(spec))
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
	if spec.Workspace != "" {
		fd, err := unix.Open(spec.Workspace, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("workspace %s: %w", spec.Workspace, err)
		}
		r.theirs = append(r.theirs, fd)
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
	if r.control >= 0 {
		unix.Close(r.control)
	}
	r.copying.Wait()
}

// watch follows the run to its end. When ctx ends, or the command has executed for the spec's timeout, it
// stops the run: SIGTERM, grace, and the end of init, with which everything ends.
func (r *run) watch(ctx context.Context, spec *sandbox.Spec) (*sandbox.Result, error) {
	p := &progress{started: make(chan struct{}), exited: make(chan struct{}), reaped: make(chan struct{})}
	var stopping sync.WaitGroup
	stopping.Go(func() { r.stop(ctx, spec, p) })
	res, err := r.follow(p)
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
	return res, nil
}

// A progress is how far a run has come; each channel is closed when it has come there.
type progress struct {
	started, exited, reaped chan struct{}
	told                    bool // to end, before it exited by itself; written before reaped is waited for
}

// stop tells the run to end when it is time to, and makes sure that it does.
func (r *run) stop(ctx context.Context, spec *sandbox.Spec, p *progress) {
	var timeout <-chan time.Time
	for started := p.started; ; {
		select {
		case <-started:
			started = nil
			if spec.Timeout > 0 {
				timer := time.NewTimer(spec.Timeout)
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
	if spec.Grace > 0 {
		_ = zygote.Send(r.control, []byte(zygote.WordTerm))
		select {
		case <-p.exited:
			return
		case <-p.reaped:
			return
		case <-time.After(spec.Grace):
		}
	}
	_ = zygote.Send(r.control, []byte(zygote.WordKill))
}

// follow reads reports until the run is reaped.
func (r *run) follow(p *progress) (*sandbox.Result, error) {
	var res sandbox.Result
	for {
		packet, _, err := zygote.Receive(r.control)
		if err != nil {
			return nil, fmt.Errorf("the zygote died during the run: %w", err)
		}
		var rep zygote.Report
		if err := json.Unmarshal(packet, &rep); err != nil {
			return nil, fmt.Errorf("report of the run: %w", err)
		}
		switch {
		case rep.Failed != "":
			return nil, fmt.Errorf("start of the run: %s", rep.Failed)
		case rep.Started != 0:
			res.Start = time.Unix(0, rep.Started)
			close(p.started)
		case rep.Exited != nil:
			res.End = time.Unix(0, rep.Exited.At)
			res.ExitCode = rep.Exited.Code
			if s := rep.Exited.Signal; s != 0 {
				res.Signal, res.ExitCode = syscall.Signal(s), 128+s
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
			}
			return &res, nil
		}
	}
}
