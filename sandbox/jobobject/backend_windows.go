// SPDX-License-Identifier: Apache-2.0

package jobobject

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"golang.org/x/sys/windows"
)

// A backend runs each command in a job of its own.
type backend struct{ *placement.Host }

// New returns a backend. The caller closes it.
func New() sandbox.Backend { return &backend{placement.NewHost()} }

// Probe runs this program in a job and checks that the job counts it, and kills it.
func (*backend) Probe(context.Context) (sandbox.Features, error) {
	f := features()
	check := sandbox.Check{Name: "job object", OK: true, Detail: "a process was started in a job and killed with it", Required: true}
	err := probe()
	if err != nil {
		check.OK, check.Detail, f.Tier = false, err.Error(), "none"
		err = preflight.Fail(preflight.JobProbe, "job objects: %w", err)
	}
	f.Checks = append([]sandbox.Check{check}, f.Checks...)
	return f, err
}

func probe() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	j, err := newJob(&unlimited)
	if err != nil {
		return err
	}
	defer j.close()
	p, err := j.start(self, []string{self}, []string{}, "", sandbox.Stdio{}, false)
	if err != nil {
		return err
	}
	used, err := j.usage()
	switch {
	case err == nil && used.active != 1:
		err = fmt.Errorf("the job counts %d processes instead of one", used.active)
	case err == nil:
		err = j.kill()
	}
	if err == nil {
		<-p.exited
		_ = p.cmd.Wait() // it was killed
	}
	return err
}

// unlimited are the limits of the probe.
var unlimited = sandbox.Limits{
	Memory: sandbox.Unlimited, CPU: sandbox.Unlimited, Processes: sandbox.Unlimited, OpenFiles: sandbox.Unlimited,
	OutputBytes: sandbox.Unlimited, OutputFiles: sandbox.Unlimited, MilliCPUs: sandbox.Unlimited, DiskRate: sandbox.Unlimited,
}

// Run runs spec.
func (b *backend) Run(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	if spec != nil && !spec.Network.Loopback {
		return nil, fmt.Errorf("%w: job objects cannot keep a run from the network", sandbox.ErrUnsupported)
	}
	f := features()
	return b.Host.Run(ctx, &f, spec, std, func(placed *placement.Run, file string, res *sandbox.Result) error {
		j, err := newJob(&spec.Limits)
		if err != nil {
			return err
		}
		defer j.close()
		p, err := j.start(file, placed.Args, placed.Env, placed.Dir, std, true)
		switch {
		case errors.Is(err, windows.ERROR_FILENAME_EXCED_RANGE):
			return placement.TooLong(file)
		case errors.Is(err, windows.ERROR_BAD_EXE_FORMAT):
			return &placement.NotExecuted{ExitCode: 126, Reason: file + ": " + err.Error()}
		case err != nil:
			return fmt.Errorf("start of the run: %w", err)
		}
		r := &run{backend: b, limits: &spec.Limits, placed: placed, job: j, process: p}
		return r.follow(ctx, res)
	})
}
