// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// Probe runs this executable in a sandbox and reports what it finds there. It concludes nothing from version numbers.
func (b *Backend) Probe(ctx context.Context) (sandbox.Features, error) {
	f := sandbox.Features{Backend: name, Tier: "none"}
	check := func(ok bool, name, detail, fix string) {
		f.Checks = append(f.Checks, sandbox.Check{Name: name, OK: ok, Detail: detail, Fix: fix, Required: true})
	}
	fail := func(name string, err error) (sandbox.Features, error) {
		if errors.Is(err, errHelper) {
			check(false, name, err.Error(), "")
			return f, err
		}
		detail, fix := explain(err)
		check(false, name, detail, fix)
		if fix != "" {
			fix = "; fix: " + fix
		}
		return f, preflight.Fail(preflight.NamespaceProbe, "%s: %s%s", name, detail, fix)
	}

	if err := b.ready(); err != nil {
		return f, err
	}
	b.mu.Lock()
	err := b.start()
	b.mu.Unlock()
	if err != nil {
		return fail("zygote", err)
	}
	if b.rootless {
		check(true, "user namespace", fmt.Sprintf("user %d is root of its own user namespace", os.Geteuid()), "")
	}
	facts, reason, err := b.probeOverlays(ctx)
	if err != nil {
		return fail("namespaces and empty root", err)
	}
	if b.exposed.Load() {
		f.Checks = append(f.Checks, sandbox.Check{
			Name:   string(HiddenPaths),
			Detail: "mount tables of runs show paths of the store: " + reason.Error(),
		})
	}
	switch {
	case !b.rootless:
	case !b.noLower.Load():
		check(true, "unchangeable inputs",
			"files only; in its own copy, an action can change directory modes and remove empty directories", "")
	default:
		f.Checks = append(f.Checks, sandbox.Check{
			Name:   "unchangeable inputs",
			Detail: "inputs are private copies, which an action can change, since this kernel cannot protect them: " + reason.Error(),
			Fix:    "run Linux 6.15 or newer, or run the worker as root",
		})
	}
	b.check(facts, check)
	for _, c := range f.Checks {
		if !c.OK && c.Required {
			return f, preflight.Fail(preflight.NamespaceProbe, "%s: got: %s", c.Name, c.Detail)
		}
	}
	b.optional(&f, facts)
	b.root.Store(true)
	if b.probeRoot(ctx) != nil {
		b.root.Store(false)
	}
	b.probeConditions(ctx)
	enforced := b.features(b.capabilities())
	enforced.Checks, enforced.Tier, enforced.Layers = f.Checks, b.tier(f.Checks), b.layers()
	return *enforced, nil
}

// probeOverlays is probeRun with what not every kernel supports: overlays over inputs, and hidden directories. If that
// fails, it leaves out one, the other or both, and returns the first error as the reason.
func (b *Backend) probeOverlays(ctx context.Context) (facts *zygote.Facts, reason, err error) {
	for _, without := range []struct{ lower, hidden bool }{{}, {lower: true}, {hidden: true}, {lower: true, hidden: true}} {
		if without.hidden && len(b.config.Hidden) == 0 {
			break
		}
		b.noLower.Store(without.lower)
		b.exposed.Store(without.hidden)
		if facts, err = b.probeRun(ctx, sandbox.Conditions{}); err == nil {
			return facts, reason, nil
		}
		reason = cmp.Or(reason, err)
	}
	return nil, nil, err
}

// check checks what runs must always find.
func (b *Backend) check(facts *zygote.Facts, check func(ok bool, name, detail, fix string)) {
	check(true, "detached tmpfs", "inputs are on a mount without a path", "")
	check(facts.PID > 1 && facts.Processes == 1 || !b.config.has(ProcSubset), "pid namespace",
		fmt.Sprintf("runs see their own processes only (%d)", facts.Processes), "")
	if b.config.has(ReadOnly) {
		check(!facts.RootWritable, "mount namespace", "empty read-only root", "")
	}
	if b.config.has(NetNamespace) {
		check(len(facts.Interfaces) == 1 && facts.Interfaces[0] == "lo" && facts.Loopback, "network namespace",
			fmt.Sprintf("loopback only (interfaces: %s)", strings.Join(facts.Interfaces, " ")), "")
	}
	check(facts.Hostname == zygote.Hostname, "UTS namespace", "host name "+zygote.Hostname, "")
	check(facts.UID == zygote.UID && facts.GID == zygote.GID, "inner user namespace",
		fmt.Sprintf("runs have user %d, group %d", facts.UID, facts.GID), "")
	check(strings.Trim(facts.Capabilities, "0") == "", "capabilities", "none (effective set "+facts.Capabilities+")", "")
	check(facts.NoNewPrivs, "no_new_privs", "set-user-ID programs gain nothing", "")
	if b.config.has(Seccomp) {
		check(facts.Filtered, "seccomp", "unneeded system calls are refused", "")
	}
	for _, dir := range b.config.Hidden {
		if b.config.has(HiddenPaths) && !b.exposed.Load() {
			check(!showsPath(facts.Mounts, dir), string(HiddenPaths), "mount tables of runs show no path of the store", "")
		}
	}
}

