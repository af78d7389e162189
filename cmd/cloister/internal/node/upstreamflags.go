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
	Instance                  string         // in which checks of Server read and write
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
	u := &upstream{
		address: f.Server + f.Bucket, calls: newUpstreamCalls(log), full: fullStore{window: upstreamFullWindow},
		reason: errNotProbed, since: time.Now(),
	}
	switch {
	case f.Server != "":
		options, err := f.Identity.DialOptions(f.Server)
		if err != nil {
			return nil, err
		}
		refused := refusal{f.Identity.Sources()}
		options = slices.Concat(options, traced.DialOptions(), refused.dialOptions(),
			[]grpc.DialOption{grpc.WithStatsHandler(callStats{u.calls, refused})})
		c, err := remote.New(f.Server, options...)
		if err != nil {
			return nil, exit.New(exit.Usage, fmt.Errorf("--cas: %w", err))
		}
		u.instances, u.breaker, u.close = c.Instance, c.Err, c.Close
		u.check = (&serverCheck{client: c, instance: f.Instance, log: log}).check
		// Clients are offered what the upstream supports, so wait for its capabilities.
		probe, cancel := context.WithTimeout(ctx, StartupProbe)
		defer cancel()
		select {
		case <-c.Probed():
			err = u.check(probe)
		case <-probe.Done():
		}
		if err := f.started("--cas", err, true); err != nil {
			return nil, errors.Join(err, c.Close())
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
	if err := f.started("--store", c.Check(ctx), f.WriteMode == "back"); err != nil {
		return errors.Join(err, c.Close())
	}
	return nil
}

// started returns the error with which this node does not start after the first check of its upstream, or nil. If
// maySilent, it may start without an answer.
func (f *UpstreamFlags) started(flag string, err error, maySilent bool) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, object.ErrNoBucket): // the server answered, although the error may also be cas.ErrUnavailable
	case unanswered(err) && maySilent:
		return nil
	case unanswered(err):
		return exit.New(exit.Unreachable, fmt.Errorf("%s: %w", flag, err))
	}
	return exit.New(exit.Environment, fmt.Errorf("%s: %w", flag, err))
}
