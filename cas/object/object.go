// SPDX-License-Identifier: Apache-2.0

// Package object is the store and the action cache of package cas over a bucket: of Amazon S3, of any server
// that speaks its protocol, or of Google Cloud Storage. It keeps no blob here for longer than a call, and
// removes none from the bucket.
//
// A bucket is not trusted with contents: what it returns is checked against the digest, and what is sent to
// it becomes visible after the last byte was checked, or never. It is trusted with results, which nothing but
// their own checksum vouches for: who may write to the bucket decides what actions result in.
//
// # What it costs
//
// Every digest that Missing is asked about is a call of its own. 32 are under way at once: where one takes
// 15 ms, that is 2,000 digests a second, a five-hundredth of what a disk does. So it belongs behind a disk.
// A Put holds up to 32 MiB in memory, and all those of a Client together up to 256 MiB: more of them wait.
//
// # What it promises
//
// An object store knows no lease. As long as its bucket has no lifecycle rule, nothing ever leaves it. Where
// a rule deletes objects N days after they were created, the URL must say so: expire_days=N. Then Missing
// and Lookup copy an object onto itself, which makes it new, when they find it older than half of that: what
// Put stored, Missing called present or Lookup returned stays for N/2 days. Open promises nothing. S3 does
// not copy a blob above 5 GiB in one call; there Missing calls it absent instead, so that it is put again.
//
// The rule should go by the age of the object alone, and abort multipart uploads that are a day old. A
// bucket that keeps old versions, or deleted objects, also keeps one of each copy.
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

// ErrURL says that the URL of a bucket is malformed.
var ErrURL = errors.New("URL of a bucket is s3://BUCKET[/PREFIX][?region=REGION][&endpoint=http(s)://HOST[:PORT]][&expire_days=N], or gs:// without region")

const (
	parallel = 32 // calls under way at once, of one Missing or Fetch
	attempts = 5  // at one call, or at going on with a body that brings nothing
)

// A Config says which bucket, and who is told of damage.
type Config struct {
	// URL is s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]. After a question mark it may say
	//
	//	endpoint=https://HOST[:PORT]  another server than Amazon's or Google's; http:// if without TLS
	//	region=REGION                 of S3; otherwise AWS_REGION, and otherwise the bucket is asked
	//	expire_days=N                 a lifecycle rule of the bucket deletes what is N days old
	//
	// Credentials are not part of it. Those for S3 come from the environment (AWS_ACCESS_KEY_ID and
	// AWS_SECRET_ACCESS_KEY), from a profile (AWS_PROFILE) in ~/.aws, or from the role that this host
	// or pod has; those for Google are the application default credentials, which are sent to nobody
	// without TLS. They must be permitted to get and put objects, to abort multipart uploads, and to
	// list the bucket, without which it refuses to say that an object is absent: at Amazon
	// s3:GetObject, s3:PutObject, s3:AbortMultipartUpload and s3:ListBucket, at Google the role
	// roles/storage.objectUser.
	URL string
	// Corrupt is told of each blob that is found damaged, and under which key it lies; nil: nobody. It
	// is called by whoever reads, from several goroutines.
	Corrupt func(instance string, d cas.Digest, where string)
}

// A Client is access to one bucket. It is safe for concurrent use; Open makes it.
type Client struct {
	core      *minio.Core
	transport *http.Transport
	google    bool
	bucket    string
	prefix    string        // of every key; empty, or ends with a slash
	target    string        // as messages name the bucket
	expire    time.Duration // age at which a rule deletes; 0: there is none
	corrupt   func(instance string, d cas.Digest, where string)
	memory    *semaphore.Weighted // bytes of what is being uploaded

	mu      sync.Mutex
	damaged map[string]bool // keys of blobs that were found damaged; guarded by mu
}

// Open returns access to a bucket that exists, answers, and lets itself be read; the caller closes it. A
// malformed URL is ErrURL. The other errors are those of Check.
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
	o, err := options(ctx, a, attempt{c.transport})
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

