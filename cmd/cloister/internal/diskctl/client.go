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
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/unixsocket"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

var (
	// ErrNoStore reports that a directory is not a store.
	ErrNoStore = errors.New("no store")
	// ErrNoServer reports that no process has a store open.
	ErrNoServer = errors.New("no server")
)

// openTimeout is the time that Open waits for the process that has the store open. It may be starting or exiting.
var openTimeout = 10 * time.Second

const retryInterval = 100 * time.Millisecond

// A Client gives access to a store. It is safe for concurrent use. The caller of Open closes it.
type Client struct {
	cache  *disk.Cache // nil if another process has the store open
	conn   *grpc.ClientConn
	holder int
	// explain converts errors of calls, except for the end of their contexts.
	explain func(error) error
}

// Connect returns a Client of the service cloister.v1.Store at conn, which Close closes. explain converts the errors of
// its calls.
func Connect(conn *grpc.ClientConn, explain func(error) error) *Client {
	return &Client{conn: conn, explain: explain}
}

// Open connects to the process that has the store in dir open. If there is none, it opens the store with this lease
// (see disk.Config.Lease) and no budget. It returns ErrNoStore, and creates nothing, if dir is not a store. It
// returns disk.ErrLocked if a process has the store open but does not answer within ten seconds.
func Open(ctx context.Context, dir string, lease time.Duration) (*Client, error) {
	if err := checkStore(dir); err != nil {
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	for {
		c, dialErr := dial(waiting, dir)
		if dialErr == nil {
			return c, nil
		}
		c, err := open(dir, lease)
		if !errors.Is(err, disk.ErrLocked) {
			return c, err
		}
		select {
		case <-time.After(retryInterval):
		case <-waiting.Done():
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, fmt.Errorf("%w (no answer on %s: %v)", err, filepath.Join(dir, socket), dialErr)
		}
	}
}

// Dial connects to the process that has the store in dir open, for services that only a server offers. It returns
// ErrNoStore if dir is not a store, and ErrNoServer if no process answers there. The caller closes the connection.
func Dial(ctx context.Context, dir string) (*grpc.ClientConn, error) {
	if err := checkStore(dir); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	probe, err := unixsocket.Dial(ctx, dir, socket)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED): // or a killed process left the socket
		return nil, fmt.Errorf("%w has %s open", ErrNoServer, dir)
	case err != nil:
		return nil, err
	}
	_ = probe.Close() // it carried nothing
	c, err := dial(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("no answer on %s: %w", filepath.Join(dir, socket), err)
	}
	return c.conn, nil
}

// checkStore returns ErrNoStore if dir is not a store.
func checkStore(dir string) error {
	_, err := os.Stat(filepath.Join(dir, "version"))
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w in %s", ErrNoStore, dir)
	}
	return err
}

// open opens a store that no process has open.
func open(dir string, lease time.Duration) (*Client, error) {
	// Without a budget, opening the store evicts nothing.
	cache, err := disk.Open(disk.Config{Dir: dir, MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt64, Lease: lease})
	if err != nil {
		return nil, err
	}
	return &Client{cache: cache}, nil
}

// dial connects to the process that has the store open.
func dial(ctx context.Context, dir string) (*Client, error) {
	conn, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return unixsocket.Dial(ctx, dir, socket) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	c := Connect(conn, explainHolder)
	if _, err := c.Stats(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if b, err := os.ReadFile(filepath.Join(dir, "lock")); err == nil {
		c.holder, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return c, nil
}

// Holder returns the ID of the process that has the store open, or 0 if the Client opened it.
func (c *Client) Holder() int { return c.holder }

// Close closes the connection, or the store if the Client opened it.
func (c *Client) Close() error {
	if c.cache != nil {
		return c.cache.Close()
	}
	return c.conn.Close()
}

func (c *Client) api() cloisterpb.StoreClient { return cloisterpb.NewStoreClient(c.conn) }

// callError converts the error of a call.
func (c *Client) callError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return c.explain(err)
}

// explainHolder converts the error of a call to the process that has the store open.
func explainHolder(err error) error {
	st := status.Convert(err)
	if st.Code() == codes.Unavailable {
		return fmt.Errorf("process that has the store open: %w: %s", cas.ErrUnavailable, printable.Text(st.Message()))
	}
	return errors.New(printable.Text(st.Message()))
}

// Stats is disk.Cache.Stats.
func (c *Client) Stats(ctx context.Context) (disk.Stats, error) {
	if c.cache != nil {
		return c.cache.Stats(), nil
	}
	m, err := c.api().Stat(ctx, &cloisterpb.StatRequest{})
	if err != nil {
		return disk.Stats{}, c.callError(ctx, err)
	}
	return toStats(m), nil
}

// Forget removes the result of an action, and reports whether there was one. It returns cas.ErrInvalid for an invalid
// instance name.
func (c *Client) Forget(ctx context.Context, instance string, action cas.Digest) (bool, error) {
	if c.cache != nil {
		return forget(ctx, c.cache, instance, action)
	}
	m, err := c.api().Forget(ctx, &cloisterpb.ForgetRequest{Instance: instance, Action: action.String()})
	if err != nil {
		return false, c.callError(ctx, err)
	}
	return m.Recorded, nil
}

// Collect is disk.Cache.Collect. If ctx ends early and another process has the store open, the report is empty.
func (c *Client) Collect(ctx context.Context, o disk.CollectOptions) (disk.CollectReport, error) {
	if c.cache != nil {
		return c.cache.Collect(ctx, o)
	}
	m, err := c.api().Collect(ctx, &cloisterpb.CollectRequest{
		MaxBytes: o.MaxBytes, OlderThan: durationpb.New(o.OlderThan), DryRun: o.DryRun,
	})
	if err != nil {
		return disk.CollectReport{}, c.callError(ctx, err)
	}
	return toCollect(m), nil
}

// Verify is disk.Cache.Verify. It interrupts a scrub and resumes at its position.
func (c *Client) Verify(ctx context.Context, o disk.VerifyOptions) (disk.VerifyReport, error) {
	if c.cache != nil {
		return c.cache.Verify(ctx, o)
	}
	var report disk.VerifyReport
	stream, err := c.api().Verify(ctx, &cloisterpb.VerifyRequest{BytesPerSecond: o.BytesPerSecond, Restart: o.Restart})
	if err != nil {
		return report, c.callError(ctx, err)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return report, c.callError(ctx, err)
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

// Quarantine returns the path of the damaged content of d in the store in dir, or "" if it was not kept.
func Quarantine(dir string, d cas.Digest) string {
	path := filepath.Join(dir, "quarantine", fmt.Sprintf("%s-%d", d.Hash(), d.Size()))
	if _, err := os.Lstat(path); err != nil {
		return ""
	}
	return path
}
