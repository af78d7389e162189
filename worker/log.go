// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	"io"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// Logs are the output of one run. Others may read them while the run writes.
type Logs struct{ Stdout, Stderr Log }

// Names returns the names of both logs, or "" for nil Logs.
func (l *Logs) Names() (stdout, stderr string) {
	if l == nil {
		return "", ""
	}
	return l.Stdout.Name, l.Stderr.Name
}

// A Log is a text that grows until it is closed. The zero Log is empty. It is safe for concurrent use. Writers do not
// wait for readers, and all readers share one copy of the text.
type Log struct {
	// Name is the name under which clients read the log, or "". It is set before the first Write.
	Name string

	mu     sync.Mutex
	text   bytes.Buffer  // guarded by mu; append-only
	err    error         // guarded by mu; nil while the log is open, io.EOF once the text is complete
	change chan struct{} // guarded by mu; closed on the next change, nil if nobody waits
}

// Write appends p, or fails with io.ErrClosedPipe once the log is closed.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, io.ErrClosedPipe
	}
	l.wake()
	return l.text.Write(p)
}

// Close ends the text, which is complete if why is nil. Otherwise readers get why at its end. Only the first call has
// an effect.
func (l *Log) Close(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	if l.err = why; why == nil {
		l.err = io.EOF
	}
	l.wake()
}

// wake wakes the readers that wait. l.mu is held.
func (l *Log) wake() {
	if l.change != nil {
		close(l.change)
		l.change = nil
	}
}

// ReadAt reads from off and waits only if nothing is there yet. It returns io.EOF at the end of a complete text,
// cas.ErrRange beyond it, the reason at the end of an incomplete text, and the error of ctx.
func (l *Log) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		switch n := int64(l.text.Len()); {
		case off < n:
			return copy(p, l.text.Bytes()[off:]), nil
		case l.err == io.EOF && off > n:
			return 0, cas.ErrRange
		case l.err != nil:
			return 0, l.err
		}
		if l.change == nil {
			l.change = make(chan struct{})
		}
		change := l.change
		l.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
		}
		l.mu.Lock()
		if err := ctx.Err(); err != nil {
			return 0, err
		}
	}
}

// bytes returns the text. Callers call it after the last write, and must not modify the text.
func (l *Log) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Bytes()
}
