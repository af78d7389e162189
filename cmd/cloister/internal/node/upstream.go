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
	probeEvery   = 10 * time.Second // how often an upstream is asked whether it answers
	probeLimit   = 10 * time.Second // how long that may take
	StartupProbe = 3 * time.Second  // how long a start waits for the first answer
)

// errNotProbed is why it is not known whether an upstream answers.
var errNotProbed = errors.New("it has not been asked yet")

// An upstream is what is behind the disk, and whether it answers.
type upstream struct {
	address   string
	instances cas.Instances
	check     func(ctx context.Context) error
	close     func() error

	mu     sync.Mutex
	reason error     // guarded by mu; nil while it answers
	since  time.Time // guarded by mu; when that began
}

// checkServer asks a server for a blob that it may have or not: a connection that nobody uses notices nothing.
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
	return nil // any other answer is one: the server may not have an instance of this name
}

// watch asks again and again whether the upstream answers, until ctx ends.
func (u *upstream) watch(ctx context.Context, log *slog.Logger) {
	for {
		u.Probe(ctx, probeLimit, log)
		select {
		case <-time.After(probeEvery):
		case <-ctx.Done():
			return
		}
	}
}

// Probe asks once whether the upstream answers.
func (u *upstream) Probe(ctx context.Context, limit time.Duration, log *slog.Logger) {
	probe, cancel := context.WithTimeout(ctx, limit)
	err := u.check(probe)
	cancel()
	if ctx.Err() == nil {
		u.note(err, log)
	}
}

// note remembers how a probe ended.
func (u *upstream) note(err error, log *slog.Logger) {
	u.mu.Lock()
	defer u.mu.Unlock()
	was := u.reason
	u.reason = err
	if (was == nil) != (err == nil) {
		u.since = time.Now()
	}
	switch {
	case err != nil && (was == nil || was == errNotProbed):
		log.Warn("upstream is down", "address", u.address, "err", err)
	case err == nil && was != nil:
		log.Info("upstream answers", "address", u.address)
	}
}

// Down says since when the upstream does not answer, and why, or nothing.
func (u *upstream) Down() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reason == nil {
		return ""
	}
	return fmt.Sprintf("upstream %s is down since %s: %v", u.address, u.since.UTC().Format(time.RFC3339), u.reason)
}
