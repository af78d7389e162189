// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/source"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/sandbox/printable"
	"golang.org/x/sys/unix"
)

// times bound what the guest of a run may delay.
type times struct {
	stop time.Duration // after the grace period, until a stopped run has ended
	late time.Duration // after the timeout and the grace period, until the guest answers
	copy time.Duration // until the workspace has been copied into the machine, or outputs back
	end  time.Duration // after the kill of a machine, until its process has ended
}

// Run runs spec.
func (b *backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	features, err := b.supported(ctx)
	if err != nil {
		return nil, err
	}
	if err := features.Covers(spec); err != nil {
		return nil, err
	}
	if std.Terminal != nil {
		return nil, fmt.Errorf("%w: a run in a virtual machine cannot have a terminal", sandbox.ErrUnsupported)
	}
	if slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return in.Image != "" }) ||
		slices.ContainsFunc(spec.Lower, func(l sandbox.Lower) bool { return l.Image != "" }) {
		return nil, fmt.Errorf("%w: this backend mounts no images", sandbox.ErrSpec)
	}
	r := &run{b: b, spec: spec, std: std, root: -1}
	defer r.close()
	key, sources, err := r.plan()
	if err != nil {
		return nil, err
	}
	if r.m, err = b.acquire(ctx, key, sources); err != nil {
		return nil, err
	}
	for i, n := range r.served {
		r.request.Spec.Inputs[i].Source = fmt.Sprintf("%s/%d", hostDir, r.m.files.first+n)
	}
	res, err := r.follow(ctx)
	if err = errors.Join(err, b.release(r.m, r.fit)); err != nil {
		return nil, err
	}
	return res, nil
}

// A run is the host's side of one run.
type run struct {
	b       *backend
	spec    *sandbox.Spec
	std     sandbox.Stdio
	request runRequest
	served  map[int]int // the sources of inputs on this host, by input
	root    int         // of the workspace, or -1
	m       *machine

	sent     bool // the guest has everything that the command needs
	answered bool // the command has ended
	fit      bool // the machine is fit for another run

	stdout, stderr stream
	wake           *os.File       // ends the copying of stdin when it is closed
	serving        sync.WaitGroup // copies streams
	asking         sync.WaitGroup // asks the guest to stop
	limit          *time.Timer    // of what the guest does
}

// A stream has the errors of copying a stream from the guest: those of the writer and of the port.
type stream struct{ writeErr, err error }

func (r *run) close() {
	if r.root >= 0 {
		unix.Close(r.root)
	}
}

// plan makes the request, and opens the sources on this host and the workspace.
func (r *run) plan() (key string, sources []int, err error) {
	r.request = runRequest{
		Spec: *r.spec, Bytes: sandbox.Unlimited, Files: sandbox.Unlimited,
		Stdin: r.std.Stdin != nil, Same: wire.SameWriter(r.std.Stdout, r.std.Stderr),
	}
	spec := &r.request.Spec
	var w *workspace
	if spec.Workspace != "" {
		if w = r.b.workspace(spec.Workspace); w == nil {
			return "", nil, fmt.Errorf("%w: unknown workspace %q", sandbox.ErrSpec, spec.Workspace)
		}
		r.request.Bytes, r.request.Files = w.bytes, w.files
		if r.root, err = unix.Open(spec.Workspace, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return "", nil, fmt.Errorf("workspace %s: %w", spec.Workspace, err)
		}
	}
	spec.Inputs, r.served = slices.Clone(spec.Inputs), map[int]int{}
	number := map[string]int{}
	id := strings.Builder{}
	id.WriteString("sources")
	for i := range spec.Inputs {
		in := &spec.Inputs[i]
		if !path.IsAbs(in.Source) {
			continue
		}
		n, known := number[in.Source]
		if !known {
			fd, err := unix.Openat2(unix.AT_FDCWD, in.Source, &unix.OpenHow{
				Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
			})
			var st unix.Stat_t
			if err == nil {
				sources = append(sources, fd)
				err = unix.Fstat(fd, &st)
			}
			if err != nil {
				closeAll(sources)
				var root *os.Root
				if w != nil {
					root = w.Root()
				}
				return "", nil, source.Explain(r.spec, root, fmt.Sprintf("%s: %v", in.Source, err))
			}
			n = len(number)
			number[in.Source] = n
			fmt.Fprintf(&id, "\n%q %d %d", in.Source, st.Dev, st.Ino)
		}
		r.served[i] = n
	}
	return id.String(), sources, nil
}

