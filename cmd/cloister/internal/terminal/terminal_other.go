// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package terminal

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
)

// A PTY does not exist on this system.
type PTY struct{ TTY *os.File }

// Open fails: interactive runs need the sandbox, and so Linux.
func Open(_, _ *os.File) (*PTY, error) { return nil, errors.New("--shell needs Linux") }

// Close does nothing.
func (*PTY) Close() {}

// Background returns false.
func Background(io.Writer) bool { return false }

// CharMode leaves a terminal unchanged.
func CharMode(*os.File) (restore func()) { return func() {} }

// AskSecret fails, because the terminal would show what is typed.
func AskSecret(context.Context, string) ([]byte, error) {
	return nil, errors.New("cannot prompt on " + runtime.GOOS)
}
