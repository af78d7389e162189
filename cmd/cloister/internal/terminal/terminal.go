// SPDX-License-Identifier: Apache-2.0

// Package terminal controls the terminal of a person: pseudo-terminals, single keys, secrets and the size of the
// screen.
//
// It opens pseudo-terminals itself, because creack/pty opens the slave in non-blocking mode, which a shell in the
// sandbox would inherit. It reads secrets itself, because x/term can neither be interrupted nor restore the terminal
// after a signal.
package terminal

import (
	"io"
	"os"

	"golang.org/x/term"
)

// Is reports whether w is a terminal.
func Is(w io.Writer) bool {
	f, ok := w.(*os.File)
	is := false
	return ok && Control(f, func(fd int) error { is = term.IsTerminal(fd); return nil }) == nil && is
}

// Rows returns the number of lines of a terminal, 0 if it is unknown.
func Rows(f *os.File) int {
	rows := 0
	if err := Control(f, func(fd int) (err error) { _, rows, err = term.GetSize(fd); return err }); err != nil {
		return 0
	}
	return rows
}

// Control calls f with the descriptor of a file. Unlike Fd, it keeps the file non-blocking, so that deadlines work.
func Control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := conn.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}
