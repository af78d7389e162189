// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"
)

// credentialTimeout limits requests for credentials, some of which ignore the context of their caller.
const credentialTimeout = 10 * time.Second

var errNoCredentials = errors.New("no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, " +
	"or AWS_PROFILE, or give this host a role")

// s3Options returns the client options for S3.
func s3Options(_ context.Context, a *address, transport http.RoundTripper) (*minio.Options, error) {
	o := &minio.Options{
		Creds: credentials.New(requiredChain{&credentials.Chain{Providers: []credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{},
			&credentials.IAM{Client: &http.Client{Timeout: credentialTimeout}},
		}}}),
		Transport: transport,
		Region:    cmp.Or(a.region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")),
	}
	if a.custom {
		// Few of these servers have regions.
		o.Region = cmp.Or(o.Region, "us-east-1")
	}
	return o, nil
}

// A requiredChain fails without credentials. A plain chain would continue anonymously: if the credentials of a role
// were late, the bucket would seem to refuse the role.
type requiredChain struct{ *credentials.Chain }

func (r requiredChain) RetrieveWithCredContext(c *credentials.CredContext) (credentials.Value, error) {
	v, err := r.Chain.RetrieveWithCredContext(c)
	if err == nil && v.SignerType.IsAnonymous() {
		err = errNoCredentials
	}
	return v, err
}

// googleOptions returns the client options for Google Cloud Storage: its XML API understands the S3 protocol, with a
// token instead of a signature.
func googleOptions(ctx context.Context, a *address, transport http.RoundTripper) (*minio.Options, error) {
	d := &googleTransport{next: transport}
	// Never send a token without TLS.
	if a.endpoint.Scheme == "https" {
		ctx = context.WithValue(context.WithoutCancel(ctx), oauth2.HTTPClient, &http.Client{Timeout: credentialTimeout})
		found, err := google.FindDefaultCredentials(ctx, "https://www.googleapis.com/auth/devstorage.read_write")
		if err != nil {
			return nil, fmt.Errorf("%w; set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, "+
				"run gcloud auth application-default login, or give this host a service account", err)
		}
		d.tokens = found.TokenSource
	}
	return &minio.Options{
		Creds:     credentials.NewStatic("", "", "", credentials.SignatureAnonymous),
		Transport: d, Region: "auto", BucketLookup: minio.BucketLookupPath,
	}, nil
}

// A googleTransport translates S3 requests for Google: it changes the prefix of headers and adds a token.
type googleTransport struct {
	tokens oauth2.TokenSource // nil for none
	next   http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (d *googleTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	ours := r.Clone(r.Context())
	for name, values := range r.Header {
		if rest, ok := strings.CutPrefix(name, "X-Amz-"); ok {
			delete(ours.Header, name)
			ours.Header["X-Goog-"+rest] = values
		}
	}
	if d.tokens != nil {
		token, err := d.token(r.Context())
		if err != nil {
			if r.Body != nil {
				r.Body.Close()
			}
			return nil, err
		}
		token.SetAuthHeader(ours)
	}
	return d.next.RoundTrip(ours)
}

// token waits for a token until ctx ends. TokenSource does not support contexts.
func (d *googleTransport) token(ctx context.Context) (*oauth2.Token, error) {
	var token *oauth2.Token
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		token, err = d.tokens.Token()
	}()
	select {
	case <-done:
		return token, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A bodyCopier gives each attempt of a request its own body. The minio client rewinds a shared body for a retry while
// the transport may still read it for the previous attempt, and each of them would then miss the bytes that the other
// reads. Requests come through a limiter.
type bodyCopier struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (a bodyCopier) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		return a.next.RoundTrip(r)
	}
	body := make([]byte, r.ContentLength)
	_, err := io.ReadFull(r.Body, body)
	if err := errors.Join(err, r.Body.Close()); err != nil {
		return nil, err
	}
	ours := r.WithContext(r.Context())
	ours.Body = &sentBody{bytes.NewReader(body), r.Context().Value(attemptKey{}).(*attempt)}
	return a.next.RoundTrip(ours)
}
