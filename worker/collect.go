// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// collected is what the action left, in the store.
type collected struct {
	result *repb.ActionResult
	*Violations
	// unread are the inputs that were never read, if the run was watched so closely.
	unread []string
	// log is the text that says all that, or the zero Digest.
	log cas.Digest
	// batch has what is not yet in the store, blobs are all that the result may name.
	batch *cas.Batch
	blobs []cas.Digest
	// left says which special files were left out of output directories, "" for none.
	left string
	// bad says which output is of a kind that cannot be one.
	bad error

	// ended is set once all of it is in the store.
	began, ended time.Time
}

// collect takes outputs, stdout, stderr and what the action tried into the store, or a batch for it. No process of the
// action is alive.
func (l *Local) collect(ctx context.Context, t *Task, req *Request, box *confined, s *staged, r *ran) (*collected, error) {
	c := &collected{result: &repb.ActionResult{}, began: time.Now()}
	fn, store := req.Digest.Function(), req.Instance.Store
	// Where the action was of our own user, it may have taken away our rights to its root.
	if err := s.ws.Root().Chmod(outDir, 0o755); err != nil {
		return nil, err
	}
	if err := l.attempted(t, req, box, s, r, c); err != nil {
		return nil, err
	}
	if text := c.auditText(t, req, box); text != "" {
		var err error
		if c.log, err = cas.PutBytes(ctx, store, fn, []byte(text)); err != nil {
			return nil, err
		}
	}
	batch := cas.NewBatch(store)
	c.batch = batch
	for _, log := range []struct {
		text *Log
		to   **repb.Digest
	}{{r.stdout.kept, &c.result.StdoutDigest}, {r.stderr.kept, &c.result.StderrDigest}} {
		d, err := batch.AddBytes(ctx, fn, log.text.Bytes())
		if err != nil {
			return nil, err
		}
		*log.to = d.Proto()
	}
	left, err := tree.Capture(ctx, batch, fn, s.out, tree.OutputSpec{
		Dir:         req.Command.WorkingDirectory,
		Paths:       req.Command.OutputPaths,
		Files:       req.Command.OutputFiles,
		Directories: req.Command.OutputDirectories,
		Format:      req.Command.OutputDirectoryFormat,
		Properties:  req.Command.OutputNodeProperties,
		MaxBytes:    max(0, box.spec.Limits.OutputBytes), // zero is no limit here
	}, c.result)
	c.left = left
	if errors.Is(err, tree.ErrOutput) {
		c.bad, err = err, nil
	}
	if err != nil {
		return nil, err
	}
	c.blobs = batch.Blobs()
	return c, nil
}
