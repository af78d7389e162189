// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/identity"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// runscArgs are the arguments of runsc, except for fileAccess. They include defaults that a run relies on.
var runscArgs = []string{
	"--root=" + zygote.StateDir, "--platform=systrap", "--network=none", "--gofer-network-namespace=new",
	"--overlay2=none", "--host-uds=none", "--host-fifo=none", "--directfs=true",
	"--ignore-cgroups", "--cpu-num-from-quota=false", "--host-settings=ignore", "--oci-seccomp=false",
}

// fileAccess returns the argument that lets gVisor cache names, listings and sizes of files, unless the host may change
// them during the run.
func fileAccess(spec *sandbox.Spec) string {
	if slices.ContainsFunc(spec.Inputs, func(in sandbox.Input) bool { return in.Content == "volume" }) {
		return "--file-access=shared"
	}
	return "--file-access=exclusive"
}

// plan turns a valid spec into what the launcher does outside and what the guest does inside. user is the host user of
// the command.
func plan(spec *sandbox.Spec, runsc string, user int) (*zygote.Launch, *zygote.Guest, error) {
	id := identity.Of(&spec.Conditions)
	config, err := containerConfig(id.Hostname, limit.Rlimits(&spec.Limits, true))
	if err != nil {
		return nil, nil, err
	}
	l := &zygote.Launch{
		Workspace: spec.Workspace != "", Owned: spec.Owned, Runsc: runsc, Config: config,
		User: user, UID: id.UID, CPUs: spec.Conditions.CPUs,
	}
	l.Args = append(slices.Clone(runscArgs), fileAccess(spec), "run", "--bundle="+zygote.BundleDir)
	for fd := zygote.GuestIn; fd <= zygote.GuestStderr; fd++ {
		l.Args = append(l.Args, fmt.Sprintf("--pass-fd=%d:%[1]d", fd))
	}
	l.Args = append(l.Args, "run")
	g := &zygote.Guest{
		Args: spec.Args, Env: spec.Env, Dir: spec.Dir, UID: id.UID, Umask: 0o022, Domain: "(none)",
		Processes: spec.Limits.Processes, Loopback: spec.Network.Loopback,
		Filter: seccomp.Encode(seccomp.Program(seccomp.Config{Listen: spec.Network.Listen})),
	}
	if spec.Conditions.Umask != 0 {
		g.Umask = int(spec.Conditions.Umask)
	}
	if spec.Conditions.Hostname != "" {
		g.Domain = spec.Conditions.Hostname
	}
	l.Ops = id.Etc("", false)
	l.MountPoints = []string{"/dev", "/proc"}
	g.Temps = []zygote.Op{temp("/dev/shm", limit.ShmBytes, unix.MS_NOEXEC)}
	if err := addMounts(spec, l, g); err != nil {
		return nil, nil, err
	}
	for i := range l.Ops {
		l.Ops[i].Target = zygote.RunRoot + l.Ops[i].Target
	}
	for i := range l.MountPoints {
		l.MountPoints[i] = zygote.RunRoot + l.MountPoints[i]
	}
	return l, g, nil
}

