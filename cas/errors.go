// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"errors"
	"fmt"
)

// Errors of naming: the caller's words are wrong.
var (
	// ErrInvalid says that a digest, an instance name or a resource name is malformed.
	ErrInvalid = errors.New("invalid")
	// ErrRange says that an offset lies outside the blob.
	ErrRange = errors.New("offset outside the blob")
)

// Errors of reading.
var (
	// ErrNotFound says that a blob or an action result is absent.
	ErrNotFound = errors.New("not found")
	// ErrCorrupt says that what a store holds no longer matches its digest.
	ErrCorrupt = errors.New("stored blob is corrupt")
)

// ErrUnavailable says that another server on which a store depends cannot be reached, or does not answer: a
// later try may succeed.
var ErrUnavailable = errors.New("unavailable")

// Errors of writing.
var (
	// ErrMismatch says that the bytes offered are not those that the digest names.
	ErrMismatch = errors.New("data does not match the digest")
	// ErrFull says that the store has no room and can make none.
	ErrFull = errors.New("store is full")
)

// invalidf returns an error that is ErrInvalid and reads as the formatted text alone.
func invalidf(format string, args ...any) error {
	return &labelled{kind: ErrInvalid, text: fmt.Sprintf(format, args...)}
}

// Mismatch returns the ErrMismatch for bytes that were offered as want and turned out to be got. A
// negative size of got says that reading stopped early because there were already too many.
func Mismatch(want, got Digest) error {
	if got.IsZero() {
		return &labelled{kind: ErrMismatch, text: fmt.Sprintf("data is longer than the %d bytes that digest %s states", want.size, want)}
	}
	return &labelled{kind: ErrMismatch, text: fmt.Sprintf("data has digest %s, not %s as stated", got, want)}
}

// labelled is an error of a kind whose text does not repeat the kind.
type labelled struct {
	kind error
	text string
}

func (e *labelled) Error() string { return e.text }
func (e *labelled) Unwrap() error { return e.kind }
