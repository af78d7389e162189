// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// A fault makes system calls fail with one of several errors.
type fault struct{ calls, errors string }

// mountFaults are the calls that make and remove mounts, in the server and in the sandbox.
var mountFaults = []fault{
	{"mount", "ENOMEM EPERM"},
	{"umount2", "EBUSY"},
	{"fsopen fsconfig fsmount", "ENOMEM EINVAL"},
	{"open_tree move_mount mount_setattr", "ENOMEM EINVAL"},
}

// storeFaults are the calls of the server itself. Failed reads are missing: a blob that cannot be read counts as
// damaged, and its loss is what the documentation promises. So is write, with which the Go runtime wakes itself.
var storeFaults = append([]fault{
	{"syncfs", "EIO ENOSPC"},
	{"fsync fdatasync", "EIO ENOSPC"},
	{"pwrite64", "EIO ENOSPC EDQUOT"},
	{"ftruncate fallocate", "EIO ENOSPC"},
	{"rename renameat renameat2 linkat", "EIO ENOSPC"},
	{"unlinkat mkdirat", "EIO"},
	{"fchmod fchmodat utimensat", "EIO EPERM"},
	{"openat", "EMFILE ENFILE ENOMEM"},
	{"newfstatat fstat", "ENOMEM"},
	{"socketpair pipe2 memfd_create pidfd_open", "EMFILE"},
	{"sendmsg recvmsg", "ENOMEM ENOBUFS"},
}, mountFaults...)

// sandboxFaults are the calls of the processes between the server and the commands, and none that the commands make.
var sandboxFaults = append([]fault{
	{"clone clone3 vfork", "EAGAIN ENOMEM"},
	{"unshare setns", "ENOMEM EPERM"},
	{"pivot_root chroot", "EPERM"},
	{"seccomp", "EINVAL ENOMEM"},
	{"landlock_create_ruleset landlock_add_rule landlock_restrict_self", "ENOMEM E2BIG"},
	{"prctl capset", "EPERM EINVAL"},
	{"setgroups setresuid setresgid", "EPERM"},
	{"sethostname setdomainname", "EPERM"},
	{"mkdirat symlinkat mknodat fchownat", "EIO ENOSPC"},
	{"socketpair sendmsg recvmsg", "ENOMEM EMFILE"},
	{"pidfd_send_signal close_range", "EINVAL"},
}, mountFaults...)

// found are faults that have found bugs, which the comments describe. Each fault hits every second call of a thread.
var found = []struct {
	sandbox bool // not the server itself
	fault
}{
	{true, fault{"prctl", "EPERM"}},           // a command ran with capabilities in the bounding set
	{false, fault{"recvmsg", "ENOMEM"}},       // the server waited for a command that waited for its monitor
	{false, fault{"syncfs fdatasync", "EIO"}}, // the store was never durable again and did not report it
	{false, fault{"fsync fdatasync", "EIO"}},  // with --sync, the store lost files that it rewrote
}

// always returns arguments for strace that inject f into every second call.
func always(f fault) []string {
	return []string{
		"-e", fmt.Sprintf("inject=%s:error=%s:when=2+2", commas(f.calls), f.errors), "-e", "trace=" + commas(f.calls),
	}
}

// choose returns arguments for strace that inject up to three of the faults. It counts the calls of each thread.
func choose(random *rand.Rand, faults []fault) []string {
	var args, traced []string
	for range 1 + random.IntN(3) {
		f := faults[random.IntN(len(faults))]
		if slices.Contains(traced, f.calls) {
			continue
		}
		traced = append(traced, f.calls)
		errors := strings.Fields(f.errors)
		args = append(args, "-e", fmt.Sprintf("inject=%s:error=%s:when=%d+%d", commas(f.calls),
			errors[random.IntN(len(errors))], 1+random.IntN(5), 1+random.IntN(8)))
	}
	return append(args, "-e", "trace="+commas(strings.Join(traced, " ")))
}

func commas(words string) string { return strings.Join(strings.Fields(words), ",") }

// strace returns a command that writes its trace to a file.
func strace(trace string, args ...string) *exec.Cmd {
	return exec.Command("strace", append([]string{"-f", "-qq", "-o", trace}, args...)...)
}

// inject injects faults into processes, and those they start, until the returned function is called, which returns the
// number of injected faults by call.
func inject(t *testing.T, args []string, pids []int) (end func() map[string]int) {
	t.Helper()
	trace := filepath.Join(t.TempDir(), "trace")
	for _, pid := range pids {
		args = append(args, "-p", strconv.Itoa(pid))
	}
	cmd := strace(trace, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	must.Succeed(t, cmd.Start())
	t.Logf("faults: %s", strings.Join(args, " "))
	return func() map[string]int {
		_ = cmd.Process.Signal(syscall.SIGINT) // it detaches; it has ended if its processes have
		// It cannot detach from a thread that waits for its vfork. If it is killed, the kernel detaches all.
		killed := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		killed.Stop()
		return injected(t, trace)
	}
}

var injectedCall = regexp.MustCompile(`(?m)^\d+ +(?:<\.\.\. )?(\w+).*\(INJECTED\)$`)

// injected returns the number of injected faults in a trace by call.
func injected(t *testing.T, trace string) map[string]int {
	t.Helper()
	b := must.Get(os.ReadFile(trace))(t)
	calls := map[string]int{}
	for _, m := range injectedCall.FindAllStringSubmatch(string(b), -1) {
		calls[m[1]]++
	}
	return calls
}
