// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"io"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/violation"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// ran is the result of the command and its output.
type ran struct {
	*sandbox.Result
	timedOut       bool
	violated       string // what its violations did: violation.Failed, violation.Killed or ""
	exited         int    // the exit code of the command itself
	failure        string // how the persistent worker failed, or ""
	remote         *manifest.RemoteAPIs
	stdout, stderr *capped
}

// run runs the command. Only its execution time counts towards the timeout (rule 108).
func (l *Local) run(ctx context.Context, t *Task, box *confined, s *staged) (*ran, error) {
	logs := t.Logs
	if logs == nil {
		logs = &Logs{}
	}
	r := &ran{
		stdout: &capped{log: &logs.Stdout, left: l.cfg.LogBytes, live: t.Stdout},
		stderr: &capped{log: &logs.Stderr, left: l.cfg.LogBytes, live: t.Stderr},
	}
	var err error
	if s.request != nil {
		r.Result, r.failure, err = l.runPersistent(ctx, box, s.request, r.stderr)
	} else {
		r.Result, err = l.cfg.Backend.Run(ctx, box.spec, sandbox.Stdio{
			Stdin: t.Stdin, Stdout: r.stdout, Stderr: r.stderr, Terminal: t.Terminal,
		})
	}
	var used actionapi.Use
	if s.remote != nil {
		used = s.remote.Close()
	}
	if r.Result != nil {
		r.called(box, used)
		r.exited = r.ExitCode
		r.violated = violation.Apply(r.Result, box.grant.Fail, box.grant.Kill)
	}
	if ctx.Err() != nil {
		if r.Result != nil {
			l.audit(t, r.violations(box, nil, 0)) // they happened, even though the client is gone
		}
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	logs.Stdout.Close(nil)
	logs.Stderr.Close(nil)
	r.timedOut = r.Stopped
	return r, nil
}

// violations returns the violations of the run. It left the files undeclared and more of them behind.
func (r *ran) violations(box *confined, undeclared []string, more int) *Violations {
	v := newViolations(r.Result, box.root, undeclared, more)
	v.OnViolation = r.violated
	return v
}

// capped keeps the first left bytes of an output, then appends one notice and discards the rest, so that endless output
// neither blocks the action nor fills the worker's memory. It does not use the workspace, which the action may fill.
type capped struct {
	log     *Log
	left    int64
	noticed bool
	live    io.Writer // receives everything, if not nil
}

// TruncationNotice ends an output that reached its limit.
const TruncationNotice = "\ncloister: output truncated here: it reached its limit\n"

func (c *capped) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), c.left)]
	c.left -= int64(len(keep))
	_, _ = c.log.Write(keep) // fails only after Close
	if len(keep) < len(p) && !c.noticed {
		c.noticed = true
		_, _ = c.log.Write([]byte(TruncationNotice))
	}
	if c.live != nil {
		return c.live.Write(p)
	}
	return len(p), nil
}
