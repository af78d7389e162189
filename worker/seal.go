// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// times is when things happened; it becomes metadata and nothing else.
type times struct {
	queued, began time.Time
	staged        *staged
	ran           *ran
	collected     *collected
}

// seal states what became of the action. What is volatile (times, worker) goes into the metadata alone.
func (l *Local) seal(when times, req *Request, r *ran, c *collected) *Outcome {
	out := &Outcome{Result: c.result}
	out.Result.ExitCode = int32(r.ExitCode)
	switch {
	case r.timedOut:
		out.Code = codes.DeadlineExceeded
		out.Message = fmt.Sprintf("cloister: killed after its timeout of %v", req.Timeout)
	case c.bad != nil && r.ExitCode == 0:
		// Where the action failed of itself, that is what its client needs to see.
		out.Code = codes.FailedPrecondition
		out.Message = "cloister: " + c.bad.Error()
	case r.Signal != 0:
		out.Message = fmt.Sprintf("cloister: killed by signal %d (%v), exit code %d", int(r.Signal), r.Signal, r.ExitCode)
	case r.ExitCode != 0:
		out.Message = fmt.Sprintf("cloister: exit code %d after %v, action %s", r.ExitCode, r.End.Sub(r.Start).Round(time.Millisecond), req.Digest)
	}
	out.Result.ExecutionMetadata = l.metadata(when)
	if n := proto.Size(out.Result); n > MaxResult {
		// Kept whole it could neither be sent nor, once recorded, be read.
		if out.Code == codes.OK && r.ExitCode == 0 {
			out.Code = codes.FailedPrecondition
		}
		out.Message = fmt.Sprintf("cloister: the result names %d output files and takes %d bytes, more than the %d of a message: "+
			"declare a directory instead of what is in it", len(out.Result.OutputFiles), n, MaxResult)
		out.Result.OutputFiles, out.Result.OutputSymlinks, out.Result.OutputDirectories = nil, nil, nil
		out.Result.OutputFileSymlinks, out.Result.OutputDirectorySymlinks = nil, nil
	}
	return out
}

// MaxResult is the largest encoded result, in bytes, that a worker returns: it must fit into a message of
// 4 MiB with what goes around it.
const MaxResult = 7 << 19

// metadata states each moment no earlier than the one before it, though the clock may have been set
// back in between (rule 121).
func (l *Local) metadata(when times) *repb.ExecutedActionMetadata {
	var last time.Time
	stamp := func(t time.Time) *timestamppb.Timestamp {
		if t.Before(last) {
			t = last
		}
		last = t
		return timestamppb.New(t)
	}
	m := &repb.ExecutedActionMetadata{Worker: l.Name}
	m.QueuedTimestamp = stamp(when.queued)
	m.WorkerStartTimestamp = stamp(when.began)
	m.InputFetchStartTimestamp = stamp(when.staged.began)
	m.InputFetchCompletedTimestamp = stamp(when.staged.ended)
	m.ExecutionStartTimestamp = stamp(when.ran.Start)
	m.ExecutionCompletedTimestamp = stamp(when.ran.End)
	m.VirtualExecutionDuration = durationpb.New(m.ExecutionCompletedTimestamp.AsTime().Sub(m.ExecutionStartTimestamp.AsTime()))
	m.OutputUploadStartTimestamp = stamp(when.collected.began)
	m.OutputUploadCompletedTimestamp = stamp(when.collected.ended)
	m.WorkerCompletedTimestamp = stamp(time.Now())
	m.AuxiliaryMetadata = l.auxiliary(when.ran.Usage)
	return m
}

// auxiliary says how the action was confined and what it consumed.
func (l *Local) auxiliary(u sandbox.Usage) []*anypb.Any {
	box := &cloisterpb.Sandbox{Backend: l.Features.Backend, Tier: l.Features.Tier, Layers: l.Features.Layers}
	for _, c := range l.Features.Checks {
		if !c.OK {
			box.NotEnforced = append(box.NotEnforced, c.Name)
		}
	}
	m, err := anypb.New(&cloisterpb.Execution{Sandbox: box, Usage: &cloisterpb.Usage{
		UserTime:          durationpb.New(u.User),
		SystemTime:        durationpb.New(u.System),
		PeakResidentBytes: u.PeakRSS,
	}})
	if err != nil {
		// Only a name that is not UTF-8 could fail to encode, and every name is our own.
		panic(err)
	}
	return []*anypb.Any{m}
}
