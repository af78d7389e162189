// SPDX-License-Identifier: Apache-2.0

// Package interrupt turns signals that would end the process into the end of a context.
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

// Context returns a context that ends with Ctrl-C, and then has an *interrupted as its cause.
func Context(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
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

// Explain returns the error of what a signal has ended, which text explains, and else err as one of this host.
func Explain(ctx context.Context, err error, text string) error {
	var by *Error
	if errors.As(context.Cause(ctx), &by) {
		return exit.New(by.ExitCode(), errors.New(text))
	}
	return exit.New(exit.Environment, err)
}

// Cleanup returns a context that the first signal ends which would end this process, so that it can remove what it
// has made. Further signals of that kind do nothing. The caller calls cancel.
func Cleanup(ctx context.Context, more ...os.Signal) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, append(more, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)...)
	go func() {
		select {
		case s := <-signals:
			end(&Error{s})
		case <-ctx.Done():
		}
	}()
	// A reader that went away is an error like any other: it must not leave our files behind.
	signal.Ignore(syscall.SIGPIPE)
	return ctx, func() { end(nil) }
}

// Error is why a context ended: a signal that this process was sent.
type Error struct{ Signal os.Signal }

func (i *Error) Error() string { return fmt.Sprintf("interrupted by %v", i.Signal) }

// ExitCode is what a shell would report.
func (i *Error) ExitCode() int {
	if s, ok := i.Signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exit.Internal
}
