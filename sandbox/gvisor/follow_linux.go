// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// An ending is why and how a run ended.
type ending struct {
	exited   *zygote.Exited
	full     []string
	failed   string         // why it never started, as the guest reports
	exceeded *sandbox.Event // the limit for which it was killed
	closed   bool           // the backend was closed
}

// follow follows the run to its end.
func (r *run) follow(ctx context.Context) (*sandbox.Result, error) {
	var res sandbox.Result
	e := r.await(ctx, &res)
	res.End = time.Now()
	usage, sampleErr := r.sample()
	if err := r.end(); err != nil {
		return nil, err
	}
	if e.closed {
		return nil, fmt.Errorf("%w, with every run in it", sandbox.ErrClosed)
	}
	if sampleErr != nil {
		return nil, fmt.Errorf("usage of the run: %w", sampleErr)
	}
	oom := limit.ExceededBy(&r.spec.Limits, &usage)
	if res.Start.IsZero() {
		switch {
		case res.Stopped:
			res.Start = res.End
		case oom == nil:
			return nil, r.explain(e.failed)
		default:
			return nil, fmt.Errorf("start of the run: %s", oom)
		}
	}
	if err := errors.Join(r.copyErr[:]...); err != nil {
		return nil, fmt.Errorf("copy the run's output: %w", err)
	}
	switch {
	case e.exited != nil && e.exited.Signal == 0:
		res.ExitCode = e.exited.Code
	case e.exited != nil:
		res.Signal, res.ExitCode = syscall.Signal(e.exited.Signal), 128+e.exited.Signal
	default:
		res.Signal, res.ExitCode = syscall.SIGKILL, 128+int(syscall.SIGKILL)
	}
	res.Exceeded, res.Released = e.exceeded, true
	if res.Exceeded == nil {
		res.Exceeded = oom
	}
	if e.exited == nil && !res.Stopped && res.Exceeded == nil {
		return nil, fmt.Errorf("gVisor ended before the command did: %s", r.diag.String())
	}
	r.account(&res, &usage, e)
	return &res, nil
}

// await waits until the run has ended or must be killed, and sets its Start and whether it is Stopped. A gVisor that the
// run has taken over may report anything or nothing, and must not keep its cell.
func (r *run) await(ctx context.Context, res *sandbox.Result) *ending {
	e := &ending{}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	done, timeout, grace := ctx.Done(), (<-chan time.Time)(nil), (<-chan time.Time)(nil)
	late := time.After(r.b.times.start) // deadline of the next report, if one is due: Started, or Reaped after Exited
	for {
		stop := false
		select {
		case rep, ok := <-r.reports:
			switch {
			case !ok:
				return e
			case rep.Started != 0 && res.Start.IsZero():
				res.Start, late = time.Now(), nil
				r.messages <- []byte(`"` + zygote.WordStart + `"`)
				if r.spec.Timeout > 0 {
					timeout = time.After(r.spec.Timeout)
				}
			case rep.Failed != "":
				e.failed, res.Start = rep.Failed, time.Time{}
				return e
			case rep.Exited != nil && e.exited == nil && !res.Start.IsZero():
				e.exited, late = rep.Exited, time.After(r.b.times.reap)
			case rep.Reaped != nil:
				e.full = rep.Reaped.Full
				return e
			}
		case <-done:
			done, stop = nil, true
		case <-timeout:
			timeout, stop = nil, true
		case <-grace:
			return e
		case <-late:
			if res.Start.IsZero() {
				e.failed = fmt.Sprintf("gVisor did not report within %v that the command started", r.b.times.start)
			}
			return e
		case <-r.b.ending:
			e.closed = true
			return e
		case <-tick.C:
			if e.exceeded = r.check(); e.exceeded != nil {
				return e
			}
		}
		if stop && e.exited == nil && grace == nil {
			res.Stopped = true
			if r.spec.Grace == 0 || res.Start.IsZero() {
				return e
			}
			r.messages <- []byte(`"` + zygote.WordTerm + `"`) // once
			grace = time.After(r.spec.Grace)
		}
	}
}

// check returns the limit for which the run must be killed, or nil. Usage that cannot be read is read again at the end.
func (r *run) check() *sandbox.Event {
	r.checkSpace()
	used, err := r.sample()
	if err != nil {
		return nil
	}
	return limit.ExceededBy(&r.spec.Limits, &used)
}

// sample returns what the run has used, or nothing without a control group. The peak of memory includes gVisor's own
// and is dropped.
func (r *run) sample() (cgroup.Usage, error) {
	if r.cell.group == nil {
		return cgroup.Usage{}, nil
	}
	used, err := r.cell.group.Sample()
	used.PeakMemory, used.PeakProcesses = 0, 0
	return used, err
}

// checkSpace records whether the workspace is full, as in package namespace.
func (r *run) checkSpace() {
	var st unix.Statfs_t
	if r.spec.Workspace == "" || unix.Statfs(r.spec.Workspace, &st) != nil {
		return
	}
	r.noBytes = r.noBytes || st.Bavail == 0 && st.Blocks > 0
	r.noFiles = r.noFiles || st.Ffree == 0 && st.Files > 0
}

// account completes res with what the dead run used and the limits that it hit.
func (r *run) account(res *sandbox.Result, used *cgroup.Usage, e *ending) {
	u := &res.Usage
	u.User, u.System = r.launcher.ProcessState.UserTime(), r.launcher.ProcessState.SystemTime()
	if ru, ok := r.launcher.ProcessState.SysUsage().(*syscall.Rusage); ok {
		u.PeakRSS = ru.Maxrss << 10
	}
	if r.cell.group != nil {
		can := r.b.groups.Capabilities()
		if used.User+used.System > u.User+u.System {
			u.User, u.System = used.User, used.System
		}
		u.ReadBytes, u.WrittenBytes = used.ReadBytes, used.WrittenBytes
		u.Measured.CPU, u.Measured.DiskBytes = can.CountCPU, can.CountIO
	}
	hit := func(e *sandbox.Event) {
		res.Events = append(res.Events, *e)
		if res.Exceeded == nil && res.ExitCode != 0 {
			res.Exceeded = e
		}
	}
	r.checkSpace()
	limits := r.outputLimits()
	if r.noBytes && limits.Bytes != sandbox.Unlimited {
		hit(limit.Event(sandbox.LimitOutputBytes, limits.Bytes, limits.Bytes))
	}
	if r.noFiles && limits.Files != sandbox.Unlimited {
		hit(limit.Event(sandbox.LimitOutputFiles, limits.Files, limits.Files))
	}
	for _, t := range r.spec.Temp {
		if slices.Contains(e.full, t.Target) {
			hit(limit.FullTemp(t))
		}
	}
	if res.Exceeded != nil && !slices.Contains(res.Events, *res.Exceeded) {
		res.Events = append(res.Events, *res.Exceeded)
	}
	slices.SortFunc(res.Events, sandbox.Event.Compare)
}
