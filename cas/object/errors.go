// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/minio/minio-go/v7"
)

// ErrNoBucket says that the bucket does not exist.
var ErrNoBucket = errors.New("the bucket does not exist; make it, or correct its name or the endpoint")

// failed says what did not succeed in which bucket, and gives err the kind that package cas has for it. What
// a server says is repeated as one printable line. The end of ctx comes before all else.
func (c *Client) failed(ctx context.Context, what string, err error) error {
	what += " in " + c.target
	var answer minio.ErrorResponse
	said := func() string { return fmt.Sprintf("%+.300q", answer.Code+": "+answer.Message) }
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, errNoCredentials):
		return fmt.Errorf("%s: %w: %w", what, cas.ErrUnavailable, err)
	case !errors.As(err, &answer):
		return fmt.Errorf("%s: %w: %+.500q", what, cas.ErrUnavailable, err.Error())
	case answer.Code == minio.NoSuchBucket:
		return fmt.Errorf("%s: %w", what, ErrNoBucket)
	case answer.Code == minio.NoSuchKey:
		return fmt.Errorf("%s: %w", what, cas.ErrNotFound)
	case answer.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("%s: it has not that many bytes: %w", what, cas.ErrCorrupt)
	case answer.StatusCode == http.StatusInsufficientStorage || strings.Contains(answer.Code, "QuotaExceeded"):
		return fmt.Errorf("%s: %w: the server says %s", what, cas.ErrFull, said())
	case answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%s: %w: the server says %s; the credentials must be permitted to read, write and list the bucket (without list, what is absent is forbidden)",
			what, os.ErrPermission, said())
	// Without a status it is an answer that makes no sense; what a server does not implement it never will.
	case answer.StatusCode == 0 || answer.StatusCode >= 499 && answer.StatusCode != http.StatusNotImplemented ||
		answer.StatusCode == http.StatusTooManyRequests || answer.StatusCode == http.StatusRequestTimeout:
		return fmt.Errorf("%s: %w: the server says %s", what, cas.ErrUnavailable, said())
	}
	return fmt.Errorf("%s: the server says %s", what, said())
}
