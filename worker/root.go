// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
)

// placeProperties are the platform properties that state the path of the input root: RBE's and BuildBox's.
var placeProperties = []string{"InputRootAbsolutePath", "chroot-path"}

// IsPlacement reports whether a platform property states where, or as which user, an action runs. A Local implements
// these; workers of other makes may ignore them.
func IsPlacement(name string) bool {
	return slices.ContainsFunc(append([]string{policy.PropertySuperuser}, placeProperties...), func(p string) bool {
		return strings.EqualFold(p, name)
	})
}

// A placement is where the input root of an action is, and in which root file system.
type placement struct {
	path string
	// root is the root file system to mount, or nil if that is this host's toolchain, is not read yet, or if path is "/".
	root *tree.Input
	own  bool // the action sees nothing of this host
	// property is the one that states the path, or the zero Property.
	property Property
}

// points returns the paths, relative to the root file system, over which things are mounted.
func (p *placement) points() []string {
	points := []string{"dev", "proc", "tmp"}
	if p.path != "/" {
		points = append(points, strings.TrimPrefix(p.path, "/"))
	}
	return points
}

// place decides where the input root of req is. If it is at "/", its directories are merged with those of the root file
// system, and req.Input becomes that tree.
func (l *Local) place(t *Task, req *request) error {
	p := placement{path: ExecRoot, root: req.root.tree}
	for _, q := range l.cfg.Policy.Properties(req.ask(t)) {
		if !slices.ContainsFunc(placeProperties, func(name string) bool { return strings.EqualFold(name, q.Name) }) {
			continue
		}
		if p.property.Name != "" && q.Value != p.path {
			return faultf(FaultInvalid, "confine: property %s contradicts property %s: set one of them", q, p.property)
		}
		p.path, p.property = q.Value, q
	}
	if v := t.Variation; v != nil && v.Root != "" {
		if p.property.Name != "" {
			return faultf(FaultInvalid, "confine: the path of the input root cannot be varied: property %s sets it", p.property)
		}
		p.path = v.Root
	}
	p.own = req.root.own() || p.path == "/"
	if err := l.checkPlace(&p); err != nil {
		return err
	}
	if p.path != "/" || req.root.own() && req.root.tree == nil {
		req.place = p
		return nil
	}
	var err error
	if p.root != nil {
		req.Input, err = tree.Merge(req.Input, p.root)
		p.root = nil
	}
	req.place = p
	if err == nil {
		req.Input, err = req.Input.WithPaths(req.Digest.Function(), p.points(), []string{"etc/hosts"})
	}
	if err == nil {
		err = req.plan(nil)
	}
	return fault(StageFetch, err)
}

// checkPlace checks that the input root can be at p.path, without hiding the toolchain or a directory of the sandbox.
func (l *Local) checkPlace(p *placement) error {
	if p.path == ExecRoot || p.path == "/" && p.property.Name != "" {
		return nil
	}
	what := fmt.Sprintf("the varied root %+.256q", p.path)
	if p.property.Name != "" {
		what = fmt.Sprintf("property %s: the path", p.property)
	}
	if p.path == "/" || !path.IsAbs(p.path) || path.Clean(p.path) != p.path || strings.ContainsRune(p.path, 0) || len(p.path) > maxPlace {
		return faultf(FaultInvalid, "confine: %s is not a clean absolute path below /", what)
	}
	taken := []string{"/dev", "/proc", "/tmp"}
	hint := ""
	if !p.own {
		hint = "; choose another path, or a root file system that is not the host's"
		taken = append(taken, "/etc", "/sys")
		for _, in := range l.cfg.Toolchain {
			taken = append(taken, in.Target)
		}
	}
	if strings.HasPrefix(p.path+"/", hostsFile+"/") {
		return faultf(FaultInvalid, "confine: %s overlaps %s, which every run has; choose another path", what, hostsFile)
	}
	for _, dir := range taken {
		if strings.HasPrefix(dir+"/", p.path+"/") || strings.HasPrefix(p.path+"/", dir+"/") {
			return faultf(FaultInvalid, "confine: %s overlaps %s, which every run has%s", what, dir, hint)
		}
	}
	return nil
}

// hostsFile is a file that every run has, also in a root file system of its own.
const hostsFile = "/etc/hosts"

// maxPlace bounds the path of the input root, in bytes: the paths below it must not become too long for the kernel.
const maxPlace = 90

// stageRoot stages the root file system of req, if it has one, and adds it to spec.
func (l *Local) stageRoot(ctx context.Context, req *request, spec *sandbox.Spec) (*tree.Root, error) {
	p := &req.place
	if p.root == nil {
		return nil, nil
	}
	workspace := func(bytes, files int64) (tree.Workspace, error) { return l.cfg.Backend.Workspace(ctx, bytes, files) }
	root, err := l.cfg.Stager.StageRoot(ctx, p.root, p.points(), req.Instance, workspace)
	if err != nil {
		return nil, fmt.Errorf("root file system %s: %w", p.root.Digest(), err)
	}
	spec.Root.Image, spec.Root.Source = root.Image, root.Source
	for _, b := range root.Binds {
		spec.Inputs = append(spec.Inputs, sandbox.Input{Target: "/" + b.Target, Content: b.Content.String(), Source: b.Source})
	}
	return root, nil
}
