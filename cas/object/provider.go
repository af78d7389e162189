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

// credentialTime is how long whoever gives out credentials may take, since not every such call ends with
// the context of the call that waits for it.
const credentialTime = 10 * time.Second

var errNoCredentials = errors.New("no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this host a role")

// s3Options returns how S3 is spoken to.
func s3Options(_ context.Context, a *address, transport http.RoundTripper) (*minio.Options, error) {
	o := &minio.Options{
		Creds: credentials.New(required{&credentials.Chain{Providers: []credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{Client: &http.Client{Timeout: credentialTime}},
		}}}),
		Transport: transport,
		Region:    cmp.Or(a.region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")),
	}
	if a.custom {
		// Few of these servers have regions. They are spoken to by path, for few have a name per bucket.
		o.Region = cmp.Or(o.Region, "us-east-1")
	}
	return o, nil
}

// required is a chain for which it is an error that there are no credentials. By itself it would go on
// without any, and the bucket would seem to refuse a role whose credentials were late.
type required struct{ *credentials.Chain }

func (r required) RetrieveWithCredContext(c *credentials.CredContext) (credentials.Value, error) {
	v, err := r.Chain.RetrieveWithCredContext(c)
	if err == nil && v.SignerType.IsAnonymous() {
		err = errNoCredentials
	}
	return v, err
}

// googleOptions returns how Google Cloud Storage is spoken to: in the dialect of S3, which its XML API
// understands, without a signature but with a token.
func googleOptions(ctx context.Context, a *address, transport http.RoundTripper) (*minio.Options, error) {
	d := &dialect{next: transport}
	// A token is as good as a password.
	if a.endpoint.Scheme == "https" {
		ctx = context.WithValue(context.WithoutCancel(ctx), oauth2.HTTPClient, &http.Client{Timeout: credentialTime})
		found, err := google.FindDefaultCredentials(ctx, "https://www.googleapis.com/auth/devstorage.read_write")
		if err != nil {
			return nil, fmt.Errorf("%w; set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, run gcloud auth application-default login, or give this host a service account", err)
		}
		d.tokens = found.TokenSource
	}
	return &minio.Options{
		Creds:     credentials.NewStatic("", "", "", credentials.SignatureAnonymous),
		Transport: d, Region: "auto", BucketLookup: minio.BucketLookupPath,
	}, nil
}

// A dialect makes a request in Amazon's words one in Google's: headers of another prefix, and a token
// instead of a signature.
type dialect struct {
	tokens oauth2.TokenSource // nil: requests carry none
	next   http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (d *dialect) RoundTrip(r *http.Request) (*http.Response, error) {
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

// token waits for a token until ctx ends. Whoever fetches it knows no context.
func (d *dialect) token(ctx context.Context) (*oauth2.Token, error) {
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

// attempt gives each attempt at a request a body of its own. The client rewinds one body for the next
// attempt, which a transport may still read for the last one: either would send what the other skips.
type attempt struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (a attempt) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		return a.next.RoundTrip(r)
	}
	body := make([]byte, r.ContentLength)
	_, err := io.ReadFull(r.Body, body)
	if err := errors.Join(err, r.Body.Close()); err != nil {
		return nil, err
	}
	ours := r.WithContext(r.Context())
	ours.Body = io.NopCloser(bytes.NewReader(body))
	return a.next.RoundTrip(ours)
}
