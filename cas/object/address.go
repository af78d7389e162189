// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/internal/health"
)

// ErrURL is returned for a malformed URL of a bucket.
var ErrURL = errors.New("write s3://BUCKET[/PREFIX][?region=REGION][&endpoint=http(s)://HOST[:PORT]]" +
	"[&ca=FILE][&expire_days=N], or gs:// without region")

// An address is the parsed URL of a bucket.
type address struct {
	google         bool
	bucket, prefix string
	endpoint       *url.URL
	custom         bool // the URL has an endpoint
	region         string
	ca             string        // PEM file of the authorities of the endpoint's certificate; empty for those of this host
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

// maxPrefix is the maximum length of a prefix in bytes; keys have at most 1024.
const maxPrefix = 256

var (
	bucketNames = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$`)
	prefixes    = regexp.MustCompile(`^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?$`)
)

// parse parses the URL of a bucket.
func parse(text string) (*address, error) {
	reject := func(format string, args ...any) (*address, error) {
		return nil, fmt.Errorf("%+.256q: %s: %w", health.Redact(text), fmt.Sprintf(format, args...), ErrURL)
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
		case name == "ca" && value != "":
			a.ca = value
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
	if a.ca != "" && !a.secure() {
		return reject("ca needs an endpoint with https")
	}
	return a, nil
}

// secure reports whether the endpoint uses TLS.
func (a *address) secure() bool { return a.endpoint.Scheme == "https" }

// tls returns the configuration of connections to an endpoint with TLS.
func (a *address) tls() (*tls.Config, error) {
	config := &tls.Config{}
	if a.ca == "" {
		return config, nil
	}
	rest, err := os.ReadFile(a.ca)
	if err != nil {
		return nil, fmt.Errorf("%w: ca: %w", ErrURL, err)
	}
	begun := bytes.Count(rest, []byte("-----BEGIN "))
	config.RootCAs = x509.NewCertPool()
	for n := 0; ; n++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil && n > 0 {
			if n < begun { // pem.Decode has skipped one
				return nil, fmt.Errorf("%w: ca: %s: %d of %d certificates are damaged", ErrURL, a.ca, begun-n, begun)
			}
			return config, nil
		}
		if block == nil || block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%w: ca: %s: want only certificates in PEM format", ErrURL, a.ca)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: ca: %s: %w", ErrURL, a.ca, err)
		}
		config.RootCAs.AddCert(c)
	}
}

// isEndpoint reports whether u consists of only a scheme and a host.
func isEndpoint(u *url.URL) bool {
	return (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" &&
		*u == url.URL{Scheme: u.Scheme, Host: u.Host}
}
