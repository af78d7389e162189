// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"errors"
	"fmt"
	"os"
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

// ErrThrottled reports that a remote store throttles requests. It wraps ErrUnavailable and says nothing about the blob.
var ErrThrottled error = &labelled{ErrUnavailable, "unavailable: too many requests"}

// Errors of an upstream that operators must correct. They are not the caller's fault.
var (
	// ErrUpstreamFull reports that an upstream is full. Freeing space in the local store does not help.
	ErrUpstreamFull = errors.New("the upstream is full")
	// ErrDenied reports that the server of a store refuses our credentials. It wraps os.ErrPermission.
	ErrDenied error = &labelled{os.ErrPermission, "permission denied by the server"}
)

// Errors from writing.
var (
	// ErrMismatch reports that the content of a Put does not match the digest.
	ErrMismatch = errors.New("data does not match the digest")
	// ErrFull reports that the store has no room and cannot evict enough.
	ErrFull = errors.New("store is full")
	// ErrUnwritable reports that a store currently cannot be written, because its file system is read-only or fails.
	ErrUnwritable = errors.New("store cannot be written")
)

// A Limit is a limit that a full store has reached.
type Limit uint8

// The limits of a store.
const (
	LimitBytes Limit = iota + 1 // the store's budget of bytes
	LimitFiles                  // the store's budget of files
	LimitDisk                   // the space, inodes or quota of its file system
)

// A FullError is an ErrFull of a store on this machine, whose operator can change its limits.
type FullError struct {
	Limit Limit
	Err   error // wraps ErrFull
}

// Error returns the text of the error.
func (e *FullError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e *FullError) Unwrap() error { return e.Err }

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
