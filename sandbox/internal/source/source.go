// SPDX-License-Identifier: Apache-2.0

// Package source explains why a run could not start by checking its sources, for every backend. It opens none of them.
package source

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
)

// Explain returns the error of a run that could not be started for the reason text. Workspace is its workspace, or nil
// if the backend made none of that name. Sources are checked only after a failure, because that takes a system call for
// each directory on their paths.
func Explain(spec *sandbox.Spec, workspace *os.Root, text string) error {
	for i := range spec.Inputs {
		in := &spec.Inputs[i]
		var err error
		switch {
		case in.Image != "":
		case path.IsAbs(in.Source):
			err = check(in)
		default:
			_, err = inWorkspace(workspace, in.Source)
		}
		if err != nil {
			return fmt.Errorf("source %s of input %s: %w", in.Source, in.Target, err)
		}
	}
	for _, out := range spec.Outputs {
		info, err := inWorkspace(workspace, out.Source)
		if err == nil && info != nil && !info.IsDir() {
			err = fmt.Errorf("%w: it is not a directory", sandbox.ErrSpec)
		}
		if err != nil {
			return fmt.Errorf("source %s of output %s: %w", out.Source, out.Target, err)
		}
	}
	if strings.TrimSpace(text) == "working directory: "+syscall.EACCES.Error() {
		return fmt.Errorf("%w: working directory %s: the run's user may not enter it", sandbox.ErrSpec, spec.Dir)
	}
	return fmt.Errorf("start of the run: %s", text)
}

// check returns an error for a source on this host that does not exist or leads through a symbolic link.
func check(in *sandbox.Input) error {
	source, err := filepath.EvalSymlinks(in.Source)
	if err == nil && source != path.Clean(in.Source) {
		err = fmt.Errorf("%w: it leads through a symbolic link to %s: use that path", sandbox.ErrSpec, source)
	}
	if err != nil {
		return fmt.Errorf("%w (%s)", err, preflight.MountSource)
	}
	return nil
}

// inWorkspace describes a path of a workspace, or returns an error if it does not exist or leads through a symbolic
// link. It returns nil without a workspace.
func inWorkspace(workspace *os.Root, source string) (fs.FileInfo, error) {
	if workspace == nil {
		return nil, nil
	}
	for p := source; p != "."; p = path.Dir(p) {
		if info, err := workspace.Lstat(p); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("%w: %s is a symbolic link: use the path that it leads to", sandbox.ErrSpec, p)
		}
	}
	return workspace.Lstat(source)
}
