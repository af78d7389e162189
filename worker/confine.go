// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/violation"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// ExecRoot is the path of the input root in the sandbox of every worker, unless a Variation changes it.
const ExecRoot = "/build"

// Admit checks everything that needs no slot: t, everything it refers to, the policy and the sandbox's features.
// Without a backend, the policy and the features are left to the workers that execute. In a fleet, an action that needs
// missing features is admitted, since another worker may have them. The error is a *Fault.
func (l *Local) Admit(ctx context.Context, t *Task) (Admission, error) {
	if t == nil {
		return Admission{}, faultf(FaultInvalid, "the Task is missing")
	}
	in, err := l.cfg.Instances(t.Instance)
	if err != nil {
		return Admission{}, fault(StageFetch, err)
	}
	req, err := l.resolveFor(ctx, in, t, true)
	if err != nil {
		return Admission{}, err
	}
	a := Admission{DoNotMerge: req.Action.DoNotCache || t.Variation != nil, Demands: l.demands(t, req)}
	calls := false
	if l.cfg.Backend != nil {
		switch box, err := l.confine(t, req); {
		case err == nil:
			calls = box.grant.RemoteAPIs != ""
			a.DoNotMerge = a.DoNotMerge || !box.grant.Cache || calls // it has the rights of its caller
			a.MergeKey = fmt.Sprintf("%q %q", box.grant.Profile, box.grant.Rule)
		case !l.cfg.Fleet || !errors.Is(err, sandbox.ErrUnsupported): // another worker may have what this one lacks
			return Admission{}, fault(StageConfine, err)
		}
	}
	if l.cfg.Fleet || l.cfg.Backend == nil { // everything else that selects a policy rule is part of the action
		a.MergeKey += fmt.Sprintf(" %q %q", t.Target, t.Mnemonic)
	}
	if r := &req.root; r.unpinned || r.own() {
		a.MergeKey += fmt.Sprintf(" root %s %q %q", r.digest, r.env, r.image)
	}
	if t.expects(req) { // its layout differs
		a.MergeKey += " output_directories"
	}
	if !calls {
		t.Caller = t.Caller.Bare()
	}
	if image := req.root; image.image != "" {
		a.Pull = func(ctx context.Context) error { return l.loadImage(ctx, in, &image) }
	}
	return a, nil
}

// confined is what the action may see and use.
type confined struct {
	spec  *sandbox.Spec
	grant *policy.Grant
	root  string // path of the input root
	// socket is the path of the socket for remote APIs, relative to the input root, or "" if it is not in it.
	socket string
	// timeout is the timeout by the action and the policy, without Task.Timeout.
	timeout time.Duration
	// toolchain is the fingerprint of this host's toolchain, "" if it is unknown or the action does not see it.
	toolchain string
}

