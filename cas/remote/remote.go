// SPDX-License-Identifier: Apache-2.0

// Package remote implements the store and the action cache of package cas on a server of the Remote Execution API. It
// caches no blobs and executes nothing.
//
// The server is not trusted:
//   - Received blobs are verified against their digests, and so are sent blobs before their last byte leaves.
//   - Its messages appear in errors as one printable line.
//   - A call without progress for a minute ends, and after five seconds if the server does not answer a probe within
//     five more. A server that fails several calls in a row, or a probe after a failed or waiting call, counts as down:
//     until it answers a probe, every call fails at once with cas.ErrUnavailable. A call whose caller gave up within ten
//     seconds does not count. If the server refuses our credentials for the probe, calls fail with cas.ErrDenied.
//
// Blobs are compressed in transit if the server supports zstd.
//
// The package implements cas.Store over the generated stubs. The client library of the API's authors brings nine
// modules, its own retry policies and an interface that is not cas.Store. gRPC repeats calls that fail with UNAVAILABLE
// before they are answered. The package adds only what gRPC cannot know: a broken download resumes at its offset, and
// an upload restarts if its reader can seek. It never combines reads of different callers into one call; callers that
// need many blobs use Fetch.
package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/health"
	"github.com/cloister-build/cloister/sandbox/printable"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// ErrAddress reports a malformed server address.
var ErrAddress = errors.New("invalid server address: write grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")

// Limits of one call. By default, all clients and servers accept messages of 4 MiB.
const (
	maxSmall   = 1 << 20 // bytes of a blob that is not streamed
	maxBatch   = 3 << 20 // bytes of all blobs in a batch, which leaves room for their digests
	maxEntries = 4000    // blobs in a batch
	maxMissing = 16_000  // digests of one FindMissingBlobs
	maxMessage = 4 << 20 // bytes of a message
	maxData    = 1 << 20 // bytes of data in one message of a stream
	attempts   = 5       // for a call, or to resume a broken stream
	maxReason  = 1000    // bytes of a server's message in an error
)

// retries makes gRPC repeat calls that fail with UNAVAILABLE before any part of the answer arrives. It gives up after
// 1.5 s. GetCapabilities is not repeated, so that a wrong address is reported at once.
var retries = fmt.Sprintf(`{"methodConfig": [{
	"name": [
		{"service": "build.bazel.remote.execution.v2.ContentAddressableStorage"},
		{"service": "build.bazel.remote.execution.v2.ActionCache"},
		{"service": "google.bytestream.ByteStream"}
	],
	"retryPolicy": {
		"maxAttempts": %d, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE"]
	}
}]}`, attempts)

// A Client is a connection to one server. It is safe for concurrent use. Create it with Dial or New.
type Client struct {
	conn     *grpc.ClientConn
	target   string // the server, for messages
	instance string // from the address
	limits   limits
	health   *health.Check
	// capabilities are those of the last successful probe, nil before.
	capabilities atomic.Pointer[capabilities]
}

// Dial connects to the server at address and gets its capabilities. The address is grpc://HOST:PORT[/INSTANCE], or
// grpcs:// for TLS with the certificates that this host trusts; a malformed one is ErrAddress. Dial fails if the server
// does not answer before ctx ends or supports none of our digest functions. The options override the defaults. The
// caller closes the Client.
func Dial(ctx context.Context, address string, options ...grpc.DialOption) (*Client, error) {
	c, err := connect(address, options)
	if err != nil {
		return nil, err
	}
	if err := c.health.Probe(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// New is like Dial, but gets the capabilities in the background and retries until it succeeds. Calls wait for the first
// attempt; then they fail with the error of Client.Err until one succeeds.
func New(address string, options ...grpc.DialOption) (*Client, error) {
	c, err := connect(address, options)
	if err != nil {
		return nil, err
	}
	c.health.Start()
	return c, nil
}

// connect returns a Client that does not know the capabilities of its server.
func connect(address string, options []grpc.DialOption) (*Client, error) {
	shown := health.Redact(address)
	u, err := url.Parse(address)
	if err != nil || u.Port() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("%+.256q: %w", shown, ErrAddress)
	}
	creds := insecure.NewCredentials()
	switch u.Scheme {
	case "grpc":
	case "grpcs":
		creds = credentials.NewTLS(&tls.Config{})
	default:
		return nil, fmt.Errorf("%+.256q: %w", shown, ErrAddress)
	}
	c := &Client{target: u.Scheme + "://" + u.Host, instance: strings.Trim(u.Path, "/"), limits: newLimits()}
	if err := cas.CheckInstanceName(c.instance); err != nil {
		return nil, fmt.Errorf("%+.256q: %w", shown, err)
	}
	c.health = health.New(health.Config{
		Name: "server at " + c.target, Probe: c.negotiate, Failure: unanswered,
	})
	c.conn, err = grpc.NewClient(u.Host, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultServiceConfig(retries),
		// gRPC can only repeat requests that fit into this buffer.
		grpc.WithDefaultCallOptions(grpc.MaxRetryRPCBufferSize(maxMessage)),
		// The default of up to two minutes would outlast most outages.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second,
			},
			MinConnectTimeout: connectTime,
		}),
		// Unacknowledged data ends the connection after Timeout. By default, servers reject more frequent pings.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 5 * time.Minute, Timeout: 20 * time.Second}),
		grpc.WithChainUnaryInterceptor(c.unary),
		grpc.WithChainStreamInterceptor(c.stream),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	return c, nil
}

// Close ends the connection and all calls, and waits for its goroutines.
func (c *Client) Close() error {
	c.health.Close()
	return c.conn.Close()
}

