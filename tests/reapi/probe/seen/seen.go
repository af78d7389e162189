// SPDX-License-Identifier: Apache-2.0

// Package seen is what the probe says of the place in which it runs, as both of its ends know it. It looks
// at nothing itself.
package seen

// A Report is what a process was given. It travels as one line of JSON.
type Report struct {
	Args     []string
	Dir      string   // what getcwd says
	Env      []string // as given, in order
	FDs      []int    // descriptors that were open at the start
	Umask    int
	Limits   map[string]Limit // by name of the resource, as in RLIMIT_NOFILE without the prefix
	Hostname string
	UID, GID int
	TTY      bool  // there is a terminal that controls it
	Stdin    int64 // bytes that can be read
	// Ignored and Blocked are signals at the start.
	Ignored, Blocked []int
	// Tmp and TempDir are the names in /tmp and in the directory that TMPDIR names.
	Tmp, TempDir []string
	TempWorks    bool // a file can be made in TempDir
	// Interfaces are the names of the network's; Loopback says whether one can talk to oneself by 127.0.0.1.
	Interfaces []string
	Loopback   bool
}

// A Limit is a resource limit; math.MaxUint64 is none.
type Limit struct{ Soft, Hard uint64 }

// An Entry is a line of a tree that the probe walked.
type Entry struct {
	Path       string
	Type       string // f, d, l or ?
	Mode       uint32 // permission bits
	Size       int64
	MTime      int64 // seconds
	MTimeNanos int32
	Target     string // of a symlink
	SHA256     string // of a file's content
	Error      string // why there is no more to say
}
