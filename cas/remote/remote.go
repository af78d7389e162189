// SPDX-License-Identifier: Apache-2.0

// Package remote is the store and the action cache of package cas over a server of the Remote Execution
// API. It keeps no blob here, not even for a moment longer than a call, and executes nothing.
//
// A server is not trusted with contents: what it sends is checked against the digest, and what it is
// sent is checked before the last of it leaves. Nor with words: what it says stands in errors as one
// printable line. Nor with time: a call during which nothing comes for a minute ends, and a server that
// answers no call, or none that its caller gave ten seconds, is left alone until it answers a probe; meanwhile every call is cas.ErrUnavailable at once.
// Blobs travel compressed where the server takes zstd.
package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// ErrAddress says that the address of a server is malformed.
var ErrAddress = errors.New("address of a server is grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")

// What goes into one call. Every client and server accepts messages of 4 MiB unless told otherwise.
const (
	maxSmall   = 1 << 20 // bytes of a blob that is not streamed
	maxBatch   = 3 << 20 // bytes of the blobs of one call, which leaves room for what stands beside them
	maxEntries = 4000    // blobs of such a call
	maxAsked   = 16_000  // digests of one FindMissingBlobs
	maxMessage = 4 << 20 // bytes of a message
	pieceBytes = 1 << 20 // of one message of a stream
	attempts   = 5       // at one call, or at going on with a stream that broke off
)

// retries makes gRPC repeat what a server did not take up or was too busy for, as long as nothing of an
// answer has arrived: after 1.5 s in all it gives up. gRPC makes each wait up to a fifth longer or shorter by
// chance, so that clients do not come back all at once. GetCapabilities is not repeated, so that a wrong
// address is told at once.
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

// A Client is a connection to one server. It is safe for concurrent use; Dial and New make it.
type Client struct {
	conn     *grpc.ClientConn
	target   string // as messages name the server
	instance string // of the address
	turns    turns
	health
}

// Dial connects to the server of an address grpc://HOST:PORT[/INSTANCE], or grpcs:// for TLS with the
// certificates that this host trusts, and asks it what it can do. The caller closes the Client. A
// malformed address is ErrAddress; a server that cannot be reached before ctx ends, or that does not
// serve SHA-256, is an error that says so. Options come after our own and override them.
func Dial(ctx context.Context, address string, options ...grpc.DialOption) (*Client, error) {
	c, err := connect(address, options)
	if err != nil {
		return nil, err
	}
	if err := c.negotiate(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// New is Dial for a server that need not be there yet: it asks it in the background, again and again. Calls
// wait for the first time that it answers or fails to, and until it has answered fail with
// cas.ErrUnavailable.
func New(address string, options ...grpc.DialOption) (*Client, error) {
	c, err := connect(address, options)
	if err != nil {
		return nil, err
	}
	c.work.Go(c.probe)
	return c, nil
}

// harmless returns address without what may be a secret: a user, and all behind a question or number mark. It need not
// be an address.
func harmless(address string) string {
	if at := strings.LastIndexByte(address, '@'); at >= 0 {
		scheme, _, found := strings.Cut(address[:at], "://")
		if !found {
			scheme = ""
		}
		address = scheme + "://..." + address[at:]
	}
	if i := strings.IndexAny(address, "?#"); i >= 0 {
		address = address[:i+1] + "..."
	}
	return address
}

// connect returns a Client that has not asked its server anything.
func connect(address string, options []grpc.DialOption) (*Client, error) {
	shown := harmless(address)
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
	c := &Client{target: u.Scheme + "://" + u.Host, instance: strings.Trim(u.Path, "/"), turns: newTurns()}
	if err := cas.CheckInstanceName(c.instance); err != nil {
		return nil, fmt.Errorf("%+.256q: %w", shown, err)
	}
	c.begin()
	c.conn, err = grpc.NewClient(u.Host, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultServiceConfig(retries),
		// A batch that is put must fit, for gRPC to send it again.
		grpc.WithDefaultCallOptions(grpc.MaxRetryRPCBufferSize(maxMessage)),
		// gRPC's own waits of up to two minutes would outlast the outage.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: probeTime,
		}),
		// What was sent and is not acknowledged ends the connection in Timeout. Servers take a ping more often
		// than every five minutes for an attack.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 5 * time.Minute, Timeout: 20 * time.Second}),
		grpc.WithChainUnaryInterceptor(c.unary),
		grpc.WithChainStreamInterceptor(c.stream),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	return c, nil
}

// Close ends the connection and every call on it, and waits for what it began itself.
func (c *Client) Close() error {
	c.end()
	return c.conn.Close()
}

// Store returns the blobs and results of an instance: the one of the address if name is empty, and else
// the one called name below it. A name that no instance may have is cas.ErrInvalid.
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

// Instance is Store as a cas.Instances.
func (c *Client) Instance(name string) (*cas.Instance, error) {
	s, err := c.Store(name)
	if err != nil {
		return nil, err
	}
	return &cas.Instance{Name: s.name, Store: s, Actions: s, Functions: c.functions()}, nil
}

// failed says what did not succeed at which server, and gives err the kind that there is for it: one that is about
// us, such as a refusal, must not reach a client of ours as if it were about him. An error for which there is none
// stays the status it is. The end of ctx comes before all else.
func (c *Client) failed(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s at %s: %w", what, c.target, ctx.Err())
	}
	st, answered := status.FromError(err)
	for _, row := range []struct {
		code codes.Code
		kind error
	}{
		{codes.NotFound, cas.ErrNotFound},
		{codes.OutOfRange, cas.ErrRange},
		{codes.DataLoss, cas.ErrCorrupt},
	} {
		if st.Code() == row.code {
			return fmt.Errorf("%s at %s: %w", what, c.target, row.kind)
		}
	}
	if answered {
		p := st.Proto()
		p.Message = Reason(st)
		st = status.FromProto(p)
		err = st.Err()
	}
	switch st.Code() {
	case codes.Unavailable:
		err = fmt.Errorf("%w: %w", cas.ErrUnavailable, answer{st})
	case codes.DeadlineExceeded:
		err = fmt.Errorf("%w: %v", cas.ErrUnavailable, answer{st})
	case codes.PermissionDenied, codes.Unauthenticated:
		err = fmt.Errorf("%w: %v", os.ErrPermission, answer{st})
	case codes.Unimplemented:
		err = fmt.Errorf("%w: %v", errors.ErrUnsupported, answer{st})
	}
	return fmt.Errorf("%s at %s: %w", what, c.target, err)
}

// An answer is the status of a call whose code another word says already.
type answer struct{ st *status.Status }

// Error implements error: it is what the status says.
func (a answer) Error() string { return a.st.Message() }

// GRPCStatus is what package status looks for.
func (a answer) GRPCStatus() *status.Status { return a.st }

// Reason returns what st says as one line that cannot steer a terminal, of at most 1000 bytes: whoever answered chose it. Of a
// connection that could not be made that is why not, without what gRPC calls the steps on the way.
func Reason(st *status.Status) string {
	text := st.Message()
	if quoted, ok := strings.CutPrefix(text, "connection error: desc = "); ok && st.Code() == codes.Unavailable {
		if why, err := strconv.Unquote(quoted); err == nil {
			text = strings.TrimPrefix(strings.TrimPrefix(why, "transport: "), "Error while dialing: ")
		}
		if strings.HasPrefix(text, "error reading server preface") {
			text += "; the address of a server with TLS is grpcs://HOST:PORT"
		}
	}
	return printable(text)
}

// maxText is the most bytes of what a server says that an error repeats.
const maxText = 1000

// printable returns s as one line of at most maxText bytes that cannot steer a terminal: what is not
// printable is written as in a Go string.
func printable(s string) string {
	const more = "..."
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		text := s[:size]
		if r == utf8.RuneError && size == 1 || !strconv.IsPrint(r) {
			text = strconv.Quote(text)
			text = text[1 : len(text)-1]
		}
		s = s[size:]
		if b.Len()+len(text) > maxText-len(more) {
			return b.String() + more
		}
		b.WriteString(text)
	}
	return b.String()
}

// A Store is one instance of a server: a cas.Store, a cas.Batcher and a cas.ActionCache. It is safe for concurrent use,
// and usable until its Client is closed.
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

// Name returns the name of the instance at the server.
func (s *Store) Name() string { return s.name }

// resource returns the name of a resource of ByteStream.
func (s *Store) resource(rest string) string {
	if s.name == "" {
		return rest
	}
	return s.name + "/" + rest
}

// Lookup implements cas.ActionCache.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
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

// Record implements cas.ActionCache. A server may permit it to nobody, which is os.ErrPermission, or only for
// successes all of whose blobs are present.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	t, err := s.readyFor(ctx, action.Function())
	if err != nil {
		return err
	}
	if !t.results {
		return fmt.Errorf("record the result of action %s at %s: the server takes no results, or not ours: %w", action, s.target, os.ErrPermission)
	}
	_, err = s.results.UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
		InstanceName: s.name, ActionDigest: action.Proto(), DigestFunction: action.Function().Proto(), ActionResult: r,
	})
	if err != nil {
		return s.failed(ctx, fmt.Sprintf("record the result of action %s", action), err)
	}
	return nil
}
