// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"os"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Status converts err to a gRPC status error with the code that Code returns. Status errors and nil are returned
// unchanged.
func Status(err error) error {
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
		{ErrInvalid, codes.InvalidArgument},
		{ErrMismatch, codes.InvalidArgument},
		{ErrRange, codes.OutOfRange},
		{ErrNotFound, codes.NotFound},
		{ErrFull, codes.ResourceExhausted},
		// The store has dropped the blob. Clients recover from NOT_FOUND, while Bazel gives up on DATA_LOSS.
		{ErrCorrupt, codes.NotFound},
		{ErrUnavailable, codes.Unavailable},
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
