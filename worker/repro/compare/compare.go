// SPDX-License-Identifier: Apache-2.0

// Package compare finds where two blobs or directories differ and the likely cause, in terms of their formats: the
// member of an archive, the section of a program.
//
// A cause comes from one of three sources: a field with a known meaning such as mtime, a word or number that is one of
// the Facts of a run, or the appearance of the differing bytes. Formats lie in a file each, named after the format;
// formats.go lists them. Files of other formats are compared as bytes, and Diffoscope can tell more about them.
package compare

import "time"

// A Difference is one location at which two blobs or directories differ.
type Difference struct {
	// Where is the path to the location, outermost name first: an output, a member of an archive, a section. It has at
	// least one name.
	Where []string `json:"where"`
	// What names the difference: "mtime", "order of members", "content".
	What string `json:"what"`
	// A and B are the values of each side as printable text of at most maxText bytes; "" means none.
	A string `json:"a"`
	B string `json:"b"`
	// Offset is the offset of the first different byte in the innermost element of Where, or -1.
	Offset int64 `json:"offset"`
	// Cause is the likely cause, or Unknown.
	Cause Cause `json:"cause"`
	// Format is the name of the format, for FixFor; "" if there is none.
	Format string `json:"-"`
	// Within are the names of the formats of the files that contain the differing one, outermost first.
	Within []string `json:"-"`
	// More is the number of further differences of this kind that a difference without values stands for, or 0.
	More int `json:"more,omitempty"`
	// Fix explains in one line how to remove the difference, or is "".
	Fix string `json:"fix,omitempty"`
}

// maxText limits the texts of a Difference, in bytes.
const maxText = 200

// A Cause is why two runs of an action differ. Causes explains each.
type Cause string

// The causes.
const (
	Unknown          Cause = ""
	Timestamp        Cause = "timestamp"         // the time of the run, in a field or a text
	Duration         Cause = "duration"          // how long something took
	BuildDate        Cause = "__DATE__"          // the preprocessor's date and time
	BuildID          Cause = "build id"          // derived from the rest, or random
	Path             Cause = "path"              // of the working directory or of a temporary file
	Owner            Cause = "owner"             // user or group, as number or name
	Mode             Cause = "file mode"         // the umask
	MemberOrder      Cause = "member order"      // the order in which a directory was read
	Locale           Cause = "locale"            // order or language of texts
	Zone             Cause = "time zone"         //
	HashSeed         Cause = "hash seed"         // the order of a hash table
	Random           Cause = "random"            // random bytes, UUIDs, salts
	Compressed       Cause = "compressed"        // or encrypted data, whose differences cannot be read
	Hostname         Cause = "hostname"          //
	ProcessID        Cause = "process id"        //
	Address          Cause = "address"           // a pointer under ASLR
	Parallel         Cause = "parallel"          // a race
	Processors       Cause = "cpu count"         //
	Environment      Cause = "environment"       // a variable that the command does not set
	Uptime           Cause = "uptime"            // a monotonic clock
	PersistentWorker Cause = "persistent worker" // what it kept: no content shows it
)

// Facts are the known conditions of a run. Unknown ones are zero.
type Facts struct {
	// Start and End are when the command ran, by its own clock.
	Start, End time.Time
	Zone       string // TZ
	Locale     string // LC_ALL
	Hostname   string
	User       string
	UID        uint32
	InputOwner uint32 // number of the user to whom inputs belong
	Umask      uint32
	Root       string // path of the input root
	CPUs       int
	// Env holds the variables as KEY=VALUE.
	Env []string
	// Digests are the names of the run's outputs by their digests in hexadecimal.
	Digests map[string]string
	// FixedLayout means that ASLR was off, HeldRandom that the kernel's random numbers had a fixed seed.
	FixedLayout, HeldRandom bool
}

// Known holds the facts of both sides; nil means unknown.
type Known struct{ A, B *Facts }
