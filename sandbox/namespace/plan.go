// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// devices are the device nodes of every run.
var devices = []string{"full", "null", "random", "urandom", "zero"}

// shmBytes bounds /dev/shm.
const shmBytes = 1 << 30

// What a mount may be restricted to (mount_setattr(2)); the numbers are the kernel's.
const (
	readOnly = 1
	noSetuid = 2
	noDevice = 4
	noExec   = 8
)

// Resources of getrlimit(2); the numbers are the kernel's.
const (
	rlimitCPU     = 0
	rlimitCore    = 4
	rlimitNproc   = 6
	rlimitNofile  = 7
	rlimitMemlock = 8
	rlimitSignals = 11
	rlimitQueues  = 12
	rlimitNice    = 13
	rlimitRTPrio  = 14
)

// conditions are what a plan depends on besides the spec.
type planOptions struct {
	without []Layer
	// landlock is the version that the kernel has, or 0.
	landlock int
	// groups says that a control group counts processes.
	groups bool
	// filter and reaper are programs of the filter of system calls.
	filter, initFilter []byte
	notify             bool
	// hidden are directories whose paths are not to show.
	hidden   []string
	terminal bool
}

func (c *planOptions) has(l Layer) bool { return !slices.Contains(c.without, l) }

// plan turns a valid spec into what the slot does, and names the images that it speaks of. It decides everything and
// touches nothing: the same spec under the same conditions gives the same plan on every host.
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
		ProcOptions:      "subset=pid,hidepid=invisible",
		WritableRoot:     !c.has(ReadOnly),
		SingleUse:        !c.has(ReadOnly),
	}
	p = &zygote.Plan{
		Base:      b,
		Args:      spec.Args,
		Env:       spec.Env,
		Dir:       spec.Dir,
		Workspace: spec.Workspace != "",
		Terminal:  c.terminal,
		Rlimits:   rlimits(&spec.Limits, c),
	}
	p.Conditions = slotConditionsOf(&spec.Conditions)
	if !c.has(ProcSubset) {
		b.ProcOptions = ""
	}
	hosts := assignAddresses(spec.Network.Allow, p)
	attrs := func(a uint64) uint64 {
		if !c.has(ReadOnly) {
			a &^= readOnly
		}
		if !c.has(NoSetuid) {
			a &^= noSetuid
		}
		return a
	}
	add := func(kind zygote.OpKind, target, source string, a uint64) {
		b.Ops = append(b.Ops, zygote.Op{Kind: kind, Target: target, Source: source, Attrs: attrs(a)})
	}
	temp := func(target string, bytes int64, a uint64) zygote.Op {
		p.Writable = append(p.Writable, target)
		return zygote.Op{Kind: zygote.OpTmpfs, Target: target, Bytes: bytes, Attrs: attrs(a)}
	}
	nodes := slices.Clone(devices)
	if c.terminal {
		nodes = append(nodes, "tty")
	}
	for _, d := range nodes {
		add(zygote.OpDevice, "/dev/"+d, "/dev/"+d, readOnly|noSetuid|noExec)
	}
	add(zygote.OpSymlink, "/dev/fd", "/proc/self/fd", 0)
	add(zygote.OpSymlink, "/dev/stdin", "/proc/self/fd/0", 0)
	add(zygote.OpSymlink, "/dev/stdout", "/proc/self/fd/1", 0)
	add(zygote.OpSymlink, "/dev/stderr", "/proc/self/fd/2", 0)
	b.Temps = append(b.Temps, temp("/dev/shm", shmBytes, noSetuid|noDevice|noExec))
	id := identityOf(&spec.Conditions)
	add(zygote.OpFile, "/etc/passwd", fmt.Sprintf("root:x:0:0:root:/:/bin/sh\n%s:x:%d:%d:%[1]s:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", id.user, id.uid, id.gid), 0)
	add(zygote.OpFile, "/etc/group", fmt.Sprintf("root:x:0:\n%s:x:%d:\nnogroup:x:65534:\n", id.user, id.gid), 0)
	add(zygote.OpFile, "/etc/hosts", "127.0.0.1 localhost "+id.hostname+"\n::1 localhost "+id.hostname+"\n"+hosts, 0)
	add(zygote.OpFile, "/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n", 0)

	var ops []zygote.Op
	numbers := map[string]int{}
	for _, in := range spec.Inputs {
		op := zygote.Op{Kind: zygote.OpBind, Target: in.Target, Source: in.Source, Attrs: attrs(readOnly | noSetuid | noDevice)}
		if in.Image != "" {
			if numbers[in.Image] == 0 {
				images = append(images, in.Image)
				numbers[in.Image] = len(images)
			}
			op.Image = numbers[in.Image]
		}
		ops = append(ops, op)
	}
	for _, out := range spec.Outputs {
		ops = append(ops, zygote.Op{Kind: zygote.OpBind, Target: out.Target, Source: out.Source, Attrs: attrs(noSetuid | noDevice)})
		p.Writable = append(p.Writable, out.Target)
	}
	for _, t := range spec.Temp {
		ops = append(ops, temp(t.Target, t.Bytes, noSetuid|noDevice))
	}
	for _, dir := range c.hidden {
		if slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return within(in.Source, dir) }) {
			b.Hidden = append(b.Hidden, dir)
		}
	}
	// What lies inside something else comes after it, since a parent sorts before its children.
	slices.SortStableFunc(ops, func(a, b zygote.Op) int { return strings.Compare(a.Target, b.Target) })
	split(p, ops)
	slices.Sort(p.Writable)
	return p, images
}