// optional adds checks of what is in force only if the host has it, and of what was left out by name.
func (b *Backend) optional(f *sandbox.Features, facts *zygote.Facts) {
	add := func(ok bool, name, detail, fix string) {
		f.Checks = append(f.Checks, sandbox.Check{Name: name, OK: ok, Detail: detail, Fix: fix})
	}
	for _, l := range b.config.Without {
		add(false, string(l), "left out by the operator", "")
	}
	if fix := "sudo sysctl -w fs.protected_hardlinks=1"; !b.rootless && !protectsHardLinks() {
		add(false, "protected hard links", "an action can hard-link an input, but not change it (fs.protected_hardlinks is 0)", fix)
	}
	if facts.Inotify > zygote.MaxInotify {
		add(false, "inotify limit", "an action can use up the inotify instances and watches of the sandbox's owner: "+
			"/proc/sys/user is not writable", "make /proc/sys writable in the worker's container")
	}
	switch {
	case b.landlock > 0:
		add(true, "landlock", fmt.Sprintf("second layer over the file system (version %d)", b.landlock), "")
	case b.config.has(Landlock):
		add(false, "landlock", "no second layer: the kernel lacks Landlock or it is disabled", "boot with landlock in lsm=")
	}
	if b.groups == nil {
		return
	}
	can := b.groups.Capabilities()
	why, fix := b.groups.Missing()
	why = preflight.Coded(why, preflight.NoCgroup)
	if b.groups.Mode() != cgroup.None {
		add(true, "control groups", string(b.groups.Mode()), "")
	}
	add(can.LimitMemory, "memory limit", detail(can.LimitMemory, "for all processes of a run together", why), fix)
	add(can.CountCPU, "CPU time limit", detail(can.CountCPU, "for all processes of a run together", "for each process alone: "+why), fix)
	add(can.LimitProcesses || b.config.has(Rlimits), "limit of processes",
		detail(can.LimitProcesses, "by control group, with peak", "by resource limit, without peak: "+why), "")
}

// protectsHardLinks reports whether the kernel forbids hard links to files that the caller cannot write.
func protectsHardLinks() bool {
	value, err := os.ReadFile("/proc/sys/fs/protected_hardlinks")
	return err != nil || strings.TrimSpace(string(value)) != "0"
}

func detail(ok bool, yes, no string) string {
	if ok {
		return yes
	}
	return no
}

// tier names what is in force.
func (b *Backend) tier(checks []sandbox.Check) string {
	switch {
	case slices.Equal(b.config.Without, NamespacesOnly):
		return "namespaces"
	case len(b.config.Without) > 0:
		return "weakened"
	case slices.ContainsFunc(checks, func(c sandbox.Check) bool { return !c.OK }):
		return "partial"
	}
	return "full"
}

// probeRun runs this executable as NameProbe under some conditions.
func (b *Backend) probeRun(ctx context.Context, c sandbox.Conditions) (*zygote.Facts, error) {
	w, err := b.Workspace(ctx, sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		return nil, fmt.Errorf("detached tmpfs: %w", err)
	}
	defer w.Close()
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	if err := w.Root().Mkdir("out", 0o755); err != nil {
		return nil, err
	}
	var lower []sandbox.Lower
	if !b.noLower.Load() {
		lower = []sandbox.Lower{{Target: "/probe", Source: "in"}}
		if err := w.Root().Mkdir("in", 0o755); err != nil {
			return nil, err
		}
		if err := w.Root().WriteFile("in/"+zygote.NameProbeInput, nil, 0o644); err != nil {
			return nil, err
		}
	}
	spec := probeSpec(self, c)
	spec.Outputs = []sandbox.Output{{Target: "/probe", Source: "out"}}
	spec.Lower, spec.Workspace = lower, w.Name()
	for i, dir := range b.config.Hidden {
		spec.Inputs = append(spec.Inputs, sandbox.Input{Target: fmt.Sprintf("/hidden%d", i), Content: "host", Source: dir})
	}
	facts, err := b.probe(ctx, spec)
	if err == nil && facts.InputWritable {
		return nil, errors.New("an overlay does not protect the files of its lower layer")
	}
	return facts, err
}

