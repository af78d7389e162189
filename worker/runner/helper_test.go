// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"io"

	// Tests of this package use a sandbox.
	_ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit"
)

// CloseLog closes a Writer of a command's output.
func CloseLog(w io.Writer) error { return w.(*log).file.Close() }