// follow performs the run in r.m and sets r.fit. If it is false, the machine has ended.
func (r *run) follow(ctx context.Context) (*sandbox.Result, error) {
	began := time.Now()
	r.limit = time.NewTimer(r.b.times.copy)
	over, watched := make(chan struct{}), make(chan error, 1)
	go func() { watched <- r.watch(ctx, over) }()
	res, err := r.perform(ctx, began)
	end := time.Now()
	close(over)
	why := <-watched
	if r.fit = r.fit && why == nil && ctx.Err() == nil; r.fit { // otherwise the guest may have been asked to stop
		return res, err
	}
	killed := r.m.kill()
	if r.wake != nil {
		r.wake.Close()
	}
	r.serving.Wait()
	r.asking.Wait()
	if err != nil && why != nil {
		err = why // the rest follows from it
	}
	stopped := !r.answered && (r.sent || ctx.Err() != nil)
	if errors.Is(err, errOverdue) && stopped && killed == nil {
		return killedResult(began, end), nil
	}
	return res, errors.Join(err, killed)
}

// watch kills the machine, so that each operation on its ports fails, if the backend is closed, if the guest takes too
// long, or if it does not end the run in time after ctx has ended. It returns why it did.
func (r *run) watch(ctx context.Context, over <-chan struct{}) error {
	defer r.limit.Stop()
	done, why := ctx.Done(), error(nil)
	var last <-chan time.Time
	for why == nil {
		select {
		case <-over:
			return nil
		case <-done:
			done, last = nil, time.After(r.spec.Grace+r.b.times.stop)
			r.asking.Go(func() { _ = r.m.ports[portControl].sendMessage(request{Stop: true}) }) // watch notices what fails
		case <-last:
			why = errOverdue
		case <-r.limit.C:
			why = errOverdue
		case <-r.b.ending:
			why = errEnding
		}
	}
	_ = r.m.process.Kill() // it may have ended
	return why
}

// errOverdue means that a machine did not end a run in time.
var errOverdue = errors.New("the virtual machine took too long and was killed")

// perform runs the command, and returns an error if the machine is lost. It sets r.fit if the guest kept to the
// protocol.
func (r *run) perform(ctx context.Context, began time.Time) (*sandbox.Result, error) {
	if err := r.startStreams(); err != nil {
		return nil, err
	}
	if err := r.m.ports[portControl].sendMessage(request{Run: &r.request}); err != nil {
		return nil, r.lost(err)
	}
	if err := r.sendWorkspace(); err != nil {
		return nil, r.lost(err)
	}
	r.sent = true
	r.limit.Stop()
	if limit := r.patience(); limit > 0 {
		r.limit.Reset(limit)
	}
	var a runAnswer
	if err := r.m.ports[portControl].receiveMessage(&a, maxAnswer); err != nil {
		return nil, r.lost(err)
	}
	end := time.Now()
	r.answered = true
	r.limit.Reset(r.b.times.copy)
	r.wake.Close()
	r.serving.Wait()
	if err := errors.Join(r.stdout.err, r.stderr.err); err != nil {
		return nil, r.lost(err)
	}
	treeErr, err := r.collect(&a)
	if err != nil {
		return nil, r.lost(err)
	}
	r.fit = treeErr == nil
	if a.Error != "" {
		return nil, r.explain(ctx, &a)
	}
	if treeErr != nil {
		return nil, fmt.Errorf("outputs of the run: %w", treeErr)
	}
	if err := errors.Join(r.stdout.writeErr, r.stderr.writeErr); err != nil {
		return nil, fmt.Errorf("copy the run's output: %w", err)
	}
	res, err := a.Result.checked(r.spec)
	if err == nil && res.Stopped && r.spec.Timeout == 0 && ctx.Err() == nil {
		err = errors.New("stopped, although nothing ended the run")
	}
	if err != nil {
		r.fit = false
		return nil, fmt.Errorf("result from the virtual machine: %w", err)
	}
	res.Released = true // the run had only copies of this host's files
	res.End = end
	res.Start = end.Add(-min(max(a.Took, 0), end.Sub(began)))
	return res, nil
}

