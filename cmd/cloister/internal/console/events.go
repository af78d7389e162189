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
	// maxViewers limits the streams of live snapshots.
	maxViewers = 32
	// snapshotAge is the least interval of snapshots, which viewers of a page with the same credentials share.
	snapshotAge = time.Second
	// writeTime is the time limit of a write to a viewer.
	writeTime = 10 * time.Second
)

// A feed returns what a page repeats: the data of the template live of the page's file, and a channel that is closed when
// there may be more. Without a channel there is more after a while, and without either there will be none.
type feed struct {
	template string
	large    bool // as of a page
	read     func(*request) (data any, changed <-chan struct{}, over bool, err error)
}

// live holds the snapshots of the present viewers.
type live struct {
	mu        sync.Mutex
	viewers   map[string]int       // by page and credentials
	snapshots map[string]*snapshot // likewise
	total     int
}

// A snapshot is an event with the rendered state.
type snapshot struct {
	mu      sync.Mutex
	at      time.Time
	pause   time.Duration   // until the next one
	changed <-chan struct{} // as of a feed
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

// get returns the snapshot, renewed if it is old. Rendering takes a small part of the time of a processor: the longer it
// takes, the longer the snapshot stays.
func (s *snapshot) get(r *request, f *feed) (now snapshot, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= s.pause*9/10 {
		s.renew(r, f)
	}
	return snapshot{pause: s.pause, changed: s.changed, over: s.over, text: s.text}, s.err
}

// renew renders the snapshot. The caller holds s.mu.
func (s *snapshot) renew(r *request, f *feed) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), requestTime) // others share it
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
		if s.err = templates[f.template].ExecuteTemplate(&out, "live", data); s.err == nil {
			var text []byte
			text, s.err = json.Marshal(out.String())
			s.text = fmt.Appendf(nil, "data: %s\n\n", text)
		}
	}
	s.at = time.Now()
	s.pause = min(max(snapshotAge, 20*s.at.Sub(begun)), requestTime)
}

// identityOf returns a text that is equal for requests with the same credentials.
func identityOf(r *http.Request) string {
	who := r.Header.Get("Authorization")
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		who += "\n" + string(r.TLS.VerifiedChains[0][0].Raw)
	}
	return who
}

// events returns a handler that sends what a feed returns until it is over or the browser leaves.
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

// follow sends snapshots.
func (h *Handler) follow(w http.ResponseWriter, r *http.Request, s *snapshot, f *feed) {
	control := http.NewResponseController(w)
	for begun := false; ; begun = true {
		now, err := s.get(h.request(r), f)
		if err != nil && !begun {
			h.fail(w, r, err)
			return
		}
		if err != nil {
			return // the browser connects again
		}
		if !begun {
			w.Header().Set("Content-Type", "text/event-stream")
		}
		if now.over {
			now.text = append(slices.Clip(now.text), "event: over\ndata:\n\n"...)
		}
		_ = control.SetWriteDeadline(time.Now().Add(writeTime)) // a failure shows in the write
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
