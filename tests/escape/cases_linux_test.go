// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// A guarantee is something that a run must not be able to do, with the attack that tries it.
type guarantee struct {
	name    string
	promise string
	attack  []string
	// spec modifies the run.
	spec func(*sandbox.Spec)
	// before is an attack that runs first. concurrent is one that prints "ready" and keeps running during the attack.
	before, concurrent []string
	// onLine receives each line that the attack prints while it runs.
	onLine func(*fixture, string)
	// outputs checks the outputs of the run, and check the host afterwards. They return what escaped.
	outputs func(*os.Root) error
	check   func(*fixture) error

	// without are the layers without which the attack must succeed. If there are none, reason says why.
	without []namespace.Layer
	reason  string
	// rootOnly is set if only a worker of root can omit the layers: the kernel refuses /proc to others without a pid
	// namespace.
	rootOnly bool

	// events must be recorded, by kind and prefix of the subject, if the syscall monitor runs.
	events []sandbox.Event
	// limit must be hit; a backend that cannot enforce it is not tested. If kills is set, it kills the run, which then
	// prints no verdict.
	limit sandbox.Limit
	kills bool
	// quiet is set if the kernel may slow the run down at the limit, without a report.
	quiet bool
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

// limits returns a function that sets a limit to v.
func limits(l sandbox.Limit, v int64) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) { s.Limits.Set(l, v) }
}

// memory sets a memory limit of 64 MiB and allows larger directories in memory.
func memory(s *sandbox.Spec) {
	s.Limits.Memory = 64 << 20
	s.Temp = []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 30}}
}

// overTree adds a tree of inputs below the output.
func overTree(s *sandbox.Spec) {
	s.Lower = []sandbox.Lower{{Target: "/build", Content: "x", Source: "lower"}}
}

// writable are the layers that make everything but the outputs read-only.
var writable = []namespace.Layer{namespace.ReadOnly, namespace.Landlock}[:2:2]

