// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// A call is what a filter sees of a system call.
type call struct {
	nr   uint32
	arch uint32
	args [6]uint64
}

// run interprets a filter.
func run(program []unix.SockFilter, c call) (uint32, error) {
	var a uint32
	for pc := 0; pc < len(program); pc++ {
		i := program[pc]
		taken := false
		switch i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			switch {
			case i.K == 0:
				a = c.nr
			case i.K == 4:
				a = c.arch
			case i.K >= 16 && i.K < 64 && i.K%4 == 0:
				a = uint32(c.args[(i.K-16)/8] >> (i.K % 8 * 8))
			default:
				return 0, fmt.Errorf("instruction %d loads from %d", pc, i.K)
			}
			continue
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= i.K
			continue
		case unix.BPF_RET | unix.BPF_K:
			return i.K, nil
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(i.K)
			continue
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			taken = a == i.K
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			taken = a >= i.K
		default:
			return 0, fmt.Errorf("instruction %d has the code %#x", pc, i.Code)
		}
		if taken {
			pc += int(i.Jt)
		} else {
			pc += int(i.Jf)
		}
	}
	return 0, errors.New("the program does not return")
}

// evaluate applies the rules without a program.
func evaluate(rules []rule, unknown unix.Errno, conf Config, c call) uint32 {
	if c.arch != arch {
		return unix.SECCOMP_RET_TRAP
	}
	r, v := decide(rules, c)
	if r == nil {
		return unix.SECCOMP_RET_ERRNO | uint32(unknown)
	}
	return conf.answer(r, v)
}

// decide returns the rule of a call and its verdict for these arguments, nil if it has none.
func decide(rules []rule, c call) (*rule, verdict) {
	meets := func(cases []all) bool {
		return slices.ContainsFunc(cases, func(conditions all) bool {
			return !slices.ContainsFunc(conditions, func(k condition) bool {
				masked := c.args[k.arg] & k.mask
				return masked > low32 || !slices.Contains(k.values, uint32(masked))
			})
		})
	}
	for i := range rules {
		r := &rules[i]
		switch {
		case c.nr >= uint32(len(names)) || !slices.Contains(strings.Fields(r.calls), names[c.nr]):
		case meets(r.allowed):
			return r, allow
		case meets(r.cases):
			return r, r.then
		default:
			return r, r.otherwise
		}
	}
	return nil, absent
}

// word names an answer as the tests write it.
func word(answer uint32) string {
	switch answer {
	case unix.SECCOMP_RET_ALLOW:
		return "allow"
	case unix.SECCOMP_RET_USER_NOTIF:
		return "notify"
	case unix.SECCOMP_RET_TRAP:
		return "SIGSYS"
	case unix.SECCOMP_RET_ERRNO:
		return "success"
	}
	if answer&unix.SECCOMP_RET_ACTION_FULL == unix.SECCOMP_RET_ERRNO {
		return unix.ErrnoName(unix.Errno(answer & unix.SECCOMP_RET_DATA))
	}
	return fmt.Sprintf("%#x", answer)
}

func number(name string) (uint32, bool) {
	nr := slices.Index(names[:], name)
	return uint32(nr), nr >= 0
}

// answers returns the answers to a call at each level, without listening.
func answers(t testing.TB, c call) string {
	var words []string
	for _, w := range []Level{MonitorOff, MonitorViolations, MonitorFull} {
		a := must.Get(run(Program(Config{Monitor: w}), c))(t)
		words = append(words, word(a))
	}
	return strings.Join(words, " ")
}

const (
	allowed  = "allow allow allow"
	refused  = "EPERM notify notify"
	noFamily = "EAFNOSUPPORT notify notify"
	silent   = "ENOSYS ENOSYS ENOSYS"
	omitted  = "success success success"
	reported = "allow notify notify"
	lookedUp = "allow allow notify"

	high = 1 << 32 // a bit that the kernel does not lookup at where an argument has 32
)

