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

// A FaultKind classifies an error by who is at fault, and so by what the caller can do about it. The list is closed.
type FaultKind uint8

// The kinds. The client causes the first three, and this side the others.
const (
	FaultInvalid     FaultKind = iota + 1 // the request is malformed; a retry cannot help
	FaultMissing                          // blobs are missing; upload them and retry
	FaultUnmet                            // the host or the operator's policy does not permit it
	FaultExhausted                        // a resource is exhausted for now
	FaultUnavailable                      // temporary; retry
	FaultInternal                         // a bug, or the host failed
	FaultCancelled                        // the caller cancelled the request
)

// A Fault is an error with its kind.
type Fault struct {
	Kind FaultKind
	Err  error
	// Blobs lists the missing blobs if Kind is FaultMissing.
	Blobs []cas.Digest
}

// Error returns the text of the error.
func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns the error.
func (f *Fault) Unwrap() error { return f.Err }

// faultf returns a Fault of kind k; format may wrap.
func faultf(k FaultKind, format string, args ...any) *Fault {
	return &Fault{Kind: k, Err: fmt.Errorf(format, args...)}
}

// kinds are the kinds of known errors.
var kinds = []struct {
	err  error
	kind FaultKind
}{
	{context.Canceled, FaultCancelled},
	{context.DeadlineExceeded, FaultUnavailable}, // of a call made on the way: an execution has no deadline
	{cas.ErrInvalid, FaultInvalid},
	{sandbox.ErrSpec, FaultInvalid},
	{cas.ErrFull, FaultExhausted},
	{cas.ErrUpstreamFull, FaultExhausted},
	{syscall.ENOSPC, FaultExhausted},    // on this host: an action that fills its own workspace is an Outcome
	{cas.ErrCorrupt, FaultUnavailable},  // the store has dropped the blob, so the next attempt reports it missing
	{cas.ErrNotFound, FaultUnavailable}, // evicted after the check for missing blobs; the next attempt reports it missing
	{cas.ErrUnavailable, FaultUnavailable},
	{cas.ErrUnwritable, FaultUnavailable},
	{sandbox.ErrUnsupported, FaultUnmet},
	{policy.ErrRefused, FaultUnmet},
	{cas.ErrDenied, FaultUnmet}, // an upstream refuses the operator's credentials
}

// rejected reports whether err means that an upstream store rejects a write of this worker. Such an error does
// not make the request invalid, although it is a cas.ErrInvalid.
func rejected(err error) bool {
	var r interface{ Rejected() bool } // optional interface of the errors of stores
	return errors.As(err, &r) && r.Rejected()
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
		f := faultf(FaultMissing, "%s: %w", s, err)
		f.Blobs = missing.Blobs
		return f
	}
	for _, row := range kinds {
		if errors.Is(err, row.err) && !(row.kind == FaultInvalid && rejected(err)) {
			return faultf(row.kind, "%s: %w", s, err)
		}
	}
	return faultf(FaultInternal, "%s: %w", s, err)
}
