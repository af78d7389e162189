// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cloister-build/cloister/sandbox/namespace"
	"golang.org/x/sys/unix"
)

// deniedVariable makes the test binary deny itself the listed system calls, restart, and probe, or run its tests if the
// list begins with "tests".
const deniedVariable = "CLOISTER_TEST_DENIED"

// lackingVariable is set in a test binary that runs its tests without the listed system calls.
const lackingVariable = "CLOISTER_TEST_LACKING"

// denials are the answers to what can be denied. Overlayfs alone is configured with flags and descriptors.
var denials = map[string][]unix.SockFilter{
	"keyctl":      denial(unix.SYS_KEYCTL, unix.EPERM),
	"add_key":     denial(unix.SYS_ADD_KEY, unix.EPERM),
	"request_key": denial(unix.SYS_REQUEST_KEY, unix.EPERM),
	"personality": denial(unix.SYS_PERSONALITY, unix.EPERM),
	"landlock":    denial(unix.SYS_LANDLOCK_CREATE_RULESET, unix.ENOSYS),
	"overlayfs":   denial(unix.SYS_FSCONFIG, unix.ENODEV, unix.FSCONFIG_SET_FLAG, unix.FSCONFIG_SET_FD),
}

// denial returns filter instructions that answer a call with an error, if the call's second argument is one of values
// or there are none.
func denial(number uint32, errno unix.Errno, values ...uint32) []unix.SockFilter {
	answer := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)}
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	if len(values) == 0 {
		return []unix.SockFilter{load(0), {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: number}, answer}
	}
	filter := []unix.SockFilter{
		load(0), {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: uint8(1 + 2*len(values)), K: number}, load(24),
	}
	for _, v := range values {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: v}, answer)
	}
	return filter
}

// probeDenied is that process.
func probeDenied(denied string) {
	what, list, ok := strings.Cut(denied, " ")
	if ok {
		runtime.LockOSThread()
		if err := deny(strings.Fields(list)); err != nil {
			panic(err)
		}
		environment := []string{deniedVariable + "=probe"}
		if what == "tests" {
			os.Unsetenv(deniedVariable)
			environment = append(os.Environ(), lackingVariable+"="+list)
		}
		panic(syscall.Exec("/proc/self/exe", os.Args, environment))
	}
	b := namespace.New(namespace.Config{})
	defer b.Close()
	f, err := b.Probe(timeless{})
	fmt.Printf("tier %s: %v\nconditions: %q\n", f.Tier, err, f.Conditions)
}

// deny makes the kernel refuse system calls of this thread and its programs, as a container's filter or an old kernel
// does (seccomp(2)).
func deny(names []string) error {
	var filter []unix.SockFilter
	for _, n := range names {
		filter = append(filter, denials[n]...)
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0)
}

// TestKeysThatCannotBeHidden: if a filter denies keys to everybody, nothing is left to hide. If it only prevents hiding
// them, the backend refuses.
func TestKeysThatCannotBeHidden(t *testing.T) {
	t.Parallel()
	_, f := backend(t, namespace.Config{})
	for denied, want := range map[string]string{
		"all keyctl add_key request_key": "tier " + f.Tier + ": <nil>\n",
		"all keyctl":                     "session keyring (keyctl): operation not permitted",
	} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), deniedVariable+"="+denied)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("denied %s: got %q, %v; want %q", denied, out, err, want)
		}
	}
}
