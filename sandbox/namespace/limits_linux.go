// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/monitor"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/violation"
	"golang.org/x/sys/unix"
)

// capabilities returns what control groups can do here; the backend must have been started.
func (b *Backend) capabilities() cgroup.Capabilities {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.groups == nil {
		return cgroup.Capabilities{}
	}
	return b.groups.Capabilities()
}

// features returns what this backend enforces.
func (b *Backend) features(can cgroup.Capabilities) *sandbox.Features {
	f := &sandbox.Features{
		Backend: name, Endpoints: b.config.has(NetNamespace), ListenControl: b.config.has(Seccomp), Kill: true,
		Conditions: b.supportedConditions(), Lower: !b.noLower.Load(), SameUser: b.rootless, Sockets: true,
		Root: b.root.Load(), Superuser: b.root.Load(),
		Limits: limit.Enforced(can, can.LimitProcesses || b.config.has(Rlimits), b.config.has(Rlimits)),
	}
	f.Audits = []sandbox.Audit{sandbox.AuditOff}
	if b.config.has(Seccomp) && b.config.has(Monitor) {
		f.Audits = append(f.Audits, sandbox.AuditViolations, sandbox.AuditFull)
		f.Conditions = append(f.Conditions, sandbox.ConditionFiles)
		if monitor.CanAnswer() == nil {
			f.Conditions = append(f.Conditions, sandbox.ConditionClockOffset, sandbox.ConditionFrozenClock, sandbox.ConditionRandomSeed)
		}
	}
	return f
}

// planOptions returns what the plan of a run depends on besides its spec.
func (b *Backend) planOptions(spec *sandbox.Spec, can cgroup.Capabilities, terminal bool) *planOptions {
	c := &planOptions{without: b.config.Without, landlock: b.landlock, groups: can.LimitProcesses, terminal: terminal}
	if b.config.has(HiddenPaths) && !b.exposed.Load() {
		c.hidden = b.config.Hidden
	}
	if b.config.has(Seccomp) {
		level := seccomp.MonitorOff
		switch spec.Audit {
		case sandbox.AuditViolations:
			level = seccomp.MonitorViolations
		case sandbox.AuditFull:
			level = seccomp.MonitorFull
		}
		config := seccomp.Config{
			Listen: spec.Network.Listen,
			Clock:  spec.Conditions.ClockOffset != 0 || spec.Conditions.FrozenClock != 0, Random: spec.Conditions.RandomSeed != 0,
			Files: spec.Conditions.Of(sandbox.ConditionFiles) != "",
		}
		if config.Clock || config.Random || config.Files {
			level = max(level, seccomp.MonitorViolations) // the monitor answers them; account discards its events
		}
		config.Monitor = level
		c.notify = level != seccomp.MonitorOff
		c.filter = b.filter(config)
		c.initFilter = initFilter()
	}
	return c
}

// filter returns the encoded filter of a run.
func (b *Backend) filter(c seccomp.Config) []byte {
	if f, ok := b.filters.Load(c); ok {
		return f.([]byte)
	}
	f, _ := b.filters.LoadOrStore(c, seccomp.Encode(seccomp.Program(c)))
	return f.([]byte)
}

// initFilter is the encoded filter of pid 1.
var initFilter = sync.OnceValue(func() []byte { return seccomp.Encode(seccomp.InitFilter()) })

// monitorConfig returns the permissions of the run, for its syscall monitor.
func (r *run) monitorConfig() monitor.Config {
	spec := r.spec
	v := monitor.Config{
		User: r.backend.user(r.slot), Unwritable: r.unwritable, Source: r.source, Writable: []string{"/dev/shm"},
		Loopback: spec.Network.Loopback, Full: spec.Audit == sandbox.AuditFull, Conditions: spec.Conditions,
		Resolver: r.slot.resolver, Sockets: r.slot.sockets, Hosts: addresses(spec.Network.Allow),
		Minor: violation.CachesModule,
	}
	if violation.NeedMonitor(spec.Kill) {
		v.Kill = r.killFor
	}
	for _, o := range spec.Outputs {
		v.Writable = append(v.Writable, o.Target)
		v.Layered = append(v.Layered, o.Target)
	}
	for _, t := range spec.Temp {
		v.Writable = append(v.Writable, t.Target)
	}
	if spec.Root != nil {
		v.Inputs = append(v.Inputs, "/")
	}
	for _, in := range spec.Inputs {
		v.Inputs = append(v.Inputs, in.Target)
	}
	for _, e := range spec.Network.Allow {
		if a, err := netip.ParseAddr(e.Host); err == nil { // names resolve to loopback addresses
			v.Allowed = append(v.Allowed, netip.AddrPortFrom(a, e.Port))
		}
	}
	return v
}

