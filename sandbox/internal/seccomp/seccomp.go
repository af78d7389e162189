// SPDX-License-Identifier: Apache-2.0

// Package seccomp says which system calls a run may make: rules as data, and the filter for the kernel
// (classic BPF, seccomp(2)) that they become. It builds programs and installs none; it knows neither the
// processes that are filtered nor the one that watches.
//
// A call is permitted because a rule names it. The others come in two kinds. What an action has no use for
// and an attacker may is refused, and a watched run leaves a trace of it. What the tables do not know, and
// what libraries ask for only to find out whether the kernel has it, fails as if the kernel had it not.
package seccomp

// A Watch is what a filter sends to the supervisor of a run (SECCOMP_RET_USER_NOTIF).
type Watch int

// The degrees of watching.
const (
	// WatchOff sends nothing: what is refused fails at once.
	WatchOff Watch = iota
	// WatchAttempts sends what is refused, and the calls that connect, execute, or change something at a
	// path. Each waits for the supervisor; if there is none it fails with ENOSYS.
	WatchAttempts
	// WatchFull sends also what opens or looks for a path.
	WatchFull
)

// A Config is what differs between filters. Its zero value permits least and watches nothing.
type Config struct {
	// Listen permits listen(2).
	Listen bool
	Watch  Watch
	// Clock sends what asks for the time of day or waits for a time of it. Random sends what asks
	// for random numbers, and what opens for reading. Either sends the call with which each program that was executed
	// begins (arch_prctl of amd64).
	Clock, Random bool
}
