// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/source"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// explainFailure returns the error of a run whose slot could not start it.
func (r *run) explainFailure(text string) error {
	var root *os.Root
	if w := r.backend.workspace(r.spec.Workspace); w != nil {
		root = w.root
	}
	return source.Explain(r.spec, root, text)
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
