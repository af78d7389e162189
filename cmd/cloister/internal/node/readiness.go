// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// CheckReady returns why no action can be executed now, nil if one can.
func (n *Node) CheckReady() error {
	if reasons := n.Ready.executionReasons(); len(reasons) > 0 {
		return errors.New(strings.Join(reasons, "; "))
	}
	return nil
}

// readiness tracks whether a server should get work. A server that is not ready still serves what it can.
type readiness struct {
	Draining atomic.Bool
	writable func() error // of the store; nil without one
	store    fullStore
	upstream *upstream       // nil if writes succeed without one
	notes    func() []string // what does not make the server unready
	// Scheduler returns why the scheduler sends no actions, "" if it does; nil without a scheduler.
	Scheduler func() string
	// Callers returns why the callers file is not in force, "" if it is, and whether calls are refused until it is; nil
	// without such a file.
	Callers func() (text string, closed bool)
	// Certificate returns why the certificate in the files is not in use, "" if it is; nil without TLS. It does not make
	// the server unready: the previous certificate stays in use.
	Certificate func() string
	// Workers returns why no worker takes actions, "" if some do; nil if workers cannot be drained.
	Workers func() string
}

// Reasons returns why the server is not ready, one line each.
func (r *readiness) Reasons() []string {
	var reasons []string
	if r.Draining.Load() {
		reasons = append(reasons, "draining: taking no new actions")
	}
	reasons = append(reasons, r.executionReasons()...)
	if text, closed := r.callers(); closed {
		reasons = append(reasons, text)
	}
	for _, reason := range []func() string{r.Scheduler, r.Workers} {
		if reason == nil {
			continue
		}
		if text := reason(); text != "" {
			reasons = append(reasons, text)
		}
	}
	return reasons
}

func (r *readiness) callers() (text string, closed bool) {
	if r.Callers == nil {
		return "", false
	}
	return r.Callers()
}

// executionReasons returns why actions cannot be executed or their outputs not stored, one line each.
func (r *readiness) executionReasons() []string {
	var reasons []string
	if r.writable != nil {
		if err := r.writable(); err != nil {
			reasons = append(reasons, err.Error())
		}
	}
	if text := r.store.full(time.Now()); text != "" {
		reasons = append(reasons, text)
	}
	if r.upstream != nil {
		if text := r.upstream.Down(); text != "" {
			reasons = append(reasons, text)
		}
	}
	return reasons
}

// ServeHTTP answers 200, or 503 with the reasons.
func (r *readiness) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	reasons := r.Reasons()
	if len(reasons) == 0 {
		reasons = []string{"ready"}
	} else {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	if text, closed := r.callers(); text != "" && !closed {
		reasons = append(reasons, text)
	}
	if r.Certificate != nil {
		if text := r.Certificate(); text != "" {
			reasons = append(reasons, text)
		}
	}
	if r.notes != nil {
		reasons = append(reasons, r.notes()...)
	}
	for _, text := range reasons {
		fmt.Fprintln(w, text)
	}
}

// ReportHealth keeps the overall gRPC health status up to date until ctx ends.
func (r *readiness) ReportHealth(ctx context.Context, h *health.Server) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		state := healthpb.HealthCheckResponse_SERVING
		if len(r.Reasons()) > 0 {
			state = healthpb.HealthCheckResponse_NOT_SERVING
		}
		h.SetServingStatus("", state)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// fullWindow is the time for which a failed write marks the store as full.
const fullWindow = time.Minute

// fullStore remembers writes that failed because the store or its upstream was full.
type fullStore struct {
	window time.Duration            // 0 means fullWindow
	hint   func(l cas.Limit) string // nil means FullHint

	mu    sync.Mutex
	since time.Time // guarded by mu; of the first
	last  time.Time // guarded by mu
	text  string    // guarded by mu; error of the last
}

// note records the result of a write, and returns it. A blob above the upstream's size limit does not mean that the
// upstream is full.
func (f *fullStore) note(err error) error {
	if !errors.Is(err, cas.ErrFull) && !errors.Is(err, cas.ErrUpstreamFull) || errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	now, text := time.Now(), err.Error()
	if full, ok := errors.AsType[*cas.FullError](err); ok {
		hint := FullHint
		if f.hint != nil {
			hint = f.hint
		}
		text += "; " + hint(full.Limit)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Sub(f.last) > cmp.Or(f.window, fullWindow) {
		f.since = now
	}
	f.last, f.text = now, text
	return err
}

// full returns since when and why the store is full, or "".
func (f *fullStore) full(now time.Time) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last.IsZero() || now.Sub(f.last) > cmp.Or(f.window, fullWindow) {
		return ""
	}
	return fmt.Sprintf("full since %s: %s", f.since.UTC().Format(time.RFC3339), f.text)
}

// instances returns next with stores whose writes f observes. Fetches from an upstream are not observed: next is what
// clients see. A failed write of a blob larger than most bytes does not mean that the store is full.
func (f *fullStore) instances(next cas.Instances, most int64) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil {
			return nil, err
		}
		s := fullNotingStore{in.Store, in.Actions, f, most}
		wrapped := &cas.Instance{Name: in.Name, Store: s, Actions: s, Functions: in.Functions}
		if splicer, ok := cas.As[cas.Splicer](in.Store); ok {
			wrapped.Store = fullNotingSplicer{s, splicer}
		}
		return wrapped, nil
	}
}

// A fullNotingStore reports the results of its writes to a fullStore.
type fullNotingStore struct {
	cas.Store
	cas.ActionCache
	full *fullStore
	most int64
}

// Unwrap implements cas.Unwrapper.
func (s fullNotingStore) Unwrap() cas.Store { return s.Store }

func (s fullNotingStore) note(d cas.Digest, err error) error {
	if d.Size() > s.most {
		return err
	}
	return s.full.note(err)
}

func (s fullNotingStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	return s.note(d, s.Store.Put(ctx, d, r))
}

func (s fullNotingStore) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := cas.PutAll(ctx, s.Store, blobs)
	for i, err := range errs {
		errs[i] = s.note(blobs[i].Digest, err)
	}
	return errs
}

// fullNotingSplicer is a fullNotingStore with chunk lists.
type fullNotingSplicer struct {
	fullNotingStore
	cas.Splicer
}

func (s fullNotingSplicer) Splice(ctx context.Context, d cas.Digest, m cas.ChunkList) error {
	return s.note(d, s.Splicer.Splice(ctx, d, m))
}

func (s fullNotingStore) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	return s.full.note(s.ActionCache.Record(ctx, action, r))
}

// CheckUpstream returns why the upstream does not answer: inputs would be absent, and outputs lost.
func (n *Node) CheckUpstream() error {
	if n.Ready.upstream != nil {
		if text := n.Ready.upstream.Down(); text != "" {
			return errors.New(text)
		}
	}
	return nil
}