// Store returns the store of an instance: that of the address, or name below it unless name is empty. An invalid name
// is cas.ErrInvalid.
func (c *Client) Store(name string) (*Store, error) {
	if c.instance != "" && name != "" {
		name = "/" + name
	}
	name = c.instance + name
	if err := cas.CheckInstanceName(name); err != nil {
		return nil, err
	}
	return &Store{
		Client: c, name: name,
		blobs: repb.NewContentAddressableStorageClient(c.conn), streams: bspb.NewByteStreamClient(c.conn),
		results: repb.NewActionCacheClient(c.conn),
	}, nil
}

// Instance is Store in the form of a cas.Instances.
func (c *Client) Instance(name string) (*cas.Instance, error) {
	s, err := c.Store(name)
	if err != nil {
		return nil, err
	}
	return &cas.Instance{Name: s.name, Store: s, Actions: s, Functions: c.functions()}, nil
}

// failed adds the operation and the server to err and converts its status into an error of package cas where one
// exists. Errors about us, such as PERMISSION_DENIED, must not reach our own clients as if they were about them. If ctx
// has ended, that is the error.
func (c *Client) failed(ctx context.Context, op string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s at %s: %w", op, c.target, ctx.Err())
	}
	st, isStatus := status.FromError(err)
	for _, row := range []struct {
		code codes.Code
		kind error
	}{
		{codes.NotFound, cas.ErrNotFound},
		{codes.OutOfRange, cas.ErrRange},
		{codes.DataLoss, cas.ErrCorrupt},
	} {
		if st.Code() == row.code {
			return fmt.Errorf("%s at %s: %w", op, c.target, row.kind)
		}
	}
	if isStatus {
		p := st.Proto()
		p.Message = Reason(st)
		st = status.FromProto(p)
		err = st.Err()
	}
	switch st.Code() {
	case codes.Unavailable:
		err = fmt.Errorf("%w: %w", cas.ErrUnavailable, statusError{st})
	case codes.ResourceExhausted:
		err = fmt.Errorf("%w: %w", cas.ErrThrottled, statusError{st})
	case codes.DeadlineExceeded:
		err = fmt.Errorf("%w: %v", cas.ErrUnavailable, statusError{st})
	case codes.PermissionDenied, codes.Unauthenticated:
		err = fmt.Errorf("%w: %v", cas.ErrDenied, statusError{st})
	case codes.Unimplemented:
		err = fmt.Errorf("%w: %v", errors.ErrUnsupported, statusError{st})
	}
	return fmt.Errorf("%s at %s: %w", op, c.target, err)
}

// A statusError is a status error whose text omits the code, which the wrapping error already expresses.
type statusError struct{ st *status.Status }

// Error implements error.
func (e statusError) Error() string { return e.st.Message() }

// GRPCStatus makes package status recognize the error.
func (e statusError) GRPCStatus() *status.Status { return e.st }

// Reason returns the message of st as one printable line of at most 1000 bytes, since servers are not trusted. For a
// failed connection it is only the cause.
func Reason(st *status.Status) string {
	text := st.Message()
	if quoted, ok := strings.CutPrefix(text, "connection error: desc = "); ok && st.Code() == codes.Unavailable {
		if why, err := strconv.Unquote(quoted); err == nil {
			text = strings.TrimPrefix(strings.TrimPrefix(why, "transport: "), "Error while dialing: ")
		}
		if strings.HasPrefix(text, "error reading server preface") {
			text += "; if the server uses TLS, write grpcs://HOST:PORT"
		}
	}
	return printable.Head(text, maxReason)
}

// A Store is one instance of a server: a cas.Store, cas.Batcher and cas.ActionCache. It is safe for concurrent use
// until its Client is closed. Use Client.Store; the zero Store is not usable.
type Store struct {
	*Client
	name    string
	blobs   repb.ContentAddressableStorageClient
	streams bspb.ByteStreamClient
	results repb.ActionCacheClient
}

var (
	_ cas.Store       = (*Store)(nil)
	_ cas.Batcher     = (*Store)(nil)
	_ cas.ActionCache = (*Store)(nil)
)

// Name returns the name of the instance on the server.
func (s *Store) Name() string { return s.name }

// resource prepends the instance to a resource name of ByteStream.
func (s *Store) resource(name string) string {
	if s.name == "" {
		return name
	}
	return s.name + "/" + name
}

// Lookup implements cas.ActionCache.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if err := cas.CheckDigests(action); err != nil {
		return nil, err
	}
	if _, err := s.readyFor(ctx, action.Function()); err != nil {
		return nil, err
	}
	r, err := s.results.GetActionResult(ctx, &repb.GetActionResultRequest{
		InstanceName: s.name, ActionDigest: action.Proto(), DigestFunction: action.Function().Proto(),
	})
	if err != nil {
		return nil, s.failed(ctx, fmt.Sprintf("look up the result of action %s", action), err)
	}
	return r, nil
}

// Record implements cas.ActionCache. It returns cas.ErrDenied if the server does not permit us to update results, which
// is also errors.ErrUnsupported if its capabilities say so. A server may accept only successful results whose blobs are
// all present.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := cas.CheckRecord(action, r); err != nil {
		return err
	}
	t, err := s.readyFor(ctx, action.Function())
	if err != nil {
		return err
	}
	if !t.updateResults {
		return fmt.Errorf("record the result of action %s at %s: the server does not accept our results: %w (%w)",
			action, s.target, cas.ErrDenied, errors.ErrUnsupported)
	}
	_, err = s.results.UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
		InstanceName: s.name, ActionDigest: action.Proto(), DigestFunction: action.Function().Proto(), ActionResult: r,
	})
	if err != nil {
		return s.writeFailed(ctx, fmt.Sprintf("record the result of action %s", action), err)
	}
	return nil
}
