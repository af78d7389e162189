// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A execution is all that is known of an action once it is over.
type execution struct {
	task      *Task
	began     time.Time
	req       *Request
	box       *confined
	staged    *staged
	ran       *ran
	collected *collected

	// spec is the canonical text of what the policy granted, specHash the hash of what the action could see and use.
	spec, specHash string
}

// seal states what became of the action, writes the manifest, and puts it into the store with what was collected. What is
// volatile (times, worker) goes into the metadata and the manifest's end alone.
func (l *Local) seal(ctx context.Context, c *execution) (*Outcome, error) {
	out := &Outcome{Result: c.collected.result, AuditLog: c.collected.log, Started: c.ran.Start, Ended: c.ran.End}
	out.Result.ExitCode = int32(c.ran.ExitCode)
	var line string
	var limit *sandbox.Event
	out.Status, line, limit = c.end()
	if limit != nil && c.ran.ExitCode != 0 {
		out.Exceeded = sandbox.Limit(limit.Subject)
	}
	out.Uncacheable = c.task.oneOff() || !c.box.grant.Cache || c.limit() != nil
	c.spec, c.specHash = l.permitted(c)
	ours, theirs := l.executionMetadata(c), usageOf(c)
	if n := proto.Size(out.Result) + size(append(theirs, ours)...) + sizeOf(c.task.Auxiliary) + otherMetadata; n > MaxResult {
		// Kept whole it could neither be sent nor, once recorded, be read.
		if out.Status == OK && c.ran.ExitCode == 0 {
			out.Status = BadOutput
		}
		line = fmt.Sprintf("the result names %d output files and takes %d bytes, more than the %d of a message: "+
			"declare a directory instead of what is in it", len(out.Result.OutputFiles), n, MaxResult)
		limit = nil
		out.Result.OutputFiles, out.Result.OutputSymlinks, out.Result.OutputDirectories = nil, nil, nil
		out.Result.OutputFileSymlinks, out.Result.OutputDirectorySymlinks = nil, nil
	}
	if err := l.record(ctx, c, out); err != nil {
		return nil, err
	}
	ours.StableHash = out.StableHash
	if !out.Manifest.IsZero() {
		ours.Manifest = out.Manifest.String()
	}
	out.Result.ExecutionMetadata = l.metadata(c, append([]proto.Message{ours}, theirs...)...)
	out.Result.ExecutionMetadata.AuxiliaryMetadata = append(out.Result.ExecutionMetadata.AuxiliaryMetadata, c.task.Auxiliary...)
	out.Message = c.message(line, limit)
	if out.Status != OK || c.ran.ExitCode != 0 {
		t := *c.task
		if g := c.box.grant; g.Rule == "default" && g.Profile == "build" {
			t.Target, t.Mnemonic = "", "" // they chose nothing
		}
		out.Reproduce = l.Reproduce(&t)
	}
	return out, nil
}

// MaxResult is the largest encoded result, in bytes, that a worker returns: it must fit into a message of
// 4 MiB with what goes around it.
const MaxResult = 7 << 19

// size returns how many bytes messages take once they are in a result.
func size(messages ...proto.Message) (n int) {
	const around = 100 // the name of its type
	for _, m := range messages {
		n += proto.Size(m) + around
	}
	return n
}

// sizeOf returns how many bytes messages take in a result that are packed already.
func sizeOf(packed []*anypb.Any) (n int) {
	const around = 8 // tag and length
	for _, m := range packed {
		n += proto.Size(m) + around
	}
	return n
}

// otherMetadata is more than what metadata adds to a result beside the messages that it is given, in bytes: names, times and
// hashes.
const otherMetadata = 4 << 10

// metadata states each moment no earlier than the one before it, though the clock may have been set
// back in between (rule 121).
func (l *Local) metadata(c *execution, auxiliary ...proto.Message) *repb.ExecutedActionMetadata {
	var last time.Time
	stamp := func(t time.Time) *timestamppb.Timestamp {
		if t.Before(last) {
			t = last
		}
		last = t
		return timestamppb.New(t)
	}
	m := &repb.ExecutedActionMetadata{Worker: l.Name}
	m.QueuedTimestamp = stamp(c.task.Queued)
	m.WorkerStartTimestamp = stamp(c.began)
	m.InputFetchStartTimestamp = stamp(c.staged.began)
	m.InputFetchCompletedTimestamp = stamp(c.staged.ended)
	m.ExecutionStartTimestamp = stamp(c.ran.Start)
	m.ExecutionCompletedTimestamp = stamp(c.ran.End)
	m.VirtualExecutionDuration = durationpb.New(m.ExecutionCompletedTimestamp.AsTime().Sub(m.ExecutionStartTimestamp.AsTime()))
	m.OutputUploadStartTimestamp = stamp(c.collected.began)
	m.OutputUploadCompletedTimestamp = stamp(c.collected.ended)
	m.WorkerCompletedTimestamp = stamp(time.Now())
	for _, a := range auxiliary {
		packed, err := anypb.New(a)
		if err != nil {
			// Only a text that is not UTF-8 could fail to encode, and every text is our own or printable.
			panic(err)
		}
		m.AuxiliaryMetadata = append(m.AuxiliaryMetadata, packed)
	}
	return m
}

