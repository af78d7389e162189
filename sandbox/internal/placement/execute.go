// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// interval is how often the outputs of a run are measured.
const interval = 200 * time.Millisecond

// NotExecuted means that the command cannot be executed as it is, with the exit code that a shell would give.
type NotExecuted struct {
	ExitCode int
	Reason   string
}

func (e *NotExecuted) Error() string { return e.Reason }

// TooLong is the error for a command whose arguments and environment are larger than the system permits.
func TooLong(file string) error {
	return &NotExecuted{126, file + ": the arguments and the environment are too long for this system: use a response file"}
}

// Run implements sandbox.Backend for a backend with these features. It refuses what they do not cover, and calls execute
// for a run whose files are in place. Execute runs the program file with the Args, Env and Dir of the Run, completes the
// result, and returns when no process of the run is alive. Its error is NotExecuted if that is the command's fault.
func (h *Host) Run(ctx context.Context, f *sandbox.Features, spec *sandbox.Spec, std sandbox.Stdio,
	execute func(r *Run, file string, res *sandbox.Result) error,
) (*sandbox.Result, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := f.Covers(spec); err != nil {
		return nil, err
	}
	if std.Terminal != nil {
		return nil, fmt.Errorf("%w: a run in the sandbox %s cannot have a terminal", sandbox.ErrUnsupported, f.Backend)
	}
	if err := h.begin(); err != nil {
		return nil, err
	}
	defer h.busy.Done()
	r, err := h.Place(spec)
	if err != nil {
		return nil, err
	}
	res := &sandbox.Result{Start: time.Now(), Released: true}
	file, err := r.program()
	if err == nil {
		err = execute(r, file, res)
	}
	if e := (*NotExecuted)(nil); errors.As(err, &e) {
		res.ExitCode, res.End, err = e.ExitCode, time.Now(), nil
		if std.Stderr != nil {
			fmt.Fprintf(std.Stderr, "cloister: %s\n", e.Reason)
		}
	}
	if err == nil && res.Exceeded == nil {
		res.Exceeded = r.exceeded(true)
	}
	if res.Exceeded != nil {
		res.Events = append(res.Events, *res.Exceeded)
	}
	if err = errors.Join(err, r.Restore()); err != nil {
		return nil, err
	}
	return res, nil
}

// Await waits until exited is closed or the run must be killed, and sets Stopped and Exceeded of res. Check returns a
// limit that the run has reached, or nil. Terminate, if not nil, asks the run to end at the beginning of its grace
// period. The error is sandbox.ErrClosed if the backend was closed.
func (h *Host) Await(ctx context.Context, r *Run, res *sandbox.Result, exited <-chan struct{}, check func() *sandbox.Event, terminate func()) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	done, timeout, grace := ctx.Done(), (<-chan time.Time)(nil), (<-chan time.Time)(nil)
	if r.spec.Timeout > 0 {
		timeout = time.After(r.spec.Timeout)
	}
	for {
		stop := false
		select {
		case <-exited:
			return nil
		case <-done:
			done, stop = nil, true
		case <-timeout:
			timeout, stop = nil, true
		case <-grace:
			return nil
		case <-h.ending:
			return fmt.Errorf("%w, with every run in it", sandbox.ErrClosed)
		case <-tick.C:
			if res.Exceeded = check(); res.Exceeded == nil {
				res.Exceeded = r.exceeded(false)
			}
			if res.Exceeded != nil {
				return nil
			}
		}
		if stop && grace == nil {
			res.Stopped = true
			if r.spec.Grace == 0 || terminate == nil {
				return nil
			}
			terminate()
			grace = time.After(r.spec.Grace)
		}
	}
}