// patience returns how long the guest may take to answer, or 0 if it may take any time.
func (r *run) patience() time.Duration {
	if r.spec.Timeout == 0 {
		return 0
	}
	return max(0, r.spec.Timeout+r.spec.Grace+r.b.times.late) // 0 if the sum overflows
}

// killedResult is the result of a run that did not end when it was stopped, so that its machine was killed. It has no
// outputs.
func killedResult(began, end time.Time) *sandbox.Result {
	return &sandbox.Result{
		ExitCode: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL, Stopped: true, Released: true, Start: began, End: end,
	}
}

// lost returns the error of a run whose machine failed.
func (r *run) lost(err error) error {
	return fmt.Errorf("the virtual machine failed before the run was over: %w: %s", err, r.m.console.String())
}

func (r *run) sendWorkspace() error {
	if r.root < 0 {
		return nil
	}
	if err := sendTree(r.m.ports[portTree], r.root, []string{"."}); err != nil {
		return fmt.Errorf("copy the workspace into the virtual machine: %w", err)
	}
	return nil
}

// startStreams copies stdin, stdout and stderr in the background.
func (r *run) startStreams() error {
	read, wake, err := os.Pipe()
	if err != nil {
		return err
	}
	r.wake = wake
	r.serving.Go(func() {
		defer read.Close()
		r.copyStdin(read)
	})
	for _, s := range []struct {
		of   *stream
		port int
		to   io.Writer
	}{{&r.stdout, portStdout, r.std.Stdout}, {&r.stderr, portStderr, r.std.Stderr}} {
		if s.to == nil || s.of == &r.stderr && r.request.Same { // two goroutines must not share a writer
			s.to = io.Discard
		}
		r.serving.Go(func() {
			s.of.writeErr, s.of.err = r.m.ports[s.port].copyTo(s.to)
		})
	}
	return nil
}

// copyStdin sends stdin until it or wake ends, and then the end of the stream.
func (r *run) copyStdin(wake *os.File) {
	p := r.m.ports[portStdout]
	defer func() { _ = p.end() }() // a lost machine is noticed elsewhere
	if r.std.Stdin == nil {
		return
	}
	wire.CopyInput(p, int(r.std.Stdin.Fd()), wake)
}

// collect receives the outputs. The second error is of the port.
func (r *run) collect(a *runAnswer) (treeErr, err error) {
	if r.root < 0 {
		return nil, nil
	}
	var dirs []string
	if a.Error == "" && a.Result != nil {
		for _, o := range r.spec.Outputs {
			dirs = append(dirs, o.Source)
		}
	}
	dirs = outermost(dirs)
	for _, dir := range dirs {
		if treeErr = r.empty(dir); treeErr != nil {
			dirs = nil // no path is expected
			break
		}
	}
	got, err := receiveTree(r.m.ports[portTree], r.root, dirs, receipt{r.request.Bytes, r.request.Files})
	return errors.Join(treeErr, got), err
}

// empty makes an empty directory of the workspace, or empties it: the guest returns its contents.
func (r *run) empty(dir string) error {
	root := r.b.workspace(r.spec.Workspace)
	if root == nil {
		return fmt.Errorf("%w: the workspace was closed during the run", sandbox.ErrSpec)
	}
	if err := root.Root().MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fd, err := openBeneath(r.root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("output %s: %w", dir, err)
	}
	defer unix.Close(fd)
	names, err := list(fd)
	if err != nil {
		return fmt.Errorf("output %s: %w", dir, err)
	}
	for _, name := range names {
		if err := root.Root().RemoveAll(path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// A guestError is an error of the guest, of a kind that means the same here, or nil.
type guestError struct {
	text string
	kind error
}

func (e *guestError) Error() string { return e.text }
func (e *guestError) Unwrap() error { return e.kind }

// explain returns the error of a run that did not start, as the guest reports.
func (r *run) explain(ctx context.Context, a *runAnswer) error {
	if a.Kind == kindStopped && ctx.Err() != nil {
		return ctx.Err()
	}
	return &guestError{printable.Head(a.Error, maxError), errorKinds[a.Kind]}
}

// maxError bounds the text of a guest's error, in bytes.
const maxError = 8 << 10
