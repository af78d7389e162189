// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/identity"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// devices are the device nodes of every run.
var devices = []string{"full", "null", "random", "urandom", "zero"}

// Mount attributes (mount_setattr(2)), with the kernel's values.
const (
	readOnly = 1
	noSetuid = 2
	noDevice = 4
	noExec   = 8
)

// planOptions are what a plan depends on besides the spec.
type planOptions struct {
	without []Layer
	// landlock is the kernel's version, or 0.
	landlock int
	// groups means that a control group counts processes.
	groups bool
	// filter and initFilter are encoded system call filters.
	filter, initFilter []byte
	notify             bool
	// hidden are directories whose paths must not be visible.
	hidden   []string
	terminal bool
}

func (c *planOptions) has(l Layer) bool { return !slices.Contains(c.without, l) }

// plan turns a valid spec into instructions for a slot, and names the images that they refer to. It decides everything
// and touches nothing: the same spec and options give the same plan on every host.
func plan(spec *sandbox.Spec, c *planOptions) (p *zygote.Plan, images []string) {
	b := &zygote.Base{
		Loopback:         spec.Network.Loopback,
		HostNetwork:      !c.has(NetNamespace),
		HostIPC:          !c.has(IPCNamespace),
		KeepCapabilities: !c.has(Capabilities),
		Filter:           c.filter,
		InitFilter:       c.initFilter,
		Notify:           c.notify,
		Landlock:         c.landlock,
		WritableRoot:     !c.has(ReadOnly),
		SingleUse:        !c.has(ReadOnly),
	}
	if c.has(ProcSubset) {
		b.ProcOptions = "subset=pid,hidepid=invisible"
	}
	p = &zygote.Plan{
		Base:       b,
		Args:       spec.Args,
		Env:        spec.Env,
		Dir:        spec.Dir,
		Workspace:  spec.Workspace != "",
		Owned:      spec.Owned,
		Terminal:   c.terminal,
		Rlimits:    c.rlimits(&spec.Limits),
		Conditions: slotConditionsOf(&spec.Conditions, spec.Superuser),
	}
	hosts := assignAddresses(spec.Network.Allow, p)
	resolves := b.Notify && !b.HostNetwork // the worker answers and records lookups
	id := identity.Of(&spec.Conditions)
	b.Ops = append(c.deviceOps(), id.Etc(hosts, resolves)...)
	if ownsRoot(spec) {
		b.Ops = append(c.deviceOps(), id.Hosts(hosts))
		if resolves { // without this file programs ask loopback, too
			b.Ops = append(b.Ops, zygote.Op{Kind: zygote.OpFile, Target: "/etc/resolv.conf", Source: "nameserver 127.0.0.1\n"})
		}
	}
	b.Temps = append(b.Temps, c.temp(p, "/dev/shm", limit.ShmBytes, noSetuid|noDevice|noExec))

	var ops []zygote.Op
	numbers := map[string]int{}
	number := func(image string) int {
		if image != "" && numbers[image] == 0 {
			images = append(images, image)
			numbers[image] = len(images)
		}
		return numbers[image]
	}
	if r := spec.Root; r != nil {
		b.Root = &zygote.Op{
			Kind: zygote.OpBind, Target: "/", Source: r.Source, Image: number(r.Image),
			Attrs: c.attrs(readOnly | noSetuid | noDevice),
		}
		b.RootName = r.Image + " " + r.Source
	}
	for _, in := range spec.Inputs {
		ops = append(ops, zygote.Op{
			Kind: zygote.OpBind, Target: in.Target, Source: in.Source, Image: number(in.Image),
			Attrs: c.attrs(readOnly | noSetuid | noDevice),
		})
	}
	for _, out := range spec.Outputs {
		op := zygote.Op{Kind: zygote.OpBind, Target: out.Target, Source: out.Source, Attrs: c.attrs(noSetuid | noDevice)}
		for _, l := range spec.Lower {
			if l.Target == out.Target {
				op.Kind, op.Lower = zygote.OpOverlay, append(op.Lower, zygote.Lower{Source: l.Source, Image: number(l.Image)})
			}
		}
		p.Writable = append(p.Writable, out.Target)
		if out.Target == "/" {
			b.Root, b.SingleUse = &op, true
			continue
		}
		ops = append(ops, op)
	}
	for _, t := range spec.Temp {
		ops = append(ops, c.temp(p, t.Target, t.Bytes, noSetuid|noDevice))
	}
	for _, dir := range c.hidden {
		if slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return within(in.Source, dir) }) {
			b.Hidden = append(b.Hidden, dir)
		}
	}
	// A parent sorts before its children.
	slices.SortStableFunc(ops, func(a, b zygote.Op) int { return strings.Compare(a.Target, b.Target) })
	split(p, ops)
	for _, in := range spec.Sockets { // in directories that are mounted by then
		p.Ops = append(p.Ops, zygote.Op{
			Kind: zygote.OpBind, Target: in.Target, Source: in.Source, Attrs: c.attrs(readOnly | noSetuid | noDevice),
		})
	}
	slices.Sort(p.Writable)
	return p, images
}