// addMounts adds the inputs, outputs and temporary directories of the spec. Temporary directories are gVisor's own,
// unless something of this host is mounted inside them.
func addMounts(spec *sandbox.Spec, l *zygote.Launch, g *zygote.Guest) error {
	var ops []zygote.Op
	for _, in := range spec.Inputs {
		ops = append(ops, zygote.Op{
			Kind: zygote.OpBind, Target: in.Target, Source: in.Source,
			Attrs: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		})
	}
	for _, out := range spec.Outputs {
		op := zygote.Op{Kind: zygote.OpBind, Target: out.Target, Source: out.Source, Attrs: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
		for _, lower := range spec.Lower {
			if lower.Target == out.Target {
				op.Kind, op.Lower = zygote.OpOverlay, append(op.Lower, zygote.Lower{Source: lower.Source})
			}
		}
		l.Writable = append(l.Writable, zygote.RunRoot+out.Target)
		g.Writable = append(g.Writable, out.Target)
		ops = append(ops, op)
	}
	for _, t := range spec.Temp {
		g.Full = append(g.Full, t.Target)
		holds := func(o zygote.Op) bool { return strings.HasPrefix(o.Target, t.Target+"/") }
		if slices.ContainsFunc(ops, holds) {
			ops = append(ops, temp(t.Target, t.Bytes, 0))
			g.Writable = append(g.Writable, t.Target)
			continue
		}
		g.Temps = append(g.Temps, temp(t.Target, t.Bytes, 0))
		l.MountPoints = append(l.MountPoints, t.Target)
	}
	for _, o := range slices.Concat(ops, g.Temps[1:]) {
		for _, own := range []string{"/dev", "/proc"} {
			if o.Target == own || strings.HasPrefix(o.Target, own+"/") {
				return fmt.Errorf("%w: this worker cannot mount anything at %s, where gVisor mounts its own", sandbox.ErrUnsupported, o.Target)
			}
		}
	}
	// A parent sorts before its children.
	byTarget := func(a, b zygote.Op) int { return strings.Compare(a.Target, b.Target) }
	slices.SortStableFunc(ops, byTarget)
	slices.SortStableFunc(g.Temps, byTarget)
	slices.Sort(g.Writable)
	for _, o := range ops {
		inside := func(dir string) bool { return strings.HasPrefix(o.Target, dir+"/") }
		if o.Kind == zygote.OpBind && o.Attrs&unix.MOUNT_ATTR_RDONLY != 0 && slices.ContainsFunc(g.Writable, inside) {
			g.ReadOnly = append(g.ReadOnly, o.Target)
		}
	}
	l.Ops = append(l.Ops, ops...)
	return nil
}

func temp(target string, bytes int64, attrs uint64) zygote.Op {
	return zygote.Op{Kind: zygote.OpTmpfs, Target: target, Bytes: bytes, Attrs: attrs | unix.MS_NOSUID | unix.MS_NODEV}
}

// guestCapabilities are what pid 1 of the run needs to set the run up. The command has none.
var guestCapabilities = []string{
	"CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_NET_ADMIN",
	"CAP_SYS_RESOURCE", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER",
}

// rlimitNames are the names of the resources that package limit limits. Gvisor sets most of them from the configuration
// only.
var rlimitNames = map[int]string{
	unix.RLIMIT_CPU: "RLIMIT_CPU", unix.RLIMIT_CORE: "RLIMIT_CORE", unix.RLIMIT_NOFILE: "RLIMIT_NOFILE",
	unix.RLIMIT_MEMLOCK: "RLIMIT_MEMLOCK", unix.RLIMIT_SIGPENDING: "RLIMIT_SIGPENDING",
	unix.RLIMIT_MSGQUEUE: "RLIMIT_MSGQUEUE", unix.RLIMIT_NICE: "RLIMIT_NICE", unix.RLIMIT_RTPRIO: "RLIMIT_RTPRIO",
}

type object = map[string]any

// containerConfig returns the configuration of the container whose first process is the guest
// (github.com/opencontainers/runtime-spec/blob/main/config.md).
func containerConfig(hostname string, limits []zygote.Rlimit) (string, error) {
	var rlimits []object
	for _, l := range limits {
		rlimits = append(rlimits, object{"type": rlimitNames[l.Resource], "soft": l.Value, "hard": l.Value})
	}
	text, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"process": object{
			"args": []string{zygote.NameGuest}, "cwd": "/", "user": object{"uid": 0, "gid": 0},
			// gVisor sets HOME if it is absent; the command has its own environment.
			"env":     []string{"GOMAXPROCS=2", "GOGC=off", "HOME=/"},
			"rlimits": rlimits,
			"capabilities": object{
				"bounding": guestCapabilities, "effective": guestCapabilities, "permitted": guestCapabilities,
			},
		},
		"root":     object{"path": zygote.ContainerRoot},
		"hostname": hostname,
		"linux":    object{"namespaces": []object{{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}}},
	})
	return string(text), err
}
