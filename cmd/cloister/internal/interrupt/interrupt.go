// SPDX-License-Identifier: Apache-2.0

// Package interrupt turns signals that would end the process into the end of a context, so that a command can clean up.
package interrupt

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// Context returns a context that ends with the first SIGINT, SIGTERM, SIGHUP or one of more; its cause is then an
// *Error. Later signals do nothing until the caller calls stop.
func Context(ctx context.Context, more ...os.Signal) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, append(more, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)...)
	go func() {
		select {
		case s := <-signals:
			cancel(&Error{s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// IgnoreBrokenPipe makes writes to a closed pipe fail instead of ending the process, for commands that leave files to
// remove.
func IgnoreBrokenPipe() { signal.Ignore(syscall.SIGPIPE) }

// Explain returns an error with text and the exit code of a signal if one ended ctx, and err as a fault of this host
// otherwise.
func Explain(ctx context.Context, err error, text string) error {
	if by, ok := errors.AsType[*Error](context.Cause(ctx)); ok {
		return exit.New(by.ExitCode(), errors.New(text))
	}
	if _, ok := errors.AsType[*exit.Error](err); ok {
		return err
	}
	return exit.New(exit.Environment, err)
}

// An Error is the signal that ended a context.
type Error struct{ Signal os.Signal }

func (e *Error) Error() string { return fmt.Sprintf("interrupted by %v", e.Signal) }

// ExitCode returns the exit code that a shell reports for the signal.
func (e *Error) ExitCode() int {
	if s, ok := e.Signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exit.Internal
}
