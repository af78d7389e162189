// SPDX-License-Identifier: Apache-2.0

package response

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// retryDelay is what a client is asked to wait when there is no room.
const retryDelay = 5 * time.Second

// FaultStatus returns err, which should be a *worker.Fault, as a status of the API.
func FaultStatus(err error) *status.Status {
	f, ok := errors.AsType[*worker.Fault](err)
	if !ok {
		f = &worker.Fault{Kind: worker.Internal, Err: err}
	}
	code, text := FaultText(f)
	switch f.Kind {
	case worker.Missing:
		detail := missing(f.Blobs)
		if n := len(detail.Violations); n < len(f.Blobs) || n == queue.MaxBlobs {
			text += fmt.Sprintf(" (the first %d are listed; upload them and ask again for the others)", n)
		}
		return detailed(code, text, detail)
	case worker.Exhausted:
		return detailed(code, text, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	}
	return status.New(code, text)
}

// FaultText returns the code of f and what it says. It is the one table from kinds to codes.
func FaultText(f *worker.Fault) (codes.Code, string) {
	text := "no reason is known"
	if f.Err != nil && f.Err.Error() != "" {
		text = OneLine(f.Err.Error())
	}
	switch f.Kind {
	case worker.Invalid:
		return codes.InvalidArgument, text
	case worker.Missing, worker.Unmet:
		return codes.FailedPrecondition, text
	case worker.Exhausted:
		return codes.ResourceExhausted, text
	case worker.Unavailable:
		return codes.Unavailable, text
	case worker.Cancelled:
		return codes.Canceled, text
	}
	return codes.Internal, text
}

// Status returns the status of an outcome whose code is c, or false if no outcome has that code.
func Status(c codes.Code) (worker.Status, bool) {
	s := map[codes.Code]worker.Status{codes.DeadlineExceeded: worker.TimedOut, codes.FailedPrecondition: worker.BadOutput}[c]
	return s, s != worker.OK || c == codes.OK
}

// Code returns the code of an outcome with status s.
func Code(s worker.Status) codes.Code {
	switch s {
	case worker.TimedOut:
		return codes.DeadlineExceeded
	case worker.BadOutput:
		return codes.FailedPrecondition
	}
	return codes.OK
}

// missing returns the one detail that a status about missing blobs may have: Bazel uploads them only
// if there is no other (rule 72). It lists as many as fit into a message.
func missing(blobs []cas.Digest) *errdetails.PreconditionFailure {
	p := &errdetails.PreconditionFailure{}
	left := MaxBytes - 4*maxText // the texts beside it, and what is around it
	for _, d := range blobs {
		v := &errdetails.PreconditionFailure_Violation{Type: "MISSING", Subject: d.Resource()}
		if left -= proto.Size(v) + 4; left < 0 { // and the tag and length of each
			break
		}
		p.Violations = append(p.Violations, v)
	}
	return p
}

func detailed(c codes.Code, text string, detail protoadapt.MessageV1) *status.Status {
	st := status.New(c, text)
	with, err := st.WithDetails(detail)
	if err != nil {
		return st
	}
	return with
}