// killFor kills the run if an event is a violation of Spec.Kill, and reports whether it did. A failed execution is none
// before the end of the run: see monitor.Monitor.Events.
func (r *run) killFor(e sandbox.Event) bool {
	if e.Kind == sandbox.EventExec || !violation.Counts(e, r.spec.Kill) {
		return false
	}
	r.mu.Lock()
	r.violated = true
	r.mu.Unlock()
	r.kill()
	return true
}

// user returns the user of the runs in a slot.
func (b *Backend) user(s *slot) int {
	if b.rootless {
		return os.Geteuid()
	}
	return zygote.CommandUser(s.number)
}

// limit prepares the slot's control group for the run.
func (r *run) limit(can cgroup.Capabilities) error {
	if r.slot.group == nil {
		return nil
	}
	of := &r.spec.Limits
	l := cgroup.Limits{Memory: of.Memory, Processes: of.Processes, MilliCPUs: of.MilliCPUs, DiskRate: of.DiskRate}
	if !can.LimitProcesses {
		l.Processes = cgroup.Unlimited // resource limits do it
	} else if l.Processes != sandbox.Unlimited {
		l.Processes++ // pid 1
	}
	if err := r.slot.group.Reset(l); err != nil {
		return fmt.Errorf("limits of the run: %w", err)
	}
	return nil
}

// interval is how often a run's use is checked. The run may exceed its processor time by that much on every processor.
const interval = 200 * time.Millisecond

// enforceLimits kills the run when it has used up its processor time, or when the OOM killer has killed one of its
// processes: the rest could only produce confusing errors.
func (r *run) enforceLimits(p *progress) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-p.exited:
			return
		case <-p.reaped:
			return
		case <-tick.C:
		}
		r.checkSpace()
		used, err := r.sample()
		if err != nil {
			continue // account reads it again
		}
		if slices.ContainsFunc(r.refusals(&used), r.killFor) {
			return
		}
		if e := limit.ExceededBy(&r.spec.Limits, &used); e != nil {
			r.mu.Lock()
			r.exceeded, r.violated = e, r.violated || violation.Counts(*e, r.spec.Kill)
			r.mu.Unlock()
			r.kill()
			return
		}
	}
}

// sample returns what the run has used, or nothing without a control group.
func (r *run) sample() (cgroup.Usage, error) {
	if r.slot.group == nil {
		return cgroup.Usage{}, nil
	}
	return r.slot.group.Sample()
}

// refusals returns the limits at which calls of the run have failed, as far as they are known before its end.
func (r *run) refusals(used *cgroup.Usage) []sandbox.Event {
	var events []sandbox.Event
	if l := r.spec.Limits.Processes; used.ForksRefused > 0 && l != sandbox.Unlimited {
		e := limit.Event(sandbox.LimitProcesses, l, l) // the peak is known only if it exceeds that of earlier runs
		e.Count = int(used.ForksRefused)
		events = append(events, *e)
	}
	limits := r.outputLimits()
	if r.noBytes && limits.Bytes != sandbox.Unlimited {
		events = append(events, *limit.Event(sandbox.LimitOutputBytes, limits.Bytes, limits.Bytes))
	}
	if r.noFiles && limits.Files != sandbox.Unlimited {
		events = append(events, *limit.Event(sandbox.LimitOutputFiles, limits.Files, limits.Files))
	}
	return events
}

