// SPDX-License-Identifier: Apache-2.0

package casstatus_test

import (
	"context"
	"errors"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
)

func TestCodes(t *testing.T) {
	for err, want := range map[error]codes.Code{
		nil: codes.OK, cas.ErrInvalid: codes.InvalidArgument, cas.ErrMismatch: codes.InvalidArgument, cas.ErrRange: codes.OutOfRange,
		cas.ErrNotFound: codes.NotFound, cas.ErrFull: codes.ResourceExhausted, cas.ErrCorrupt: codes.NotFound,
		context.Canceled: codes.Canceled, errors.New("x"): codes.Internal,
	} {
		expect.Equal(t, casstatus.Code(err), want, "Code(%v)", err)
	}
}
