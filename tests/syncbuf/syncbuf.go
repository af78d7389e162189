// SPDX-License-Identifier: Apache-2.0

// Package syncbuf collects what a server or process writes while a test reads it.
package syncbuf

import (
	"strings"
	"sync"
)

// A Buffer is a buffer for concurrent use. The zero Buffer is empty.
type Buffer struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

// Write appends p.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// String returns what has been written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