// confine decides what the action may see and use, before its inputs are staged. If the policy refuses, or the backend
// cannot enforce what was requested, the error is a Fault of kind FaultUnmet.
func (l *Local) confine(t *Task, req *request) (*confined, error) {
	ask := req.ask(t)
	var settings strings.Builder // for messages
	for _, p := range ask.Properties {
		if isSetting(p.Name) {
			fmt.Fprintf(&settings, ", property %s=%s", p.Name, p.Value)
		}
	}
	grant, err := l.cfg.Policy.Compile(ask, l.cfg.Features.Limits)
	if err != nil {
		l.auditRefusal(t, err)
		return nil, err
	}
	if err := l.checkNetwork(t, req, grant); err != nil {
		return nil, err
	}
	if f := &l.cfg.Features; grant.Sandbox != "" && grant.Sandbox != f.Backend {
		return nil, fmt.Errorf("%w: the action requires the sandbox %s, and this worker has %s: send it to a worker with that --sandbox",
			sandbox.ErrUnsupported, grant.Sandbox, f.Backend)
	}
	if len(t.Args) > 0 { // a person repeats what the action did
		grant.Fail, grant.Kill = nil, nil
	}
	stated, err := l.timeout(t, req, grant)
	if err != nil {
		return nil, err
	}
	timeout := stated
	if t.Timeout > 0 {
		timeout = min(timeout, t.Timeout)
	}
	spec := &sandbox.Spec{
		Args:    slices.Clip(req.Command.Arguments), // other runs may share them
		Dir:     path.Join(req.place.path, req.Command.WorkingDirectory),
		Env:     environment(req.root.env, req.Command),
		Inputs:  l.hostInputs(grant, &req.place),
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: grant.TempBytes}},
		Network: grant.Network,
		Limits:  grant.Limits,
		Audit:   grant.Audit,
		Kill:    slices.Clip(grant.Kill),
		Timeout: timeout,
		Grace:   l.cfg.Grace,
	}
	if len(t.Args) > 0 {
		spec.Args = t.Args
	}
	if v := t.Variation; v != nil {
		spec.Conditions, spec.Env = v.Conditions, environment(req.root.env, req.Command, v.Env...)
	}
	spec.Superuser = grant.Superuser
	if req.root.own() && req.place.path != "/" {
		spec.Root = &sandbox.Root{Content: req.root.digest.String()} // stage adds the rest
	}
	if req.place.path == "/" {
		spec.Outputs = []sandbox.Output{{Target: "/"}} // stage replaces it
	}
	socket, err := l.placeSocket(t, req, grant, spec)
	if err != nil {
		return nil, err
	}
	asked := slices.ContainsFunc(ask.Properties, func(p policy.Property) bool { return p.Name == "cloister-audit" }) ||
		violation.NeedMonitor(slices.Concat(grant.Fail, grant.Kill))
	if spec.Audit == sandbox.AuditViolations && !asked && !slices.Contains(l.cfg.Features.Audits, sandbox.AuditViolations) {
		// The operator chose a sandbox that cannot audit, which every result states, and nobody asked for more.
		spec.Audit = sandbox.AuditOff
	}
	// A property of the policy accepts nothing: the action's digest would not tell its result from one without gaps.
	named := slices.ContainsFunc(ask.Properties, func(p Property) bool { return p.Name == PropertySandbox })
	if f := &l.cfg.Features; len(f.Gaps) > 0 && (named || l.cfg.AcceptGaps) {
		spec.Accept = f.Backend // which equals the value of the property
	}
	if err := l.cfg.Features.Covers(spec); err != nil {
		return nil, fmt.Errorf("profile %q by rule %q%s: %w", grant.Profile, grant.Rule, settings.String(), err)
	}
	return &confined{spec: spec, grant: grant, root: req.place.path, socket: socket, timeout: stated}, nil
}

// unknownToolchain reports whether the toolchain that the action of e saw is unknown: it changed during the run, or
// could not be read. In a fleet, whose cached results are served in any case, only a change counts.
func (l *Local) unknownToolchain(e *execution) bool {
	now := l.fingerprint(e.req)
	if l.cfg.Fleet {
		return e.box.toolchain != "" && now != e.box.toolchain
	}
	return now != e.box.toolchain || now == "" && l.cfg.Fingerprint != nil && !e.req.place.own
}

// fingerprint returns the fingerprint of this host's toolchain, or "" if req does not see it.
func (l *Local) fingerprint(req *request) string {
	if l.cfg.Fingerprint == nil || req.place.own {
		return ""
	}
	return l.cfg.Fingerprint()
}

// hostInputs returns what the action may read of this host.
func (l *Local) hostInputs(g *policy.Grant, p *placement) []sandbox.Input {
	if p.own {
		return nil
	}
	inputs := slices.Clone(l.cfg.Toolchain)
	if len(g.Network.Allow) > 0 {
		inputs = append(inputs, l.cfg.Certificates...)
	}
	return inputs
}

// PropertySandbox is the platform property with which an action requires a backend. Workers of another backend than the
// default offer it.
const PropertySandbox = results.SandboxProperty

// isSetting reports whether a platform property is a setting of the sandbox, which the policy interprets.
func isSetting(property string) bool { return strings.HasPrefix(property, "cloister-") }

// timeout returns the timeout of the command by the action and the policy.
func (l *Local) timeout(t *Task, req *request, g *policy.Grant) (time.Duration, error) {
	switch {
	case t.interactive():
		return l.cfg.MaxTimeout, nil
	case g.MaxTimeout == 0 || req.Timeout <= g.MaxTimeout:
		return req.Timeout, nil
	case req.Action.Timeout.AsDuration() == 0:
		return g.MaxTimeout, nil
	}
	return 0, faultf(FaultInvalid,
		"confine: action %s sets a timeout of %v, more than the maximum of %v of profile %q, chosen by rule %q",
		req.Digest, req.Timeout, g.MaxTimeout, g.Profile, g.Rule)
}

// environment returns the variables of root, the environment of the root file system, overridden by those of the
// command and then by overrides. An override is "KEY=VALUE", or "KEY" to unset a variable.
func environment(root []string, c *repb.Command, overrides ...string) []string {
	vars := make([]string, 0, len(root)+len(c.EnvironmentVariables)+len(overrides))
	vars = append(vars, root...)
	for _, v := range c.EnvironmentVariables {
		vars = append(vars, v.Name+"="+v.Value)
	}
	return sandbox.Environment(append(vars, overrides...)...)
}
