// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"io"

	"github.com/cloister-build/cloister/sandbox"
)

// ran is how the command ended, and what it said.
type ran struct {
	*sandbox.Result
	timedOut       bool
	stdout, stderr *capped
}

// run runs the command. Only the time that it executes counts towards its timeout (rule 108).
func (l *Local) run(ctx context.Context, t *Task, spec *sandbox.Spec) (*ran, error) {
	logs := t.Logs
	if logs == nil {
		logs = &Logs{}
	}
	r := &ran{
		stdout: &capped{kept: &logs.Stdout, left: l.LogBytes, also: t.Stdout},
		stderr: &capped{kept: &logs.Stderr, left: l.LogBytes, also: t.Stderr},
	}
	var err error
	r.Result, err = l.Backend.Run(ctx, spec, sandbox.Stdio{Stdout: r.stdout, Stderr: r.stderr, Terminal: t.Terminal})
	if ctx.Err() != nil {
		if r.Result != nil {
			l.audit(t, attempts(r.Result, nil, 0)) // whoever went away has not undone it
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

// capped keeps the first left bytes, then one notice, and no more, so that an action that never stops
// talking neither blocks nor fills the worker. It is memory of the worker's, apart from the workspace,
// which an action may fill.
type capped struct {
	kept *Log
	left int64
	told bool
	also io.Writer // sees everything, if not nil
}

const notice = "\ncloister: output cut off here: it reached its limit\n"

func (c *capped) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), c.left)]
	c.left -= int64(len(keep))
	c.kept.Write(keep)
	if len(keep) < len(p) && !c.told {
		c.told = true
		c.kept.Write([]byte(notice))
	}
	if c.also != nil {
		return c.also.Write(p)
	}
	return len(p), nil
}