// examples are calls whose verdict depends on their arguments, with what an attacker would try, and the wanted answers.
var examples = []struct {
	name string
	args []uint64
	want string
}{
	{"open", []uint64{1, unix.O_RDONLY | unix.O_CLOEXEC}, lookedUp},
	{"open", []uint64{1, unix.O_WRONLY}, reported},
	{"openat", []uint64{3, 1, unix.O_RDONLY | unix.O_DIRECTORY}, lookedUp},
	{"openat", []uint64{3, 1, unix.O_RDWR}, reported},
	{"openat", []uint64{3, 1, unix.O_ACCMODE}, reported},
	{"openat", []uint64{3, 1, unix.O_CREAT}, reported},
	{"openat", []uint64{3, 1, unix.O_TRUNC}, reported},
	{"openat", []uint64{3, 1, high | unix.O_WRONLY}, reported},
	{"openat2", nil, reported},
	{"utimensat", []uint64{3, 0}, allowed},
	{"utimensat", []uint64{3, 1}, reported},
	{"utimensat", []uint64{3, high}, reported},
	{"futimesat", []uint64{3, 0}, allowed},
	{"futimesat", []uint64{3, high}, reported},
	{"sendto", []uint64{3, 1, 1, 0, 0}, allowed},
	{"sendto", []uint64{3, 1, 1, 0, 1}, reported},
	{"sendto", []uint64{3, 1, 1, 0, high}, reported},
	{"mknod", []uint64{1, 0o644}, allowed},
	{"mknod", []uint64{1, unix.S_IFIFO}, allowed},
	{"mknod", []uint64{1, unix.S_IFCHR | 0o666, 0x103}, refused},
	{"mknod", []uint64{1, high | unix.S_IFBLK}, refused},
	{"mknodat", []uint64{3, 1, unix.S_IFREG}, allowed},
	{"mknodat", []uint64{3, 1, unix.S_IFSOCK}, allowed},
	{"mknodat", []uint64{3, 1, unix.S_IFCHR}, refused},
	{"mknodat", []uint64{3, 1, unix.S_IFBLK}, refused},
	{"mknodat", []uint64{3, 1, 1<<16 | unix.S_IFCHR}, refused}, // the kernel takes 16 bits of a mode
	{"mknodat", []uint64{3, 1, 1<<16 | unix.S_IFIFO}, allowed},
	{"clone", []uint64{uint64(unix.SIGCHLD)}, allowed},
	{"clone", []uint64{unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_THREAD}, allowed},
	{"clone", []uint64{unix.CLONE_NEWUSER | uint64(unix.SIGCHLD)}, refused},
	{"clone", []uint64{high | unix.CLONE_NEWNS}, refused},
	{"clone", []uint64{unix.CLONE_NEWCGROUP}, refused},
	{"clone", []uint64{unix.CLONE_NEWUTS}, refused},
	{"clone", []uint64{unix.CLONE_NEWIPC}, refused},
	{"clone", []uint64{unix.CLONE_NEWPID}, refused},
	{"clone", []uint64{unix.CLONE_NEWNET}, refused},
	{"clone", []uint64{unix.CLONE_NEWUSER << 32}, allowed}, // invisible to the kernel
	{"clone3", nil, silent},
	{"unshare", []uint64{0}, allowed},
	{"unshare", []uint64{unix.CLONE_FILES | unix.CLONE_FS | unix.CLONE_SYSVSEM}, allowed},
	{"unshare", []uint64{unix.CLONE_FILES | unix.CLONE_NEWUSER}, refused},
	{"unshare", []uint64{unix.CLONE_NEWTIME}, refused},
	{"unshare", []uint64{unix.CLONE_NEWNET}, refused},
	{"unshare", []uint64{high}, refused},
	{"socket", []uint64{unix.AF_UNIX, unix.SOCK_SEQPACKET | unix.SOCK_CLOEXEC}, allowed},
	{"socket", []uint64{high | unix.AF_UNIX, unix.SOCK_STREAM}, allowed},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, unix.IPPROTO_TCP}, reported},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, reported},
	{"socket", []uint64{unix.AF_INET6, unix.SOCK_DGRAM}, reported},
	{"socket", []uint64{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDP}, reported},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_TCP}, noFamily},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}, noFamily},
	{"socket", []uint64{unix.AF_INET, high | unix.SOCK_RAW | unix.SOCK_CLOEXEC}, noFamily},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_PACKET, 0x300}, noFamily},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_DCCP}, noFamily},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, noFamily},
	{"socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, high | unix.IPPROTO_SCTP}, noFamily},
	{"socket", []uint64{unix.AF_INET6, unix.SOCK_SEQPACKET, unix.IPPROTO_SCTP}, noFamily},
	{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW | unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE}, reported},
	{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, noFamily},
	{"socket", []uint64{unix.AF_VSOCK, unix.SOCK_STREAM}, noFamily},
	{"socket", []uint64{high | unix.AF_VSOCK, unix.SOCK_STREAM}, noFamily},
	{"socket", []uint64{unix.AF_PACKET, unix.SOCK_RAW}, noFamily},
	{"socket", []uint64{unix.AF_ALG, unix.SOCK_SEQPACKET}, noFamily},
	{"socket", []uint64{unix.AF_XDP, unix.SOCK_RAW}, noFamily},
	{"socket", []uint64{unix.AF_UNSPEC, unix.SOCK_STREAM}, noFamily},
	{"socketpair", []uint64{unix.AF_UNIX, unix.SOCK_STREAM}, allowed},
	{"socketpair", []uint64{unix.AF_TIPC, unix.SOCK_STREAM}, noFamily},
	{"setsockopt", []uint64{3, unix.SOL_SOCKET, unix.SO_REUSEADDR}, allowed},
	{"setsockopt", []uint64{3, unix.IPPROTO_TCP, unix.TCP_NODELAY}, allowed},
	{"setsockopt", []uint64{3, unix.IPPROTO_TCP, unix.SO_ATTACH_FILTER}, allowed}, // of another level
	{"setsockopt", []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER}, refused},
	{"setsockopt", []uint64{3, high | unix.SOL_SOCKET, high | unix.SO_ATTACH_BPF}, refused},
	{"setsockopt", []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF}, refused},
	{"setsockopt", []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF}, refused},
	{"setsockopt", []uint64{3, unix.IPPROTO_TCP, high | unix.TCP_ULP}, refused},
	{"ioctl", []uint64{0, unix.TCGETS}, allowed},
	{"ioctl", []uint64{0, unix.TIOCSTI}, refused},
	{"ioctl", []uint64{0, high | unix.TIOCSTI}, refused}, // CVE-2019-10063: the kernel takes 32 bits
	{"ioctl", []uint64{0, high | 0x541c}, refused},
	{"ioctl", []uint64{0, 0x5423}, refused},
	{"fcntl", []uint64{0, unix.F_SETLK}, allowed},
	{"fcntl", []uint64{0, unix.F_GETLEASE}, allowed},
	{"fcntl", []uint64{0, high | unix.F_SETLEASE}, refused},
	{"fcntl", []uint64{0, unix.F_NOTIFY}, refused},
	{"fcntl", []uint64{0, 1040}, refused},
	{"prctl", []uint64{unix.PR_SET_NAME, 1}, allowed},
	{"prctl", []uint64{unix.PR_SET_NO_NEW_PRIVS, 1}, allowed},
	{"prctl", []uint64{high | unix.PR_SET_MM}, refused},
	{"prctl", []uint64{unix.PR_SCHED_CORE}, refused},
	{"personality", []uint64{0}, allowed},
	{"personality", []uint64{0x40000}, allowed},
	{"personality", []uint64{0xffffffff}, allowed},
	{"personality", []uint64{1<<64 - 1}, allowed},
	{"personality", []uint64{8}, refused},
	{"personality", []uint64{high | 0x400000}, refused},
	{"seccomp", []uint64{1, unix.SECCOMP_FILTER_FLAG_TSYNC, 1}, allowed},
	{"seccomp", []uint64{1, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC, 1}, refused},
	{"seccomp", []uint64{1, high | unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, 1}, refused},
	{"listen", nil, refused},
	{"bind", nil, reported},
	{"mount", nil, refused},
	{"ptrace", nil, refused},
	{"execve", nil, reported},
	{"stat", nil, lookedUp},
	{"newfstatat", nil, lookedUp},
	{"read", nil, allowed},
	{"io_uring_setup", nil, silent},
	{"io_setup", nil, silent},
	{"sync", nil, omitted},
	{"syncfs", nil, omitted},
}

