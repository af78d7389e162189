// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
)

// supported returns the features of this backend. The first call boots a machine.
func (b *backend) supported(ctx context.Context) (*sandbox.Features, error) {
	if err := b.start(ctx); err != nil {
		return nil, err
	}
	b.mu.Lock()
	f := b.features
	b.mu.Unlock()
	if f != nil {
		return f, nil
	}
	m, err := b.acquire(ctx, "", nil)
	if err != nil {
		return nil, err
	}
	inside, err := b.probe(ctx, m)
	if err = errors.Join(err, b.release(m, err == nil)); err != nil {
		return nil, err
	}
	f = b.describe(inside)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.features = f
	return f, nil
}

// probe returns what the guest's backend enforces.
func (b *backend) probe(ctx context.Context, m *machine) (*sandbox.Features, error) {
	var a answer
	err := b.within(ctx, m, func() error {
		control := m.ports[portControl]
		if err := control.sendMessage(request{Probe: true}); err != nil {
			return err
		}
		if err := control.receiveMessage(&a, maxAnswer); err != nil {
			return err
		}
		if a.Features == nil {
			return fmt.Errorf("probe: %s", a.Error)
		}
		return nil
	})
	return a.Features, err
}

// describe returns the features of the backend, whose guests have those given.
func (b *backend) describe(inside *sandbox.Features) *sandbox.Features {
	f := sandbox.Features{ // what passes through this package; a guest has no tree of source files for full audits
		Backend: b.name(), Kernel: b.kind.kernel(), Tier: inside.Tier, ListenControl: inside.ListenControl, Kill: inside.Kill, Lower: inside.Lower,
		Limits: common(sandbox.AllLimits, inside.Limits), Conditions: common(sandbox.AllConditions, inside.Conditions),
		Audits: common([]sandbox.Audit{sandbox.AuditViolations, sandbox.AuditOff}, inside.Audits),
	}
	add := func(ok bool, name, detail, fix string) {
		f.Checks = append(f.Checks, sandbox.Check{Name: name, OK: ok, Detail: detail, Fix: fix})
	}
	layer := b.engine() + " (KVM)"
	if b.emulated {
		layer = b.engine() + " (TCG: emulated, no security boundary)"
		add(false, "hardware virtualization", "the processor is emulated (TCG): the virtual machine is no security boundary, and slow; for tests only", "")
	} else {
		add(true, "hardware virtualization", "a virtual machine by "+device, "")
	}
	f.Checks[0].Required = f.Checks[0].OK
	add(true, b.engine(), fmt.Sprintf("runs have a kernel of their own, by %s with %s of memory and no network device", b.program, sandbox.Bytes(b.memory)), "")
	why, fix := b.groups.Missing()
	why = preflight.Coded(why, preflight.NoCgroup)
	limited := b.groups.Capabilities().LimitMemory
	if limited {
		why = "of each virtual machine by " + string(b.groups.Mode())
	}
	add(limited, "memory of "+b.engine(), why, fix)
	for _, c := range inside.Checks {
		c.Name = "guest: " + c.Name
		f.Checks = append(f.Checks, c)
	}
	f.Layers = append([]string{layer}, inside.Layers...)
	if b.groups.Mode() != cgroup.None {
		f.Layers = append(f.Layers, string(b.groups.Mode())+" limits of "+b.engine())
	}
	if slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return !c.OK }) {
		f.Tier = "partial"
	}
	return &f
}

// common returns the elements of a that are in b.
func common[T comparable](a, b []T) []T {
	return slices.DeleteFunc(slices.Clone(a), func(v T) bool { return !slices.Contains(b, v) })
}

// Probe boots a virtual machine and reports what its guest enforces.
func (b *backend) Probe(ctx context.Context) (sandbox.Features, error) {
	f, err := b.supported(ctx)
	if err == nil {
		return *f, nil
	}
	none := sandbox.Features{Backend: b.name(), Kernel: b.kind.kernel(), Tier: "none"}
	if errors.Is(err, sandbox.ErrClosed) || ctx.Err() != nil {
		return none, err
	}
	if preflight.Code(err) == "" {
		err = preflight.Fail(preflight.VMProbe, "%w", err)
	}
	none.Checks = []sandbox.Check{{Name: b.engine(), Detail: err.Error(), Required: true}}
	return none, err
}
