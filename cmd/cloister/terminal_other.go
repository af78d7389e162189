// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"errors"
	"os"
	"runtime"
)

// terminal does not exist on this system.
type terminal struct{ run *os.File }

func openTerminal(_, _ *os.File) (*terminal, error) {
	return nil, errors.New("--shell needs Linux, as the sandbox does")
}

func (*terminal) close() {}

// keys leaves a terminal as it is: keys come by the line.
func keys(*os.File) (restore func()) { return func() {} }

// askSecret asks nobody: what is typed would be shown.
func askSecret(context.Context, string) ([]byte, error) {
	return nil, errors.New("nobody is asked on " + runtime.GOOS)
}

// rowsOf is not known.
func rowsOf(*os.File) int { return 0 }
