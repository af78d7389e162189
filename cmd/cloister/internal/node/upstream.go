// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/sandbox"
)

const (
	// upstreamFullWindow exceeds the longest delay before a write that a full upstream rejected is retried.
	upstreamFullWindow = 11 * time.Minute

	probeInterval = 10 * time.Second
	probeTimeout  = 10 * time.Second
	// stateInterval is the interval in which the circuit breaker is observed.
	stateInterval = time.Second
	// StartupProbe is the timeout of the first probe, which delays the start.
	StartupProbe = 3 * time.Second
)

// errNotProbed is the reason before the first probe.
var errNotProbed = errors.New("not probed yet")

// An upstream is the store behind the local one, and whether it answers.
type upstream struct {
	address   string
	instances cas.Instances
	check     func(ctx context.Context) error
	breaker   func() error // why calls fail without a request, nil if they do not
	close     func() error
	calls     *upstreamCalls
	full      fullStore // of writes to the upstream

	mu     sync.Mutex
	reason error     // guarded by mu; why it does not answer, nil if it does
	since  time.Time // guarded by mu; when that changed
}

// A serverCheck checks an upstream server.
type serverCheck struct {
	client   *remote.Client
	instance string // that this node uses, below that of the address
	log      *slog.Logger
	written  atomic.Bool // the permission to write was checked
}

// check makes a call, because an idle connection does not notice a lost server. Until the server has answered once, it
// also stores a small blob, which requires the permission to write. Without an instance, a refusal is only logged: this
// node may have rights in those that clients name.
func (c *serverCheck) check(ctx context.Context) error {
	if err := c.client.Err(); err != nil {
		return err
	}
	s, err := c.client.Store(c.instance)
	if err != nil {
		return err
	}
	d := cas.SHA256.Sum(probeBlob)
	_, err = s.Missing(ctx, []cas.Digest{d})
	if err == nil && !c.written.Load() {
		err = s.Put(ctx, d, bytes.NewReader(probeBlob))
	}
	down, denied := c.client.Err(), errors.Is(err, cas.ErrDenied)
	switch {
	case down != nil:
		return down
	case unanswered(err), denied && s.Name() != "":
		return err
	}
	if !c.written.Swap(true) && denied {
		c.log.Warn("the upstream refuses blobs in the instance without a name; name the instance in --cas, "+
			"or grant the rights in every instance", "err", err)
	}
	return nil // the server answers, even if it lacks this instance
}

// probeBlob is the blob that a serverCheck looks for and stores.
var probeBlob = []byte("cloister")

// unanswered reports whether err means that the upstream has not answered.
func unanswered(err error) bool {
	return errors.Is(err, cas.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded)
}

// watch probes the upstream until ctx ends, at once when its circuit breaker has opened or closed.
func (u *upstream) watch(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(stateInterval)
	defer tick.Stop()
	for {
		open, begin := u.breaker() != nil, time.Now()
		u.Probe(ctx, probeTimeout, log)
		for time.Since(begin) < probeInterval && open == (u.breaker() != nil) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// Probe checks once whether the upstream answers.
func (u *upstream) Probe(ctx context.Context, limit time.Duration, log *slog.Logger) {
	probe, cancel := context.WithTimeout(ctx, limit)
	err := u.check(probe)
	cancel()
	if ctx.Err() == nil {
		u.note(err, log)
	}
}

// note records the result of a probe.
func (u *upstream) note(err error, log *slog.Logger) {
	u.mu.Lock()
	defer u.mu.Unlock()
	was := u.reason
	u.reason = err
	if (was == nil) != (err == nil) {
		u.since = time.Now()
	}
	switch {
	case err != nil && (was == nil || errors.Is(was, errNotProbed)):
		log.Warn("upstream is down", "address", u.address, "err", err)
	case err == nil && was != nil:
		log.Info("upstream answers", "address", u.address)
	}
}

// Notes returns the state of writes that wait for the upstream, one line each, unless they are few and recent.
func (n *Node) Notes() []string {
	if n.overlay == nil {
		return nil
	}
	var notes []string
	down := n.Upstream.Down()
	if down != "" && n.writePolicy == overlay.WriteBack { // otherwise it is a reason not to be ready
		notes = append(notes, down)
	}
	s := n.overlay.Stats()
	if text := n.Upstream.full.full(time.Now()); s.Pending > 0 && text != "" {
		notes = append(notes, fmt.Sprintf("upstream %s is %s", n.Upstream.address, text))
	}
	if s.Pending > 0 && (down != "" || time.Since(s.Oldest) > time.Minute) {
		notes = append(notes, fmt.Sprintf("%d blobs and results of %s wait to be sent to upstream %s, the oldest since %s",
			s.Pending, sandbox.Bytes(s.PendingBytes), n.Upstream.address, s.Oldest.UTC().Format(time.RFC3339)))
	}
	return notes
}

// FullHint returns what the operator can do when the store has reached a limit. Pending writes stay leased until they
// are sent.
func (n *Node) FullHint(l cas.Limit) string {
	hint := FullHint(l)
	if n.overlay == nil {
		return hint
	}
	bytes := n.overlay.Stats().PendingBytes
	switch {
	case bytes == 0:
		return hint
	case n.Upstream.full.full(time.Now()) != "":
		return fmt.Sprintf("free space in upstream %s, to which %s wait to be sent; otherwise %s", n.Upstream.address,
			sandbox.Bytes(bytes), hint)
	default:
		return fmt.Sprintf("%s; %s wait to be sent to upstream %s", hint, sandbox.Bytes(bytes), n.Upstream.address)
	}
}

// Down returns why and since when the upstream does not answer, or "".
func (u *upstream) Down() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reason == nil {
		return ""
	}
	return fmt.Sprintf("upstream %s is down since %s: %v", u.address, u.since.UTC().Format(time.RFC3339), u.reason)
}
