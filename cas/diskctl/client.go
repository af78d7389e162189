// SPDX-License-Identifier: Apache-2.0

package diskctl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// ErrNoStore says that a directory is not a store.
var ErrNoStore = errors.New("no store")

const (
	patience = 10 * time.Second // with a store that somebody holds who does not answer: it may be starting, or ending
	tryPause = 100 * time.Millisecond
)

// A Client reaches one store. It is safe for concurrent use; Open makes it, and whoever made it closes it.
type Client struct {
	cache  *disk.Cache // nil if another process holds the store
	conn   *grpc.ClientConn
	holder int
}

// Open reaches the store in dir: through the process that holds it, or, if none does, by opening it with this lease
// (disk.Config.Lease) and no budget. A directory that is no store is ErrNoStore, and nothing is made in it. A store
// that is held by a process that has not answered within ten seconds is disk.ErrLocked.
func Open(ctx context.Context, dir string, lease time.Duration) (*Client, error) {
	if _, err := os.Stat(filepath.Join(dir, "version")); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w in %s", ErrNoStore, dir)
	} else if err != nil {
		return nil, err
	}
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		c, silent := dial(asking, dir)
		if silent == nil {
			return c, nil
		}
		c, err := open(dir, lease)
		if !errors.Is(err, disk.ErrLocked) {
			return c, err
		}
		select {
		case <-time.After(tryPause):
		case <-asking.Done():
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, fmt.Errorf("%w (it does not answer at %s: %v)", err, filepath.Join(dir, socket), silent)
		}
	}
}

// open opens a store that nobody holds.
func open(dir string, lease time.Duration) (*Client, error) {
	// Nothing goes because this process knows no budget.
	cache, err := disk.Open(disk.Config{Dir: dir, MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt64, Lease: lease})
	if err != nil {
		return nil, err
	}
	return &Client{cache: cache}, nil
}

// dial reaches the process that holds a store, until ctx ends.
func dial(ctx context.Context, dir string) (*Client, error) {
	conn, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return connect(ctx, dir) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	c := &Client{conn: conn}
	if _, err := c.Stats(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if b, err := os.ReadFile(filepath.Join(dir, "lock")); err == nil {
		c.holder, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return c, nil
}

// Holder returns the process that holds the store and was asked, or 0 if it is this one.
func (c *Client) Holder() int { return c.holder }

// Close gives the store back, if this process opened it.
func (c *Client) Close() error {
	if c.cache != nil {
		return c.cache.Close()
	}
	return c.conn.Close()
}

func (c *Client) api() cloisterpb.StoreClient { return cloisterpb.NewStoreClient(c.conn) }

// failed returns the error of a call to the holder.
func (c *Client) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	st := status.Convert(err)
	if st.Code() == codes.Unavailable {
		return fmt.Errorf("the process that holds the store: %w: %s", cas.ErrUnavailable, printable(st.Message()))
	}
	return errors.New(printable(st.Message()))
}

// Stats is disk.Cache.Stats.
func (c *Client) Stats(ctx context.Context) (disk.Stats, error) {
	if c.cache != nil {
		return c.cache.Stats(), nil
	}
	m, err := c.api().Stat(ctx, &cloisterpb.StatRequest{})
	if err != nil {
		return disk.Stats{}, c.failed(ctx, err)
	}
	return toStats(m), nil
}

// Forget makes the result of an action absent, and reports whether there was one. A malformed name of an instance is
// cas.ErrInvalid.
func (c *Client) Forget(ctx context.Context, instance string, action cas.Digest) (bool, error) {
	if c.cache != nil {
		return forget(ctx, c.cache, instance, action)
	}
	m, err := c.api().Forget(ctx, &cloisterpb.ForgetRequest{Instance: instance, Action: action.String()})
	if err != nil {
		return false, c.failed(ctx, err)
	}
	return m.Recorded, nil
}

// Collect is disk.Cache.Collect. If ctx ends while another process collects, the report is empty.
func (c *Client) Collect(ctx context.Context, o disk.CollectOptions) (disk.CollectReport, error) {
	if c.cache != nil {
		return c.cache.Collect(ctx, o)
	}
	m, err := c.api().Collect(ctx, &cloisterpb.CollectRequest{
		MaxBytes: o.MaxBytes, OlderThan: durationpb.New(o.OlderThan), DryRun: o.DryRun,
	})
	if err != nil {
		return disk.CollectReport{}, c.failed(ctx, err)
	}
	return toCollect(m), nil
}

// Verify is disk.Cache.Verify. It interrupts a scrub, and goes on where that is.
func (c *Client) Verify(ctx context.Context, o disk.VerifyOptions) (disk.VerifyReport, error) {
	if c.cache != nil {
		return c.cache.Verify(ctx, o)
	}
	var report disk.VerifyReport
	stream, err := c.api().Verify(ctx, &cloisterpb.VerifyRequest{BytesPerSecond: o.BytesPerSecond, Restart: o.Restart})
	if err != nil {
		return report, c.failed(ctx, err)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return report, c.failed(ctx, err)
		}
		damaged := report.Damaged
		if report, err = toVerify(m); err != nil {
			return report, err
		}
		report.Damaged = append(damaged, report.Damaged...)
		if m.Done {
			return report, nil
		}
		if o.Progress != nil {
			o.Progress(report)
		}
	}
}

// Quarantine returns where the store in dir keeps the bytes of a blob that it found damaged, or "" if it kept none.
func Quarantine(dir string, d cas.Digest) string {
	path := filepath.Join(dir, "quarantine", fmt.Sprintf("%s-%d", d.Hash(), d.Size()))
	if _, err := os.Lstat(path); err != nil {
		return ""
	}
	return path
}
