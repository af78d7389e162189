// SPDX-License-Identifier: Apache-2.0

// Package object implements the store and the action cache of package cas in a bucket of Amazon S3, of an S3-compatible
// server or of Google Cloud Storage. It caches no blobs on this host, and deletes none from the bucket.
//
// The bucket is not trusted with contents: downloads are verified against the digest, and an upload becomes visible
// only after its last byte was verified. It is trusted with results, which only a checksum protects: anyone with write
// access to the bucket determines the results of actions.
//
// # Cost
//
// Missing takes one call for each digest, with 32 calls in parallel. At 15 ms for a call, that is 2,000 digests per
// second, a five-hundredth of the rate of a disk. The store should therefore be the upstream of a disk. A Put holds up
// to 32 MiB in memory, and all Puts of a Client up to 256 MiB: further ones wait.
//
// # Guarantees
//
// A bucket has no leases. Without a lifecycle rule, nothing ever leaves it. If a rule deletes objects N days after
// their creation, the URL must have expire_days=N. Missing and Lookup then renew an object older than N/2 days by
// copying it onto itself. What Put stored, Missing reported present or Lookup returned stays for N/2 days; Open renews
// nothing. S3 cannot copy a blob above 5 GiB in one call, so Missing reports it as absent instead and the client puts
// it again.
//
// The rule should depend only on the age of the object, and abort multipart uploads after a day. A bucket with
// versioning or soft delete also keeps the previous version of each copy.
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
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/semaphore"
)

// ErrURL is returned for a malformed URL of a bucket.
var ErrURL = errors.New("write s3://BUCKET[/PREFIX][?region=REGION][&endpoint=http(s)://HOST[:PORT]]" +
	"[&expire_days=N], or gs:// without region")

const (
	parallel = 32 // concurrent calls of one Missing or Fetch
	attempts = 5  // for a call, and for resuming a download without progress
)

// Config configures a Client.
type Config struct {
	// URL is s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX], with optional query parameters:
	//
	//	endpoint=https://HOST[:PORT]  another server than Amazon's or Google's; http:// without TLS
	//	region=REGION                 of S3; defaults to AWS_REGION, then to a query of the bucket
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
	corrupt   func(instance string, d cas.Digest, where string)
	memory    *semaphore.Weighted // bytes of running uploads

	mu      sync.Mutex
	damaged map[string]bool // keys of damaged blobs; guarded by mu
}

// Open returns a Client for a bucket and checks it; the caller closes it. A malformed URL is ErrURL. Other errors are
// those of Check.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	a, err := parse(cfg.URL)
	if err != nil {
		return nil, err
	}
	c := &Client{
		google: a.google, bucket: a.bucket, prefix: a.prefix, target: a.String(), expire: a.expire,
		corrupt: cfg.Corrupt, memory: semaphore.NewWeighted(maxUpload), damaged: map[string]bool{},
	}
	if c.transport, err = minio.DefaultTransport(a.endpoint.Scheme == "https"); err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	c.transport.MaxIdleConnsPerHost = 2 * parallel
	options := s3Options
	if a.google {
		options = googleOptions
	}
	o, err := options(ctx, a, bodyCopier{c.transport})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	o.Secure, o.MaxRetries = a.endpoint.Scheme == "https", attempts
	if c.core, err = minio.NewCore(a.endpoint.Host, o); err != nil {
		return nil, fmt.Errorf("%s: %w", c.target, err)
	}
	if err := c.Check(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Check reports whether the bucket can be read, by a request for an object that does not exist. An absent bucket is
// ErrNoBucket, one without read permission os.ErrPermission, and one that does not respond cas.ErrUnavailable.
func (c *Client) Check(ctx context.Context) error {
	body, _, _, err := c.core.GetObject(ctx, c.bucket, c.prefix+"absent", minio.GetObjectOptions{})
	if err == nil {
		return body.Close()
	}
	if err := c.wrap(ctx, "reach the bucket", err); !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	return nil
}

// Close closes idle connections.
func (c *Client) Close() error {
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
	return &cas.Instance{Name: name, Store: s, Actions: s}, nil
}

// An address is the parsed URL of a bucket.
type address struct {
	google         bool
	bucket, prefix string
	endpoint       *url.URL
	custom         bool // the URL has an endpoint
	region         string
	expire         time.Duration // age at which a lifecycle rule deletes; 0 without one
}

// String returns the URL without the query.
func (a *address) String() string {
	scheme := "s3://"
	if a.google {
		scheme = "gs://"
	}
	return scheme + a.bucket + "/" + a.prefix
}

// redact removes the parts of a possibly malformed URL that may be secret: the user, the query and the fragment.
func redact(text string) string {
	if at := strings.LastIndexByte(text, '@'); at >= 0 {
		scheme, _, found := strings.Cut(text[:at], "://")
		if !found {
			scheme = ""
		}
		text = scheme + "://..." + text[at:]
	}
	if i := strings.IndexAny(text, "?#"); i >= 0 {
		text = text[:i+1] + "..."
	}
	return text
}

// maxPrefix is the maximum length of a prefix in bytes; keys have at most 1024.
const maxPrefix = 256

var (
	bucketNames = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$`)
	prefixes    = regexp.MustCompile(`^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?$`)
)

// parse parses the URL of a bucket.
func parse(text string) (*address, error) {
	reject := func(format string, args ...any) (*address, error) {
		return nil, fmt.Errorf("%+.256q: %s: %w", redact(text), fmt.Sprintf(format, args...), ErrURL)
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "s3" && u.Scheme != "gs" {
		return reject("the scheme must be s3 or gs")
	}
	if u.User != nil || u.Fragment != "" || !bucketNames.MatchString(u.Host) {
		return reject("the bucket must be 3 to 63 of a-z, 0-9, dot, hyphen and underscore, without user or port")
	}
	if len(u.Path) > maxPrefix || !prefixes.MatchString(u.Path) {
		return reject("the prefix must be up to %d of A-Z, a-z, 0-9, dot, hyphen, underscore and slash, "+
			"without a leading dot", maxPrefix)
	}
	a := &address{google: u.Scheme == "gs", bucket: u.Host}
	if path := strings.Trim(u.Path, "/"); path != "" {
		a.prefix = path + "/"
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return reject("the query is malformed")
	}
	endpoint := "https://s3.amazonaws.com"
	if a.google {
		endpoint = "https://storage.googleapis.com"
	}
	for name, values := range query {
		value := values[0]
		switch {
		case len(values) > 1:
			return reject("duplicate parameter %+q", name)
		case name == "endpoint":
			endpoint, a.custom = value, true
		case name == "region" && !a.google:
			a.region = value
		case name == "expire_days":
			days, err := strconv.ParseUint(value, 10, 16)
			if err != nil || days == 0 {
				return reject("expire_days must be a number of days from 1 to 65535")
			}
			a.expire = time.Duration(days) * 24 * time.Hour
		default:
			return reject("unknown parameter %+q", name)
		}
	}
	a.endpoint, err = url.Parse(endpoint)
	if err != nil || !isEndpoint(a.endpoint) {
		return reject("the endpoint must be http://HOST[:PORT] or https://HOST[:PORT]")
	}
	return a, nil
}

// isEndpoint reports whether u consists of only a scheme and a host.
func isEndpoint(u *url.URL) bool {
	return (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" &&
		*u == url.URL{Scheme: u.Scheme, Host: u.Host}
}
