// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Names under which this executable starts itself for a run in gVisor (package gvisor).
//
//	worker ──life, plan──▶ launcher             assembles the run's root in a mount namespace of its own
//	                         └─ runsc           pid 1 of a pid namespace: when it is reaped, all of the run is dead
//	                              ├─ gofer      opens the root's files
//	                              └─ sandbox    gVisor's kernel
//	worker ◀──reports────────────────  guest    pid 1 inside: mounts, limits, then the command
const (
	NameLauncher = "cloister-launcher"
	nameRunsc    = "cloister-runsc"
	// NameGuest is the path of this executable in the container.
	NameGuest = "/cloister-guest"
)

// Paths of the launcher's root, which contains nothing else that runsc needs.
const (
	// RunRoot is the run's root, below the root of the container.
	RunRoot       = ContainerRoot + guestRoot
	ContainerRoot = "/container"
	guestRoot     = "/run" // in the container
	BundleDir     = "/bundle"
	StateDir      = "/state"
	runscPath     = "/runsc"
)

// The launcher's descriptors.
const (
	launchPlan = 3 + iota
	launchIn
	launchOut
	launchStdin
	launchStdout
	launchStderr
	launchMore // the workspace, if any, then the files of a control group, as for a slot
)

// The guest's descriptors.
const (
	GuestIn = 3 + iota
	GuestOut
	GuestStdin
	GuestStdout
	GuestStderr
)

// A Launch is what the launcher does for one run.
type Launch struct {
	Ops []Op // in order; targets are below RunRoot
	// MountPoints are directories that the guest mounts on; they are created last.
	MountPoints []string
	// Writable and Owned are as in a Plan.
	Writable, Owned []string
	Workspace       bool

	Runsc  string   // path on this host
	Args   []string // of runsc
	Config string   // the container's config.json

	// User is the host user of the command. The next one is that of gVisor and of everything else inside. UID is the
	// command's number inside.
	User, UID int
	CPUs      int // how many processors the run may use; 0 is all

	Cgroup bool
	Tasks  int
}

// launcherMain performs a Launch. It ends the run when its stdin ends, and exits once everything in it is dead.
func launcherMain() {
	// The thread that joins control groups must not be the main thread, as in slotMain.
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			launcherMain()
		}
		if err := launchRun(); err != nil {
			fmt.Fprintln(os.Stderr, "launch:", err)
			syscall.Exit(1)
		}
		syscall.Exit(0)
	}()
	select {}
}

func launchRun() error {
	if err := unix.CloseRange(launchPlan, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close inherited descriptors: %w", err)
	}
	text, err := io.ReadAll(os.NewFile(launchPlan, "plan"))
	if err != nil {
		return err
	}
	var l Launch
	if err := json.Unmarshal(text, &l); err != nil {
		return fmt.Errorf("read the plan: %w", err)
	}
	s := &slot{command: l.User, reaper: l.User + 1, cgroup: -1, staging: -1, template: -1, root: tree{fd: -1}}
	next, sources := launchMore, []int{-1}
	if l.Workspace {
		sources[0] = next
		next++
	}
	if l.Cgroup {
		s.cgroup = next
	}
	for fd := next; fd < next+l.Tasks; fd++ {
		if _, err := unix.Write(fd, []byte("0")); err != nil {
			return fmt.Errorf("join a control group: %w", err)
		}
	}
	if err := s.assemble(&l, sources); err != nil {
		return err
	}
	pid, err := s.startRunsc(&l)
	if err != nil {
		return fmt.Errorf("start runsc: %w", err)
	}
	closeAll([]int{launchIn, launchOut, launchStdin, launchStdout, launchStderr})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = unix.Kill(pid, unix.SIGKILL) // it is a child until it is waited for
	}()
	return waitFor(pid)
}

