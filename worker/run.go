// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/sandbox"
)

// ran is how the command ended.
type ran struct {
	*sandbox.Result
	timedOut bool
}

// run runs the command. Only the time that it executes counts towards its timeout (rule 108).
func (l *Local) run(ctx context.Context, t *Task, req *Request, spec *sandbox.Spec, s *staged) (*ran, error) {
	limit := req.Timeout
	if limit == 0 {
		limit = l.MaxTimeout
	}
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res, err := l.Backend.Run(timed, spec, sandbox.Stdio{
		Stdout: &capped{w: tee(s.stdout, t.Stdout), left: l.LogBytes},
		Stderr: &capped{w: tee(s.stderr, t.Stderr), left: l.LogBytes},
	})
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	return &ran{Result: res, timedOut: res.Stopped}, nil
}

func tee(w, also io.Writer) io.Writer {
	if also == nil {
		return w
	}
	return io.MultiWriter(w, also)
}

// capped passes on the first left bytes, then one notice, and swallows the rest, so that an action that
// never stops talking neither blocks nor fills the worker.
type capped struct {
	w    io.Writer
	left int64
	told bool
}

func (c *capped) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), c.left)]
	if len(keep) > 0 {
		if _, err := c.w.Write(keep); err != nil {
			return 0, err
		}
		c.left -= int64(len(keep))
	}
	if len(keep) < len(p) && !c.told {
		c.told = true
		if _, err := fmt.Fprintf(c.w, "\ncloister: output cut off here: it reached its limit\n"); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}
