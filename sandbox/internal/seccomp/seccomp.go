// SPDX-License-Identifier: Apache-2.0

// Package seccomp defines which system calls a run may make: rules as data, and the kernel's filter (classic BPF,
// seccomp(2)) compiled from them. It builds programs and installs none; it knows neither the filtered processes nor the
// monitor.
//
// A call is permitted because a rule names it. Calls that actions do not need and attackers do are refused, and a
// monitored run reports them. Unknown calls, and calls that libraries make only to see whether the kernel has them,
// fail with ENOSYS.
package seccomp

// A Level is how much a filter reports to the syscall monitor of a run (SECCOMP_RET_USER_NOTIF).
type Level int

// The levels.
const (
	// MonitorOff reports nothing: refused calls fail at once.
	MonitorOff Level = iota
	// MonitorViolations reports refused calls and calls that connect, execute or change something at a path. Each waits
	// for the monitor, and fails with ENOSYS if there is none.
	MonitorViolations
	// MonitorFull also reports calls that open or look up a path.
	MonitorFull
)

// A Config is what differs between filters. Its zero value permits least and reports nothing.
type Config struct {
	// Listen permits listen(2), and bind(2) for datagram sockets, which a monitored run is denied otherwise.
	Listen  bool
	Monitor Level
	// Clock reports calls that read the time of day or wait for one. Random reports calls that read random numbers or
	// open files for reading. Either reports the first call of each executed program (arch_prctl on amd64).
	Clock, Random bool
	// Files reports calls that query files or list directories.
	Files bool
}
