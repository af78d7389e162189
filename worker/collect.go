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

// collected holds the outputs of an action and what was observed of its run.
type collected struct {
	result *repb.ActionResult
	*Violations
	// unread are the inputs that were never read, if the run was watched closely enough.
	unread []string
	// log is the blob of the audit log, or the zero Digest.
	log cas.Digest
	// batch holds the blobs that are not yet in the store, and blobs every blob that the result may name.
	batch *cas.Batch
	blobs []cas.Digest
	// omitted describes special files that were left out of output directories, "" for none.
	omitted string
	// bad is the error about an output of the wrong type.
	bad error

	// ended is set once everything is in the store.
	began, ended time.Time
}

// collect puts outputs, stdout, stderr and the audit log into the store, or into a batch for it. No process of the
// action is left, or it can change no name.
func (l *Local) collect(
	ctx context.Context, t *Task, req *request, box *confined, s *staged, r *ran,
) (*collected, error) {
	c := &collected{result: &repb.ActionResult{}, began: time.Now()}
	fn, store := req.Digest.Function(), req.Instance.Store
	// An action with our own user ID may have revoked our permissions on its root.
	if err := s.ws.Root().Chmod(outDir, 0o755); err != nil {
		return nil, err
	}
	s.removeSocket(box)
	if err := l.addViolations(t, req, box, s, r, c); err != nil {
		return nil, err
	}
	if text := c.auditText(t, req, box); text != "" {
		var err error
		if c.log, err = cas.PutBytes(ctx, store, fn, []byte(text)); err != nil {
			return nil, err
		}
	}
	c.batch = cas.NewBatch(store)
	stdout, err := c.batch.AddBytes(ctx, fn, r.stdout.log.bytes())
	if err != nil {
		return nil, err
	}
	stderr, err := c.batch.AddBytes(ctx, fn, r.stderr.log.bytes())
	if err != nil {
		return nil, err
	}
	c.result.StdoutDigest, c.result.StderrDigest = stdout.Proto(), stderr.Proto()
	c.omitted, err = tree.Capture(ctx, c.batch, fn, s.out, tree.OutputSpec{
		Dir:         req.Command.WorkingDirectory,
		Paths:       req.Command.OutputPaths,
		Files:       req.Command.OutputFiles,
		Directories: req.Command.OutputDirectories,
		Format:      req.Command.OutputDirectoryFormat,
		Properties:  req.Command.OutputNodeProperties,
		MaxBytes:    max(0, box.spec.Limits.OutputBytes), // zero is no limit here
	}, c.result)
	if errors.Is(err, tree.ErrOutput) {
		c.bad, err = err, nil
	}
	if err != nil {
		return nil, err
	}
	c.blobs = c.batch.Blobs()
	if s.request != nil {
		s.request.reuse = r.failure == "" && c.bad == nil
	}
	return c, nil
}
