// SPDX-License-Identifier: Apache-2.0

// Package compare says in which places two things differ, blobs above all, and what the likely cause is, in the words
// of their formats: the member of an archive, the section of a program. It knows nothing of how they came about but
// what it is told as Facts.
package compare

import "time"

// A Difference is one place in which two things differ.
type Difference struct {
	// Where are the names of the things around the place, from the outermost in: an output, a member of an archive, a
	// section. It has at least one.
	Where []string `json:"where"`
	// What differs there: "mtime", "order of members", "content".
	What string `json:"what"`
	// A and B are what each of the two has there, in printable text of at most MaxText bytes; "" is nothing.
	A string `json:"a"`
	B string `json:"b"`
	// Offset is that of the first differing byte, in bytes from the beginning of the innermost thing that Where names;
	// -1 where there is none to name.
	Offset int64 `json:"offset"`
	// Cause is the likely cause, or Unknown.
	Cause Cause `json:"cause"`
	// Format is the name of the format in whose words it is told, "" if it is of none. It is for FixFor alone.
	Format string `json:"-"`
	// Fix says what would end it, in one line, or is "".
	Fix string `json:"fix,omitempty"`
}

// MaxText bounds the texts of a Difference, in bytes.
const MaxText = 200

// A Cause is why two runs of one action differ. It is a closed list, of which Causes has the table.
type Cause string

// The causes.
const (
	Unknown     Cause = ""
	Timestamp   Cause = "timestamp"    // the time of the run, in a field or a text
	BuildDate   Cause = "__DATE__"     // the preprocessor's date and time
	BuildID     Cause = "build id"     // derived from the rest, or random
	Path        Cause = "path"         // of the working directory or of a temporary file
	Owner       Cause = "owner"        // user or group, in number or name
	Mode        Cause = "file mode"    // the umask
	MemberOrder Cause = "member order" // of an archive or a list, as a directory was read
	Locale      Cause = "locale"       // order or language of texts
	Zone        Cause = "time zone"    //
	HashSeed    Cause = "hash seed"    // the order of a hash table
	Random      Cause = "random"       // bytes asked of the kernel, UUIDs, salts
	Hostname    Cause = "hostname"     //
	ProcessID   Cause = "process id"   //
	Address     Cause = "address"      // a pointer, as ASLR chose it
	Parallel    Cause = "parallel"     // who came first
	Processors  Cause = "cpu count"    //
	Environment Cause = "environment"  // a variable that is none of the command's
	Uptime      Cause = "uptime"       // a monotonic clock
)

// Facts are what is known of the run that made one of two things; what is not known is zero.
type Facts struct {
	// Start and End are when the command ran, as its own clock had it.
	Start, End time.Time
	Zone       string // as in TZ
	Locale     string // as in LC_ALL
	Hostname   string
	User       string
	UID        uint32
	Umask      uint32
	Root       string // where the input root was
	CPUs       int
	// Env are the variables, "KEY=VALUE".
	Env []string
	// FixedLayout says that memory was laid out without randomness, HeldRandom that the kernel's randomness was
	// that of a seed.
	FixedLayout, HeldRandom bool
}

// Known are the facts of both sides, nil where nothing is known.
type Known struct{ A, B *Facts }