// split divides ops between the plan and its base: what is the same for many runs is the base's.
func split(p *zygote.Plan, ops []zygote.Op) {
	b := p.Base
	var mine []string // targets in the plan
	for _, o := range ops {
		over := slices.ContainsFunc(mine, func(dir string) bool { return within(o.Target, dir) })
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
		mine = append(mine, o.Target)
		if slices.Contains(p.Writable, o.Target) { // an output, and so a directory
			b.MountPoints = append(b.MountPoints, o.Target)
		} else {
			b.SingleUse = true // it remains to be seen what it is
		}
	}
}

// within reports whether p is dir or lies below it.
func within(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

// rlimits are the limits of each process, and of a run where nothing else counts its processes.
func rlimits(l *sandbox.Limits, c *planOptions) []zygote.Rlimit {
	if !c.has(Rlimits) {
		return nil
	}
	// Of one byte, not of none: that stops a program of the host as well, to which the kernel would hand the
	// core whatever its size (do_coredump in fs/coredump.c of Linux).
	rs := []zygote.Rlimit{{Resource: rlimitCore, Value: 1}}
	// Signals and message queues count for the user id owns the run's user namespace as well.
	rs = append(rs, zygote.Rlimit{Resource: rlimitMemlock, Value: 64 << 10}, zygote.Rlimit{Resource: rlimitSignals, Value: 1024},
		zygote.Rlimit{Resource: rlimitQueues, Value: 128 << 10}, zygote.Rlimit{Resource: rlimitNice}, zygote.Rlimit{Resource: rlimitRTPrio})
	if l.OpenFiles != sandbox.Unlimited {
		rs = append(rs, zygote.Rlimit{Resource: rlimitNofile, Value: uint64(l.OpenFiles)})
	}
	if l.Processes != sandbox.Unlimited && !c.groups {
		// The kernel counts those of one user in one user namespace, and a slot has its own.
		rs = append(rs, zygote.Rlimit{Resource: rlimitNproc, Value: uint64(l.Processes)})
	}
	if l.CPU != sandbox.Unlimited {
		// Of one process, and late: the monitor counts all of them together, and says so.
		rs = append(rs, zygote.Rlimit{Resource: rlimitCPU, Value: uint64(math.Ceil(time.Duration(l.CPU).Seconds())) + 2})
	}
	return rs
}

// reach says in p how the endpoints are reached, and returns the lines of /etc/hosts for it. Each host has an
// address on the run's own loopback, where the worker listens and carries on what comes: a name one of
// 127.1.0.0/16, an address itself.
func assignAddresses(allow []sandbox.Endpoint, p *zygote.Plan) string {
	var hosts strings.Builder
	known := map[string][4]byte{}
	for _, e := range allow {
		at, ok := known[e.Host]
		if !ok {
			if a, err := netip.ParseAddr(e.Host); err == nil {
				at = a.As4()
				p.Addresses = append(p.Addresses, at)
			} else {
				n := len(known) + 1
				at = [4]byte{127, 1, byte(n >> 8), byte(n)}
				fmt.Fprintf(&hosts, "%v %s\n", netip.AddrFrom4(at), e.Host)
			}
			known[e.Host] = at
		}
		p.Listeners = append(p.Listeners, zygote.Listener{Address: at, Port: e.Port})
	}
	return hosts.String()
}
