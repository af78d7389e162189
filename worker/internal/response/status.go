// SPDX-License-Identifier: Apache-2.0

package response

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// retryDelay is the delay that a client is asked to wait when a resource is exhausted.
const retryDelay = 5 * time.Second

// FaultStatus returns err, which should be a *worker.Fault, as a gRPC status.
func FaultStatus(err error) *status.Status {
	f, ok := errors.AsType[*worker.Fault](err)
	if !ok {
		f = &worker.Fault{Kind: worker.FaultInternal, Err: err}
	}
	code, text := FaultText(f)
	switch f.Kind {
	case worker.FaultMissing:
		detail := missing(f.Blobs)
		if n := len(detail.Violations); n < len(f.Blobs) || n == queue.MaxBlobs {
			text += fmt.Sprintf(" (the first %d are listed; upload them and retry to get the others)", n)
		}
		return detailed(code, text, detail)
	case worker.FaultExhausted:
		return detailed(code, text, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	case worker.FaultUnmet:
		if errors.Is(f, sandbox.ErrUnsupported) {
			return detailed(code, text, &errdetails.ErrorInfo{Reason: unsupported, Domain: domain})
		}
	}
	return status.New(code, text)
}

// FaultText returns the gRPC code and the text of f. It is the only table from kinds to codes.
func FaultText(f *worker.Fault) (codes.Code, string) {
	text := "unknown reason"
	if f.Err != nil && f.Err.Error() != "" {
		text = OneLine(f.Err.Error())
	}
	switch f.Kind {
	case worker.FaultInvalid:
		return codes.InvalidArgument, text
	case worker.FaultMissing, worker.FaultUnmet:
		return codes.FailedPrecondition, text
	case worker.FaultExhausted:
		return codes.ResourceExhausted, text
	case worker.FaultUnavailable:
		return codes.Unavailable, text
	case worker.FaultCancelled:
		return codes.Canceled, text
	}
	return codes.Internal, text
}

// Code returns the gRPC code of an outcome with status s.
func Code(s worker.Status) codes.Code {
	switch s {
	case worker.StatusTimedOut:
		return codes.DeadlineExceeded
	case worker.StatusBadOutput:
		return codes.FailedPrecondition
	}
	return codes.OK
}

// Status returns the status of an outcome whose gRPC code is c, or false if outcomes never have that code.
func Status(c codes.Code) (worker.Status, bool) {
	switch c {
	case codes.OK:
		return worker.StatusOK, true
	case codes.DeadlineExceeded:
		return worker.StatusTimedOut, true
	case codes.FailedPrecondition:
		return worker.StatusBadOutput, true
	}
	return 0, false
}

// missing returns the detail of a status about missing blobs, with as many of them as fit into a message. It must be
// the only detail, because otherwise Bazel does not upload them (rule 72).
func missing(blobs []cas.Digest) *errdetails.PreconditionFailure {
	p := &errdetails.PreconditionFailure{}
	left := MaxBytes - 4*maxText // for the other texts
	for _, d := range blobs {
		v := &errdetails.PreconditionFailure_Violation{Type: "MISSING", Subject: d.Resource()}
		if left -= proto.Size(v) + 4; left < 0 { // with tag and length
			break
		}
		p.Violations = append(p.Violations, v)
	}
	return p
}

// detailed returns a status with a detail, or without it if it cannot be encoded.
func detailed(c codes.Code, text string, detail protoadapt.MessageV1) *status.Status {
	st := status.New(c, text)
	with, err := st.WithDetails(detail)
	if err != nil {
		return st
	}
	return with
}
