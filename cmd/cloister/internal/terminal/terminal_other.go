// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package terminal

import (
	"context"
	"errors"
	"os"
	"runtime"
)

// terminal does not exist on this system.
type PTY struct{ Slave *os.File }

func Open(_, _ *os.File) (*PTY, error) {
	return nil, errors.New("--shell needs Linux, as the sandbox does")
}

func (*PTY) Close() {}

// keys leaves a terminal as it is: keys come by the line.
func CharMode(*os.File) (restore func()) { return func() {} }

// askSecret asks nobody: what is typed would be shown.
func AskSecret(context.Context, string) ([]byte, error) {
	return nil, errors.New("nobody is asked on " + runtime.GOOS)
}

// rowsOf is not known.
func Rows(*os.File) int { return 0 }
