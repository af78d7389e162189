// SPDX-License-Identifier: Apache-2.0

// Package exit defines the exit codes of the commands and the error that carries one.
package exit

import (
	"fmt"
)

// Exit codes, the same for every subcommand but run, which returns its command's own.
const (
	No          = 1 // the answer is no
	Usage       = 2
	Environment = 3   // the host cannot do it
	Absent      = 4   // blobs are absent from a server's store
	Unreachable = 5   // a server cannot be reached
	Timeout     = 6   // the time that the command line gives is over
	Internal    = 125 // of run: cloister itself failed
)

// An exit is an error with its exit code. A nil err has been told already.
type Error struct {
	Code int
	Err  error
}

// New returns err with an exit code. A nil err prints nothing.
func New(code int, err error) *Error { return &Error{code, err} }

func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Trouble is the code of repro and diff where nothing could be compared, as of diff(1).
const Trouble = 2
