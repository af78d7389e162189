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
	"github.com/cloister-build/cloister/cmd/cloister/internal/tracing"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
)

// UpstreamFlags select the upstream of the local store.
type UpstreamFlags struct {
	Server, Bucket, WriteMode string
	Identity                  identity.Flags // at Server
	// RenewInterval is overlay.Config.UpstreamInterval.
	RenewInterval time.Duration
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

// open connects to the upstream, or returns nil if there is none. The caller closes it. A server need not be reachable
// yet, nor need a bucket if it is written later.
func (f *UpstreamFlags) open(ctx context.Context, log *slog.Logger, traced *tracing.Tracing) (*upstream, error) {
	u := &upstream{address: f.Server + f.Bucket, calls: newUpstreamCalls(log), reason: errNotProbed, since: time.Now()}
	switch {
	case f.Server != "":
		options, err := f.Identity.DialOptions(f.Server)
		if err != nil {
			return nil, err
		}
		options = append(append(options, traced.DialOptions()...), grpc.WithStatsHandler(callStats{u.calls}))
		c, err := remote.New(f.Server, options...)
		if err != nil {
			return nil, exit.New(exit.Usage, fmt.Errorf("--cas: %w", err))
		}
		u.instances, u.breaker, u.close = c.Instance, c.Err, c.Close
		u.check = func(ctx context.Context) error { return checkServer(ctx, c) }
		// Clients are offered what the upstream supports, so wait for its capabilities.
		select {
		case <-c.Probed():
		case <-time.After(StartupProbe):
		}
	case f.Bucket != "":
		if err := f.openBucket(ctx, u, log, traced); err != nil {
			return nil, err
		}
	default:
		return nil, nil
	}
	return u, nil
}

// openBucket connects u to the bucket and checks it.
func (f *UpstreamFlags) openBucket(ctx context.Context, u *upstream, log *slog.Logger, traced *tracing.Tracing) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c, err := object.New(ctx, object.Config{
		URL: f.Bucket, Observe: func(ctx context.Context, c object.Call) {
			u.calls.observe(c)
			traced.BucketCall(ctx, c)
		},
		Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob in the bucket", "digest", d.String(), "instance", instance, "where", where)
		},
	})
	if errors.Is(err, object.ErrURL) {
		return exit.New(exit.Usage, fmt.Errorf("--store: %w", err))
	} else if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("--store: %w", err))
	}
	u.instances, u.check, u.breaker, u.close = c.Instance, c.Check, c.Err, c.Close
	err = c.Check(ctx)
	silent := errors.Is(err, cas.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded)
	switch {
	case err == nil, silent && f.WriteMode == "back":
		return nil
	case silent:
		err = exit.New(exit.Unreachable, fmt.Errorf("--store: %w", err))
	default:
		err = exit.New(exit.Environment, fmt.Errorf("--store: %w", err))
	}
	return errors.Join(err, c.Close())
}
