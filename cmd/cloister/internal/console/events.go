// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	// maxViewers limits the number of concurrent event streams.
	maxViewers = 32
	// snapshotAge is the minimum interval between snapshots. Viewers of a page with the same credentials share them.
	snapshotAge = time.Second
	// writeTime is the timeout of a write to a viewer.
	writeTime = 10 * time.Second
)

// A feed is the source of the live part of a page.
type feed struct {
	template string // file whose template "live" renders the data
	large    bool   // counts towards the limit of large pages
	// read returns the current data and a channel that is closed when it may have changed. If the channel is nil, viewers
	// poll. over means that this data is the last.
	read func(*request) (data any, changed <-chan struct{}, over bool, err error)
}

// live holds the snapshots of the connected viewers.
type live struct {
	mu        sync.Mutex
	viewers   map[string]int       // number by page and credentials
	snapshots map[string]*snapshot // by page and credentials
	total     int
}

// A snapshot is a server-sent event with the rendered data of a feed.
type snapshot struct {
	mu      sync.Mutex
	at      time.Time
	pause   time.Duration   // until the next one
	changed <-chan struct{} // see feed
	over    bool
	text    []byte
	err     error
}

// enter counts a viewer, or returns nil if there are too many.
func (l *live) enter(who string) *snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total == maxViewers {
		return nil
	}
	if l.viewers == nil {
		l.viewers, l.snapshots = map[string]int{}, map[string]*snapshot{}
	}
	l.total++
	if l.viewers[who]++; l.viewers[who] == 1 {
		l.snapshots[who] = &snapshot{}
	}
	return l.snapshots[who]
}

func (l *live) leave(who string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total--
	if l.viewers[who]--; l.viewers[who] == 0 {
		delete(l.viewers, who)
		delete(l.snapshots, who)
	}
}

// get returns a copy of the snapshot, which it renews first if it is old. A snapshot that takes longer to render is
// used for longer, so that rendering takes a small part of a processor's time.
func (s *snapshot) get(r *request, f *feed) (now snapshot, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= s.pause*9/10 {
		s.renew(r, f)
	}
	return snapshot{pause: s.pause, changed: s.changed, over: s.over, text: s.text}, s.err
}

// renew renders the snapshot again. The caller holds s.mu.
func (s *snapshot) renew(r *request, f *feed) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), requestTime) // other viewers wait for it
	defer cancel()
	r.Request = r.WithContext(ctx)
	if f.large {
		leave, err := r.h.enterLarge(ctx)
		if s.err = err; err != nil {
			return
		}
		defer leave()
	}
	begun := time.Now()
	var data any
	data, s.changed, s.over, s.err = f.read(r)
	if s.err == nil {
		var out buffer
		if s.err = templates()[f.template].ExecuteTemplate(&out, "live", data); s.err == nil {
			var text []byte
			text, s.err = json.Marshal(out.String())
			s.text = fmt.Appendf(nil, "data: %s\n\n", text)
		}
	}
	s.at = time.Now()
	s.pause = min(max(snapshotAge, 20*s.at.Sub(begun)), requestTime)
}

// identityOf returns a key that requests with the same credentials share.
func identityOf(r *http.Request) string {
	who := r.Header.Get("Authorization")
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		who += "\n" + string(r.TLS.VerifiedChains[0][0].Raw)
	}
	return who
}

// events returns a handler that sends the snapshots of a feed until the feed is over or the browser disconnects.
func (h *Handler) events(f feed) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			return
		}
		who := r.URL.RequestURI() + "\n" + identityOf(r)
		s := h.live.enter(who)
		if s == nil {
			http.Error(w, "too many viewers", http.StatusServiceUnavailable)
			return
		}
		defer h.live.leave(who)
		h.follow(w, r, s, &f)
	}
}

// follow sends the snapshots of f.
func (h *Handler) follow(w http.ResponseWriter, r *http.Request, s *snapshot, f *feed) {
	control := http.NewResponseController(w)
	for begun := false; ; begun = true {
		now, err := s.get(h.request(r), f)
		if err != nil && !begun {
			h.fail(w, r, err)
			return
		}
		if err != nil {
			return // the browser reconnects
		}
		if !begun {
			w.Header().Set("Content-Type", "text/event-stream")
		}
		if now.over {
			now.text = append(slices.Clip(now.text), "event: over\ndata:\n\n"...)
		}
		_ = control.SetWriteDeadline(time.Now().Add(writeTime)) // if it fails, so does the write
		if _, err := w.Write(now.text); err != nil || control.Flush() != nil || now.over {
			return
		}
		pause := time.NewTimer(now.pause)
		select {
		case <-pause.C:
		case <-r.Context().Done():
			pause.Stop()
			return
		}
		if now.changed == nil {
			continue
		}
		select {
		case <-now.changed:
		case <-r.Context().Done():
			return
		}
	}
}
