// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// A guarantee is something that a run must not be able to do, and the attack that tries it.
type guarantee struct {
	name    string
	promise string
	attack  []string
	// spec changes what the run is given.
	spec func(*sandbox.Spec)
	// first is an attack that is run to its end before; beside is one that says "ready" and is alive meanwhile.
	first, beside []string
	// said is told each line that the attack prints while it runs.
	said func(*world, string)
	// outputs looks at what the run left in its outputs, check at the host afterwards: they return what escaped.
	outputs func(*os.Root) error
	check   func(*world) error

	// without are the layers without which the attack must succeed. Where there are none, because says why.
	without []namespace.Layer
	because string
	// root says that only root's worker can leave the layers out: the kernel refuses /proc to another one that has no
	// pid namespace of its own.
	root bool

	// events are what must be recorded, by kind and the beginning of the subject, where the syscall monitor runs.
	events []sandbox.Event
	// limit is one that must be met; a backend that cannot hold it is not tested. If ends, it ends the run, which
	// has no last word then.
	limit sandbox.Limit
	ends  bool
}

func event(kind sandbox.EventKind, subject string) sandbox.Event {
	return sandbox.Event{Kind: kind, Subject: subject}
}

func syscalls(names ...string) (events []sandbox.Event) {
	for _, n := range names {
		events = append(events, event(sandbox.EventSyscall, n))
	}
	return events
}

// limits returns a change of a spec by which one limit is v.
func limits(l sandbox.Limit, v int64) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) { s.Limits.Set(l, v) }
}

// memory is a limit of 64 MiB, beside directories in memory that would take more.
func memory(s *sandbox.Spec) {
	s.Limits.Memory = 64 << 20
	s.Temp = []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 30}}
}

// writable are the layers that keep a run from writing where it may not.
var writable = []namespace.Layer{namespace.ReadOnly, namespace.Landlock}[:2:2]

