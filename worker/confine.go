// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
)

// ExecRoot is where every action finds its input root, on every worker, unless its Variation says otherwise.
const ExecRoot = "/build"

// Defaults are the variables that an action has if its command does not set them.
var defaults = map[string]string{
	"HOME":   "/tmp",
	"PATH":   "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"TMPDIR": "/tmp",
}

// Admit checks t and all that it refers to, as Resolve does, and whether the policy and this host give it what it
// asks for: everything that can be refused without a slot. A worker without a backend asks neither, since it is others that
// execute. It fails with a *Fault.
func (l *Local) Admit(ctx context.Context, t *Task) (Admission, error) {
	in, err := l.Instances(t.Instance)
	if err != nil {
		return Admission{}, fault(Fetch, err)
	}
	req, err := l.Resolve(ctx, in, t.Action)
	if err != nil {
		return Admission{}, err
	}
	a := Admission{DoNotMerge: req.Action.DoNotCache || t.Variation != nil, Demands: req.demands()}
	if l.Backend != nil {
		box, err := l.confine(t, req)
		if err != nil {
			return Admission{}, fault(Confine, err)
		}
		a.DoNotMerge = a.DoNotMerge || !box.grant.Cache
		a.MergeKey = fmt.Sprintf("%q %q", box.grant.Profile, box.grant.Rule)
	}
	// All else that decides on a grant is in the action itself.
	if l.Fleet {
		a.MergeKey += fmt.Sprintf(" %q %q", t.Target, t.Mnemonic)
	}
	return a, nil
}

// confined is what the action may see and use, and why.
type confined struct {
	spec  *sandbox.Spec
	grant *policy.Grant
	root  string // where it finds its input root
	// timeout is what the action and the policy say of it, whatever less the task asks for.
	timeout time.Duration
}

// confine says what the action may see and use, before anything is laid out for it. What the policy does
// not grant or the backend does not enforce is a Fault of kind Unmet.
func (l *Local) confine(t *Task, req *Request) (*confined, error) {
	ask := policy.Request{Instance: t.Instance, Target: t.Target, Mnemonic: t.Mnemonic}
	var asked string // what of it is ours, for messages
	for _, p := range req.properties() {
		ask.Properties = append(ask.Properties, policy.Property{Name: p.Name, Value: p.Value})
		if ours(p.Name) {
			asked += fmt.Sprintf(", property %s=%s", p.Name, p.Value)
		}
	}
	grant, err := l.Policy.Compile(ask, l.Features.Limits)
	if err != nil {
		l.refused(t, err)
		return nil, err
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
		Args:    slices.Clip(req.Command.Arguments), // which other runs may share
		Dir:     path.Join(t.root(), req.Command.WorkingDirectory),
		Env:     environment(req.Command),
		Inputs:  slices.Clone(l.Toolchain),
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: grant.TempBytes}},
		Network: grant.Network,
		Limits:  grant.Limits,
		Audit:   grant.Audit,
		Timeout: timeout,
		Grace:   l.Grace,
	}
	if len(t.Args) > 0 {
		spec.Args = t.Args
	}
	if v := t.Variation; v != nil {
		if err := l.vary(v); err != nil {
			return nil, err
		}
		spec.Conditions, spec.Env = v.Conditions, environment(req.Command, v.Env...)
	}
	named := slices.ContainsFunc(ask.Properties, func(p policy.Property) bool { return p.Name == "cloister-audit" })
	if spec.Audit == sandbox.AuditViolations && !named && !slices.Contains(l.Features.Audits, sandbox.AuditViolations) {
		// The operator chose a sandbox without the syscall monitor, which every result says; nobody asked for more.
		spec.Audit = sandbox.AuditOff
	}
	if err := l.Features.Covers(spec); err != nil {
		return nil, fmt.Errorf("profile %q by rule %q%s: %w", grant.Profile, grant.Rule, asked, err)
	}
	return &confined{spec, grant, t.root(), stated}, nil
}

// ours reports whether a platform property is the policy's business.
func ours(property string) bool { return strings.HasPrefix(property, "cloister-") }

// timeout returns how long the command may execute.
func (l *Local) timeout(t *Task, req *Request, g *policy.Grant) (time.Duration, error) {
	switch {
	case t.byHand():
		return l.MaxTimeout, nil // a person is not to be hurried by the action's
	case g.MaxTimeout == 0 || req.Timeout <= g.MaxTimeout:
		return req.Timeout, nil
	case req.Action.Timeout.AsDuration() == 0:
		return g.MaxTimeout, nil
	}
	return 0, faultf(Invalid, "confine: action %s asks for a timeout of %v; profile %q by rule %q permits at most %v",
		req.Digest, req.Timeout, g.Profile, g.Rule, g.MaxTimeout)
}

// vary checks what only this worker knows of a variation: that its root can be made where no part of the toolchain lies,
// nor anything that a sandbox has of its own.
func (l *Local) vary(v *Variation) error {
	if v.Root == "" {
		return nil
	}
	if v.Root == "/" || !path.IsAbs(v.Root) || path.Clean(v.Root) != v.Root {
		return faultf(Invalid, "confine: the root %+.256q of a varied run is not a clean absolute path below /", v.Root)
	}
	taken := []string{"/dev", "/etc", "/proc", "/sys", "/tmp"}
	for _, in := range l.Toolchain {
		taken = append(taken, in.Target)
	}
	for _, dir := range taken {
		if strings.HasPrefix(dir+"/", v.Root+"/") || strings.HasPrefix(v.Root+"/", dir+"/") {
			return faultf(Invalid, "confine: the root %+.256q of a varied run would lie in or over %s, which every run has", v.Root, dir)
		}
	}
	return nil
}

// environment returns the command's variables and the defaults beneath them, sorted. Over both lie others: "KEY=VALUE",
// or "KEY" for one that is not to be set.
func environment(c *repb.Command, over ...string) []string {
	vars := make(map[string]string, len(defaults)+len(c.EnvironmentVariables)+len(over))
	for k, v := range defaults {
		vars[k] = v
	}
	for _, v := range c.EnvironmentVariables {
		vars[v.Name] = v.Value
	}
	for _, kv := range over {
		k, v, set := strings.Cut(kv, "=")
		if vars[k] = v; !set {
			delete(vars, k)
		}
	}
	env := make([]string, 0, len(vars))
	for k, v := range vars {
		env = append(env, k+"="+v)
	}
	slices.SortFunc(env, func(a, b string) int {
		ka, _, _ := strings.Cut(a, "=")
		kb, _, _ := strings.Cut(b, "=")
		return strings.Compare(ka, kb)
	})
	return env
}

// toolchainPaths are the parts of a host that compilers, interpreters and shells are made of. What an
// administrator, a user or a service keeps is not among them.
var toolchainPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
	"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
	"/etc/java-*", "/etc/python3*", "/etc/perl",
	"/etc/mime.types", "/etc/protocols", "/etc/services",
}

// HostToolchain returns the parts of this host that every action may read: directories of programs and
// libraries, and the few files of /etc that these need. What does not exist is left out.
func HostToolchain() ([]sandbox.Input, error) {
	var inputs []sandbox.Input
	for _, pattern := range toolchainPaths {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, target := range matches {
			source, err := filepath.EvalSymlinks(target)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			inputs = append(inputs, sandbox.Input{Target: target, Content: "host", Source: source})
		}
	}
	return inputs, nil
}
