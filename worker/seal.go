// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// MaxResult bounds an encoded result, in bytes, so that it fits in a message of 4 MiB with everything around it.
const MaxResult = 7 << 19

// An execution holds what the stages produced for one action.
type execution struct {
	task      *Task
	began     time.Time
	req       *request
	box       *confined
	staged    *staged
	ran       *ran
	collected *collected

	// spec is the canonical text of what the policy granted. specHash hashes what the action could see and use.
	spec, specHash string
}

// seal decides the outcome, writes the manifest, and stores it with the collected blobs. Volatile values such as times
// and the worker's name go only into the metadata and the end of the manifest.
func (l *Local) seal(ctx context.Context, e *execution) (*Outcome, error) {
	result := e.collected.result
	result.ExitCode = int32(e.ran.ExitCode)
	status, line, limit := e.status()
	unknown := l.unknownToolchain(e)
	if unknown {
		e.box.toolchain = ""
	}
	out := &Outcome{
		Result: result, Status: status, AuditLog: e.collected.log, Started: e.ran.Start, Ended: e.ran.End,
		Uncacheable: l.uncacheable(e.task, e.req) || !e.box.grant.Cache || e.limit() != nil || unknown || e.ran.violated != "",
		OnViolation: e.ran.violated,
	}
	if limit != nil && e.ran.ExitCode != 0 {
		out.Exceeded = sandbox.Limit(limit.Subject)
	}
	e.spec, e.specHash = l.grantedSpec(e)
	details, usage := l.executionMetadata(e), usageMetadata(e)
	n := proto.Size(result) + sizeOf(append(usage, details)...) + sizeOfPacked(e.task.Auxiliary) + otherMetadata
	if n > MaxResult {
		// The whole result could neither be sent nor, once cached, be read again.
		if out.Status == StatusOK && e.ran.ExitCode == 0 {
			out.Status = StatusBadOutput
		}
		line = fmt.Sprintf("the result names %d output files and takes %d bytes, more than the %d of a message: "+
			"declare a directory instead of its files", len(result.OutputFiles), n, MaxResult)
		limit = nil
		result.OutputFiles, result.OutputSymlinks, result.OutputDirectories = nil, nil, nil
		result.OutputFileSymlinks, result.OutputDirectorySymlinks = nil, nil
	}
	if err := l.record(ctx, e, out); err != nil {
		return nil, err
	}
	details.StableHash = out.StableHash
	if !out.Manifest.IsZero() {
		details.Manifest = out.Manifest.String()
	}
	if !out.AuditLog.IsZero() {
		details.AuditLog = out.AuditLog.String()
	}
	m := l.metadata(e, append([]proto.Message{details}, usage...)...)
	m.AuxiliaryMetadata = append(m.AuxiliaryMetadata, e.task.Auxiliary...)
	result.ExecutionMetadata = m
	out.Message = e.message(line, limit, l.ignoredLine(e.task, e.req))
	if out.Status != StatusOK || e.ran.ExitCode != 0 {
		t := *e.task
		if g := e.box.grant; g.Rule == "default" && g.Profile == "build" {
			t.Target, t.Mnemonic = "", "" // they selected nothing
		}
		out.Reproduce = l.cfg.Reproduce(&t)
	}
	return out, nil
}

// otherMetadata is an upper bound for the bytes that metadata adds beside the messages passed to it: names, times and
// hashes.
const otherMetadata = 4 << 10

// sizeOf returns an upper bound for the bytes that messages take in a result.
func sizeOf(messages ...proto.Message) (n int) {
	const typeURL = 100
	for _, m := range messages {
		n += proto.Size(m) + typeURL
	}
	return n
}

// sizeOfPacked is sizeOf for packed messages.
func sizeOfPacked(packed []*anypb.Any) (n int) {
	const header = 8 // tag and length
	for _, m := range packed {
		n += proto.Size(m) + header
	}
	return n
}
