// SPDX-License-Identifier: Apache-2.0

// Package audit keeps the record of what actions tried, in files that are only ever appended to. It
// writes, reads and verifies that record; it neither watches runs nor decides what may be recorded, and
// it knows nothing of stores or the wire.
//
// A log is a directory:
//
//	lock                          locked by its writer, whose process id it states
//	00000000000000000001.v1.jsonl a segment, named by the number of its first entry
//	00000000000000018220.v1.jsonl the next
//
// An entry is one line of JSON in printable ASCII. It begins with its number and the hash of the line
// before it, and ends with its own hash: the SHA-256 of the line up to the comma before "hash". Whoever
// changes, inserts, removes or moves a line must therefore write every later line anew. Against that, and
// against a tail that is cut off, helps only a hash that is remembered elsewhere: Verify looks for it.
//
// A log that has a bound deletes its oldest segments. An entry says so first: what is gone without such an entry, somebody
// else has deleted.
//
// The format is docs/audit.md.
package audit

import (
	"errors"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// ErrTampered says that a log is not what was appended to it. Its text names file and line, what is there
// and what is expected.
var ErrTampered = errors.New("the audit log was changed")

// genesis stands for the hash of the line before the first.
var genesis = strings.Repeat("0", hashDigits)

// Sizes of what is written.
const (
	// maxLine is how long a line may be, in bytes, its end included.
	maxLine = 1 << 20
	// maxText is how long one text of an entry may be, in bytes. Without events an entry fits a line
	// whatever is in it: a byte becomes six at most.
	maxText = 4 << 10
	// segmentBytes is how large a segment grows at most. Open reads two of them.
	segmentBytes = 16 << 20
	// segmentsOf is how many segments a bound is divided into: one of them is what is deleted at once.
	segmentsOf = 8
	// dropRoom is what an entry takes, in bytes, that says that older ones are deleted. It is there before they are gone.
	dropRoom = 1 << 10
)

// DefaultBytes is a bound for logs of whom nobody has asked for another: some two million entries of one event.
const DefaultBytes = 1 << 30

// LeastBytes is the least bound that is kept whatever is appended: a segment of it takes the longest entry.
const LeastBytes = 16 << 20

// An Entry is what one run of an action tried. Texts may hold any bytes; those that are not UTF-8 are
// recorded as \xNN.
type Entry struct {
	// Time is when the run ended. It is recorded in UTC.
	Time time.Time
	// Action is the digest of the action.
	Action string
	// Instance is the instance name of the request. Target, Mnemonic and Invocation are what its client
	// said of it, or "".
	Instance, Target, Mnemonic, Invocation string
	// Worker is the name of the worker that ran it.
	Worker string
	// Exit is the exit code of the command, sandbox.NeverRan if it was not executed.
	Exit int
	// Events and Unrecorded are those of the run's sandbox.Result.
	Events     []sandbox.Event
	Unrecorded int
}

// A Drop says which entries the log itself deleted, to stay within its bound.
type Drop struct {
	// First and Last are the numbers of the oldest and of the newest of them.
	First, Last uint64
	// Since is the time of the oldest, and Until that of the oldest that stayed; zero where that could not be read.
	Since, Until time.Time
}

// A Record is an Entry as it stands in a log.
type Record struct {
	// Seq counts entries from 1, without a gap.
	Seq uint64
	// Prev is the hash of the line before, and Hash that of this one, in hexadecimal.
	Prev, Hash string
	// Note is what the log itself says: why this entry is not whole, how many before it could not be
	// written, what was found as the log was opened, or what is deleted. In the last two cases the Entry holds
	// nothing but the time.
	Note string
	// Dropped is what is deleted, nil in all entries that do not say so. It may still be there: the writer may have died.
	Dropped *Drop
	Entry

	line string
}

// JSON returns the line as it is stored, without its end. It is printable ASCII.
func (r *Record) JSON() string { return r.line }
