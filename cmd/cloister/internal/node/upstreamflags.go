// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/spf13/cobra"
)

// UpstreamFlags select the upstream of the local store.
type UpstreamFlags struct {
	Server, Bucket, WriteMode string
	Identity                  identity.Flags // at Server
}

// Register adds the flags.
func (f *UpstreamFlags) Register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.Server, "cas", "", "upstream server with a store and an action cache: grpc://HOST:PORT[/INSTANCE] or grpcs://")
	fs.StringVar(&f.Bucket, "store", "", "upstream bucket: s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]")
	fs.StringVar(&f.WriteMode, "cas-write", "through", "time of upstream writes: through, before the client is answered, or back, later")
	f.Identity.Register(fs, "cas-")
	cmd.MarkFlagsMutuallyExclusive("cas", "store")
}

// policy validates the flags and returns the write policy.
func (f *UpstreamFlags) policy(cmd *cobra.Command) (overlay.Policy, error) {
	switch {
	case cmd.Flags().Changed("cas-write") && f.Server == "" && f.Bucket == "":
		return 0, errors.New("--cas-write needs --cas or --store")
	case f.Server == "" && slices.ContainsFunc(f.Identity.Names(), cmd.Flags().Changed):
		return 0, fmt.Errorf("--%s need --cas", strings.Join(f.Identity.Names(), ", --"))
	case f.WriteMode == "through":
		return overlay.WriteThrough, nil
	case f.WriteMode == "back":
		return overlay.WriteBack, nil
	}
	return 0, fmt.Errorf("--cas-write %q: write through or back", f.WriteMode)
}

// open connects to the upstream, or returns nil if there is none. The caller closes it. A bucket must be reachable, a
// server need not be yet.
func (f *UpstreamFlags) open(ctx context.Context, log *slog.Logger) (*upstream, error) {
	u := &upstream{address: f.Server + f.Bucket, reason: errNotProbed, since: time.Now()}
	switch {
	case f.Server != "":
		options, err := f.Identity.DialOptions(f.Server)
		if err != nil {
			return nil, err
		}
		c, err := remote.New(f.Server, options...)
		if err != nil {
			return nil, exit.New(exit.Usage, fmt.Errorf("--cas: %w", err))
		}
		u.instances, u.close = c.Instance, c.Close
		u.check = func(ctx context.Context) error { return checkServer(ctx, c) }
		// Clients are offered what the upstream supports, so wait for its capabilities.
		select {
		case <-c.Probed():
		case <-time.After(StartupProbe):
		}
	case f.Bucket != "":
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		c, err := object.Open(ctx, object.Config{URL: f.Bucket, Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob in the bucket", "digest", d.String(), "instance", instance, "where", where)
		}})
		switch {
		case errors.Is(err, object.ErrURL):
			return nil, exit.New(exit.Usage, fmt.Errorf("--store: %w", err))
		case errors.Is(err, cas.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
			return nil, exit.New(exit.Unreachable, fmt.Errorf("--store: %w", err))
		case err != nil:
			return nil, exit.New(exit.Environment, fmt.Errorf("--store: %w", err))
		}
		u.instances, u.check, u.close = c.Instance, c.Check, c.Close
	default:
		return nil, nil
	}
	return u, nil
}
