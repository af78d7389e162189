// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// A tag is what a registry answered about one.
type tag struct {
	digest string
	err    error // of the last query
	asked  time.Time
}

// resolve returns the digest of a tag. Concurrent requests share a query to the registry, and a failure is remembered
// for a short time, because waiting callers delay other requests.
func (l *Library) resolve(ctx context.Context, ref Reference) (string, error) {
	name := ref.String()
	l.mu.Lock()
	known := l.tags[name]
	l.mu.Unlock()
	age := l.config.TagAge
	if known.err != nil {
		age /= failedTagAge
	}
	if !known.asked.IsZero() && time.Since(known.asked) < age {
		return known.digest, known.err
	}
	answer := l.queries.DoChan(name, func() (any, error) { return l.query(ref), nil })
	select {
	case a := <-answer:
		t := a.Val.(tag)
		return t.digest, t.err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// query asks the registry for the digest of a tag and remembers the answer. A registry gets one query at a time, and
// none for a while after one that it did not answer in time: otherwise a client could delay others with many tags of
// it.
func (l *Library) query(ref Reference) tag {
	r := l.registry(ref.Registry())
	r.busy <- struct{}{}
	defer func() { <-r.busy }()
	t := tag{asked: time.Now()}
	if l.isLate(r) {
		t.err = &temporary{fmt.Errorf("resolve image %s: %w", ref, errLate)}
		return t
	}
	ctx, cancel := context.WithTimeoutCause(l.ctx, maxQuery, fmt.Errorf("resolve image %s: the registry did not answer within %v", ref, maxQuery))
	defer cancel()
	c := l.config.Config
	c.Store = noStore{}
	c.Transport = bodies{cmp.Or(c.Transport, remote.DefaultTransport)}
	t.digest, t.err = Resolve(ctx, c, ref)
	if ctx.Err() != nil {
		l.setLate(r)
	}
	if t.err != nil && (ctx.Err() != nil || unanswered(t.err)) {
		t.err = &temporary{t.err}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.tags) >= maxTags {
		clear(l.tags)
	}
	l.tags[ref.String()] = t
	return t
}

// A temporary is an error that says nothing about an image: its registry did not answer, or asks for a retry.
type temporary struct{ error }

func (t *temporary) Unwrap() error { return t.error }

// Temporary distinguishes the error from a refusal; see worker.Images.
func (t *temporary) Temporary() bool { return true }

// A bodies marks errors of reading response bodies as temporary. Types do not identify them, because net/http does not
// export those of HTTP/2.
type bodies struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b bodies) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := b.RoundTripper.RoundTrip(r)
	if err == nil {
		answer.Body = body{answer.Body}
	}
	return answer, err
}

type body struct{ io.ReadCloser }

func (b body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = &temporary{err}
	}
	return n, err
}

// unanswered reports whether err, the error of a query, means that the registry sent no complete response or asks for a
// retry. Neither applies to a certificate that cannot be verified or to malformed content. Any other error of a request
// counts, because net/http does not export the types of its errors about HTTP/2 and closed connections.
func unanswered(err error) bool {
	if answer, ok := errors.AsType[*transport.Error](err); ok {
		code := answer.StatusCode
		return code >= 500 || code == http.StatusTooManyRequests || code == http.StatusRequestTimeout
	}
	if _, untrusted := errors.AsType[*tls.CertificateVerificationError](err); untrusted {
		return false
	}
	if call, failed := errors.AsType[*url.Error](err); failed {
		return call.Op != "parse" // of url.Parse
	}
	_, interrupted := errors.AsType[*temporary](err) // of a body
	return interrupted || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// A registry is one of the hosts that are queried for tags. The operator permits them, so there are few.
type registry struct {
	busy chan struct{} // holds a value during a query
	late time.Time     // when it last did not answer in time; guarded by Library.mu
}

var errLate = fmt.Errorf("its registry did not answer in time; it is asked again after %v", lateAge)

func (l *Library) setLate(r *registry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.late = time.Now()
}

func (l *Library) isLate(r *registry) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(r.late) < lateAge
}

func (l *Library) registry(host string) *registry {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.registries[host]
	if r == nil {
		r = &registry{busy: make(chan struct{}, 1)}
		l.registries[host] = r
	}
	return r
}

// maxQuery is the maximum time of a query for the digest of a tag. It is a variable for tests.
var maxQuery = 5 * time.Second

const (
	lateAge      = 30 * time.Second // a registry that did not answer in time is not asked for this time
	failedTagAge = 10               // a failure is remembered for this part of TagAge
)

// maxTags bounds the number of remembered tags, which clients choose.
const maxTags = 10_000

// noStore stands for the store of a Config that stores nothing.
type noStore struct{ cas.Store }