// account completes res with what the dead run used and what was recorded of it.
func (r *run) account(res *sandbox.Result, can cgroup.Capabilities) error {
	u := &res.Usage
	res.Exceeded = r.exceeded
	used, err := r.sample()
	if err != nil {
		return fmt.Errorf("usage of the run: %w", err)
	}
	if r.slot.group != nil {
		if used.User+used.System > u.User+u.System {
			u.User, u.System = used.User, used.System
		}
		u.PeakMemory, u.PeakProcesses = used.PeakMemory, used.PeakProcesses
		u.Measured.CPU, u.Measured.DiskBytes = can.CountCPU, can.CountIO
		u.Measured.PeakMemory, u.Measured.PeakProcesses = used.PeakMemory > 0, used.PeakProcesses > 0
		u.ReadBytes, u.WrittenBytes = max(u.ReadBytes, used.ReadBytes), max(u.WrittenBytes, used.WrittenBytes)
		if res.Exceeded == nil {
			res.Exceeded = limit.ExceededBy(&r.spec.Limits, &used)
		}
	}
	r.recordFull(res, &used)
	networkClean := false
	if r.syscalls != nil {
		r.syscalls.Stop()
		if events, unrecorded, opened := r.syscalls.Events(); r.spec.Audit != sandbox.AuditOff {
			res.Events = append(res.Events, events...)
			res.Unrecorded, res.Opened = unrecorded, opened
			res.Executed, res.ExecutedAll = r.syscalls.Executed()
		} // else it is watched for its conditions alone
		if err := r.syscalls.Err(); err != nil {
			return fmt.Errorf("conditions of the run: %w", err)
		}
		networkClean = !r.syscalls.UsedNetwork() && r.proxy == nil
	}
	u.Measured.PacketsRefused = true // none, if the run made no socket
	if r.slot.networkClean = networkClean; !networkClean {
		if u.PacketsRefused, u.Measured.PacketsRefused, err = r.slot.replaceNetwork(); err != nil {
			return err
		}
		r.recordPackets(res)
	}
	res.KilledForViolation = r.violated
	if r.proxy != nil {
		res.Events = append(res.Events, r.proxy.close()...)
	}
	if r.missing != "" && r.spec.Audit != sandbox.AuditOff {
		if e, ok := missingToolchain(r.spec, r.missing); ok {
			res.Events = append(res.Events, e)
		}
	}
	if res.Exceeded != nil && !slices.ContainsFunc(res.Events, func(e sandbox.Event) bool { return e == *res.Exceeded }) {
		res.Events = append(res.Events, *res.Exceeded)
	}
	slices.SortFunc(res.Events, sandbox.Event.Compare)
	return nil
}

// recordPackets records that packets of a monitored run were refused, if its system calls do not show that: sendmsg(2)
// has its addresses in memory.
func (r *run) recordPackets(res *sandbox.Result) {
	known := func(e sandbox.Event) bool { return e.Kind == sandbox.EventConnect }
	if res.Usage.PacketsRefused > 0 && r.spec.Audit != sandbox.AuditOff && !slices.ContainsFunc(res.Events, known) {
		res.Events = append(res.Events, sandbox.Event{Kind: sandbox.EventConnect, Subject: "other hosts", Count: 1})
	}
}

// limitHit records a limit that the run hit. If its command failed, this is the cause.
func (r *run) limitHit(res *sandbox.Result, e *sandbox.Event) {
	res.Events = append(res.Events, *e)
	if res.Exceeded == nil && res.ExitCode != 0 {
		res.Exceeded = e
	}
}

// checkSpace records whether the workspace is full: it has a little more space than the run may use, so a full one
// means that the run wanted more. Files deleted between two checks are missed.
func (r *run) checkSpace() {
	var st unix.Statfs_t
	if r.spec.Workspace == "" || unix.Statfs(r.spec.Workspace, &st) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noBytes = r.noBytes || st.Bavail == 0 && st.Blocks > 0
	r.noFiles = r.noFiles || st.Ffree == 0 && st.Files > 0
}

// outputLimits returns the limits of the Spec, or those of the workspace where they are lower.
func (r *run) outputLimits() zygote.WorkspaceSize {
	limits := zygote.WorkspaceSize{Bytes: r.spec.Limits.OutputBytes, Files: r.spec.Limits.OutputFiles}
	if w := r.backend.workspace(r.spec.Workspace); w != nil {
		limits.Bytes, limits.Files = limit.Lower(limits.Bytes, w.room.Bytes), limit.Lower(limits.Files, w.room.Files)
	}
	return limits
}

// recordFull records the limits at which calls of the run failed.
func (r *run) recordFull(res *sandbox.Result, used *cgroup.Usage) {
	r.checkSpace()
	for _, e := range r.refusals(used) {
		r.limitHit(res, &e)
	}
	for _, target := range r.fullTemps {
		for _, t := range r.spec.Temp {
			if t.Target == target {
				r.limitHit(res, limit.FullTemp(t))
			}
		}
	}
}

// layers names the layers in force, for Features.
func (b *Backend) layers() []string {
	names := []string{"user", "mount", "pid", "network", "ipc", "uts", "cgroup"}
	for layer, name := range map[Layer]string{NetNamespace: "network", IPCNamespace: "ipc"} {
		if !b.config.has(layer) {
			names = slices.DeleteFunc(names, func(n string) bool { return n == name })
		}
	}
	names = []string{strings.Join(names, "+") + " namespaces"}
	if b.groups != nil && b.groups.Mode() != cgroup.None {
		names = append(names, string(b.groups.Mode())+" limits")
	}
	if b.config.has(Seccomp) {
		names = append(names, "seccomp")
	}
	if b.landlock > 0 {
		names = append(names, "landlock")
	}
	if b.config.has(Seccomp) && b.config.has(Monitor) {
		names = append(names, "monitor")
	}
	return names
}
