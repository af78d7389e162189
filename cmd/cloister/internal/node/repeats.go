// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// repeatInterval is the interval at which a warning that repeats is logged.
const repeatInterval = time.Minute

// LimitRepeats returns a logger like log that limits warnings with equal messages: it logs the first at once, and then
// once a minute the latest, with the number that occurred since. flush logs pending warnings. Both may be used
// concurrently.
func LimitRepeats(log *slog.Logger) (limited *slog.Logger, flush func()) {
	r := &repeats{waiting: map[string]*repeat{}}
	return slog.New(repeatHandler{log.Handler(), r}), r.flush
}

// repeats are the warnings of the last minute.
type repeats struct {
	mu      sync.Mutex
	waiting map[string]*repeat // by message
}

// A repeat is a message that was logged within the last minute.
type repeat struct {
	more  int          // number of records since
	last  slog.Record  // the last of them
	to    slog.Handler // for last
	timer *time.Timer
}

// A repeatHandler is a slog.Handler for LimitRepeats.
type repeatHandler struct {
	slog.Handler
	repeats *repeats
}

// Handle implements slog.Handler.
func (h repeatHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn && h.repeats.hold(h.Handler, r) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h repeatHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return repeatHandler{h.Handler.WithAttrs(attrs), h.repeats}
}

// WithGroup implements slog.Handler.
func (h repeatHandler) WithGroup(name string) slog.Handler {
	return repeatHandler{h.Handler.WithGroup(name), h.repeats}
}

// hold keeps a record for later if its message was logged within the last minute.
func (r *repeats) hold(to slog.Handler, record slog.Record) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.waiting[record.Message]; w != nil {
		w.more, w.last, w.to = w.more+1, record.Clone(), to
		return true
	}
	w := &repeat{}
	r.waiting[record.Message] = w
	w.timer = time.AfterFunc(repeatInterval, func() { r.elapsed(record.Message, w) })
	return false
}

// elapsed logs the pending record of w, or forgets w if there is none.
func (r *repeats) elapsed(message string, w *repeat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting[message] != w {
		return // flush was faster
	}
	if w.more == 0 {
		delete(r.waiting, message)
		return
	}
	w.log()
	w.timer.Reset(repeatInterval)
}

// flush logs all pending records and forgets all messages.
func (r *repeats) flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for message, w := range r.waiting {
		w.timer.Stop()
		if w.more > 0 {
			w.log()
		}
		delete(r.waiting, message)
	}
}

// log logs the last record with the number of records since the previous line.
func (w *repeat) log() {
	w.last.AddAttrs(slog.Int("repeated", w.more))
	_ = w.to.Handle(context.Background(), w.last) // there is nowhere to report it
	w.more = 0
}
