// SPDX-License-Identifier: Apache-2.0

// Package terminal controls the terminal of a person: pseudo-terminals, single keys, secrets and the size of the screen.
package terminal

import (
	"io"
	"os"
)

// Is reports whether w is a terminal, or another device that a person may look at.
func Is(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}
