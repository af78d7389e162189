// SPDX-License-Identifier: Apache-2.0

package monitor

import "golang.org/x/sys/unix"

// stubCode is the code that replaces functions of the vDSO: the system call, or a return of ENOSYS, after which
// libraries make the call. getrandom needs the latter: its replacement would also seed the caller's own generator, at
// times that the kernel chooses.
var stubCode = map[string]struct {
	random bool
	code   []byte
}{
	"__vdso_clock_gettime": {code: call(unix.SYS_CLOCK_GETTIME)},
	"__vdso_gettimeofday":  {code: call(unix.SYS_GETTIMEOFDAY)},
	"__vdso_time":          {code: call(unix.SYS_TIME)},
	"__vdso_getrandom":     {random: true, code: []byte{0x48, 0xc7, 0xc0, 0xda, 0xff, 0xff, 0xff, 0xc3}}, // mov $-38, %rax; ret
}

// call is the code of a system call below 256: mov $number, %eax; syscall; ret.
func call(number byte) []byte { return []byte{0xb8, number, 0, 0, 0, 0x0f, 0x05, 0xc3} }
