// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
)

const (
	probeInterval = 10 * time.Second
	probeTimeout  = 10 * time.Second
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
	close     func() error

	mu     sync.Mutex
	reason error     // guarded by mu; why it does not answer, nil if it does
	since  time.Time // guarded by mu; when that changed
}

// checkServer makes a call, because an idle connection does not notice a lost server.
func checkServer(ctx context.Context, c *remote.Client) error {
	if err := c.Err(); err != nil {
		return err
	}
	s, err := c.Store("")
	if err != nil {
		return err
	}
	_, err = s.Missing(ctx, []cas.Digest{cas.SHA256.Sum([]byte("cloister"))})
	if errors.Is(err, cas.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil // the server answers, even if it lacks this instance
}

// watch probes the upstream until ctx ends.
func (u *upstream) watch(ctx context.Context, log *slog.Logger) {
	for {
		u.Probe(ctx, probeTimeout, log)
		select {
		case <-time.After(probeInterval):
		case <-ctx.Done():
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

// Down returns why and since when the upstream does not answer, or "".
func (u *upstream) Down() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reason == nil {
		return ""
	}
	return fmt.Sprintf("upstream %s is down since %s: %v", u.address, u.since.UTC().Format(time.RFC3339), u.reason)
}