// calls calls f for those of examples that this architecture has.
func calls(f func(c call, want string)) {
	for _, j := range examples {
		if nr, ok := number(j.name); ok {
			c := call{nr: nr, arch: arch}
			copy(c.args[:], j.args)
			f(c, j.want)
		}
	}
}

func TestVerdicts(t *testing.T) {
	calls(func(c call, want string) {
		expect.Equal(t, answers(t, c), want, "%s(%#x)", Name(int(c.nr)), c.args)
		c.arch ^= 1
		expect.Equal(t, answers(t, c), "SIGSYS SIGSYS SIGSYS", "%s of another architecture", Name(int(c.nr)))
	})
	for _, nr := range []uint32{uint32(len(names)), 1 << 20, 1 << 30, 1<<30 | 1, 1<<30 | unix.SYS_EXECVE, 1 << 31, 1<<32 - 1} {
		expect.Equal(t, answers(t, call{nr: nr, arch: arch}), silent, "unknown number %#x", nr)
	}
	for _, nr := range []uint32{unix.SYS_LISTEN, unix.SYS_BIND} {
		for _, w := range []Level{MonitorOff, MonitorViolations, MonitorFull} {
			if a, err := run(Program(Config{Listen: true, Monitor: w}), call{nr: nr, arch: arch}); err != nil || word(a) != "allow" {
				t.Errorf("%s, permitted, level %d: got %s, %v", Name(int(nr)), w, word(a), err)
			}
		}
	}
}

