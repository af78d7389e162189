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

// ErrNoBucket is returned if the bucket does not exist.
var ErrNoBucket = errors.New("the bucket does not exist; create it, or correct its name or the endpoint")

// wrap adds the failed operation and the bucket to err, and the matching error of package cas. It quotes the response
// of the server as one printable line. If ctx has ended, it returns that error instead.
func (c *Client) wrap(ctx context.Context, what string, err error) error {
	what += " in " + c.target
	var answer minio.ErrorResponse
	response := func() string { return fmt.Sprintf("%+.300q", answer.Code+": "+answer.Message) }
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
		return fmt.Errorf("%s: the object is too short: %w", what, cas.ErrCorrupt)
	case answer.StatusCode == http.StatusInsufficientStorage || strings.Contains(answer.Code, "QuotaExceeded"):
		return fmt.Errorf("%s: %w: the server responded %s", what, cas.ErrFull, response())
	case answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%s: %w: the server responded %s; the credentials need permission to "+
			"read, write and list the bucket (without list, absent objects are forbidden)",
			what, os.ErrPermission, response())
	// Without a status, the response is malformed. Retrying does not help if the server does not implement the call.
	case answer.StatusCode == 0 || answer.StatusCode >= 499 && answer.StatusCode != http.StatusNotImplemented ||
		answer.StatusCode == http.StatusTooManyRequests || answer.StatusCode == http.StatusRequestTimeout:
		return fmt.Errorf("%s: %w: the server responded %s", what, cas.ErrUnavailable, response())
	}
	return fmt.Errorf("%s: the server responded %s", what, response())
}
