// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/internal/results"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// maxResultEvents is the number of events that a result carries; the audit log lists all of them.
const maxResultEvents = 100

// metadata returns the metadata of a result. Its timestamps never decrease, even if the clock was set back during the
// execution (rule 121).
func (l *Local) metadata(e *execution, auxiliary ...proto.Message) *repb.ExecutedActionMetadata {
	var last time.Time
	stamp := func(t time.Time) *timestamppb.Timestamp {
		if t.Before(last) {
			t = last
		}
		last = t
		return timestamppb.New(t)
	}
	m := &repb.ExecutedActionMetadata{Worker: l.cfg.Name}
	m.QueuedTimestamp = stamp(e.task.Queued)
	m.WorkerStartTimestamp = stamp(e.began)
	m.InputFetchStartTimestamp = stamp(e.staged.began)
	m.InputFetchCompletedTimestamp = stamp(e.staged.ended)
	m.ExecutionStartTimestamp = stamp(e.ran.Start)
	m.ExecutionCompletedTimestamp = stamp(e.ran.End)
	ran := m.ExecutionCompletedTimestamp.AsTime().Sub(m.ExecutionStartTimestamp.AsTime())
	m.VirtualExecutionDuration = durationpb.New(ran)
	m.OutputUploadStartTimestamp = stamp(e.collected.began)
	m.OutputUploadCompletedTimestamp = stamp(e.collected.ended)
	m.WorkerCompletedTimestamp = stamp(time.Now())
	for _, a := range auxiliary {
		packed, err := anypb.New(a)
		if err != nil {
			panic(err) // only invalid UTF-8 fails, and every text is ours or printable
		}
		m.AuxiliaryMetadata = append(m.AuxiliaryMetadata, packed)
	}
	return m
}

// executionMetadata returns how the action was confined, what the sandbox denied and what the action consumed.
func (l *Local) executionMetadata(e *execution) *cloisterpb.Execution {
	box := &cloisterpb.Sandbox{Backend: l.cfg.Features.Backend, Tier: l.cfg.Features.Tier, Layers: l.cfg.Features.Layers}
	if s := e.staged.tree; s != nil {
		box.Inputs, box.InputsReason = string(s.Form), s.CopyReason
	}
	for _, check := range l.cfg.Features.Checks {
		if !check.OK {
			box.NotEnforced = append(box.NotEnforced, check.Name)
		}
	}
	u := e.ran.Usage
	m := &cloisterpb.Execution{
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
			Measured: &cloisterpb.Measured{
				Cpu: u.Measured.CPU, PeakMemory: u.Measured.PeakMemory, PeakProcesses: u.Measured.PeakProcesses,
				DiskBytes: u.Measured.DiskBytes, PacketsRefused: u.Measured.PacketsRefused,
			},
		},
		SpecHash: e.specHash,
		Profile:  e.box.grant.Profile,
		Rule:     e.box.grant.Rule,
		Hermetic: e.box.grant.Hermetic,

		OnViolation:       e.ran.violated,
		IgnoredProperties: e.req.ignored, Toolchain: e.box.toolchain,
	}
	if l.cfg.Images != nil && slices.ContainsFunc(e.req.properties(), func(p Property) bool { return isImage(p) && noImage(p.Value) }) {
		m.Image = results.NoImage
	}
	if root := e.req.root; root.own() {
		m.Root, m.Image, m.Unpinned = root.digest.String(), root.image, root.image != "" && root.unpinned
		if m.Image != "" {
			m.ImageArchitecture = runtime.GOARCH
		}
	}
	events := e.collected.byImportance()
	shown := events[:min(len(events), maxResultEvents)]
	m.EventsOmitted = int64(e.collected.Unrecorded + len(events) - len(shown))
	for _, v := range shown {
		m.Events = append(m.Events, &cloisterpb.Event{
			Kind: string(v.Kind), Subject: v.Subject, Syscall: v.Syscall, Process: v.Process,
			Count: int64(v.Count), Actual: v.Actual, Limit: v.Limit, Detail: v.Detail,
		})
	}
	if e.box.spec.Audit == sandbox.AuditFull {
		unread := int64(len(e.collected.unread))
		m.UnreadInputs = &unread
	}
	return m
}

// usageMetadata returns what the action consumed in Buildbarn's messages, which its browser shows.
func usageMetadata(e *execution) []proto.Message {
	messages := []proto.Message{POSIXUsage(e.ran.Result)}
	if e.box.spec.Audit == sandbox.AuditFull {
		read := e.req.Input.Files() - int64(len(e.collected.unread))
		messages = append(messages, &resourceusagepb.InputRootResourceUsage{FilesRead: uint64(read)})
	}
	return messages
}

// POSIXUsage returns the resource usage of a run, and the signal that ended it, as a Buildbarn message.
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

// signals are the names of the Linux signals, from 1.
var signals = strings.Fields("HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT " +
	"CHLD CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS")

// signalName returns the name of s without "SIG", or "" for an unknown signal.
func signalName(s syscall.Signal) string {
	if s < 1 || int(s) > len(signals) {
		return ""
	}
	return signals[s-1]
}
