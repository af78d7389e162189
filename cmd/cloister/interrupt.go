// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// interruptible returns a context that the first signal ends which would end this process, so that it can remove what it
// has made. Further signals of that kind do nothing. The caller calls cancel.
func interruptible(ctx context.Context, more ...os.Signal) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, append(more, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)...)
	go func() {
		select {
		case s := <-signals:
			end(&interrupted{s})
		case <-ctx.Done():
		}
	}()
	// A reader that went away is an error like any other: it must not leave our files behind.
	signal.Ignore(syscall.SIGPIPE)
	return ctx, func() { end(nil) }
}

// interrupted is why a context ended: a signal that this process was sent.
type interrupted struct{ signal os.Signal }

func (i *interrupted) Error() string { return fmt.Sprintf("interrupted by %v", i.signal) }

// exitCode is what a shell would report.
func (i *interrupted) exitCode() int {
	if s, ok := i.signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exitOurs
}
