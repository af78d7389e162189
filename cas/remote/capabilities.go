// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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

// Err returns nil if the server was up at the last call or probe. Otherwise it returns the error with which every call
// fails, including the time and the reason: cas.ErrDenied if the server refuses our credentials, else
// cas.ErrUnavailable.
func (c *Client) Err() error { return c.health.Err() }

// Probed returns a channel that is closed after the first probe of the server, whether it succeeded or not.
func (c *Client) Probed() <-chan struct{} { return c.health.Probed() }

// functions returns the digest functions that both the server and we support, or nil if the server is down.
func (c *Client) functions() []cas.Function {
	t := c.capabilities.Load()
	if t == nil || c.Err() != nil {
		return nil
	}
	return t.functions
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
	if err := c.health.Ready(ctx); err != nil {
		return nil, err
	}
	return c.capabilities.Load(), nil
}

// unanswered returns the reason of a call that the server did not answer, or nil if err is its answer.
func unanswered(err error) error {
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		return nil
	}
	return errors.New(Reason(status.Convert(err)))
}

// negotiate gets the capabilities of the server. It is the probe of the health check.
func (c *Client) negotiate(ctx context.Context) error {
	t, err := c.getCapabilities(ctx)
	if err == nil {
		c.capabilities.Store(t)
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
