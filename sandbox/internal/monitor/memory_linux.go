// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A memory is the memory of a process, whatever becomes of the process. Pages that the process may only read are
// written as private copies (proc_pid_mem(5)); shared mappings are not writable.
type memory int

// memory opens the memory of the process that waits in a call. The caller closes it.
func (w *session) memory(n *notification) (memory, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/mem", n.PID), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open its memory: %w", err)
	}
	if !w.queue.valid(n.ID) { // it may be another process's
		unix.Close(fd)
		return -1, unix.ESRCH
	}
	return memory(fd), nil
}

func (m memory) close() { unix.Close(int(m)) }

// read fills b from an address and reports whether it did.
func (m memory) read(at uint64, b []byte) bool {
	n, err := unix.Pread(int(m), b, int64(at))
	return err == nil && n == len(b)
}

// write writes b to an address and reports whether it did.
func (m memory) write(at uint64, b []byte) bool {
	n, err := unix.Pwrite(int(m), b, int64(at))
	return err == nil && n == len(b)
}

// timespec reads a struct timespec as a time since 1970; false if the kernel would not accept it.
func (m memory) timespec(at uint64) (time.Time, bool) {
	var b [16]byte
	if !m.read(at, b[:]) {
		return time.Time{}, false
	}
	sec, nsec := int64(binary.NativeEndian.Uint64(b[:])), int64(binary.NativeEndian.Uint64(b[8:]))
	if sec < 0 || nsec < 0 || nsec >= int64(time.Second) {
		return time.Time{}, false
	}
	return time.Unix(min(sec, maxSeconds), nsec), true
}

// signalled reports whether a thread has a pending signal.
func signalled(thread uint32) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	var pending, blocked uint64
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil {
			continue
		}
		switch name {
		case "SigPnd", "ShdPnd":
			pending |= set
		case "SigBlk":
			blocked = set
		}
	}
	return pending&^blocked != 0
}