// guarantees are in the order in which a person would ask for them.
func guarantees(w *world) []guarantee {
	files := []string{"/in/file", "/in/dir/sub", "/in/host", "/in/open/sub", "/build/file"}
	const several = "no single layer: "
	return []guarantee{
		// Files.
		{name: "input-write", promise: "The bytes of an input cannot be changed, whatever its mode and by whatever way it is opened.",
			attack: append([]string{"input-write"}, files...), without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/file"), event(sandbox.EventWrite, "/build/file")}},
		{name: "input-metadata", promise: "Mode, owner, times and attributes of an input cannot be changed.",
			attack: append([]string{"input-metadata"}, files...), without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/file")}},
		{name: "input-name", promise: "No name of an input can be removed, replaced, linked or added.",
			attack: []string{"input-name", "/in/file", "/in/dir"}, without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/dir/new")}},
		{name: "input-name-host", promise: "The same where the input is a directory of the host.",
			attack: []string{"input-name", "/in/host", "/in/open"}, without: append(writable, namespace.HiddenPaths)},
		{name: "input-lease", promise: "A run cannot hold up the host's own use of an input by a lease, or have itself told of it.",
			attack: []string{"input-lease", "/in/host", "/in/open"}, without: []namespace.Layer{namespace.Seccomp}},
		{name: "outside", promise: "Nothing can be made outside the writable directories.",
			attack:  []string{"outside", "/", "/etc", "/dev", "/proc", "/in", "/in/dir", "/in/open"},
			without: writable, events: []sandbox.Event{event(sandbox.EventWrite, "/etc/new"), event(sandbox.EventWrite, "/in/open/new")}},
		{name: "device", promise: "No device node can be made.", attack: []string{"device", "/build", "/tmp", "/dev/shm"},
			because: several + "the kernel wants a capability of the first user namespace", events: syscalls("mknod")},
		{name: "setuid", promise: "Set-user-ID bits mean nothing, on any mount.", attack: []string{"setuid"},
			without: []namespace.Layer{namespace.NoSetuid}},
		{name: "links", promise: "Links and special files among outputs lead the worker nowhere.",
			attack: []string{"links", w.secret}, outputs: linksLeadNowhere, because: "it is the worker that is tested, not a layer"},
		{name: "names", promise: "Odd, long and deep names among outputs are read and removed as any other.",
			attack: []string{"names"}, outputs: namesAreRead, because: "it is the worker that is tested, not a layer"},

		// Namespaces and processes.
		{name: "userns", promise: "No user namespace can be made, in which a run would be root.", attack: []string{"userns"},
			without: []namespace.Layer{namespace.Seccomp, namespace.NoNesting}, events: syscalls("clone", "unshare")},
		{name: "mount", promise: "Nothing can be mounted, unmounted, moved or remounted, and the root cannot be changed.",
			attack: append([]string{"mount"}, files[:3]...), without: []namespace.Layer{namespace.Seccomp, namespace.NoNesting, namespace.Landlock},
			events: syscalls("mount", "pivot_root", "fsopen", "open_tree", "move_mount", "mount_setattr", "umount2", "chroot")},
		{name: "setns", promise: "No other namespace can be entered.", attack: []string{"setns"},
			because: several + "none is in sight, and their owner is another user namespace"},
		{name: "ptrace", promise: "No process can be traced or read, not even one's own child.", attack: []string{"ptrace"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("ptrace", "process_vm_readv", "pidfd_getfd")},
		{name: "init", promise: "Pid 1 of a run cannot be looked into, and takes no signal.", attack: []string{"init"},
			because: several + "pid 1 is not dumpable, of another user namespace, and the kernel keeps it from signals"},
		{name: "others", promise: "Processes of the host and of other runs are neither in sight nor in reach.",
			attack: append([]string{"others"}, w.hostProcesses()...), beside: []string{"stubborn", w.mark},
			because: "a run without a pid namespace could signal every process of the machine, so that the layer cannot be left out"},
		{name: "kill-all", promise: "A signal to all processes reaches those of the run alone.", attack: []string{"kill-all"}, beside: []string{"stubborn", w.mark},
			because: "the attack is not for a run without a pid namespace; others shows what that does"},
		{name: "daemon", promise: "No process outlives its run.", attack: []string{"daemon", w.mark}, check: noneLeft,
			because: several + "pid namespace and groups of processes, of which others shows the first"},
		{name: "stubborn", promise: "A run that ignores its signals is ended when its time is up.", attack: []string{"stubborn"}, ends: true,
			spec: func(s *sandbox.Spec) { s.Timeout, s.Grace = 500*time.Millisecond, 100*time.Millisecond },
			check: func(w *world) error {
				if w.result == nil || !w.result.Stopped {
					return fmt.Errorf("the run was not stopped: %+v", w.result)
				}
				return nil
			}, because: "SIGKILL is the kernel's"},
		{name: "core", promise: "A crash leaves no core file.", attack: []string{"core"}, without: []namespace.Layer{namespace.Rlimits}},

		// Network.
		{name: "connect", promise: "A listener on the host's loopback cannot be reached.", attack: append([]string{"connect"}, w.listeners...),
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock}},
		{name: "public", promise: "No address can be reached: not by TCP, UDP or IPv6, and not that of cloud metadata.", attack: []string{"public"},
			because: "the attack is not for a run with a network; connect shows the same layer",
			events: []sandbox.Event{event(sandbox.EventConnect, "tcp 192.0.2.1:80"), event(sandbox.EventConnect, "udp 192.0.2.1:53"),
				event(sandbox.EventConnect, "tcp 169.254.169.254:80"), event(sandbox.EventConnect, "tcp [2001:db8::1]:80")}},
		{name: "abstract", promise: "Unix sockets of the host that have no file cannot be reached.", attack: []string{"abstract", w.abstract},
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock}},
		{name: "inbound", promise: "Nobody outside reaches what a run listens on.", attack: []string{"inbound"}, said: knock,
			without: []namespace.Layer{namespace.NetNamespace}},
		{name: "families", promise: "Only unix, internet and netlink sockets can be made, and none that is raw.", attack: []string{"families"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("socket(AF_VSOCK)", "socket(AF_PACKET)")},
		{name: "route", promise: "Interfaces, addresses and routes cannot be changed.", attack: []string{"route"},
			because: several + "the network namespace belongs to another user namespace"},

		// From one run to another.
		{name: "left", promise: "Nothing is left for the next run: no file, shared memory, queue or semaphore.",
			first: []string{"leave", "/tmp", "/dev/shm", "/build"}, attack: []string{"find", "/tmp", "/dev/shm", "/build"},
			without: []namespace.Layer{namespace.IPCNamespace}},
		{name: "pair", promise: "Two runs at once do not reach each other: not by files, IPC, loopback or unix sockets.",
			beside: []string{"victim", "/in/host", "/tmp", "/dev/shm", "/build"}, attack: []string{"find", "/tmp", "/dev/shm", "/build"},
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock}},
		{name: "lock", promise: "Two runs do not feel each other's locks on an input of both.",
			beside: []string{"victim", "/in/host"}, attack: []string{"lock", "/in/host"}, without: []namespace.Layer{namespace.HiddenPaths}},
		{name: "keys", promise: "The kernel's keyrings can neither be read nor written.", attack: []string{"keys"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("add_key", "keyctl", "request_key")},

		// Limits.
		{name: "forks", promise: "Processes and threads are limited, all together.", attack: []string{"forks", "256"},
			spec: limits(sandbox.LimitProcesses, 64), limit: sandbox.LimitProcesses,
			without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "memory-anonymous", promise: "The memory of a run is limited.", attack: []string{"memory", "anonymous", "256"},
			spec: memory, limit: sandbox.LimitMemory, ends: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "memory-tmp", promise: "What is in /tmp counts as memory.", attack: []string{"memory", "/tmp", "256"},
			spec: memory, limit: sandbox.LimitMemory, ends: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "memory-shm", promise: "What is in /dev/shm counts as memory.", attack: []string{"memory", "/dev/shm", "256"},
			spec: memory, limit: sandbox.LimitMemory, ends: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "memory-memfd", promise: "Files without a name count as memory.", attack: []string{"memory", "memfd", "256"},
			spec: memory, limit: sandbox.LimitMemory, ends: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "cpu", promise: "Processor time is limited, of all processes together.", attack: []string{"cpu"},
			spec: limits(sandbox.LimitCPU, int64(time.Second)), limit: sandbox.LimitCPU, ends: true,
			without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits}},
		{name: "fds", promise: "Open files of a process are limited.", attack: []string{"fds", "2000"},
			spec: func(s *sandbox.Spec) { s.Limits.OpenFiles = 64 }, without: []namespace.Layer{namespace.Rlimits}},
		{name: "tmp-bytes", promise: "/tmp takes no more than it was made for.", attack: []string{"fill", "/tmp/big", "64"},
			because: "the size of a tmpfs is no layer"},
		{name: "output-bytes", promise: "The bytes of outputs are limited.", attack: []string{"fill", "/build/big", "64"},
			spec: limits(sandbox.LimitOutputBytes, 16<<20), limit: sandbox.LimitOutputBytes, because: "the size of a tmpfs is no layer"},
		{name: "output-files", promise: "The number of outputs is limited.", attack: []string{"files", "/build", "2000"},
			spec: limits(sandbox.LimitOutputFiles, 1000), limit: sandbox.LimitOutputFiles, because: "the size of a tmpfs is no layer"},

		// The kernel and the machine.
		{name: "absent", promise: "Nothing tells of the machine or leads to its devices.", attack: []string{"absent", w.secret, w.store},
			without: []namespace.Layer{namespace.ProcSubset}},
		{name: "syscalls", promise: "System calls that no action needs do not come through to the kernel.", attack: []string{"syscalls"},
			without: []namespace.Layer{namespace.Seccomp},
			events:  syscalls("bpf", "userfaultfd", "perf_event_open", "init_module", "kexec_load", "ioctl")},
		{name: "foreign", promise: "System calls by the numbers of another architecture do not either.", attack: []string{"foreign"},
			without: []namespace.Layer{namespace.Seccomp}},
		{name: "mounts", promise: "Mount tables and groups show no path of the store.", attack: []string{"mounts", w.store},
			without: []namespace.Layer{namespace.HiddenPaths}},
		{name: "identity", promise: "User, groups, host name, environment, descriptors and session are the same everywhere.", attack: []string{"identity"},
			because: several + "each is set for itself"},
		{name: "capabilities", promise: "No capability is in any of the five sets, and none can be gained.", attack: []string{"capabilities"},
			without: []namespace.Layer{namespace.Capabilities}},
	}
}

// linksLeadNowhere opens what the attack left as the worker does.
func linksLeadNowhere(out *os.Root) error {
	for i := range 4 {
		name := fmt.Sprintf("link%d", i)
		if b, err := out.ReadFile(name); err == nil {
			return fmt.Errorf("%s led to %q", name, b)
		}
		if st, err := out.Lstat(name); err != nil || st.Mode().Type() != os.ModeSymlink {
			return fmt.Errorf("%s is not the link that was left: %v", name, err)
		}
	}
	return nil
}

// namesAreRead finds everything that the attack left.
func namesAreRead(out *os.Root) error {
	dir, err := out.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}
	odd := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "odd") && len(e.Name()) == 4 {
			odd++
		}
	}
	if odd != 254 {
		return fmt.Errorf("%d odd names of 254", odd)
	}
	if _, err := out.Lstat(strings.Repeat("n", 255)); err != nil {
		return err
	}
	if _, err := out.Lstat(strings.TrimSuffix(strings.Repeat("deep/", 1000), "/")); err != nil {
		return err
	}
	return out.RemoveAll("deep")
}