// maxSealed is how many events a result carries for ever; the audit log has all.
const maxSealed = 100

// executionMetadata says how the action was confined, what it tried and what it consumed, in our own words.
func (l *Local) executionMetadata(c *execution) *cloisterpb.Execution {
	box := &cloisterpb.Sandbox{Backend: l.Features.Backend, Tier: l.Features.Tier, Layers: l.Features.Layers}
	if c.staged.tree != nil {
		box.Inputs, box.InputsReason = string(c.staged.tree.Form), c.staged.tree.CopyReason
	}
	for _, check := range l.Features.Checks {
		if !check.OK {
			box.NotEnforced = append(box.NotEnforced, check.Name)
		}
	}
	u := c.ran.Usage
	ours := &cloisterpb.Execution{
		Sandbox: box,
		Usage: &cloisterpb.Usage{
			UserTime:            durationpb.New(u.User),
			SystemTime:          durationpb.New(u.System),
			PeakResidentBytes:   u.PeakRSS,
			PeakMemoryBytes:     u.PeakMemory,
			PeakProcesses:       u.PeakProcesses,
			ReadBytes:           u.ReadBytes,
			WrittenBytes:        u.WrittenBytes,
			VoluntarySwitches:   u.VoluntarySwitches,
			InvoluntarySwitches: u.InvoluntarySwitches,
			PacketsRefused:      u.PacketsRefused,
		},
		EventsOmitted: int64(c.collected.Unrecorded),
		SpecHash:      c.specHash,
		Profile:       c.box.grant.Profile,
		Rule:          c.box.grant.Rule,
		Hermetic:      c.box.grant.Hermetic,
	}
	for i, e := range c.collected.byImportance() {
		if i == maxSealed {
			ours.EventsOmitted += int64(len(c.collected.Events) - maxSealed)
			break
		}
		ours.Events = append(ours.Events, &cloisterpb.Event{
			Kind: string(e.Kind), Subject: e.Subject, Syscall: e.Syscall, Process: e.Process,
			Count: int64(e.Count), Actual: e.Actual, Limit: e.Limit, Detail: e.Detail,
		})
	}
	if c.box.spec.Audit == sandbox.AuditFull {
		unread := int64(len(c.collected.unread))
		ours.UnreadInputs = &unread
	}
	return ours
}

// usageOf says what the action consumed in words that Buildbarn's browser reads.
func usageOf(c *execution) []proto.Message {
	messages := []proto.Message{POSIXUsage(c.ran.Result)}
	if c.box.spec.Audit == sandbox.AuditFull {
		read := c.req.Input.Files() - int64(len(c.collected.unread))
		messages = append(messages, &resourceusagepb.InputRootResourceUsage{FilesRead: uint64(read)})
	}
	return messages
}

// POSIXUsage says what a run consumed, and which signal ended it, in Buildbarn's words.
func POSIXUsage(r *sandbox.Result) *resourceusagepb.POSIXResourceUsage {
	return &resourceusagepb.POSIXResourceUsage{
		UserTime:                   durationpb.New(r.Usage.User),
		SystemTime:                 durationpb.New(r.Usage.System),
		MaximumResidentSetSize:     r.Usage.PeakRSS,
		BlockInputOperations:       r.Usage.ReadBytes / 512,
		BlockOutputOperations:      r.Usage.WrittenBytes / 512,
		VoluntaryContextSwitches:   r.Usage.VoluntarySwitches,
		InvoluntaryContextSwitches: r.Usage.InvoluntarySwitches,
		TerminationSignal:          signalName(r.Signal),
	}
}

// signals are the names of Linux' signals, from 1 on.
var signals = strings.Fields("HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT " +
	"CHLD CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS")

// signalName returns the name of a signal without "SIG", "" if it has none.
func signalName(s syscall.Signal) string {
	if s < 1 || int(s) > len(signals) {
		return ""
	}
	return signals[s-1]
}
