// SPDX-License-Identifier: Apache-2.0

package monitor

import "golang.org/x/sys/unix"

// stubCode is what functions of the vDSO are to do: the system call, with the arguments where the function has them, or
// to say that there is no such function (ENOSYS), after which libraries make the call. The latter would ask by the call
// as well, for keys of its own generator, but again whenever the kernel has got new ones.
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
