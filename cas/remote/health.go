// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	maxFailures = 5                // consecutive failed calls, each with all attempts, after which a server is down
	probeTime   = 10 * time.Second // timeout of a probe
	probePause  = 2 * time.Second  // average time between probes; the jitter is a fifth
)

// capabilities are what a server supports.
type capabilities struct {
	maxSmall      int64 // largest blob sent in a batch, in bytes
	maxBatch      int64 // bytes of all blobs in a batch
	maxBlob       int64 // largest blob accepted, in bytes; 0 means no limit
	zstd          bool  // for streams and reads of batches
	zstdUpdate    bool  // for updates by batches
	updateResults bool
	functions     []cas.Function // those that we support, too
}

// health tracks whether the server answers. While it does not, one goroutine probes it, so that calls need not wait and
// recovery does not depend on calls.
type health struct {
	ctx        context.Context // ends with the Client
	cancel     context.CancelFunc
	background sync.WaitGroup
	probed     chan struct{} // closed after the first probe

	mu           sync.Mutex
	capabilities *capabilities // guarded by mu; nil while the server is down
	err          error         // guarded by mu; the last failure, if capabilities is nil
	since        time.Time     // guarded by mu; when the failures began
	failures     int           // guarded by mu; consecutive failed calls
}

func (h *health) start() {
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.probed = make(chan struct{})
}

// stop stops probing.
func (h *health) stop() {
	h.mu.Lock()
	h.cancel()
	h.mu.Unlock()
	h.background.Wait()
}

// Err returns nil if the server was up at the last call or probe. Otherwise it returns the cas.ErrUnavailable with
// which every call fails, including the time and the reason.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down()
}

// down is Err. The caller holds c.mu.
func (c *Client) down() error {
	if c.err == nil {
		return nil
	}
	since := c.since.UTC().Format(time.RFC3339)
	return fmt.Errorf("server at %s: %w since %s: %v", c.target, cas.ErrUnavailable, since, c.err)
}

// Probed returns a channel that is closed after the first probe of the server, whether it succeeded or not.
func (c *Client) Probed() <-chan struct{} { return c.probed }

// functions returns the digest functions that both the server and we support, or nil if the server is down.
func (c *Client) functions() []cas.Function {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.capabilities == nil {
		return nil
	}
	return c.capabilities.functions
}

// readyFor is ready for calls with digests of f. If the server does not support f, it returns cas.ErrInvalid, because
// the caller chose f.
func (c *Client) readyFor(ctx context.Context, f cas.Function) (*capabilities, error) {
	t, err := c.ready(ctx)
	if err == nil && !slices.Contains(t.functions, f) {
		err = fmt.Errorf("%w: server at %s does not support digest function %v; use one of %v",
			cas.ErrInvalid, c.target, f, t.functions)
	}
	return t, err
}

// ready waits for the first probe and returns the capabilities of the server, or an error while it is down.
func (c *Client) ready(ctx context.Context) (*capabilities, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	select {
	case <-c.probed:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.capabilities == nil && c.err == nil {
		return nil, fmt.Errorf("server at %s: %w: the connection is closed", c.target, cas.ErrUnavailable)
	}
	return c.capabilities, c.down()
}

// observe records the result of a call that has waited for the server since start. A call whose caller gave up within
// minWait says nothing about the server.
func (c *Client) observe(ctx context.Context, start time.Time, err error) {
	gaveUp := err != nil && ctx.Err() != nil
	if gaveUp && time.Since(start) < minWait {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if code := status.Code(err); !gaveUp && code != codes.Unavailable && code != codes.DeadlineExceeded {
		c.failures = 0
		return
	}
	if c.failures++; c.failures < maxFailures || c.capabilities == nil || c.ctx.Err() != nil {
		return
	}
	c.capabilities = nil
	c.setDown(fmt.Errorf("%d consecutive calls failed: %s", c.failures, Reason(status.Convert(err))))
	c.background.Go(func() {
		if c.pause() {
			c.probe()
		}
	})
}

// setDown records that the server is down because of err. The caller holds c.mu.
func (c *Client) setDown(err error) {
	if c.err == nil {
		c.since = time.Now()
	}
	c.err = err
}

// probe gets the capabilities, repeatedly, until the server answers or the Client is closed.
func (c *Client) probe() {
	for {
		ctx, cancel := context.WithTimeout(c.ctx, probeTime)
		err := c.negotiate(ctx)
		cancel()
		if err == nil || !c.pause() {
			return
		}
	}
}

// pause waits before the next probe; it returns false if the Client is closed.
func (c *Client) pause() bool {
	select {
	case <-time.After(time.Duration((0.8 + 0.4*rand.Float64()) * float64(probePause))):
		return true
	case <-c.ctx.Done():
		return false
	}
}

// negotiate gets the capabilities of the server and records them, or the failure.
func (c *Client) negotiate(ctx context.Context) error {
	t, err := c.getCapabilities(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.capabilities = t; err != nil {
		c.setDown(err)
	} else {
		c.err, c.failures = nil, 0
	}
	select {
	case <-c.probed:
	default:
		close(c.probed)
	}
	return err
}

func (c *Client) getCapabilities(ctx context.Context) (*capabilities, error) {
	client := repb.NewCapabilitiesClient(c.conn)
	resp, err := client.GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: c.instance})
	if err != nil {
		return nil, c.failed(ctx, "reach the server", err)
	}
	cc := resp.GetCacheCapabilities()
	t := &capabilities{
		maxBatch:      maxBatch,
		maxBlob:       cc.GetMaxCasBlobSizeBytes(),
		zstd:          slices.Contains(cc.GetSupportedCompressors(), repb.Compressor_ZSTD),
		zstdUpdate:    slices.Contains(cc.GetSupportedBatchUpdateCompressors(), repb.Compressor_ZSTD),
		updateResults: cc.GetActionCacheUpdateCapabilities().GetUpdateEnabled(),
	}
	if limit := cc.GetMaxBatchTotalSizeBytes(); limit > 0 {
		t.maxBatch = min(limit, t.maxBatch)
	}
	t.maxSmall = min(maxSmall, t.maxBatch)
	for _, f := range cas.Functions() {
		if slices.Contains(cc.GetDigestFunctions(), f.Proto()) {
			t.functions = append(t.functions, f)
		}
	}
	if len(t.functions) == 0 {
		return nil, fmt.Errorf("server at %s: it supports the digest functions %s, but none of %v",
			c.target, printable.Head(fmt.Sprint(cc.GetDigestFunctions()), maxReason), cas.Functions())
	}
	return t, nil
}
