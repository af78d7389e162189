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
)

// outDir is the directory of a workspace that becomes the root of the inputs.
const outDir = "out"

// few is how many inputs are copied rather than mounted: below that, mounting an image takes longer.
const few = 16

// NewStager returns what lays out input trees for runs in a backend: by images, if it can mount these, else by copies,
// and then why says why. The images' files are made in dir, which must not be a file system in memory, and have no
// names; subtrees that many runs share stay mounted within budget bytes. The caller closes it before the backend.
func NewStager(ctx context.Context, b sandbox.Backend, dir string, budget int64, log *slog.Logger) (s *tree.Stager, why error) {
	c := tree.StagerConfig{Dir: dir, Budget: budget, CopyUpTo: few, Log: log}
	if imager, ok := b.(sandbox.ImageMounter); ok {
		c.Mounter = mounter{imager}
	}
	s = tree.NewStager(c)
	return s, s.Probe(ctx)
}

// A mounter mounts images by a backend.
type mounter struct{ imager sandbox.ImageMounter }

func (m mounter) Mount(ctx context.Context, image *os.File, devices []*os.File) (tree.Mount, error) {
	return m.imager.Mount(ctx, image, devices)
}

// staged is the input tree, ready to be mounted.
type staged struct {
	ws   sandbox.Workspace
	tree *tree.Staged
	out  *os.Root

	began, ended time.Time
}

// stage lays out the input tree and says in box.spec where it lies.
func (l *Local) stage(ctx context.Context, t *Task, req *Request, box *confined) (*staged, error) {
	s, spec := &staged{began: time.Now()}, box.spec
	var err error
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	room := func(bytes, files int64) (*os.Root, error) {
		bytes, files = beside(bytes, spec.Limits.OutputBytes), beside(files, spec.Limits.OutputFiles)
		var err error
		if s.ws, err = l.Backend.Workspace(ctx, bytes, files); err != nil {
			return nil, err
		}
		return s.ws.Root(), nil
	}
	layout := req.Layout
	if v := t.Variation; v != nil && v.Order != 0 {
		layout = layout.WithOrder(v.Order)
	}
	if s.tree, err = l.Stager.Stage(ctx, layout, req.Instance, room); err != nil {
		return nil, err
	}
	if s.out, err = s.ws.Root().OpenRoot(outDir); err != nil {
		return nil, err
	}
	spec.Workspace = s.ws.Name()
	spec.Outputs = []sandbox.Output{{Target: box.root, Source: outDir}}
	spec.Inputs = slices.Grow(spec.Inputs, len(s.tree.Binds))
	for _, b := range s.tree.Binds {
		spec.Inputs = append(spec.Inputs, sandbox.Input{
			Target: path.Join(box.root, b.Target), Content: b.Content.String(), Source: b.Source, Image: b.Image,
		})
	}
	if err = spec.Validate(); err != nil {
		return nil, fmt.Errorf("confine: %w", err)
	}
	s.ended = time.Now()
	return s, nil
}

// beside returns the room for the inputs and for what the action may make beside them.
func beside(inputs, outputs int64) int64 {
	if outputs == sandbox.Unlimited {
		return sandbox.Unlimited
	}
	return min(inputs, math.MaxInt64-outputs) + outputs
}

// close gives everything back. It is called once the run is over.
func (s *staged) close() {
	if s.tree != nil {
		s.tree.Release()
	}
	if s.out != nil {
		s.out.Close()
	}
	if s.ws != nil {
		// A workspace that does not close is memory lost, which the next one will report as full.
		_ = s.ws.Close()
	}
}