// assemble moves the thread into a root that contains the container and what runsc needs, and nothing else of the host.
func (s *slot) assemble(l *Launch, sources []int) error {
	var err error
	if s.proc, err = unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("/proc: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	unix.Umask(0)
	if s.hostMounts, err = s.mounts(); err != nil {
		return err
	}
	plan := &Plan{Writable: l.Writable, Owned: l.Owned}
	if err := s.ownAll(plan, sources); err != nil {
		return err
	}
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	if err := s.enterRoot(unix.MS_PRIVATE); err != nil {
		return err
	}
	if err := s.furnish(l, self); err != nil {
		return err
	}
	if err := unix.Mount("root", RunRoot, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	host, err := unix.Open(oldRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(host)
	for i := range l.Ops {
		if err := s.perform(plan, &l.Ops[i], host, sources); err != nil {
			return fmt.Errorf("%s %s: %w", l.Ops[i].Kind, strings.TrimPrefix(l.Ops[i].Target, RunRoot), err)
		}
	}
	for _, p := range l.MountPoints {
		if err := closeNew(target(p, true)); err != nil {
			return fmt.Errorf("%s: %w", strings.TrimPrefix(p, RunRoot), err)
		}
	}
	if err := lock(RunRoot); err != nil {
		return err
	}
	return leaveHost(&Base{SingleUse: true})
}

// perform performs one operation while the host's root is at host.
func (s *slot) perform(plan *Plan, o *Op, host int, sources []int) error {
	var t tree
	var err error
	switch {
	case o.fromHost():
		t, err = o.take(host, strings.TrimPrefix(o.Source, "/"))
	case o.fromSources():
		t, err = s.takeFrom(plan, o, sources)
	default:
		return o.do()
	}
	if err != nil {
		return err
	}
	defer unix.Close(t.fd)
	return o.attach(t)
}

// furnish makes what runsc needs around the run's root: self is the path of this executable.
func (s *slot) furnish(l *Launch, self string) error {
	for _, dir := range []string{
		ContainerRoot, RunRoot, ContainerRoot + "/proc", ContainerRoot + "/sys", ContainerRoot + "/dev", ContainerRoot + "/tmp",
		BundleDir, StateDir, "/tmp", "/etc",
	} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	for _, dir := range []string{StateDir, "/tmp"} {
		if err := os.Chown(dir, s.reaper, s.reaper); err != nil {
			return err
		}
	}
	if err := writeFile(BundleDir+"/config.json", l.Config); err != nil {
		return err
	}
	// A user namespace may mount /proc only beside one that shows everything. Runsc starts processes with /dev/null.
	const attrs = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	around := []Op{
		{Kind: OpBind, Target: "/proc", Source: "/proc"},
		{Kind: OpDevice, Target: "/dev/null", Source: "/dev/null", Attrs: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC},
		{Kind: OpBind, Target: runscPath, Source: l.Runsc, Attrs: attrs},
		{Kind: OpBind, Target: ContainerRoot + NameGuest, Source: self, Attrs: attrs},
	}
	return applyOps(around, "")
}

// startRunsc starts runsc as pid 1 of a pid namespace, in a user namespace with two users that own nothing else: what
// breaks out of gVisor is such a user, without rights over the files of anybody.
func (s *slot) startRunsc(l *Launch) (int, error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return -1, err
	}
	defer null.Close()
	if l.CPUs > 0 {
		if err := restrictCPUs(l.CPUs); err != nil {
			return -1, err
		}
	}
	ids := append(idMap(0, s.reaper), idMap(l.UID, s.command)...)
	attr := &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, Setsid: true, Pdeathsig: syscall.SIGKILL,
	}
	if s.cgroup >= 0 {
		attr.UseCgroupFD, attr.CgroupFD = true, s.cgroup
	}
	return syscall.ForkExec("/proc/self/exe", append([]string{nameRunsc}, l.Args...), &syscall.ProcAttr{
		Dir: "/", Env: []string{}, Sys: attr,
		Files: []uintptr{null.Fd(), null.Fd(), 2, launchIn, launchOut, launchStdin, launchStdout, launchStderr},
	})
}

// restrictCPUs lets this thread and its children use only the first n of its processors.
func restrictCPUs(n int) error {
	var mine, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return fmt.Errorf("processors: %w", err)
	}
	for cpu := 0; cpu < 64*len(mine) && set.Count() < n; cpu++ {
		if mine.IsSet(cpu) {
			set.Set(cpu)
		}
	}
	if set.Count() < n {
		return errors.New("processors: too few")
	}
	return unix.SchedSetaffinity(0, &set)
}

// runscMain becomes runsc, with the /proc of its pid namespace.
func runscMain() {
	err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if err != nil {
		err = fmt.Errorf("mount /proc: %w", err)
	} else if err = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err == nil { // a dump would contain the run's data
		err = syscall.Exec(runscPath, append([]string{"runsc"}, os.Args[1:]...), []string{})
	}
	fmt.Fprintln(os.Stderr, "start runsc:", err)
	syscall.Exit(1)
}