// TestChangedConditionsAreNotified: a run with its own clock, random numbers or view of files reports calls for them
// whether it is monitored or not, and no other run does.
func TestChangedConditionsAreNotified(t *testing.T) {
	const (
		nobody = "allow allow allow allow"
		time   = "allow notify allow allow"
		chance = "allow allow notify allow"
		either = "allow notify notify allow"
		query  = "allow notify allow notify"
		list   = "allow allow allow notify"
	)
	for _, x := range []struct {
		name string
		args [6]uint64
		want string // usual, Clock, Random, Files
	}{
		{"clock_gettime", [6]uint64{unix.CLOCK_REALTIME}, time},
		{"clock_gettime", [6]uint64{high | unix.CLOCK_REALTIME_COARSE}, time},
		{"clock_gettime", [6]uint64{unix.CLOCK_TAI}, time},
		{"clock_gettime", [6]uint64{unix.CLOCK_MONOTONIC}, nobody},
		{"clock_gettime", [6]uint64{unix.CLOCK_PROCESS_CPUTIME_ID}, nobody},
		{"gettimeofday", [6]uint64{}, time},
		{"time", [6]uint64{}, time},
		{"nanosleep", [6]uint64{}, time},
		{"clock_nanosleep", [6]uint64{unix.CLOCK_REALTIME, unix.TIMER_ABSTIME}, time},
		{"clock_nanosleep", [6]uint64{unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME}, nobody},
		{"futex", [6]uint64{1, futexWaitBitset | futexClockRealtime | futexPrivate, 0, 1}, time},
		{"futex", [6]uint64{1, futexWaitBitset | futexClockRealtime, 0, high}, time},
		{"futex", [6]uint64{1, futexWaitBitset | futexClockRealtime, 0, 0}, nobody},
		{"futex", [6]uint64{1, futexWaitBitset, 0, 1}, nobody},
		{"futex", [6]uint64{1, futexClockRealtime, 0, 1}, nobody}, // FUTEX_WAIT, for a while
		{"getrandom", [6]uint64{}, chance},
		{"openat", [6]uint64{}, chance},
		{"open", [6]uint64{}, chance},
		{"stat", [6]uint64{}, query},
		{"fstat", [6]uint64{}, query},
		{"statx", [6]uint64{}, query},
		{"access", [6]uint64{}, nobody},
		{"getdents64", [6]uint64{}, list},
		{"arch_prctl", [6]uint64{archSetFS}, either},
		{"arch_prctl", [6]uint64{0x1003}, nobody},
	} {
		nr, ok := number(x.name)
		if !ok {
			continue
		}
		var words []string
		for _, conf := range []Config{{}, {Clock: true}, {Random: true}, {Files: true}} {
			a := must.Get(run(Program(conf), call{nr: nr, arch: arch, args: x.args}))(t)
			words = append(words, word(a))
		}
		expect.Equal(t, strings.Join(words, " "), x.want, "%s(%#x)", x.name, x.args)
	}
}