// guarantees returns all guarantees, grouped by subject.
func guarantees(w *fixture) []guarantee {
	files := []string{"/in/file", "/in/dir/sub", "/in/host", "/in/open/sub", "/build/file"}
	inputTree := []string{"input-tree", "/build/tree/sub", "/build/tree"}
	if os.Geteuid() == 0 { // otherwise directories of inputs belong to the run
		inputTree = append(inputTree, "/build/tree/empty")
	}
	const several = "no single layer: "
	return []guarantee{
		// Files.
		{
			name: "input-write", promise: "The content of an input cannot be changed, whatever its mode and however it is opened.",
			attack: append([]string{"input-write"}, files...), without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/file"), event(sandbox.EventWrite, "/build/file")},
		},
		{
			name: "input-metadata", promise: "Mode, owner, times and attributes of an input cannot be changed.",
			attack: append([]string{"input-metadata"}, files...), without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/file")},
		},
		{
			name: "input-name", promise: "Inputs cannot be removed, replaced or linked, and none can be added.",
			attack: []string{"input-name", "/in/file", "/in/dir"}, without: writable,
			events: []sandbox.Event{event(sandbox.EventWrite, "/in/dir/new")},
		},
		{
			name: "input-name-host", promise: "The same if the input is a directory of the host.",
			attack: []string{"input-name", "/in/host", "/in/open"}, without: append(writable, namespace.HiddenPaths),
		},
		{
			name: "input-tree", promise: "Inputs in a directory that accepts new entries, and as root also the directories of inputs, cannot be changed, removed, replaced, linked or hidden.",
			attack: inputTree, spec: overTree,
			reason: several + "owners and modes always apply",
			events: []sandbox.Event{event(sandbox.EventWrite, "/build/tree/sub")},
		},
		{
			name: "input-tree-write", promise: "Such inputs cannot be written or truncated.",
			attack: []string{"input-write", "/build/tree/sub"}, spec: overTree, reason: several + "owners and modes always apply",
			events: []sandbox.Event{event(sandbox.EventWrite, "/build/tree/sub")},
		},
		{
			name: "input-tree-metadata", promise: "Mode, owner, times and attributes of such inputs cannot be changed.",
			attack: []string{"input-metadata", "/build/tree/sub"}, spec: overTree, reason: several + "owners and modes always apply",
			events: []sandbox.Event{event(sandbox.EventWrite, "/build/tree/sub")},
		},
		{
			name: "input-copy", promise: "Nothing makes the kernel copy such an input of 10 GiB into the memory of the run.",
			attack: []string{"input-copy", "/build/tree/huge", "/build/tree", fmt.Sprint(huge)}, spec: overTree, reason: several + "owners and modes always apply",
			events: []sandbox.Event{event(sandbox.EventWrite, "/build/tree/huge")},
		},
		{
			name: "input-lease", promise: "A run cannot block or observe the host's use of an input with a lease.",
			attack: []string{"input-lease", "/in/host", "/in/open"}, without: []namespace.Layer{namespace.Seccomp},
		},
		{
			name: "outside", promise: "Nothing can be created outside the writable directories.",
			attack:  []string{"outside", "/", "/etc", "/dev", "/proc", "/in", "/in/dir", "/in/open"},
			without: writable, events: []sandbox.Event{event(sandbox.EventWrite, "/etc/new"), event(sandbox.EventWrite, "/in/open/new")},
		},
		{
			name: "device", promise: "No device node can be created.", attack: []string{"device", "/build", "/tmp", "/dev/shm"},
			reason: several + "the kernel requires a capability in the initial user namespace", events: syscalls("mknod"),
		},
		{
			name: "setuid", promise: "Set-user-ID bits have no effect on any mount.", attack: []string{"setuid"},
			without: []namespace.Layer{namespace.NoSetuid},
		},
		{
			name: "links", promise: "Links and special files among outputs do not lead the worker out of them.",
			attack: []string{"links", w.secret}, outputs: linksLeadNowhere, reason: "this tests the worker, not a layer",
		},
		{
			name: "swap", promise: "Outputs that become links while the run ends do not lead the worker out of them either.",
			attack: []string{"swap", w.secret, w.mark}, outputs: func(out *os.Root) error { return swapsLeadNowhere(out, w.secret) },
			check: noSurvivors, reason: "this tests the worker, not a layer",
		},
		{
			name: "names", promise: "Odd, long and deeply nested output names are read and removed like others.",
			attack: []string{"names"}, outputs: namesAreRead, reason: "this tests the worker, not a layer",
		},

		// Namespaces and processes.
		{
			name: "userns", promise: "No user namespace, in which a run would be root, can be created.", attack: []string{"userns"},
			without: []namespace.Layer{namespace.Seccomp, namespace.NoNesting}, events: syscalls("clone", "unshare"),
		},
		{
			name: "mount", promise: "Nothing can be mounted, unmounted, moved or remounted, and the root cannot be changed.",
			attack: append([]string{"mount"}, files[:3]...), without: []namespace.Layer{namespace.Seccomp, namespace.NoNesting, namespace.Landlock},
			events: syscalls("mount", "pivot_root", "fsopen", "open_tree", "move_mount", "mount_setattr", "umount2", "chroot"),
		},
		{
			name: "setns", promise: "No other namespace can be entered.", attack: []string{"setns"},
			reason: several + "none is visible, and another user namespace owns them",
		},
		{
			name: "ptrace", promise: "No process can be traced or read, not even a child.", attack: []string{"ptrace"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("ptrace", "process_vm_readv", "pidfd_getfd"),
		},
		{
			name: "init", promise: "Pid 1 of a run cannot be inspected and ignores signals.", attack: []string{"init"},
			reason: several + "pid 1 is not dumpable, is in another user namespace, and the kernel protects it from signals",
		},
		{
			name: "others", promise: "Processes of the host and of other runs are neither visible nor reachable.",
			attack: append([]string{"others"}, w.hostProcesses()...), concurrent: []string{"stubborn", w.mark},
			reason: "a run without a pid namespace could signal every process of the machine, so the layer cannot be omitted",
		},
		{
			name: "kill-all", promise: "A signal to all processes reaches only those of the run.", attack: []string{"kill-all"}, concurrent: []string{"stubborn", w.mark},
			reason: "too dangerous without a pid namespace; 'others' shows its effect",
		},
		{
			name: "daemon", promise: "No process outlives its run.", attack: []string{"daemon", w.mark}, check: noSurvivors,
			reason: several + "pid namespace and process groups; 'others' shows the first",
		},
		{
			name: "stubborn", promise: "A run that ignores signals is killed at its timeout.", attack: []string{"stubborn"}, kills: true,
			spec: func(s *sandbox.Spec) { s.Timeout, s.Grace = 500*time.Millisecond, 100*time.Millisecond },
			check: func(w *fixture) error {
				if w.result == nil || !w.result.Stopped {
					return fmt.Errorf("the run was not stopped: %+v", w.result)
				}
				return nil
			}, reason: "SIGKILL is part of the kernel",
		},
		{name: "core", promise: "A crash leaves no core file.", attack: []string{"core"}, without: []namespace.Layer{namespace.Rlimits}},

		// Network.
		{
			name: "connect", promise: "A listener on the host's loopback cannot be reached.", attack: append([]string{"connect"}, w.listeners...),
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock},
		},
		{
			name: "public", promise: "No address can be reached, by TCP, UDP or IPv6, including cloud metadata.", attack: []string{"public"},
			reason: "too dangerous with a network; 'connect' shows the same layer",
			events: []sandbox.Event{
				event(sandbox.EventConnect, "tcp 192.0.2.1:80"), event(sandbox.EventConnect, "udp 192.0.2.1:53"),
				event(sandbox.EventConnect, "tcp 169.254.169.254:80"), event(sandbox.EventConnect, "tcp [2001:db8::1]:80"),
				event(sandbox.EventConnect, "dns example.com"),
			},
		},
		{
			name: "abstract", promise: "Abstract unix sockets of the host cannot be reached.", attack: []string{"abstract", w.abstract},
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock},
		},
		{
			name: "inbound", promise: "A port on which a run listens cannot be reached from outside.", attack: []string{"inbound"}, onLine: connectBack,
			without: []namespace.Layer{namespace.NetNamespace},
		},
		{
			name: "families", promise: "Only unix, internet and netlink sockets can be created, and no raw ones.", attack: []string{"families"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("socket(AF_VSOCK)", "socket(AF_PACKET)"),
		},
		{
			name: "route", promise: "Interfaces, addresses and routes cannot be changed.", attack: []string{"route"},
			reason: several + "the network namespace belongs to another user namespace",
		},

		// From one run to another.
		{
			name: "left", promise: "A run leaves nothing for the next one: no file, shared memory, queue or semaphore.",
			before: []string{"leave", "/tmp", "/dev/shm", "/build"}, attack: []string{"find", "/tmp", "/dev/shm", "/build"},
			without: []namespace.Layer{namespace.IPCNamespace},
		},
		{
			name: "pair", promise: "Concurrent runs cannot reach each other by files, IPC, loopback or unix sockets.",
			concurrent: []string{"victim", "/in/host", "/tmp", "/dev/shm", "/build"}, attack: []string{"find", "/tmp", "/dev/shm", "/build"},
			without: []namespace.Layer{namespace.NetNamespace, namespace.Landlock},
		},
		{
			name: "lock", promise: "Runs do not see each other's locks on a shared input.",
			concurrent: []string{"victim", "/in/host"}, attack: []string{"lock", "/in/host"}, without: []namespace.Layer{namespace.HiddenPaths},
		},
		{
			name: "keys", promise: "Kernel keyrings can be neither read nor written.", attack: []string{"keys"},
			without: []namespace.Layer{namespace.Seccomp}, events: syscalls("add_key", "keyctl", "request_key"),
		},

		// Limits.
		{
			name: "forks", promise: "The number of processes and threads is limited.", attack: []string{"forks", "256"},
			spec: limits(sandbox.LimitProcesses, 64), limit: sandbox.LimitProcesses,
			without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "memory-anonymous", promise: "The memory of a run is limited.", attack: []string{"memory", "anonymous", "256"},
			spec: memory, limit: sandbox.LimitMemory, kills: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "memory-tmp", promise: "/tmp counts as memory.", attack: []string{"memory", "/tmp", "256"},
			spec: memory, limit: sandbox.LimitMemory, kills: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "memory-shm", promise: "/dev/shm counts as memory.", attack: []string{"memory", "/dev/shm", "256"},
			spec: memory, limit: sandbox.LimitMemory, kills: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "memory-memfd", promise: "Anonymous files count as memory.", attack: []string{"memory", "memfd", "256"},
			spec: memory, limit: sandbox.LimitMemory, kills: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "memory-sockets", promise: "The buffers of a run's sockets are limited with its memory.", attack: []string{"sockets", "128"},
			spec: memory, limit: sandbox.LimitMemory, kills: true, quiet: true, without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "cpu", promise: "The CPU time of all processes together is limited.", attack: []string{"cpu"},
			spec: limits(sandbox.LimitCPU, int64(time.Second)), limit: sandbox.LimitCPU, kills: true,
			without: []namespace.Layer{namespace.Cgroups, namespace.Rlimits},
		},
		{
			name: "fds", promise: "The number of open files per process is limited.", attack: []string{"fds", "2000"},
			spec: func(s *sandbox.Spec) { s.Limits.OpenFiles = 64 }, without: []namespace.Layer{namespace.Rlimits},
		},
		{
			name: "tmp-bytes", promise: "The size of /tmp is limited.", attack: []string{"fill", "/tmp/big", "64"},
			reason: "the size of a tmpfs is not a layer",
		},
		{
			name: "output-bytes", promise: "The size of the outputs is limited.", attack: []string{"fill", "/build/big", "64"},
			spec: limits(sandbox.LimitOutputBytes, 16<<20), limit: sandbox.LimitOutputBytes, reason: "the size of a tmpfs is not a layer",
		},
		{
			name: "output-files", promise: "The number of outputs is limited.", attack: []string{"files", "/build", "2000"},
			spec: limits(sandbox.LimitOutputFiles, 1000), limit: sandbox.LimitOutputFiles, reason: "the size of a tmpfs is not a layer",
		},
		{
			name: "output-files-tree", promise: "The same in a directory of inputs, which are readable at the limit.",
			attack: []string{"files", "/build/tree", "2000", "/build/tree/sub"}, limit: sandbox.LimitOutputFiles,
			spec: func(s *sandbox.Spec) {
				overTree(s)
				s.Limits.OutputFiles = 1000
			}, reason: "the size of a tmpfs is not a layer",
		},

		// The kernel and the machine.
		{
			name: "absent", promise: "Nothing reveals the machine or leads to its devices.", attack: []string{"absent", w.secret, w.store},
			without: []namespace.Layer{namespace.ProcSubset},
		},
		{
			name: "syscalls", promise: "System calls that no action needs do not reach the kernel.", attack: []string{"syscalls"},
			without: []namespace.Layer{namespace.Seccomp},
			events:  syscalls("bpf", "userfaultfd", "perf_event_open", "init_module", "kexec_load", "ioctl"),
		},
		{
			name: "counters", promise: "Resources of which the host has one amount for everybody cannot be used up.",
			attack: []string{"counters"}, without: []namespace.Layer{namespace.Seccomp}, events: syscalls("setsockopt"),
		},
		{
			name: "foreign", promise: "System calls of another architecture do not reach the kernel either.", attack: []string{"foreign"},
			without: []namespace.Layer{namespace.Seccomp},
		},
		{
			name: "mounts", promise: "Mount tables and control groups reveal no path of the store.", attack: []string{"mounts", w.store},
			without: []namespace.Layer{namespace.HiddenPaths},
		},
		{
			name: "identity", promise: "User, groups, ID maps, host name, environment, descriptors and session are the same everywhere.", attack: []string{"identity"},
			reason: several + "each is set separately",
		},
		{
			name: "capabilities", promise: "All five capability sets are empty, and no capability can be gained.", attack: []string{"capabilities"},
			without: []namespace.Layer{namespace.Capabilities},
		},
	}
}

