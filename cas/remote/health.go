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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	maxFailures = 5                // calls in a row, each tried "attempts" times, after which a server counts as down
	probeTime   = 10 * time.Second // that a server may take to answer a probe
	probePause  = 2 * time.Second  // between probes, a fifth more or less
)

// terms are what a server said that it can do.
type terms struct {
	small   int64 // bytes up to which a blob goes into a batch
	batch   int64 // bytes of the blobs of a batch
	zstd    bool  // reads and streams may be compressed
	zstdPut bool  // so may the blobs of a batch that are put
	largest int64 // bytes of a blob that it takes; 0: it does not say
	results bool  // it takes them

	functions []cas.Function // that it serves, of ours
}

// health is whether the server answers. While it does not, one goroutine probes it, so that no call has to wait
// to find out, and so that it is found out where nobody calls.
type health struct {
	ctx    context.Context // ends with the Client
	cancel context.CancelFunc
	work   sync.WaitGroup
	asked  chan struct{} // closed when the server has been asked once

	mu       sync.Mutex
	terms    *terms    // nil while the server does not answer
	why      error     // the last failure, if terms is nil
	since    time.Time // of the first of these failures
	failures int       // of calls in a row
}

func (h *health) begin() {
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.asked = make(chan struct{})
}

// end ends the probing and waits for it.
func (h *health) end() {
	h.mu.Lock()
	h.cancel()
	h.mu.Unlock()
	h.work.Wait()
}

// Err returns nil if the server answers, as far as is known: an idle Client notices nothing. Else it returns
// the cas.ErrUnavailable that every call fails with, which says since when and why.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down()
}

// down is Err. The caller holds c.mu.
func (c *Client) down() error {
	if c.why == nil {
		return nil
	}
	return fmt.Errorf("server at %s: %w since %s: %v", c.target, cas.ErrUnavailable, c.since.UTC().Format(time.RFC3339), c.why)
}

// Asked returns a channel that is closed when the server has said for the first time what it serves, or has not
// answered.
func (c *Client) Asked() <-chan struct{} { return c.asked }

// functions returns the digest functions that the server serves, of ours, or nil if it has not said so yet.
func (c *Client) functions() []cas.Function {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terms == nil {
		return nil
	}
	return c.terms.functions
}

// readyFor is ready for calls that name digests of f. A function that the server does not serve is cas.ErrInvalid: it is
// what the caller chose.
func (c *Client) readyFor(ctx context.Context, f cas.Function) (*terms, error) {
	t, err := c.ready(ctx)
	if err == nil && !slices.Contains(t.functions, f) {
		err = fmt.Errorf("%w: server at %s does not serve digest function %v; it serves %v", cas.ErrInvalid, c.target, f, t.functions)
	}
	return t, err
}

// ready returns the terms of the server, or why no call can be made now.
func (c *Client) ready(ctx context.Context) (*terms, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	select {
	case <-c.asked:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terms == nil && c.why == nil {
		return nil, fmt.Errorf("server at %s: %w: the connection is closed", c.target, cas.ErrUnavailable)
	}
	return c.terms, c.down()
}

// heard notes how a call with ctx ended that waited for the server since begun. One that its caller soon gave up
// says nothing about the server.
func (c *Client) heard(ctx context.Context, begun time.Time, err error) {
	gaveUp := err != nil && ctx.Err() != nil
	if gaveUp && time.Since(begun) < patience {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if code := status.Code(err); !gaveUp && code != codes.Unavailable && code != codes.DeadlineExceeded {
		c.failures = 0
		return
	}
	if c.failures++; c.failures < maxFailures || c.terms == nil || c.ctx.Err() != nil {
		return
	}
	c.terms = nil
	c.fail(fmt.Errorf("%d calls in a row failed: %s", c.failures, Reason(status.Convert(err))))
	c.work.Go(func() {
		if c.pause() {
			c.probe()
		}
	})
}

// fail notes that the server does not answer. The caller holds c.mu.
func (c *Client) fail(why error) {
	if c.why == nil {
		c.since = time.Now()
	}
	c.why = why
}

// probe asks the server until it answers or the Client is closed.
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

// pause waits for the time of the next probe, and reports whether there is to be one.
func (c *Client) pause() bool {
	select {
	case <-time.After(time.Duration((0.8 + 0.4*rand.Float64()) * float64(probePause))):
		return true
	case <-c.ctx.Done():
		return false
	}
}

// negotiate asks the server for its functions and its limits, and notes the answer.
func (c *Client) negotiate(ctx context.Context) error {
	t, err := c.capabilities(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terms = t; err != nil {
		c.fail(err)
	} else {
		c.why, c.failures = nil, 0
	}
	select {
	case <-c.asked:
	default:
		close(c.asked)
	}
	return err
}

func (c *Client) capabilities(ctx context.Context) (*terms, error) {
	caps, err := repb.NewCapabilitiesClient(c.conn).GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: c.instance})
	if err != nil {
		return nil, c.failed(ctx, "reach the server", err)
	}
	cc := caps.GetCacheCapabilities()
	t := &terms{
		batch:   maxBatch,
		zstd:    slices.Contains(cc.SupportedCompressors, repb.Compressor_ZSTD),
		zstdPut: slices.Contains(cc.SupportedBatchUpdateCompressors, repb.Compressor_ZSTD),
	}
	for _, f := range cas.Functions() {
		if slices.Contains(cc.GetDigestFunctions(), f.Proto()) {
			t.functions = append(t.functions, f)
		}
	}
	if len(t.functions) == 0 {
		return nil, fmt.Errorf("server at %s: it serves the digest functions %s, and one of %v is needed",
			c.target, printable(fmt.Sprint(cc.GetDigestFunctions())), cas.Functions())
	}
	if limit := cc.MaxBatchTotalSizeBytes; limit > 0 {
		t.batch = min(limit, t.batch)
	}
	t.small = min(maxSmall, t.batch)
	t.largest, t.results = cc.MaxCasBlobSizeBytes, cc.GetActionCacheUpdateCapabilities().GetUpdateEnabled()
	return t, nil
}
