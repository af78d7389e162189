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
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"golang.org/x/sys/unix"
)

// deniedVariable makes the test binary deny itself the listed system calls, restart, and probe.
const deniedVariable = "CLOISTER_TEST_DENIED"

// probeDenied is that process.
func probeDenied(denied string) {
	if list, ok := strings.CutPrefix(denied, "all "); ok {
		runtime.LockOSThread()
		var numbers []uint32
		for word := range strings.FieldsSeq(list) {
			numbers = append(numbers, map[string]uint32{
				"keyctl": unix.SYS_KEYCTL, "add_key": unix.SYS_ADD_KEY, "request_key": unix.SYS_REQUEST_KEY,
				"personality": unix.SYS_PERSONALITY,
			}[word])
		}
		if err := deny(numbers); err != nil {
			panic(err)
		}
		panic(syscall.Exec("/proc/self/exe", os.Args, []string{deniedVariable + "=probe"}))
	}
	b := namespace.New(namespace.Config{})
	defer b.Close()
	f, err := b.Probe(timeless{})
	fmt.Printf("tier %s: %v\nconditions: %q\n", f.Tier, err, f.Conditions)
}

// deny makes the kernel answer EPERM to system calls of this thread and its programs, as a container's filter does
// (seccomp(2)).
func deny(numbers []uint32) error {
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}
	for _, n := range numbers {
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: n},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
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
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	for denied, want := range map[string]string{
		"all keyctl add_key request_key": "tier full: <nil>\n",
		"all keyctl":                     "session keyring (keyctl): operation not permitted",
	} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), deniedVariable+"="+denied)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("denied %s: got %q, %v; want %q", denied, out, err, want)
		}
	}
}