// attrs returns mount attributes without those of layers that are left out.
func (c *planOptions) attrs(a uint64) uint64 {
	if !c.has(ReadOnly) {
		a &^= readOnly
	}
	if !c.has(NoSetuid) {
		a &^= noSetuid
	}
	return a
}

// temp returns the operation for a temporary directory, which is writable in p.
func (c *planOptions) temp(p *zygote.Plan, target string, bytes int64, attrs uint64) zygote.Op {
	p.Writable = append(p.Writable, target)
	return zygote.Op{Kind: zygote.OpTmpfs, Target: target, Bytes: bytes, Attrs: c.attrs(attrs)}
}

// deviceOps populate /dev.
func (c *planOptions) deviceOps() (ops []zygote.Op) {
	nodes := slices.Clone(devices)
	if c.terminal {
		nodes = append(nodes, "tty")
	}
	for _, d := range nodes {
		ops = append(ops, zygote.Op{Kind: zygote.OpDevice, Target: "/dev/" + d, Source: "/dev/" + d, Attrs: c.attrs(readOnly | noSetuid | noExec)})
	}
	for _, l := range [][2]string{{"fd", ""}, {"stdin", "/0"}, {"stdout", "/1"}, {"stderr", "/2"}} {
		ops = append(ops, zygote.Op{Kind: zygote.OpSymlink, Target: "/dev/" + l[0], Source: "/proc/self/fd" + l[1]})
	}
	return ops
}

// ownsRoot reports whether the spec has its own root file system, of which nothing but /etc/hosts and /etc/resolv.conf
// is replaced.
func ownsRoot(spec *sandbox.Spec) bool {
	return spec.Root != nil || slices.ContainsFunc(spec.Outputs, func(o sandbox.Output) bool { return o.Target == "/" })
}

// split divides ops between the plan and its base, which gets what many runs share.
func split(p *zygote.Plan, ops []zygote.Op) {
	b := p.Base
	var inPlan []string // targets in the plan
	for _, o := range ops {
		over := slices.ContainsFunc(inPlan, func(dir string) bool { return within(o.Target, dir) })
		hidden := slices.ContainsFunc(b.Hidden, func(dir string) bool { return within(o.Source, dir) })
		switch {
		case o.Kind == zygote.OpTmpfs && !over:
			b.Temps = append(b.Temps, o)
			continue
		case o.Kind == zygote.OpBind && !over && !hidden && o.Image == 0 && strings.HasPrefix(o.Source, "/"):
			b.Ops = append(b.Ops, o)
			continue
		}
		p.Ops = append(p.Ops, o)
		if over {
			continue
		}
		inPlan = append(inPlan, o.Target)
		if slices.Contains(p.Writable, o.Target) { // an output is a directory
			b.MountPoints = append(b.MountPoints, o.Target)
		} else {
			b.SingleUse = true // a file or a directory
		}
	}
}

// within reports whether p is dir or lies below it.
func within(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// rlimits are the limits of each process, and of the run if no control group counts its processes.
func (c *planOptions) rlimits(l *sandbox.Limits) []zygote.Rlimit {
	if !c.has(Rlimits) {
		return nil
	}
	return limit.Rlimits(l, c.groups)
}

// addresses returns the address of each host of the endpoints on the run's own loopback, where the egress proxy
// listens: names get one of 127.1.0.0/16, addresses stay.
func addresses(allow []sandbox.Endpoint) map[string]netip.Addr {
	known := map[string]netip.Addr{}
	for _, e := range allow {
		if _, ok := known[e.Host]; ok {
			continue
		}
		a, err := netip.ParseAddr(e.Host)
		if err != nil {
			n := len(known) + 1
			a = netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)})
		}
		known[e.Host] = a
	}
	return known
}

// assignAddresses adds the addresses of the endpoints to the plan, and returns the lines for /etc/hosts.
func assignAddresses(allow []sandbox.Endpoint, p *zygote.Plan) string {
	var hosts strings.Builder
	known := addresses(allow)
	for i, e := range allow {
		at := known[e.Host]
		switch {
		case i > 0 && allow[i-1].Host == e.Host: // they are sorted
		case at.String() == e.Host:
			p.Addresses = append(p.Addresses, at.As4())
		default:
			fmt.Fprintf(&hosts, "%v %s\n", at, e.Host)
		}
		p.Listeners = append(p.Listeners, zygote.Listener{Address: at.As4(), Port: e.Port})
	}
	return hosts.String()
}