// TestDefaultFilterIgnoresClockRules: the filter of a default run is the same as without rules for clock and random
// numbers.
func TestDefaultFilterIgnoresClockRules(t *testing.T) {
	plain := slices.Clone(rules)
	usual := map[verdict]verdict{clock: allow, random: allow, startup: allow, openRead: lookup, statFile: lookup, statOpen: allow, listing: allow}
	for i := range plain {
		r := &plain[i]
		if then, ok := usual[r.then]; ok && r.cases != nil {
			r.then = then
		}
		if otherwise, ok := usual[r.otherwise]; ok {
			r.otherwise = otherwise
		}
		if r.otherwise == allow && r.then == allow {
			r.cases, r.allowed = nil, nil
		}
	}
	for _, conf := range configs() {
		if conf.Clock || conf.Random || conf.Files {
			continue
		}
		want := compile(index(plain), conf, returnErrno|uint32(unix.ENOSYS))
		expect.Equal(t, cmp.Diff(want, Program(conf)), "", "%+v (-without +with)", conf)
	}
}

func TestInitFilter(t *testing.T) {
	for _, x := range []struct {
		nr   uint32
		args [6]uint64
		want string
	}{
		{unix.SYS_WAIT4, [6]uint64{}, "allow"},
		{unix.SYS_KILL, [6]uint64{}, "allow"},
		{unix.SYS_OPENAT, [6]uint64{}, "EPERM"},
		{unix.SYS_EXECVE, [6]uint64{}, "EPERM"},
		{unix.SYS_SOCKET, [6]uint64{unix.AF_UNIX, unix.SOCK_STREAM}, "EPERM"},
		{unix.SYS_PPOLL, [6]uint64{}, "allow"},
		{unix.SYS_CLONE, [6]uint64{unix.CLONE_VM | unix.CLONE_SIGHAND | unix.CLONE_THREAD}, "EPERM"},
		{unix.SYS_CLONE, [6]uint64{uint64(unix.SIGCHLD)}, "EPERM"},
		{unix.SYS_RT_SIGPROCMASK, [6]uint64{}, "EPERM"}, // all stay blocked
		{unix.SYS_MMAP, [6]uint64{0, 1, unix.PROT_READ | unix.PROT_WRITE}, "EPERM"},
		{uint32(len(names)), [6]uint64{}, "EPERM"},
		{1 << 30, [6]uint64{}, "EPERM"},
	} {
		a, err := run(InitFilter(), call{nr: x.nr, arch: arch, args: x.args})
		if err != nil || word(a) != x.want {
			t.Errorf("%s(%#x): got %s, %v, want %s", Name(int(x.nr)), x.args, word(a), err, x.want)
		}
	}
}

