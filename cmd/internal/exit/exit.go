// SPDX-License-Identifier: Apache-2.0

// Package exit defines the exit codes of the commands and the error that carries one.
package exit

import (
	"errors"
	"fmt"
	"os"
)

// Exit codes of every subcommand but run, which returns the code of its command.
const (
	No          = 1 // the answer is no
	Usage       = 2
	Trouble     = 2   // repro and diff could not compare anything, as diff(1)
	Environment = 3   // the host cannot do it
	Absent      = 4   // a server lacks blobs
	Unreachable = 5   // a server cannot be reached
	Timeout     = 6   // a time limit on the command line has passed
	Internal    = 125 // run: cloister itself failed
)

// An Error is an error with an exit code. A nil Err has been reported already.
type Error struct {
	Code int
	Err  error
}

// New returns err with an exit code. A nil err prints nothing.
func New(code int, err error) *Error { return &Error{code, err} }

// Compared gives an error of a comparison its exit code: that of an unreachable server, or else Trouble.
func Compared(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok && e.Code == Unreachable {
		return New(Unreachable, err)
	}
	return New(Trouble, err)
}

// End prints err, the result of a program's command line, and exits with its code. It returns if err is nil.
func End(program string, err error) {
	if err == nil {
		return
	}
	e, ok := errors.AsType[*Error](err)
	if !ok { // cobra found a mistake in the command line
		e = New(Usage, err)
	}
	if e.Err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, e.Err)
	}
	os.Exit(e.Code)
}

func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }
