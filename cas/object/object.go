// SPDX-License-Identifier: Apache-2.0

// Package object implements the store and the action cache of package cas in a bucket of Amazon S3, of an S3-compatible
// server or of Google Cloud Storage. It caches no blobs on this host, and deletes none from the bucket. The package
// does not trust the contents of the bucket: it verifies downloads of whole blobs against the digest, and an upload
// becomes visible only after its last byte was verified. It checks only the length of a download from an offset, which
// resumes an earlier download or reads part of a blob. It trusts results, which only a checksum protects: anyone with
// write access to the bucket determines the results of actions.
//
// # Cost
//
// Missing takes one call for each digest, with 32 calls in parallel. At 15 ms for a call, that is 2,000 digests per
// second. A disk is 500 times as fast, so the store should be the upstream of a disk. A Put holds up to 32 MiB in
// memory while it sends a part. In a Client, Puts of blobs up to 1 MiB share 32 MiB, and all others share 256 MiB;
// beyond that, a Put waits before it reads the next part.
//
// # Guarantees
//
// A bucket has no leases. Without a lifecycle rule, nothing ever leaves it. If a rule deletes objects N days after
// their creation, the URL must have expire_days=N. Missing and Lookup then renew an object older than N/2 days by
// copying it onto itself. What Put stored, Missing reported present or Lookup returned stays for N/2 days; Open renews
// nothing. S3 cannot copy a blob above 5 GiB in one call, and some servers do not reset the age of an object that is
// copied onto itself. Missing reports such a blob as absent, and the client puts it again. The same applies to a blob
// whose object the bucket fails to look up or has refused to read although it answers a probe, or refuses to look up or
// to copy although it accepts uploads. Lookup reports a result that cannot be renewed as absent, and the action runs
// again. A full bucket renews nothing: until there is space, Missing and Lookup find old objects until they expire, and
// only Renew fails.
//
// The rule should depend only on the age of the object, and abort multipart uploads after a day. A bucket with
// versioning or soft delete also keeps the previous version of each copy. An attempt ends after 10 seconds without
// progress by the server, an upload after 30, and a copy after a minute plus a second for each 4 MiB. A call that has
// waited for 20 seconds makes no further attempt. A bucket that does not answer several calls in a row, or one probe,
// counts as down: until it answers a probe, every call fails immediately with cas.ErrUnavailable. An absent bucket
// counts as down at once, and its calls also fail with ErrNoBucket. A bucket that refuses our credentials in a probe
// also counts as down, and its calls fail with cas.ErrDenied. An attempt without an answer starts a probe. So does an
// error from the bucket, which may concern only one object. A running upload in parts waits up to 20 seconds for the
// bucket to recover, and sends each part at most three times.
//
// One client, minio-go, serves both kinds of bucket: Google's XML API understands the S3 protocol, with renamed headers
// and a token instead of a signature. The JSON API would need a second client, and answers 404 both for an absent
// bucket and for an absent object. Without TLS no token is sent.
package object

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/health"
	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
)

const (
	parallel = 32 // concurrent calls of one Missing or Fetch
	attempts = 5  // for a call, and for resuming a download without progress
)

// Config configures a Client.
type Config struct {
	// URL is s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX], with optional query parameters:
	//
	//	endpoint=https://HOST[:PORT] a server other than Amazon's or Google's; http:// without TLS
	//	region=REGION                 of S3; defaults to AWS_REGION, then to a query of the bucket
	//	ca=FILE                       PEM file of the authorities of the server's certificate; defaults to this host's
	//	expire_days=N                 a lifecycle rule of the bucket deletes objects after N days
	//
	// It has no credentials. Those for S3 come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), from
	// a profile (AWS_PROFILE) in ~/.aws, or from the role of this host or pod. Those for Google are the application
	// default credentials, which are never sent without TLS. They need permission to get and put objects, to abort
	// multipart uploads, and to list the bucket, without which the bucket does not reveal that an object is absent. At
	// Amazon these are s3:GetObject, s3:PutObject, s3:AbortMultipartUpload and s3:ListBucket, at Google
	// roles/storage.objectUser.
	URL string
	// Corrupt receives each blob that is found damaged, and its key; it may be nil. Readers call it concurrently.
	Corrupt func(instance string, d cas.Digest, where string)
	// Observe receives each call when it has ended, with the context of its caller; it may be nil. Callers call it
	// concurrently.
	Observe func(context.Context, Call)
}

// A Client gives access to one bucket. It is safe for concurrent use. Create one with Open.
type Client struct {
	core      *minio.Core
	transport *http.Transport
	google    bool
	bucket    string
	prefix    string        // of every key; empty or with a trailing slash
	target    string        // the bucket in messages
	expire    time.Duration // age at which a lifecycle rule deletes; 0 without one
	config    Config
	small     *semaphore.Weighted // bytes of running uploads of small blobs
	large     *semaphore.Weighted // bytes of running uploads of other blobs, one part of each
	health    *health.Check
	writable  atomic.Bool     // a probe has found that the credentials may write
	ctx       context.Context // of shared probes; ends with the Client
	cancel    context.CancelFunc
	shared    singleflight.Group // of probeUploads
	uploaded  time.Time          // when probeUploads last succeeded; its calls, which are sequential, use it

	mu      sync.Mutex
	damaged map[string]bool // keys of damaged blobs, at most maxDamaged; guarded by mu
}

// Open returns a Client for a bucket and checks it; the caller closes it. A malformed URL is ErrURL. Other errors are
// those of Check.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	c, err := connect(ctx, cfg, nil)
	if err != nil {
		return nil, err
	}
	if err := c.Check(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// New is like Open, but checks the bucket in the background and retries until it answers. Calls wait for the first
// attempt; then they fail with the error of Client.Err until an attempt succeeds.
func New(ctx context.Context, cfg Config) (*Client, error) {
	c, err := connect(ctx, cfg, nil)
	if err != nil {
		return nil, err
	}
	c.health.Start()
	return c, nil
}

// connect returns a Client that has not checked the bucket. Tests replace its transport with next.
func connect(ctx context.Context, cfg Config, next http.RoundTripper) (*Client, error) {
	a, err := parse(cfg.URL)
	if err != nil {
		return nil, err
	}
	c := &Client{
		google: a.google, bucket: a.bucket, prefix: a.prefix, target: a.String(), expire: a.expire,
		config: cfg, small: semaphore.NewWeighted(maxSmall), large: semaphore.NewWeighted(maxLarge),
		damaged: map[string]bool{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.health = health.New(health.Config{Name: c.target, Probe: c.probe, Down: down, Failure: unanswered})
	if c.transport, err = minio.DefaultTransport(a.secure()); err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	if a.secure() {
		if c.transport.TLSClientConfig, err = a.tls(); err != nil {
			return nil, fmt.Errorf("%s: %w", c.target, err)
		}
	}
	c.transport.MaxIdleConnsPerHost = 2 * parallel
	c.transport.ResponseHeaderTimeout = 0 // limiter has the timeouts
	if next == nil {
		next = c.transport
	}
	options := s3Options
	if a.google {
		options = googleOptions
	}
	o, err := options(ctx, a, bodyCopier{next})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	o.Transport = limiter{o.Transport}
	o.Secure, o.MaxRetries = a.secure(), attempts
	if c.core, err = minio.NewCore(a.endpoint.Host, o); err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	return c, nil
}

// Check reports whether the bucket can be read and, until that has succeeded once, written. An absent bucket is
// ErrNoBucket, missing permission cas.ErrDenied, and a bucket that does not respond cas.ErrUnavailable.
func (c *Client) Check(ctx context.Context) error {
	if err := c.Err(); err != nil {
		return err
	}
	return c.health.Probe(ctx)
}

// Err returns nil if the bucket was up at the last call or probe. Otherwise it returns the error with which every call
// fails, including the time and the reason: cas.ErrDenied if the bucket refuses our credentials, else
// cas.ErrUnavailable, and also ErrNoBucket if the bucket does not exist.
func (c *Client) Err() error { return c.health.Err() }

// Probed returns a channel that is closed after the first probe of the bucket, whether it succeeded or not.
func (c *Client) Probed() <-chan struct{} { return c.health.Probed() }

// probe requests an object that does not exist. Until it has succeeded once, it also begins and aborts a multipart
// upload, which requires the permissions to write and leaves nothing behind.
func (c *Client) probe(ctx context.Context) error {
	err := c.newCall(ctx, probe).do("reach the bucket", func(ctx context.Context) error {
		body, _, _, err := c.core.GetObject(ctx, c.bucket, c.prefix+"absent", minio.GetObjectOptions{})
		if err == nil {
			err = body.Close()
		}
		return err
	})
	if err != nil && !errors.Is(err, cas.ErrNotFound) || c.writable.Load() {
		return ignore(err, cas.ErrNotFound)
	}
	err = c.probeWrites(ctx)
	c.writable.Store(err == nil)
	return err
}

// probeWrites begins and aborts a multipart upload. A full bucket is no error.
func (c *Client) probeWrites(ctx context.Context) error {
	err := c.newCall(ctx, probe).do("write to the bucket", func(ctx context.Context) error {
		upload, err := c.core.NewMultipartUpload(ctx, c.bucket, c.prefix+"absent", minio.PutObjectOptions{})
		if err == nil {
			err = c.core.AbortMultipartUpload(ctx, c.bucket, c.prefix+"absent", upload)
		}
		return err
	})
	return ignore(err, cas.ErrUpstreamFull)
}

// uploadsAge is the time for which a successful probeUploads is remembered.
const uploadsAge = time.Minute

// probeUploads returns nil if the bucket permits reads and writes, now or within the last minute: a query may name
// thousands of blobs that the bucket refuses to look up or to copy. Concurrent calls share a probe, which does not end
// with the context of a caller.
func (c *Client) probeUploads(ctx context.Context) error {
	answer := c.shared.DoChan("", func() (any, error) {
		if time.Since(c.uploaded) < uploadsAge {
			return nil, nil
		}
		err := c.health.Probe(c.ctx)
		if err == nil {
			err = c.probeWrites(c.ctx)
		}
		if err == nil {
			c.uploaded = time.Now()
		}
		return nil, err
	})
	select {
	case a := <-answer:
		return a.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ignore returns err, or nil if it is kind.
func ignore(err, kind error) error {
	if errors.Is(err, kind) {
		return nil
	}
	return err
}

// Close closes idle connections and ends probes.
func (c *Client) Close() error {
	c.cancel()
	c.health.Close()
	c.transport.CloseIdleConnections()
	return nil
}

// Store returns the blobs and results of an instance. An invalid name is cas.ErrInvalid.
func (c *Client) Store(name string) (*Store, error) {
	if err := cas.CheckInstanceName(name); err != nil {
		return nil, err
	}
	return &Store{Client: c, name: name, dir: c.prefix + escape(name) + "/"}, nil
}

// Instance is Store as a cas.Instances.
func (c *Client) Instance(name string) (*cas.Instance, error) {
	s, err := c.Store(name)
	if err != nil {
		return nil, err
	}
	return &cas.Instance{Name: name, Store: instance{s}, Actions: instance{s}}, nil
}
