// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// readiness is whether a server should be given work. One that is not ready serves what it can all the same.
type readiness struct {
	draining atomic.Bool
	store    fullness
	upstream *upstream // nil if writes succeed without one
	// scheduler says why no actions come from there, "" if they do; nil without one.
	scheduler func() string
	// workers says why no action is given to any worker, "" if some are; nil where none can be drained.
	workers func() string
}

// why returns a line for each reason not to be ready.
func (r *readiness) why() []string {
	var reasons []string
	if r.draining.Load() {
		reasons = append(reasons, "draining: no new actions are taken")
	}
	reasons = append(reasons, r.unable()...)
	for _, says := range []func() string{r.scheduler, r.workers} {
		if says == nil {
			continue
		}
		if text := says(); text != "" {
			reasons = append(reasons, text)
		}
	}
	return reasons
}

// unable returns a line for each reason why actions cannot be executed, or their outputs not kept.
func (r *readiness) unable() []string {
	var reasons []string
	if text := r.store.full(time.Now()); text != "" {
		reasons = append(reasons, text)
	}
	if r.upstream != nil {
		if text := r.upstream.down(); text != "" {
			reasons = append(reasons, text)
		}
	}
	return reasons
}

// allDrained says since when and why no worker is given actions, "" if one is, or would be if it joined: actions that wait
// are why an autoscaler starts some.
func allDrained(work *queue.Queue) string {
	since, why := work.Drained()
	if since.IsZero() {
		return ""
	}
	text := "every worker is drained since " + since.UTC().Format(time.RFC3339)
	if why != "" {
		text += ": " + why
	}
	return printable.Text(text) + "; cloister undrain gives them actions again"
}

// ServeHTTP answers 200, or 503 with the reasons.
func (r *readiness) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	reasons := r.why()
	if len(reasons) == 0 {
		io.WriteString(w, "ready\n")
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, text := range reasons {
		fmt.Fprintln(w, text)
	}
}

// tell keeps the health of the server as a whole up to date until ctx ends. The services stay as they are.
func (r *readiness) tell(ctx context.Context, h *health.Server) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		state := healthpb.HealthCheckResponse_SERVING
		if len(r.why()) > 0 {
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

// fullFor is for how long a write that found no room says something.
const fullFor = time.Minute

// fullness remembers that writes found no room.
type fullness struct {
	mu    sync.Mutex
	since time.Time // guarded by mu; of the first of them
	last  time.Time // guarded by mu
	text  string    // guarded by mu; of the last
}

// note looks at how a write ended, and returns that.
func (f *fullness) note(err error) error {
	if errors.Is(err, cas.ErrFull) {
		now := time.Now()
		f.mu.Lock()
		defer f.mu.Unlock()
		if now.Sub(f.last) > fullFor {
			f.since = now
		}
		f.last, f.text = now, err.Error()
	}
	return err
}

// full says since when there is no room, and why, or nothing.
func (f *fullness) full(now time.Time) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last.IsZero() || now.Sub(f.last) > fullFor {
		return ""
	}
	return fmt.Sprintf("full since %s: %s", f.since.UTC().Format(time.RFC3339), f.text)
}

// instances returns next with writes that f is told of. What comes near from an upstream to be read is no write: next
// is what clients see. That there is no room for a blob of more than most bytes says nothing. Stores of next are a
// cas.Batcher, a cas.Filer, a cas.Locator and a cas.Splicer.
func (f *fullness) instances(next cas.Instances, most int64) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil {
			return nil, err
		}
		s := noting{in.Store.(filing), in.Actions, f, most}
		wrapped := &cas.Instance{Name: in.Name, Store: s, Actions: s, Functions: in.Functions}
		if fetcher, ok := in.Store.(cas.Fetcher); ok {
			wrapped.Store = struct {
				noting
				cas.Fetcher
			}{s, fetcher}
		}
		return wrapped, nil
	}
}

// filing is what a store on a disk is able to, also in front of another one.
type filing interface {
	cas.Store
	cas.Batcher
	cas.Filer
	cas.Locator
	cas.Splicer
}

// noting is a store whose writes are noted.
type noting struct {
	filing
	cas.ActionCache
	full *fullness
	most int64
}

func (s noting) note(d cas.Digest, err error) error {
	if d.Size() > s.most {
		return err
	}
	return s.full.note(err)
}

func (s noting) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	return s.note(d, s.filing.Put(ctx, d, r))
}

func (s noting) Splice(ctx context.Context, d cas.Digest, m cas.ChunkList) error {
	return s.note(d, s.filing.Splice(ctx, d, m))
}

func (s noting) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := s.filing.PutAll(ctx, blobs)
	for i, err := range errs {
		errs[i] = s.note(blobs[i].Digest, err)
	}
	return errs
}

func (s noting) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	return s.full.note(s.ActionCache.Record(ctx, action, r))
}
