// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	"io"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// Logs are the output of one run: kept for its result, and read by others while it grows.
type Logs struct{ Stdout, Stderr Log }

// Names returns the names of both logs; of nil Logs they are empty.
func (l *Logs) Names() (stdout, stderr string) {
	if l == nil {
		return "", ""
	}
	return l.Stdout.Name, l.Stderr.Name
}

// A Log is a text that grows until it is closed. The zero Log is empty. It is safe for concurrent use: whoever
// writes waits for no reader, and there is one copy of the text, whoever reads it.
type Log struct {
	// Name is what clients read it by, "" if none can. It is set before anything is written.
	Name string

	mu     sync.Mutex
	text   bytes.Buffer  // guarded by mu; only its end is ever written
	ended  error         // guarded by mu; nil while there may be more
	change chan struct{} // guarded by mu; closed when text or ended changes, nil if nobody waits
}

// Write appends p, or fails with io.ErrClosedPipe once the log is closed.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		return 0, io.ErrClosedPipe
	}
	l.changed()
	return l.text.Write(p)
}

// Close says that the text is whole, if why is nil, or else why no more of it will come. Only the first call
// counts.
func (l *Log) Close(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		return
	}
	if l.ended = why; why == nil {
		l.ended = io.EOF
	}
	l.changed()
}

// changed wakes those who wait.
func (l *Log) changed() {
	if l.change != nil {
		close(l.change)
		l.change = nil
	}
}

// ReadAt reads what stands at off and is there, and waits only if that is nothing. At the end of a whole text it
// returns io.EOF, beyond it cas.ErrRange; of one that is not whole, why it is not; or the error of ctx.
func (l *Log) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		switch n := int64(l.text.Len()); {
		case off < n:
			return copy(p, l.text.Bytes()[off:]), nil
		case l.ended == io.EOF && off > n:
			return 0, cas.ErrRange
		case l.ended != nil:
			return 0, l.ended
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

// Bytes returns the text, which nobody may write to any more; nor may the caller.
func (l *Log) Bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Bytes()
}
