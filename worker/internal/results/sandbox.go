// SPDX-License-Identifier: Apache-2.0

package results

import (
	"context"
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/policy"
)

// SandboxProperty is the platform property with which an action requires a backend.
const SandboxProperty = "cloister-sandbox"

// NamesKernel reports whether a property requires a backend that gives runs a kernel of their own; workers with such a
// backend offer it.
func NamesKernel(p policy.Property) bool { return p.Name == SandboxProperty && p.Value != "namespace" }

// Properties returns the platform properties of an action. Those of the action, if set, replace those of the command
// (rule 83).
func Properties(a *repb.Action, c *repb.Command) []policy.Property {
	from := a.Platform
	if from == nil {
		from = c.Platform
	}
	all := make([]policy.Property, 0, len(from.GetProperties()))
	for _, p := range from.GetProperties() {
		all = append(all, policy.Property{Name: p.Name, Value: p.Value})
	}
	return all
}

// stated is the key of what a client states about an action: its target and mnemonic.
type stated struct{}

// State returns ctx for lookups of an action of which the client states this target and mnemonic.
func State(ctx context.Context, target, mnemonic string) context.Context {
	return context.WithValue(ctx, stated{}, [2]string{target, mnemonic})
}

// OtherSandbox returns a Refusal of results that were made in another sandbox than the one that p requires of the action
// now, or in an unknown one. next has the actions. call returns the target and the mnemonic that a call states if
// its context is not from State.
func OtherSandbox(next cas.Instances, p *policy.Policy, call func(context.Context) (target, mnemonic string)) Refusal {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) string {
		ask := policy.Request{Instance: instance}
		if texts, ok := ctx.Value(stated{}).([2]string); ok {
			ask.Target, ask.Mnemonic = texts[0], texts[1]
		} else {
			ask.Target, ask.Mnemonic = call(ctx)
		}
		if differs(p, ask, r) == "" {
			return ""
		}
		// The action itself may require another sandbox than the default properties do.
		in, err := next(instance)
		if err == nil {
			ask.Properties, err = readProperties(ctx, in, action)
		}
		if err != nil {
			return fmt.Sprintf("the sandbox that the action requires is unknown: %v", err)
		}
		return differs(p, ask, r)
	}
}

// differs returns how the sandbox of a result differs from those that p requires, or "".
func differs(p *policy.Policy, ask policy.Request, r *repb.ActionResult) string {
	for _, q := range p.Properties(ask) {
		if !NamesKernel(q) {
			continue
		}
		if made := Recorded(r).GetSandbox().GetBackend(); made != q.Value {
			return fmt.Sprintf("it was made in the sandbox %+.80q, and the policy requires %s", made, q.Value)
		}
	}
	return ""
}

// readProperties reads the platform properties of an action.
func readProperties(ctx context.Context, in *cas.Instance, action cas.Digest) ([]policy.Property, error) {
	a, c := &repb.Action{}, &repb.Command{}
	if err := cas.ReadProto(ctx, in.Store, action, a); err != nil {
		return nil, err
	}
	if a.Platform == nil {
		command, err := cas.FromProto(action.Function(), a.CommandDigest)
		if err != nil {
			return nil, err
		}
		if err := cas.ReadProto(ctx, in.Store, command, c); err != nil {
			return nil, err
		}
	}
	return Properties(a, c), nil
}