// Check asks the bucket for an object that does not exist, and returns nil if that is what it answers. A
// bucket that does not exist is ErrNoBucket, one that does not let itself be read is os.ErrPermission, and
// one that does not answer is cas.ErrUnavailable.
func (c *Client) Check(ctx context.Context) error {
	body, _, _, err := c.core.GetObject(ctx, c.bucket, c.prefix+"absent", minio.GetObjectOptions{})
	if err == nil {
		return body.Close()
	}
	if err := c.failed(ctx, "reach the bucket", err); !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	return nil
}

// Close closes the connections that no call uses.
func (c *Client) Close() error {
	c.transport.CloseIdleConnections()
	return nil
}

// Store returns the blobs and results of an instance. A name that no instance may have is cas.ErrInvalid.
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

// An address is what the URL of a bucket says.
type address struct {
	google         bool
	bucket, prefix string
	endpoint       *url.URL
	custom         bool // endpoint is the operator's
	region         string
	expire         time.Duration // age at which the bucket's rule deletes; 0: never
}

// String returns the URL without what follows the question mark.
func (a *address) String() string {
	scheme := "s3://"
	if a.google {
		scheme = "gs://"
	}
	return scheme + a.bucket + "/" + a.prefix
}

// harmless returns a URL without what may be a secret: a user, and all behind a question or number mark. It need not be
// a URL.
func harmless(text string) string {
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

// maxPrefix is the most bytes of a prefix: a key may have 1024.
const maxPrefix = 256

var (
	bucketNames = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$`)
	prefixes    = regexp.MustCompile(`^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?$`)
)

func parse(text string) (*address, error) {
	refuse := func(format string, args ...any) (*address, error) {
		return nil, fmt.Errorf("%+.256q: %s: %w", harmless(text), fmt.Sprintf(format, args...), ErrURL)
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "s3" && u.Scheme != "gs" {
		return refuse("it is neither s3:// nor gs://")
	}
	if u.User != nil || u.Fragment != "" || !bucketNames.MatchString(u.Host) {
		return refuse("the bucket must be 3 to 63 of a-z, 0-9, dot, hyphen and underscore, and nothing beside it")
	}
	if len(u.Path) > maxPrefix || !prefixes.MatchString(u.Path) {
		return refuse("the prefix must be up to %d of A-Z, a-z, 0-9, dot, hyphen, underscore and slash, no dot first", maxPrefix)
	}
	a := &address{google: u.Scheme == "gs", bucket: u.Host}
	if path := strings.Trim(u.Path, "/"); path != "" {
		a.prefix = path + "/"
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return refuse("what follows the question mark is malformed")
	}
	endpoint := "https://s3.amazonaws.com"
	if a.google {
		endpoint = "https://storage.googleapis.com"
	}
	for name, values := range query {
		value := values[0]
		switch {
		case len(values) > 1:
			return refuse("%+q is there twice", name)
		case name == "endpoint":
			endpoint, a.custom = value, true
		case name == "region" && !a.google:
			a.region = value
		case name == "expire_days":
			days, err := strconv.ParseUint(value, 10, 16)
			if err != nil || days == 0 {
				return refuse("expire_days must be a number of days from 1 to 65535")
			}
			a.expire = time.Duration(days) * 24 * time.Hour
		default:
			return refuse("%+q has no meaning", name)
		}
	}
	a.endpoint, err = url.Parse(endpoint)
	if err != nil || a.endpoint.Scheme != "http" && a.endpoint.Scheme != "https" || a.endpoint.Hostname() == "" || *a.endpoint != (url.URL{Scheme: a.endpoint.Scheme, Host: a.endpoint.Host}) {
		return refuse("the endpoint must be http://HOST[:PORT] or https://HOST[:PORT]")
	}
	return a, nil
}
