// SPDX-License-Identifier: Apache-2.0

// Package soak puts a server under mixed load for a long time and looks for growth: of memory, descriptors, goroutines,
// mounts, control groups, disk and logs. It measures only while no request is in flight, so that current work does
// not count.
package soak

import (
	"context"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"golang.org/x/sync/errgroup"
)

// Config configures Run.
type Config struct {
	Salt     string
	Duration time.Duration
	Process  Process
	// Two connections to the same server: blobs and actions are sent at the same time.
	Blobs, Actions *load.Server
	// Progress, unless nil, is called after each round.
	Progress func(s Sample)
}

// interval is the time between the starts of two rounds. A longer round delays the next.
const interval = 3 * time.Second

// A Process is the server, as seen from outside.
type Process struct {
	PID     int
	Dir     string // of the store
	Log     string // the file that has its standard error
	Metrics string // URL of its metrics
}

// A Sample is the values of all Measures at one moment.
type Sample struct {
	At     time.Duration // since the start
	Values map[string]float64
}

// Run runs rounds of load for the duration and returns a sample of each. The first failed call or wrong answer ends it.
func Run(ctx context.Context, c Config) ([]Sample, error) {
	var samples []Sample
	start := time.Now()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for round := 0; ; round++ {
		salt := fmt.Sprintf("%s/%d", c.Salt, round)
		group, groupCtx := errgroup.WithContext(ctx)
		group.Go(func() error { return loadBlobs(groupCtx, c.Blobs, salt) })
		group.Go(func() error { return loadActions(groupCtx, c.Actions, salt) })
		if err := group.Wait(); err != nil {
			return samples, fmt.Errorf("round %d: %w", round+1, err)
		}
		values, err := c.Process.measure(ctx)
		if err != nil {
			return samples, err
		}
		samples = append(samples, Sample{time.Since(start), values})
		if c.Progress != nil {
			c.Progress(samples[round])
		}
		if time.Since(start) >= c.Duration {
			return samples, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return samples, context.Cause(ctx)
		}
	}
}

// loadBlobs writes 12 MiB of small blobs and one large one, reads everything and compares it.
func loadBlobs(ctx context.Context, s *load.Server, salt string) error {
	_, err := load.Run(ctx, load.Config{
		Salt: salt, Blobs: 500, Size: 4 << 10, Large: 8 << 20, Lookups: 1000, Parallel: 4, Rounds: 1,
	}, []*load.Server{s})
	return err
}

// loadActions executes actions of all kinds. Those that read share most of a tree that is new in each round, so that
// its directories are mounted for later actions and replace those of an earlier round.
func loadActions(ctx context.Context, s *load.Server, salt string) error {
	w := load.Default(load.Mixed)
	return s.Execute(ctx, &w, salt)
}