// linksLeadNowhere checks that an os.Root, with which the worker opens outputs, follows no link of the attack.
// TestOutputsLeadNowhere attacks the worker itself.
func linksLeadNowhere(out *os.Root) error {
	for i := range 4 {
		name := fmt.Sprintf("link%d", i)
		if b, err := out.ReadFile(name); err == nil {
			return fmt.Errorf("%s led to %q", name, b)
		}
		if st, err := out.Lstat(name); err != nil || st.Mode().Type() != os.ModeSymlink {
			return fmt.Errorf("%s is not the link that the attack created: %v", name, err)
		}
	}
	return nil
}

// swapsLeadNowhere does the same while links appear and disappear.
func swapsLeadNowhere(out *os.Root, secret string) error {
	name := "swap/" + filepath.Base(secret)
	for range 1000 {
		if b, err := out.ReadFile(name); err == nil && string(b) != "original" {
			return fmt.Errorf("%s led to %q", name, b)
		}
	}
	return nil
}

// namesAreRead finds all outputs of the attack.
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
		return fmt.Errorf("got %d odd names, want 254", odd)
	}
	if _, err := out.Lstat(strings.Repeat("n", 255)); err != nil {
		return err
	}
	if _, err := out.Lstat(strings.TrimSuffix(strings.Repeat("deep/", 1000), "/")); err != nil {
		return err
	}
	return out.RemoveAll("deep")
}
