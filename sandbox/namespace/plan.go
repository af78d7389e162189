// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// devices are the device nodes of every run.
var devices = []string{"full", "null", "random", "urandom", "zero"}

// shmBytes bounds /dev/shm.
const shmBytes = 1 << 30

// plan turns a valid spec into what init does. It decides everything and touches nothing: the same
// spec gives the same plan on every host.
func plan(spec *sandbox.Spec) *zygote.Plan {
	p := &zygote.Plan{
		Args:      spec.Args,
		Env:       spec.Env,
		Dir:       spec.Dir,
		Loopback:  spec.Network.Loopback,
		Workspace: spec.Workspace != "",
	}
	add := func(kind zygote.OpKind, target, source string) {
		p.Ops = append(p.Ops, zygote.Op{Kind: kind, Target: target, Source: source})
	}
	for _, d := range devices {
		add(zygote.OpDevice, "/dev/"+d, "/dev/"+d)
	}
	add(zygote.OpSymlink, "/dev/fd", "/proc/self/fd")
	add(zygote.OpSymlink, "/dev/stdin", "/proc/self/fd/0")
	add(zygote.OpSymlink, "/dev/stdout", "/proc/self/fd/1")
	add(zygote.OpSymlink, "/dev/stderr", "/proc/self/fd/2")
	p.Ops = append(p.Ops, zygote.Op{Kind: zygote.OpTmpfs, Target: "/dev/shm", Bytes: shmBytes})
	add(zygote.OpProc, "/proc", "")
	add(zygote.OpFile, "/etc/passwd", fmt.Sprintf("root:x:0:0:root:/:/bin/sh\nbuild:x:%d:%d:build:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", zygote.UID, zygote.GID))
	add(zygote.OpFile, "/etc/group", fmt.Sprintf("root:x:0:\nbuild:x:%d:\nnogroup:x:65534:\n", zygote.GID))
	add(zygote.OpFile, "/etc/hosts", "127.0.0.1 localhost "+zygote.Hostname+"\n::1 localhost "+zygote.Hostname+"\n")
	add(zygote.OpFile, "/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")

	// What lies inside something else comes after it, since a parent sorts before its children.
	first := len(p.Ops)
	for _, in := range spec.Inputs {
		add(zygote.OpBind, in.Target, in.Source)
	}
	for _, out := range spec.Outputs {
		add(zygote.OpOutput, out.Target, out.Source)
	}
	for _, t := range spec.Temp {
		p.Ops = append(p.Ops, zygote.Op{Kind: zygote.OpTmpfs, Target: t.Target, Bytes: t.Bytes})
	}
	slices.SortStableFunc(p.Ops[first:], func(a, b zygote.Op) int { return strings.Compare(a.Target, b.Target) })
	return p
}
