// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/spf13/cobra"
)

const (
	probeEvery = 10 * time.Second // how often an upstream is asked whether it answers
	probeLimit = 10 * time.Second // how long that may take
	askedLimit = 3 * time.Second  // how long a start waits for the first answer
)

// far is the flags that say what is behind the disk.
type far struct {
	cas, store, write string
	who               identity // at cas
}

func (f *far) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.cas, "cas", "", "another server whose store and action cache are behind this one: grpc://HOST:PORT[/INSTANCE] or grpcs://")
	fs.StringVar(&f.store, "store", "", "a bucket behind this store: s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]")
	fs.StringVar(&f.write, "cas-write", "through", "when what is behind has what is written: through, before the client is answered; back, later")
	f.who.register(fs, "cas-")
	cmd.MarkFlagsMutuallyExclusive("cas", "store")
}

// policy returns what is wrong with the flags, before anything is made.
func (f *far) policy(cmd *cobra.Command) (overlay.Policy, error) {
	switch {
	case cmd.Flags().Changed("cas-write") && f.cas == "" && f.store == "":
		return 0, errors.New("--cas-write goes with --cas or --store, of which none is given")
	case f.cas == "" && slices.ContainsFunc(f.who.flags(), cmd.Flags().Changed):
		return 0, fmt.Errorf("--%s go with --cas, which is not given", strings.Join(f.who.flags(), ", --"))
	case f.write == "through":
		return overlay.WriteThrough, nil
	case f.write == "back":
		return overlay.WriteBack, nil
	}
	return 0, fmt.Errorf("--cas-write %q: there are through and back", f.write)
}

// errUnasked is why it is not known whether an upstream answers.
var errUnasked = errors.New("it has not been asked yet")

// An upstream is what is behind the disk, and whether it answers.
type upstream struct {
	address   string
	instances cas.Instances
	check     func(ctx context.Context) error
	close     func() error

	mu    sync.Mutex
	why   error     // guarded by mu; nil while it answers
	since time.Time // guarded by mu; when that began
}

// open reaches what the flags name; it returns nil if they name nothing. The caller closes what it returns. A server
// need not be there yet, a bucket must be.
func (f *far) open(ctx context.Context, log *slog.Logger) (*upstream, error) {
	u := &upstream{address: f.cas + f.store, why: errUnasked, since: time.Now()}
	switch {
	case f.cas != "":
		options, err := f.who.options(f.cas)
		if err != nil {
			return nil, err
		}
		c, err := remote.New(f.cas, options...)
		if err != nil {
			return nil, newExit(exitUsage, fmt.Errorf("--cas: %w", err))
		}
		u.instances, u.close = c.Instance, c.Close
		u.check = func(ctx context.Context) error { return checkServer(ctx, c) }
		// What is advertised to clients is what the server serves.
		select {
		case <-c.Asked():
		case <-time.After(askedLimit):
		}
	case f.store != "":
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		c, err := object.Open(ctx, object.Config{URL: f.store, Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob in the bucket", "digest", d.String(), "instance", instance, "where", where)
		}})
		switch {
		case errors.Is(err, object.ErrURL):
			return nil, newExit(exitUsage, fmt.Errorf("--store: %w", err))
		case errors.Is(err, cas.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
			return nil, newExit(exitConnect, fmt.Errorf("--store: %w", err))
		case err != nil:
			return nil, newExit(exitEnvironment, fmt.Errorf("--store: %w", err))
		}
		u.instances, u.check, u.close = c.Instance, c.Check, c.Close
	default:
		return nil, nil
	}
	return u, nil
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
		u.ask(ctx, probeLimit, log)
		select {
		case <-time.After(probeEvery):
		case <-ctx.Done():
			return
		}
	}
}

// ask asks once whether the upstream answers.
func (u *upstream) ask(ctx context.Context, limit time.Duration, log *slog.Logger) {
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
	was := u.why
	u.why = err
	if (was == nil) != (err == nil) {
		u.since = time.Now()
	}
	switch {
	case err != nil && (was == nil || was == errUnasked):
		log.Warn("upstream is down", "address", u.address, "err", err)
	case err == nil && was != nil:
		log.Info("upstream answers", "address", u.address)
	}
}

// down says since when the upstream does not answer, and why, or nothing.
func (u *upstream) down() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.why == nil {
		return ""
	}
	return fmt.Sprintf("upstream %s is down since %s: %v", u.address, u.since.UTC().Format(time.RFC3339), u.why)
}

// journalOf returns the file in which a store remembers what is still to be written to its upstream.
func journalOf(dir string) string { return filepath.Join(dir, "upstream.journal") }

// unsent returns how many blobs and results stand in the journal of a store that nobody writes.
func unsent(dir string) (int, error) {
	data, err := os.ReadFile(journalOf(dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	pending := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		switch verb, entry, _ := strings.Cut(line, " "); verb {
		case "add":
			pending[entry] = true
		case "done":
			delete(pending, entry)
		}
	}
	return len(pending), nil
}
