// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"
)

const (
	// maxViewers limits the streams of live snapshots.
	maxViewers = 32
	// snapshotAge is the interval of snapshots, which viewers with the same credentials share.
	snapshotAge = time.Second
	// writeTime is the time limit of a write to a viewer.
	writeTime = 10 * time.Second
)

// live holds the snapshots of the present viewers.
type live struct {
	mu        sync.Mutex
	viewers   map[string]int       // by credentials
	snapshots map[string]*snapshot // likewise
	total     int
}

// A snapshot is an event with the rendered state.
type snapshot struct {
	mu   sync.Mutex
	at   time.Time
	text []byte
	err  error
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

// get returns the snapshot, renewed if it is old.
func (s *snapshot) get(r *request) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) < snapshotAge*9/10 {
		return s.text, s.err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), writeTime) // others share it
	defer cancel()
	r.Request = r.WithContext(ctx)
	state, err := r.state()
	if s.at, s.err = time.Now(), err; err != nil {
		return nil, err
	}
	var out buffer
	if s.err = templates["overview.html"].ExecuteTemplate(&out, "live", newLive(state)); s.err == nil {
		var text []byte
		text, s.err = json.Marshal(out.String())
		s.text = fmt.Appendf(nil, "data: %s\n\n", text)
	}
	return s.text, s.err
}

// identityOf returns a text that is equal for requests with the same credentials.
func identityOf(r *http.Request) string {
	who := r.Header.Get("Authorization")
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		who += "\n" + string(r.TLS.VerifiedChains[0][0].Raw)
	}
	return who
}

// events sends the state of the server every second until the browser leaves.
func (h *Handler) events(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodHead {
		return
	}
	who := identityOf(r)
	s := h.live.enter(who)
	if s == nil {
		http.Error(w, "too many viewers", http.StatusServiceUnavailable)
		return
	}
	defer h.live.leave(who)
	tick := time.NewTicker(snapshotAge)
	defer tick.Stop()
	control := http.NewResponseController(w)
	for begun := false; ; begun = true {
		text, err := s.get(h.request(r))
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
		_ = control.SetWriteDeadline(time.Now().Add(writeTime)) // a failure shows in the write
		if _, err := w.Write(text); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}