// TestGolden compares the answers for every number with a file.
func TestGolden(t *testing.T) {
	var b strings.Builder
	b.WriteString("# number, name, [arguments]: MonitorOff, MonitorViolations, MonitorFull; without Listen\n")
	shown := map[uint32]bool{}
	for nr, name := range names {
		if name == "" {
			continue
		}
		calls(func(c call, _ string) {
			if c.nr != uint32(nr) || c.args == [6]uint64{} {
				return
			}
			shown[c.nr] = true
			fmt.Fprintf(&b, "%3d %-24s %s", nr, name, answers(t, c))
			for _, a := range c.args {
				fmt.Fprintf(&b, " %#x", a)
			}
			b.WriteString("\n")
		})
		if !shown[uint32(nr)] {
			fmt.Fprintf(&b, "%3d %-24s %s\n", nr, name, answers(t, call{nr: uint32(nr), arch: arch}))
		}
	}
	b.WriteString("\n# what pid 1 may call\n")
	for nr, name := range names {
		if a, err := run(InitFilter(), call{nr: uint32(nr), arch: arch}); err == nil && a == returnAllow {
			fmt.Fprintf(&b, "%3d %s\n", nr, name)
		}
	}
	golden := "testdata/verdicts_" + runtime.GOARCH + ".txt"
	if *update {
		must.Succeed(t, os.WriteFile(golden, []byte(b.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	if errors.Is(err, os.ErrNotExist) && runtime.GOARCH != "amd64" {
		t.Skipf("needs %s: write it on this architecture with -update", golden)
	}
	must.Succeed(t, err)
	expect.Equal(t, cmp.Diff(string(want), b.String()), "", "the verdicts differ from %s (-want +got)", golden)
}

func TestEveryCallHasOneRule(t *testing.T) {
	count := map[string]int{}
	for _, r := range rules {
		for name := range strings.FieldsSeq(r.calls) {
			count[name]++
		}
	}
	known := map[string]bool{}
	for _, name := range names {
		if name == "" {
			continue
		}
		expect.That(t, !known[name], "%s has two numbers", name)
		known[name] = true
		expect.That(t, count[name] == 1, "%s is in %d rules: it must be in one", name, count[name])
	}
	inInit := map[string]bool{}
	for _, r := range initRules {
		for name := range strings.FieldsSeq(r.calls) {
			expect.That(t, !inInit[name], "%s is twice in the rules of pid 1", name)
			inInit[name] = true
			expect.That(t, count[name] != 0, "%s is in the rules of pid 1 alone", name)
		}
	}
	// amd64 has every call that there is; a name that it does not know is misspelt.
	if runtime.GOARCH == "amd64" {
		for name := range count {
			expect.That(t, known[name], "%s is in a rule and in no table of numbers", name)
		}
	}
}

// TestNotifiedIsPermittedOrRefused: the monitor, which knows number and arguments but not the Config, permits what the
// rules allow and refuses the rest with the same errno as an unmonitored filter.
func TestNotifiedIsPermittedOrRefused(t *testing.T) {
	notified := map[verdict]int{}
	for nr, name := range names {
		r := of(nr)
		if r == nil {
			continue // TestEveryCallHasOneRule says so, if it has a name
		}
		n := 300
		if len(r.cases) == 0 {
			n = 3
		}
		for _, conf := range configs() {
			program, unmonitored := Program(conf), Program(Config{Listen: conf.Listen})
			for _, c := range vectors(r, uint32(nr), n) {
				if got, err := run(program, c); err != nil || got != returnNotify {
					continue
				}
				_, v := decide(rules, c)
				notified[v]++
				if v == clock || v == random || v == startup || v == statOpen || v == listing {
					continue // TestChangedConditionsAreNotified
				}
				if want := v == allow || v == lookup || v == openRead || v == statFile || v == report || v == binding; Permitted(nr, c.args) != want {
					t.Errorf("%+v: %s(%#x): Permitted says %t", conf, name, c.args, !want)
				} else if got, err := run(unmonitored, c); !want && (err != nil || got != returnErrno|uint32(Errno(nr))) {
					t.Errorf("%+v: %s(%#x) fails with %v when monitored and %s, %v otherwise", conf, name, c.args, Errno(nr), word(got), err)
				}
			}
		}
	}
	for _, v := range []verdict{refuse, lookup, report, listen, binding, clock, random, startup, openRead, statFile, statOpen, listing} {
		expect.That(t, notified[v] != 0, "nothing with the verdict %d was notified: the test tries nothing", v)
	}
	for _, nr := range []int{-1, len(names)} {
		expect.That(t, Errno(nr) == unix.ENOSYS && !Permitted(nr, [6]uint64{}),
			"the number %d, which is out of range, is known", nr)
	}
}

func TestName(t *testing.T) {
	for nr, want := range map[int]string{
		unix.SYS_MOUNT: "mount", unix.SYS_READ: "read", 999: "syscall 999", -1: "syscall -1",
	} {
		expect.Equal(t, Name(nr), want, "%d", nr)
	}
}

// vectors returns n calls of a number with arguments at the boundaries of its rule.
func vectors(r *rule, nr uint32, n int) []call {
	var all []call
	random := rand.New(rand.NewPCG(1, uint64(nr)))
	candidates := []uint64{0, 1, 2, 3, 10, 1<<32 - 1, 1<<64 - 1}
	for _, conditions := range slices.Concat(r.allowed, r.cases) {
		for _, k := range conditions {
			for _, v := range k.values {
				candidates = append(candidates, uint64(v))
			}
			candidates = append(candidates, k.mask, ^k.mask)
		}
	}
	for range n {
		c := call{nr: nr, arch: arch}
		for i := range c.args {
			c.args[i] = candidates[random.IntN(len(candidates))]
			switch random.IntN(4) {
			case 0:
				c.args[i] ^= 1 << random.IntN(64)
			case 1:
				c.args[i] |= high
			}
		}
		all = append(all, c)
	}
	return all
}

// configs returns every Config to test.
func configs() []Config {
	var all []Config
	for _, w := range []Level{MonitorOff, MonitorViolations, MonitorFull} {
		all = append(all, Config{Monitor: w}, Config{Listen: true, Monitor: w})
	}
	return append(all, Config{Clock: true}, Config{Random: true}, Config{Files: true}, Config{Monitor: MonitorFull, Clock: true, Random: true, Files: true})
}

// TestProgramsMatchRules compares each compiled program with the rules, for every number and one beyond, at the
// boundaries of the rules.
func TestProgramsMatchRules(t *testing.T) {
	compare := func(name string, program []unix.SockFilter, rules []rule, unknown unix.Errno, conf Config) {
		byNumber := append(index(rules), nil)
		for nr, r := range byNumber {
			n := 1000
			if r == nil || len(r.cases) == 0 {
				r, n = &rule{}, 2
			}
			for _, c := range vectors(r, uint32(nr), n) {
				want := evaluate(rules, unknown, conf, c)
				if got, err := run(program, c); err != nil || got != want {
					t.Fatalf("%s: %s(%#x): got %s, %v, want %s", name, Name(nr), c.args, word(got), err, word(want))
				}
			}
		}
	}
	for _, conf := range configs() {
		compare(fmt.Sprintf("%+v", conf), Program(conf), rules, unix.ENOSYS, conf)
	}
	compare("init", InitFilter(), initRules, unix.EPERM, Config{})
}

func FuzzProgram(f *testing.F) {
	calls(func(c call, _ string) {
		f.Add(c.nr, c.arch, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
	})
	var programs [][]unix.SockFilter
	for _, conf := range configs() {
		programs = append(programs, Program(conf))
	}
	pid1 := InitFilter()
	f.Fuzz(func(t *testing.T, nr, arch uint32, a, b, c, d, e, g uint64) {
		x := call{nr, arch, [6]uint64{a, b, c, d, e, g}}
		for i, conf := range configs() {
			if got, err := run(programs[i], x); err != nil || got != evaluate(rules, unix.ENOSYS, conf, x) {
				t.Errorf("%+v: %+v: got %s, %v", conf, x, word(got), err)
			}
		}
		if got, err := run(pid1, x); err != nil || got != evaluate(initRules, unix.EPERM, Config{}, x) {
			t.Errorf("pid 1: %+v: got %s, %v", x, word(got), err)
		}
	})
}
