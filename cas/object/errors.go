// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/health"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/minio/minio-go/v7"
)

// ErrNoBucket is returned if the bucket does not exist.
var ErrNoBucket = health.ErrNoBucket

const (
	maxReason = 500 // bytes of the text of a failure
	maxAnswer = 300 // bytes of the server's answer
)

// unavailable is a cas.ErrUnavailable.
type unavailable struct {
	op, reason string
	kind       unavailability
}

// An unavailability describes how a bucket is unavailable.
type unavailability uint8

const (
	silent    unavailability = iota // it does not answer, or a proxy answers in its place
	broken                          // it answers with a failure, perhaps for one object only
	throttled                       // it asks for fewer requests
)

func (e *unavailable) Error() string {
	return e.op + ": " + cas.ErrUnavailable.Error() + ": " + e.reason
}

func (e *unavailable) Unwrap() error {
	if e.kind == throttled {
		return cas.ErrThrottled
	}
	return cas.ErrUnavailable
}

// refused is the cas.ErrDenied of a server that refuses to read an object. It may concern this object only, whereas a
// failed health check, wrong credentials or a wrong clock concern the whole bucket.
type refused struct{ error }

func (e *refused) Unwrap() error { return e.error }

// isRefused reports whether err is a refused.
func isRefused(err error) bool {
	_, ok := errors.AsType[*refused](err)
	return ok
}

// throttling has the codes of responses that ask for fewer requests. SlowDownRead is not one of them: with it MinIO
// reports that too few of its disks have a readable part of the object.
var throttling = map[string]bool{
	"SlowDown": true, "SlowDownWrite": true, "TooManyRequests": true, "RequestLimitExceeded": true, "Throttling": true,
	"ThrottlingException": true, "RequestThrottled": true, "BandwidthLimitExceeded": true,
}

// expired has the codes with which a server refuses the token of temporary credentials. Their status is 400.
var expired = map[string]bool{
	"ExpiredToken": true, "ExpiredTokenException": true, "InvalidToken": true, "TokenRefreshRequired": true,
}

// down returns the reason if err means that the bucket is down, otherwise nil. A bucket that is absent or refuses our
// credentials counts as down.
func down(err error) error {
	if errors.Is(err, cas.ErrDenied) || errors.Is(err, ErrNoBucket) {
		return err
	}
	if e, ok := errors.AsType[*unavailable](err); ok && e.kind != throttled {
		return errors.New(e.reason)
	}
	return nil
}

// unanswered returns the reason of a call without an answer, or nil if err is an answer.
func unanswered(err error) error {
	if e, ok := errors.AsType[*unavailable](err); ok && e.kind == silent {
		return errors.New(e.reason)
	}
	return nil
}

// ofObject reports whether err may be about one object only: the object is damaged, or the server answered that it
// failed, or refused the call for a reason that is none of the whole bucket.
func ofObject(err error) bool {
	if e, ok := errors.AsType[*unavailable](err); ok {
		return e.kind == broken
	}
	return err != nil && !slices.ContainsFunc([]error{
		cas.ErrNotFound, cas.ErrDenied, cas.ErrUpstreamFull, cas.ErrUnavailable, ErrNoBucket,
		context.Canceled, context.DeadlineExceeded,
	}, func(kind error) bool { return errors.Is(err, kind) })
}

// wrap adds the failed operation and the bucket to err, and the matching error of package cas. It quotes the response
// of the server as one printable line. If ctx has ended, it returns that error instead.
func (c *Client) wrap(ctx context.Context, what string, err error) error {
	op := what + " in " + c.target
	var answer minio.ErrorResponse
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", op, ctx.Err())
	} else if errors.Is(err, cas.ErrUnavailable) || errors.Is(err, cas.ErrDenied) {
		return fmt.Errorf("%s: %w", what, err) // of the health check
	} else if !errors.As(err, &answer) {
		return &unavailable{op: op, reason: reason(err)}
	}
	text := "the server responded " + printable.Head(strings.Trim(answer.Code+": "+answer.Message, ": "), maxAnswer)
	switch {
	case answer.Code == minio.NoSuchBucket:
		return fmt.Errorf("%s: %w", op, ErrNoBucket)
	case answer.Code == minio.NoSuchKey:
		return fmt.Errorf("%s: %w", op, cas.ErrNotFound)
	case answer.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("%s: the object is too short: %w", op, cas.ErrCorrupt)
	case answer.StatusCode == http.StatusInsufficientStorage || strings.Contains(answer.Code, "QuotaExceeded"):
		return fmt.Errorf("%s: %w; free space in the bucket or raise its quota; %s", op, cas.ErrUpstreamFull, text)
	case answer.StatusCode == http.StatusRequestEntityTooLarge || answer.Code == "EntityTooLarge":
		return fmt.Errorf("%s: the server or a proxy limits the size of requests: %w (%w); %s", op, cas.ErrUpstreamFull,
			errors.ErrUnsupported, text)
	case answer.Code == "InvalidObjectState" || answer.Code == "ObjectNotInActiveTierError": // of reads and copies
		return fmt.Errorf("%s: %w: the object is archived; let no rule of the bucket archive objects; %s", op, cas.ErrCorrupt, text)
	case answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden ||
		expired[answer.Code]:
		advice := "check the credentials and the clock"
		if answer.Code == minio.AccessDenied {
			advice = fmt.Sprintf("grant these credentials %s on bucket %s", c.permissions(), c.bucket)
		} else if expired[answer.Code] {
			advice = "renew the temporary credentials, and restart this process if they come from its environment"
		}
		return fmt.Errorf("%s: %w; %s; %s", op, cas.ErrDenied, advice, text)
	case answer.StatusCode == http.StatusTooManyRequests || throttling[answer.Code]:
		return &unavailable{op, text, throttled}
	case answer.StatusCode == http.StatusBadGateway || answer.StatusCode == http.StatusGatewayTimeout:
		return &unavailable{op, text, silent}
	// Without a status, the response is malformed. Retrying does not help if the server does not implement the call.
	case answer.StatusCode == 0 || answer.StatusCode >= 499 && answer.StatusCode != http.StatusNotImplemented ||
		answer.StatusCode == http.StatusRequestTimeout:
		return &unavailable{op, text, broken}
	}
	return fmt.Errorf("%s: %s", op, text)
}

// reason returns the text of an error without an answer. It names the server's host instead of the URL of the request.
func reason(err error) string {
	text := err.Error()
	if failed, ok := errors.AsType[*url.Error](err); ok {
		text = failed.Err.Error()
		if u, err := url.Parse(failed.URL); err == nil && !strings.Contains(text, u.Host) {
			text = u.Host + ": " + text
		}
	}
	return printable.Head(text, maxReason)
}

// permissions lists the permissions that a Client needs.
func (c *Client) permissions() string {
	if c.google {
		return "roles/storage.objectUser"
	}
	return "s3:GetObject, s3:PutObject, s3:AbortMultipartUpload and s3:ListBucket"
}
