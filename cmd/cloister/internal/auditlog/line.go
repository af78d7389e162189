// SPDX-License-Identifier: Apache-2.0

package auditlog

import "time"

// A Line is an entry of the log as its file has it. Its texts are printable ASCII.
type Line struct {
	Seq         uint64    `json:"seq"`                    // number of the entry, from 1
	Prev        string    `json:"prev"`                   // hash of the previous line
	Time        time.Time `json:"time"`                   // when the run ended
	Note        string    `json:"note,omitempty"`         // remark of the log
	Dropped     *Dropped  `json:"dropped,omitempty"`      // entries that were deleted to stay within --audit-size
	Action      string    `json:"action,omitempty"`       // digest
	Instance    string    `json:"instance,omitempty"`     // name of the instance
	Target      string    `json:"target,omitempty"`       // as the client stated it
	Mnemonic    string    `json:"mnemonic,omitempty"`     // as the client stated it
	Invocation  string    `json:"invocation,omitempty"`   // as the client stated it
	Worker      string    `json:"worker,omitempty"`       // name of the worker
	Exit        int       `json:"exit"`                   // exit code; -1 if the command never ran
	OnViolation string    `json:"on_violation,omitempty"` // fail or kill, if a violation made the action fail
	Events      []Event   `json:"events,omitempty"`
	Unrecorded  int       `json:"unrecorded,omitempty"` // number of further events
	Hash        string    `json:"hash"`                 // of the line
}

// An Event is something that a run attempted, used or exceeded.
type Event struct {
	Kind    string `json:"kind"`
	Subject string `json:"subject"`           // path, address, name or limit
	Syscall string `json:"syscall,omitempty"` // system call that was refused
	Process string `json:"process,omitempty"` // name and number of the process in the sandbox
	Count   int    `json:"count"`
	Actual  string `json:"actual,omitempty"` // what a limit was compared with
	Limit   string `json:"limit,omitempty"`
	Detail  string `json:"detail,omitempty"`
}

// Dropped names deleted entries.
type Dropped struct {
	First uint64    `json:"first"`
	Last  uint64    `json:"last"`
	Since time.Time `json:"since,omitzero"` // time of the first
	Until time.Time `json:"until,omitzero"` // time of the oldest remaining entry
}
