// SPDX-License-Identifier: Apache-2.0

// Package audit keeps a tamper-evident log of the operations that the sandbox denied to actions.
//
// A log is a directory:
//
//	lock                          locked by the writer; holds its process ID
//	00000000000000000001.v1.jsonl a segment, named by the number of its first entry
//	00000000000000018220.v1.jsonl the next segment
//
// An entry is one line of JSON in printable ASCII. It begins with its number and the hash of the previous line, and
// ends with its own hash: the SHA-256 of the line up to the comma before "hash". So anyone who changes, inserts,
// removes or moves a line must rewrite every later one. That, and truncating the end, is detected only with a hash that
// was kept elsewhere, which Verify looks for.
//
// A log with a size limit deletes its oldest segments after an entry has announced it. If segments are missing without
// such an entry, the writer did not delete them.
//
// The format is docs/audit.md.
package audit

import (
	"errors"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// ErrTampered is the error for a log that was modified. Its text names the file and line, and the found and the
// expected value.
var ErrTampered = errors.New("the audit log was changed")

// genesis is the hash before the first line.
var genesis = strings.Repeat("0", hashDigits)

const (
	// maxLine bounds a line, in bytes, with its end.
	maxLine = 1 << 20
	// maxText bounds each text of an entry, in bytes. An entry without events always fits in a line, since encoding
	// turns a byte into at most six.
	maxText = 4 << 10
	// segmentBytes is the maximum size of a segment. Open reads two of them.
	segmentBytes = 16 << 20
	// segmentsPerLog is the number of segments in a log at its limit; one of them is deleted at a time.
	segmentsPerLog = 8
	// dropBytes is reserved for the entry that announces a deletion, since it is written first.
	dropBytes = 1 << 10
)

// DefaultBytes is the default limit of a log: some two million entries with one event.
const DefaultBytes = 1 << 30

// MinBytes is the smallest limit that holds for all entries: a segment of it fits the longest entry.
const MinBytes = 16 << 20

// An Entry describes the violations of one run. Its texts may hold any bytes; invalid UTF-8 is recorded as \xNN.
type Entry struct {
	// Time is when the run ended. It is recorded in UTC.
	Time time.Time
	// Action is the digest of the action.
	Action string
	// Instance is the instance name of the request. Target, Mnemonic and Invocation are the client's metadata, or "".
	Instance, Target, Mnemonic, Invocation string
	// Worker is the name of the worker.
	Worker string
	// Exit is the exit code of the command, or sandbox.NeverRan.
	Exit int
	// OnViolation is "fail" or "kill" if the policy made the action fail for a violation or killed it at one, or "".
	OnViolation string
	// Events and Unrecorded are those of the sandbox.Result.
	Events     []sandbox.Event
	Unrecorded int
}

// A Drop names the entries that the log deletes to stay within its limit.
type Drop struct {
	// First and Last are the numbers of the oldest and the newest deleted entry.
	First, Last uint64
	// Since is the time of the oldest deleted entry, and Until that of the oldest remaining one; zero if unknown.
	Since, Until time.Time
}

// A Record is an Entry as read from a log.
type Record struct {
	// Seq numbers the entries from 1, without gaps.
	Seq uint64
	// Prev is the hash of the previous line, and Hash that of this one, in hexadecimal.
	Prev, Hash string
	// Note is a remark of the log: that this entry is truncated, that entries before it could not be written, that the
	// log was repaired, or that entries are deleted. In the last two cases the Entry holds only the time.
	Note string
	// Dropped names the entries that are deleted, or is nil. They may still exist if the writer was killed.
	Dropped *Drop
	Entry

	line string
}

// JSON returns the line as stored, without its end. It is printable ASCII.
func (r *Record) JSON() string { return r.line }
