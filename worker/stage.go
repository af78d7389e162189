// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
)

// outDir is the directory of a workspace that becomes the input root.
const outDir = "out"

// copyUpTo is the number of inputs up to which copying is faster than mounting an image.
const copyUpTo = 16

// NewStager returns a Stager that stages input trees for runs in b. It mounts images if b supports that; otherwise it
// copies, and why is the reason. It sets the fields Mounter and CopyUpTo of c. The caller closes the Stager before b.
func NewStager(ctx context.Context, b sandbox.Backend, c tree.StagerConfig) (s *tree.Stager, why error) {
	c.CopyUpTo = copyUpTo
	if m, ok := b.(sandbox.ImageMounter); ok {
		c.Mounter = mounter{m}
	}
	s = tree.NewStager(c)
	return s, s.Probe(ctx)
}

// A mounter is a tree.Mounter over a backend.
type mounter struct{ backend sandbox.ImageMounter }

func (m mounter) Mount(ctx context.Context, image *os.File, devices []*os.File) (tree.Mount, error) {
	return m.backend.Mount(ctx, image, devices)
}

// staged is an input tree that is ready to be mounted.
type staged struct {
	ws   sandbox.Workspace
	tree *tree.Staged
	root *tree.Root // nil without a separate root file system
	out  *os.Root
	// request is for a persistent worker, which owns ws and out, or nil.
	request *workRequest
	// remote serves remote APIs to the run, or is nil.
	remote actionapi.Session

	began, ended time.Time
}

// stage stages the input tree and adds it to box.spec.
func (l *Local) stage(ctx context.Context, t *Task, req *request, box *confined) (*staged, error) {
	if w := l.workRequest(t, req, box); w != nil {
		return l.stagePersistent(ctx, t, req, box, w)
	}
	s, spec := &staged{began: time.Now()}, box.spec
	var err error
	defer func() {
		if err != nil {
			s.close(l.cfg.Log)
		}
	}()
	workspace := func(bytes, files int64) (*os.Root, error) {
		bytes, files = sum(bytes, spec.Limits.OutputBytes), sum(files, spec.Limits.OutputFiles)
		var err error
		if s.ws, err = l.cfg.Backend.Workspace(ctx, bytes, files); err != nil {
			return nil, err
		}
		return s.ws.Root(), nil
	}
	if s.root, err = l.stageRoot(ctx, req, spec); err != nil {
		return nil, err
	}
	layout := req.Layout
	if f := l.cfg.Features; f.SameUser && f.Lower {
		layout = layout.Layered()
	}
	if v := t.Variation; v != nil && v.Order != 0 {
		layout = layout.WithOrder(v.Order)
	}
	if s.tree, err = l.cfg.Stager.Stage(ctx, layout, req.Instance, workspace); err != nil {
		return nil, err
	}
	if s.out, err = s.ws.Root().OpenRoot(outDir); err != nil {
		return nil, err
	}
	spec.Workspace = s.ws.Name()
	spec.Outputs = []sandbox.Output{{Target: box.root, Source: outDir}}
	for _, p := range layout.Owned() {
		spec.Owned = append(spec.Owned, path.Join(outDir, p))
	}
	_, content, err := parts(req.Digest, req.Action)
	if err != nil {
		return nil, err
	}
	for _, lower := range s.tree.Lower {
		spec.Lower = append(spec.Lower, sandbox.Lower{
			Target: box.root, Content: content.String(), Source: lower.Source, Image: lower.Image,
		})
	}
	spec.Inputs = slices.Grow(spec.Inputs, len(s.tree.Binds))
	for _, b := range s.tree.Binds {
		spec.Inputs = append(spec.Inputs, sandbox.Input{
			Target: path.Join(box.root, b.Target), Content: b.Content.String(), Source: b.Source,
		})
	}
	if err = spec.Validate(); err != nil {
		return nil, fmt.Errorf("confine: %w", err)
	}
	if s.remote, err = l.serveSocket(t, box, s.ws); err != nil {
		return nil, err
	}
	s.ended = time.Now()
	return s, nil
}

// valid reports whether the run cannot have read anything but its inputs.
func (s *staged) valid() bool { return s.tree.Valid() && (s.root == nil || s.root.Valid()) }

// sum returns the size of a workspace for the inputs and the outputs, whose size may be unlimited.
func sum(inputs, outputs int64) int64 {
	if outputs == sandbox.Unlimited {
		return sandbox.Unlimited
	}
	return min(inputs, math.MaxInt64-outputs) + outputs
}

// close releases everything after the run.
func (s *staged) close(log *slog.Logger) {
	if s.request != nil {
		s.request.end()
		return
	}
	if s.remote != nil {
		s.remote.Close()
	}
	if s.tree != nil {
		s.tree.Release()
	}
	if s.root != nil {
		s.root.Release()
	}
	if s.out != nil {
		s.out.Close()
	}
	if s.ws != nil {
		closeWorkspace(s.ws, log)
	}
}

// closeWorkspace closes a workspace. If that fails, its memory or its directory on disk remains, but no action fails.
func closeWorkspace(ws sandbox.Workspace, log *slog.Logger) {
	if err := ws.Close(); err != nil {
		log.Warn("cannot remove a workspace", "workspace", ws.Name(), "err", err)
	}
}
