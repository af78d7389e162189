// SPDX-License-Identifier: Apache-2.0

// Package seen defines the reports of the probe, for the probe and for the tests.
package seen

// A Report describes the initial state of a process. The probe prints it as one line of JSON.
type Report struct {
	Args     []string
	Dir      string   // from getcwd
	Env      []string // in the given order
	FDs      []int    // descriptors open at the start
	Umask    int
	Limits   map[string]Limit // by name without RLIMIT_, such as NOFILE
	Hostname string
	UID, GID int
	TTY      bool  // has a controlling terminal
	Stdin    int64 // readable bytes
	// Ignored and Blocked are the signals at the start.
	Ignored, Blocked []int
	// Tmp and TempDir are the entries of /tmp and of $TMPDIR.
	Tmp, TempDir []string
	TempWorks    bool // files can be created in TempDir
	// Interfaces are the network interfaces; Loopback reports whether 127.0.0.1 is reachable.
	Interfaces []string
	Loopback   bool
}

// A Limit is a resource limit; math.MaxUint64 means unlimited.
type Limit struct{ Soft, Hard uint64 }

// An Entry is one line of the step tree.
type Entry struct {
	Path       string
	Type       string // f, d, l or ?
	Mode       uint32 // permission bits
	Size       int64
	MTime      int64 // seconds
	MTimeNanos int32
	Target     string // of a symlink
	SHA256     string // of the contents
	Error      string // why the rest is missing
}
