// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// explainFailure returns the error of a run whose slot could not start it. Sources are checked only after a failure,
// because that takes a system call for each directory on their paths.
func (r *run) explainFailure(text string) error {
	for i := range r.spec.Inputs {
		in := &r.spec.Inputs[i]
		var err error
		switch {
		case in.Image != "":
		case path.IsAbs(in.Source):
			err = checkSource(in)
		default:
			_, err = r.inWorkspace(in.Source)
		}
		if err != nil {
			return fmt.Errorf("source %s of input %s: %w", in.Source, in.Target, err)
		}
	}
	for _, out := range r.spec.Outputs {
		info, err := r.inWorkspace(out.Source)
		if err == nil && info != nil && !info.IsDir() {
			err = fmt.Errorf("%w: it is not a directory", sandbox.ErrSpec)
		}
		if err != nil {
			return fmt.Errorf("source %s of output %s: %w", out.Source, out.Target, err)
		}
	}
	if text == "working directory: "+unix.EACCES.Error() {
		return fmt.Errorf("%w: working directory %s: the run's user may not enter it", sandbox.ErrSpec, r.spec.Dir)
	}
	return fmt.Errorf("start of the run: %s", text)
}

// checkSource returns an error for a source on this host that does not exist or leads through a symbolic link.
func checkSource(in *sandbox.Input) error {
	source, err := filepath.EvalSymlinks(in.Source)
	if err == nil && source != path.Clean(in.Source) {
		err = fmt.Errorf("%w: it leads through a symbolic link to %s: use that path", sandbox.ErrSpec, source)
	}
	return err
}

// inWorkspace describes a path of the run's workspace, or returns an error if it does not exist or leads through a
// symbolic link. It returns nil if the workspace is not one of this backend.
func (r *run) inWorkspace(source string) (fs.FileInfo, error) {
	w := r.backend.workspace(r.spec.Workspace)
	if w == nil {
		return nil, nil
	}
	for p := source; p != "."; p = path.Dir(p) {
		if info, err := w.root.Lstat(p); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("%w: %s is a symbolic link: use the path that it leads to", sandbox.ErrSpec, p)
		}
	}
	return w.root.Lstat(source)
}

// workspace returns the open workspace of that name, or nil.
func (b *Backend) workspace(name string) *workspace {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[name]
}

// missingToolchain returns the event for a program or interpreter that was not found because the inputs lack its usual
// directories. If they have them, ok is false: stderr explains the failure then.
func missingToolchain(spec *sandbox.Spec, what string) (e sandbox.Event, ok bool) {
	name := spec.Args[0]
	e = sandbox.Event{Kind: sandbox.EventExec, Subject: name, Count: 1}
	if ownsRoot(spec) {
		e.Detail = "the root file system lacks it"
		if what == zygote.MissingInterpreter {
			e.Subject = "the interpreter of " + name
		}
		return e, true
	}
	if what == zygote.MissingInterpreter {
		e.Subject = "the interpreter of " + name
		e.Detail = "add the toolchain to the inputs, with the directory of the dynamic linker, such as /lib64"
		return e, true
	}
	dirs := []string{path.Dir(name)}
	if !strings.Contains(name, "/") {
		dirs = nil
		for _, kv := range spec.Env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				dirs = strings.Split(list, ":")
			}
		}
	}
	switch {
	case len(dirs) == 0:
		e.Detail = "the environment has no PATH"
	case len(spec.Inputs) == 0:
		e.Detail = "there are no inputs: add the toolchain"
	case !slices.ContainsFunc(dirs, func(dir string) bool { return visible(spec, dir) }):
		e.Detail = fmt.Sprintf("no input contains %s: add the toolchain", strings.Join(dirs, " or "))
	}
	return e, e.Detail != ""
}

// visible reports whether an input or output has, contains or is inside a directory of the run.
func visible(spec *sandbox.Spec, dir string) bool {
	if !path.IsAbs(dir) {
		dir = path.Join(spec.Dir, dir)
	}
	has := func(target string) bool { return within(dir, target) || within(target, dir) }
	return slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return has(in.Target) }) ||
		slices.ContainsFunc(spec.Outputs, func(o sandbox.Output) bool { return has(o.Target) })
}
