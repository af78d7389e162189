// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
)

// A Kind classifies an error by who is at fault, and so by what the caller can do about it. The list is closed.
type Kind uint8

// The kinds. The client causes the first three, and this side the others.
const (
	Invalid     Kind = iota + 1 // the request is malformed; a retry cannot help
	Missing                     // blobs are missing; upload them and retry
	Unmet                       // the host or the operator's policy does not permit it
	Exhausted                   // a resource is exhausted for now
	Unavailable                 // temporary; retry
	Internal                    // a bug, or the host failed
	Cancelled                   // the caller cancelled the request
)

// A Fault is an error with its kind.
type Fault struct {
	Kind Kind
	Err  error
	// Blobs lists the missing blobs if Kind is Missing.
	Blobs []cas.Digest
}

// Error returns the text of the error.
func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns the error.
func (f *Fault) Unwrap() error { return f.Err }

// faultf returns a Fault of kind k; format may wrap.
func faultf(k Kind, format string, args ...any) *Fault {
	return &Fault{Kind: k, Err: fmt.Errorf(format, args...)}
}

// kinds are the kinds of known errors.
var kinds = []struct {
	err  error
	kind Kind
}{
	{context.Canceled, Cancelled},
	{context.DeadlineExceeded, Unavailable}, // of a call made on the way: an execution has no deadline
	{cas.ErrInvalid, Invalid},
	{sandbox.ErrSpec, Invalid},
	{cas.ErrFull, Exhausted},
	{syscall.ENOSPC, Exhausted},    // on this host: an action that fills its own workspace is an Outcome
	{cas.ErrCorrupt, Unavailable},  // the store has dropped the blob, so the next attempt reports it missing
	{cas.ErrNotFound, Unavailable}, // evicted after the check for missing blobs; the next attempt reports it missing
	{cas.ErrUnavailable, Unavailable},
	{sandbox.ErrUnsupported, Unmet},
	{policy.ErrRefused, Unmet},
}

// fault returns err as a Fault that names the stage s. It returns nil for nil, and a Fault unchanged.
func fault(s Stage, err error) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*Fault](err); ok {
		return f
	}
	if missing, ok := errors.AsType[*tree.MissingError](err); ok {
		f := faultf(Missing, "%s: %w", s, err)
		f.Blobs = missing.Blobs
		return f
	}
	for _, row := range kinds {
		if errors.Is(err, row.err) {
			return faultf(row.kind, "%s: %w", s, err)
		}
	}
	return faultf(Internal, "%s: %w", s, err)
}
