// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// A request is an action with everything it refers to, decoded and checked. Action, Command and Input may be shared and
// must not be modified.
type request struct {
	Digest   cas.Digest
	Instance *cas.Instance
	Action   *repb.Action
	Command  *repb.Command
	Input    *tree.Input
	// Layout places the inputs and outputs.
	Layout *tree.Layout
	// Timeout is the action's timeout, or the worker's maximum if the action sets none.
	Timeout time.Duration

	ignored              []string  // platform properties without effect, as NAME=VALUE
	ignoresImage         bool      // a container image is among them
	root                 rootFS    // set for a task
	place                placement // set for a task
	outputs, directories []string  // relative to the input root; directories are those of output_directories
}

// fetch reads the action, and its result if the action cache has one that may be used.
func (l *Local) fetch(ctx context.Context, t *Task) (*request, *Outcome, error) {
	in, err := l.cfg.Instances(t.Instance)
	if err != nil {
		return nil, nil, err
	}
	if t.ActionBlob != nil {
		if err := tree.Add(l.inputs, in, t.Action, t.ActionBlob, new(repb.Action)); err != nil {
			return nil, nil, err
		}
	}
	req, err := l.resolveFor(ctx, in, t, false)
	if err != nil {
		return nil, nil, err
	}
	if !t.SkipCacheLookup && !l.uncacheable(t, req) && !req.Action.DoNotCache {
		r, err := cas.LookupComplete(results.State(ctx, t.Target, t.Mnemonic), in, t.Action)
		// Another writer may have cached a failure; this worker never does (rule 68).
		if err == nil && r.ExitCode == 0 && !req.root.moved(r) {
			out := &Outcome{Result: r, Cached: true}
			out.Manifest, out.StableHash = RecordedManifest(r)
			return req, out, nil
		}
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			return nil, nil, err
		}
	}
	if req.root.image != "" {
		if err := l.loadImage(ctx, in, &req.root); err != nil {
			return nil, nil, err
		}
		err = l.arrange(t, req)
	}
	return req, nil, err
}

// Action reads an action from the worker's cache or the store. It may be shared and must not be modified.
func (l *Local) Action(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error) {
	if in == nil {
		return nil, errors.New("worker: the Instance is missing")
	}
	return tree.Read(ctx, l.inputs, in, action, new(repb.Action))
}

// resolveHere reads and checks an action, its command and its input root. One Fault of kind FaultMissing lists all
// missing blobs, so that a client can upload them together. A malformed action is a Fault of kind FaultInvalid.
func (l *Local) resolveHere(ctx context.Context, in *cas.Instance, action cas.Digest) (*request, error) {
	req, err := l.resolve(ctx, in, action)
	if err != nil {
		return nil, fault(StageFetch, err)
	}
	if d := req.Timeout; d > l.cfg.MaxTimeout {
		return nil, faultf(FaultInvalid, "fetch: action %s sets a timeout of %v, more than the maximum of %v",
			action, d, l.cfg.MaxTimeout)
	}
	if req.Timeout == 0 {
		req.Timeout = l.cfg.MaxTimeout
	}
	if !l.cfg.Fleet && l.cfg.Backend != nil {
		if err := l.checkPlatform(req); err != nil {
			return nil, err
		}
	}
	return req, nil
}

// resolve is resolveHere without the worker's own limits.
func (l *Local) resolve(ctx context.Context, in *cas.Instance, action cas.Digest) (*request, error) {
	req := &request{Digest: action, Instance: in}
	var err error
	if req.Action, err = l.Action(ctx, in, action); err != nil {
		return nil, missing(err, action)
	}
	command, root, err := parts(action, req.Action)
	if err != nil {
		return nil, err
	}
	// Read both before reporting an error, so that the list of missing blobs is complete.
	var commandErr, treeErr error
	req.Command, commandErr = tree.Read(ctx, l.inputs, in, command, new(repb.Command))
	req.Input, treeErr = l.inputs.Load(ctx, in, root)
	if err := joinMissing(missing(commandErr, command), treeErr); err != nil {
		return nil, err
	}
	if req.Timeout, err = timeout(req.Action); err != nil {
		return nil, fmt.Errorf("action %s: %w", action, err)
	}
	if req.outputs, req.directories, err = checkCommand(req.Command); err != nil {
		return nil, fmt.Errorf("command %s: %w", command, err)
	}
	if err := req.plan(nil); err != nil {
		return nil, err
	}
	return req, nil
}

