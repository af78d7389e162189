// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"math"
	"os"
	"path"
	"time"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
)

// outDir is the directory of a workspace that becomes ExecRoot.
const outDir = "out"

// staged is the input tree as it lies in a workspace, ready to be mounted.
type staged struct {
	ws   sandbox.Workspace
	tree *tree.Staged
	out  *os.Root

	began, ended time.Time
}

// stage lays out the input tree and says in spec where it lies.
func (l *Local) stage(ctx context.Context, req *Request, spec *sandbox.Spec) (*staged, error) {
	s := &staged{began: time.Now()}
	var err error
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	bytes, files := req.Layout.Room(req.Instance.Store)
	bytes, files = beside(bytes, spec.Limits.OutputBytes), beside(files, spec.Limits.OutputFiles)
	if s.ws, err = l.Backend.Workspace(ctx, bytes, files); err != nil {
		return nil, err
	}
	if s.tree, err = req.Layout.Stage(ctx, req.Instance.Store, s.ws.Root()); err != nil {
		return nil, err
	}
	if s.out, err = s.ws.Root().OpenRoot(outDir); err != nil {
		return nil, err
	}
	spec.Workspace = s.ws.Name()
	spec.Outputs = []sandbox.Output{{Target: ExecRoot, Source: outDir}}
	for _, b := range s.tree.Binds {
		spec.Inputs = append(spec.Inputs, sandbox.Input{
			Target: path.Join(ExecRoot, b.Target), Content: b.Content.String(), Source: b.Source,
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
