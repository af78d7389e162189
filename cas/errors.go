// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"errors"
	"fmt"
)

// Errors for malformed requests.
var (
	// ErrInvalid reports a malformed digest, instance name, resource name or message.
	ErrInvalid = errors.New("invalid")
	// ErrRange reports an offset outside the blob.
	ErrRange = errors.New("offset outside the blob")
)

// Errors from reading.
var (
	// ErrNotFound reports that a blob or an action result is absent.
	ErrNotFound = errors.New("not found")
	// ErrCorrupt reports that a stored blob no longer matches its digest.
	ErrCorrupt = errors.New("stored blob is corrupt")
)

// ErrUnavailable reports that a remote store cannot be reached or does not answer. A retry may succeed.
var ErrUnavailable = errors.New("unavailable")

// Errors from writing.
var (
	// ErrMismatch reports that the content of a Put does not match the digest.
	ErrMismatch = errors.New("data does not match the digest")
	// ErrFull reports that the store has no room and cannot evict enough.
	ErrFull = errors.New("store is full")
)

// invalidf returns an error that wraps ErrInvalid without repeating its text.
func invalidf(format string, args ...any) error {
	return &labelled{ErrInvalid, fmt.Sprintf(format, args...)}
}

// Mismatch returns the ErrMismatch for content offered as want whose digest is got. A zero got means that reading
// stopped because the content was too long.
func Mismatch(want, got Digest) error {
	if got.IsZero() {
		return &labelled{ErrMismatch, fmt.Sprintf("data is longer than the %d bytes that digest %s states", want.size, want)}
	}
	return &labelled{ErrMismatch, fmt.Sprintf("data has digest %s, not %s as stated", got, want)}
}

// labelled is an error that wraps kind without repeating its text.
type labelled struct {
	kind error
	text string
}

func (e *labelled) Error() string { return e.text }
func (e *labelled) Unwrap() error { return e.kind }