// plan sets the layout; the outputs in directories exist before the run.
func (req *request) plan(directories []string) error {
	var err error
	if req.Layout, err = req.Input.Plan(req.Command.WorkingDirectory, req.outputs, directories); err != nil {
		return fmt.Errorf("command %s: %w", req.Action.GetCommandDigest().GetHash(), err)
	}
	return nil
}

// resolveFor is resolveHere with the root file system of t and the layout that its client expects. It pulls no
// container image.
func (l *Local) resolveFor(ctx context.Context, in *cas.Instance, t *Task, admission bool) (*request, error) {
	req, err := l.resolveHere(ctx, in, t.Action)
	if err == nil {
		err = l.setRoot(ctx, in, t, req, admission)
	}
	if err == nil {
		err = l.arrange(t, req)
	}
	return req, err
}

// arrange sets the place of the input root and the layout that the client of t expects.
func (l *Local) arrange(t *Task, req *request) error {
	err := l.place(t, req)
	if err == nil && t.expects(req) {
		err = fault(StageFetch, req.plan(req.directories))
	}
	return err
}

// uncacheable reports whether the result depends on more than the action, so that the action cache is not used.
func (l *Local) uncacheable(t *Task, req *request) bool {
	return t.uncacheable() || req.root.unpinned && (req.root.image == "" || !l.cfg.CacheUnpinned)
}

// expects reports whether the client relies on the directories of output_directories existing before the action runs.
func (t *Task) expects(req *request) bool { return len(req.directories) > 0 && t.expectsDirectories() }

// properties returns the platform properties of the action, without those of the policy.
func (req *request) properties() []Property { return results.Properties(req.Action, req.Command) }

// ask returns the request to the policy.
func (req *request) ask(t *Task) policy.Request {
	return policy.Request{Instance: t.Instance, Properties: req.properties(), Target: t.Target, Mnemonic: t.Mnemonic}
}

// demands returns the platform properties that are not settings of the sandbox or of persistent workers, as
// Admission.Demands. One setting is a demand, also if only the policy has it: a backend with a kernel of its own, which
// such workers offer.
func (l *Local) demands(t *Task, req *request) []Property {
	all := slices.DeleteFunc(req.properties(), func(p Property) bool { return isSetting(p.Name) || isPersistentProperty(p.Name) })
	for _, p := range l.cfg.Policy.Properties(req.ask(t)) {
		if results.NamesKernel(p) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, Property.Compare)
	return slices.Compact(all)
}

// parts returns the digests of the command and the input root of the action a, whose digest is d.
func parts(d cas.Digest, a *repb.Action) (command, root cas.Digest, err error) {
	if command, err = cas.FromProto(d.Function(), a.CommandDigest); err != nil {
		return command, root, fmt.Errorf("command_digest of action %s: %w", d, err)
	}
	if root, err = cas.FromProto(d.Function(), a.InputRootDigest); err != nil {
		return command, root, fmt.Errorf("input_root_digest of action %s: %w", d, err)
	}
	return command, root, nil
}

// missing turns the error about a blob that was not found into a MissingError.
func missing(err error, d cas.Digest) error {
	if errors.Is(err, cas.ErrNotFound) {
		return &tree.MissingError{Blobs: []cas.Digest{d}}
	}
	return err
}

// joinMissing is errors.Join, but merges two lists of missing blobs into one.
func joinMissing(a, b error) error {
	var m, n *tree.MissingError
	if errors.As(a, &m) && errors.As(b, &n) {
		return &tree.MissingError{Blobs: slices.Concat(m.Blobs, n.Blobs)}
	}
	return errors.Join(a, b)
}