// probeRoot runs this executable as NameProbe and user 0 in a root file system that lies in another workspace.
func (b *Backend) probeRoot(ctx context.Context) error {
	w, err := b.Workspace(ctx, sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		return err
	}
	defer w.Close()
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return err
	}
	spec := probeSpec(self, sandbox.Conditions{})
	spec.Root, spec.Superuser = &sandbox.Root{Content: "probe", Image: w.Name(), Source: "root"}, true
	for _, dir := range []string{"dev", "proc", "probe"} {
		if err := w.Root().MkdirAll("root/"+dir, 0o755); err != nil {
			return err
		}
	}
	for _, in := range spec.Inputs {
		info, err := os.Stat(in.Source)
		switch {
		case err != nil:
		case info.IsDir():
			err = w.Root().MkdirAll("root"+in.Target, 0o755)
		default:
			err = w.Root().WriteFile("root"+in.Target, nil, 0o644)
		}
		if err != nil {
			return err
		}
	}
	facts, err := b.probe(ctx, spec)
	if err == nil && (facts.UID != 0 || facts.RootWritable || strings.Trim(facts.Capabilities, "0") != "") {
		err = fmt.Errorf("the root file system or the user has no effect: %+v", facts)
	}
	return err
}

// probeSpec returns the spec of a run of self as NameProbe in the directory /probe.
func probeSpec(self string, c sandbox.Conditions) *sandbox.Spec {
	spec := &sandbox.Spec{
		Args:    []string{zygote.NameProbe},
		Dir:     "/probe",
		Network: sandbox.Network{Loopback: true, Listen: true},
		Limits:  unlimited,
		Audit:   sandbox.AuditOff,
		Inputs:  []sandbox.Input{{Target: zygote.NameProbe, Content: "host", Source: self}},

		Conditions: c,
	}
	// A dynamically linked executable, as test binaries may be, needs its libraries.
	for _, dir := range []string{"/lib", "/lib64", "/usr/lib"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			spec.Inputs = append(spec.Inputs, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	return spec
}

// probe performs a run of NameProbe and returns what it found.
func (b *Backend) probe(ctx context.Context, spec *sandbox.Spec) (*zygote.Facts, error) {
	if b.config.has(Seccomp) && b.config.has(Monitor) {
		spec.Audit = sandbox.AuditViolations
	}
	var stdout, stderr bytes.Buffer
	res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		return nil, err
	}
	var facts zygote.Facts
	if err := json.Unmarshal(stdout.Bytes(), &facts); err != nil || res.ExitCode != 0 {
		return nil, fmt.Errorf("the probe exited with %d: %s", res.ExitCode, strings.TrimSpace(stderr.String()))
	}
	return &facts, nil
}

// explain describes an error on this host and the line that would fix it.
func explain(err error) (detail, fix string) {
	detail = err.Error()
	read := func(name string) string {
		b, _ := os.ReadFile("/proc/sys/" + name)
		return strings.TrimSpace(string(b))
	}
	for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		if name := "max_" + kind + "_namespaces"; read("user/"+name) == "0" {
			return detail + " (user." + name + " is 0)", "sudo sysctl -w user." + name + "=15000"
		}
	}
	switch {
	case strings.Contains(detail, "(seccomp)"):
		return detail + " (the kernel lacks seccomp notification, or a container's filter blocks another one)",
			"choose the sandbox tier \"namespaces\", which works without the filter and the syscall monitor and reports that in every result"
	case read("kernel/unprivileged_userns_clone") == "0" && os.Geteuid() != 0:
		return detail + " (kernel.unprivileged_userns_clone is 0)", "sudo sysctl -w kernel.unprivileged_userns_clone=1"
	case read("kernel/apparmor_restrict_unprivileged_userns") == "1" && os.Geteuid() != 0:
		return detail + " (AppArmor restricts user namespaces to programs with a profile)",
			"sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with the rule userns for this executable"
	case strings.Contains(detail, "overlay") && errors.Is(err, unix.ENODEV):
		return detail + " (the kernel lacks overlayfs)", "sudo modprobe overlay"
	case errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL):
		return detail + " (the kernel is too old: mount_setattr needs Linux 5.12)", "run a newer kernel"
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || strings.Contains(detail, "operation not permitted"):
		return detail + " (in a container, the runtime's profile may forbid it)", "run outside a container, or with seccomp and AppArmor profiles that permit mounts and user namespaces"
	}
	return detail, ""
}

// unlimited are the limits of a probe.
var unlimited = sandbox.Limits{
	Memory: sandbox.Unlimited, CPU: sandbox.Unlimited, Processes: sandbox.Unlimited,
	OpenFiles: sandbox.Unlimited, OutputBytes: sandbox.Unlimited, OutputFiles: sandbox.Unlimited,
	MilliCPUs: sandbox.Unlimited, DiskRate: sandbox.Unlimited,
}

// showsPath reports whether a mount table (proc_pid_mountinfo(5)) contains dir or a path below it, as a field or in an
// option.
func showsPath(mounts, dir string) bool {
	dir = strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`).Replace(dir)
	return slices.ContainsFunc(strings.FieldsFunc(mounts, func(r rune) bool { return strings.ContainsRune(" \t\n,=:", r) }),
		func(path string) bool { return path == dir || strings.HasPrefix(path, dir+"/") })
}
