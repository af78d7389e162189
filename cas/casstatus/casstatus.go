// SPDX-License-Identifier: Apache-2.0

// Package casstatus translates the errors of package cas to gRPC: it is the only table of their codes, which services
// and clients share.
package casstatus

import (
	"context"
	"errors"
	"os"

	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error converts err to a gRPC status error with the code that Code returns. Status errors and nil are returned
// unchanged.
func Error(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	return status.Error(Code(err), err.Error())
}

// Code returns the gRPC code of err.
func Code(err error) codes.Code {
	for _, row := range []struct {
		err  error
		code codes.Code
	}{
		{nil, codes.OK},
		{cas.ErrInvalid, codes.InvalidArgument},
		{cas.ErrMismatch, codes.InvalidArgument},
		{cas.ErrRange, codes.OutOfRange},
		{cas.ErrNotFound, codes.NotFound},
		{cas.ErrFull, codes.ResourceExhausted},
		{cas.ErrUpstreamFull, codes.ResourceExhausted},
		{cas.ErrDenied, codes.FailedPrecondition},
		{cas.ErrUnwritable, codes.Unavailable},
		// The store has dropped the blob. Clients recover from NOT_FOUND, while Bazel gives up on DATA_LOSS.
		{cas.ErrCorrupt, codes.NotFound},
		{cas.ErrUnavailable, codes.Unavailable},
		{context.Canceled, codes.Canceled},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{os.ErrPermission, codes.Internal},
	} {
		if errors.Is(err, row.err) {
			return row.code
		}
	}
	return codes.Internal
}
