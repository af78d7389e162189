// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"os"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Status returns err as a status of the API: the one table by which wire services turn errors into
// codes. An error that already is a status keeps it; a nil error is nil.
func Status(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	return status.Error(Code(err), err.Error())
}

// Code returns the code that Status gives err.
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
		// The store has dropped it: that it is absent is what a client knows what to do about, while Bazel
		// gives up at DATA_LOSS.
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
