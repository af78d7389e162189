// SPDX-License-Identifier: Apache-2.0

package render

import (
	"fmt"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Result prints a result.
func (p *Page) Result(r *repb.ActionResult) {
	p.Line("result", fmt.Sprintf("exit code %d", r.ExitCode))
	name := func(d *repb.Digest) string { return fmt.Sprintf("%s/%d", d.GetHash(), d.GetSizeBytes()) }
	for _, f := range r.OutputFiles {
		kind := ""
		if f.IsExecutable {
			kind = "  executable"
		}
		p.Line("output", fmt.Sprintf("%s  %s%s", Quote(f.Path), Quote(name(f.Digest)), kind))
	}
	for _, d := range r.OutputDirectories {
		digest := d.TreeDigest
		if digest == nil {
			digest = d.RootDirectoryDigest
		}
		p.Line("output", fmt.Sprintf("%s/  %s", Quote(d.Path), Quote(name(digest))))
	}
	for _, l := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		p.Line("output", fmt.Sprintf("%s -> %s", Quote(l.Path), Quote(l.Target)))
	}
	for _, log := range []struct {
		name   string
		digest *repb.Digest
	}{{"stdout", r.StdoutDigest}, {"stderr", r.StderrDigest}} {
		if log.digest.GetSizeBytes() > 0 {
			p.Line(log.name, Quote(name(log.digest)))
		}
	}
	m := r.ExecutionMetadata
	if m == nil {
		return
	}
	if text, stable := worker.RecordedManifest(r); stable != "" {
		p.Line("stable hash", Quote(stable))
		if !text.IsZero() {
			p.Line("manifest", text.String())
		}
	}
	p.Line("worker", Quote(m.Worker))
	if m.QueuedTimestamp != nil {
		p.Line("queued", m.QueuedTimestamp.AsTime().Format(time.RFC3339Nano))
	}
	span := func(name string, from, to *timestamppb.Timestamp) {
		if from != nil && to != nil {
			p.Line(name, to.AsTime().Sub(from.AsTime()).String())
		}
	}
	span("waited", m.QueuedTimestamp, m.WorkerStartTimestamp)
	span("fetched", m.InputFetchStartTimestamp, m.InputFetchCompletedTimestamp)
	span("ran", m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp)
	span("uploaded", m.OutputUploadStartTimestamp, m.OutputUploadCompletedTimestamp)
	for _, aux := range m.AuxiliaryMetadata {
		p.message(aux)
	}
}

// message prints metadata that a worker added to a result.
func (p *Page) message(aux *anypb.Any) {
	m, err := aux.UnmarshalNew()
	if err != nil {
		p.Line("metadata", fmt.Sprintf("%s  %d bytes of an unknown type", Quote(aux.TypeUrl), len(aux.Value)))
		return
	}
	p.Line("metadata", string(m.ProtoReflect().Descriptor().FullName()))
	p.fields("  ", m.ProtoReflect())
}

// fields prints the set fields of m in the order of their declaration, so that new fields show without a change here.
func (p *Page) fields(prefix string, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := prefix + string(f.Name())
		switch {
		case !m.Has(f):
		case f.IsList():
			list := m.Get(f).List()
			for j := range list.Len() {
				p.value(fmt.Sprintf("%s[%d]", name, j), f, list.Get(j))
			}
		case f.IsMap():
			p.Line("metadata", fmt.Sprintf("%s %d entries", name, m.Get(f).Map().Len()))
		default:
			p.value(name, f, m.Get(f))
		}
	}
}

func (p *Page) value(name string, f protoreflect.FieldDescriptor, v protoreflect.Value) {
	text := fmt.Sprint(v.Interface())
	if f.Message() != nil {
		switch m := v.Message().Interface().(type) {
		case *durationpb.Duration:
			text = m.AsDuration().String()
		case *timestamppb.Timestamp:
			text = m.AsTime().Format(time.RFC3339Nano)
		default:
			p.fields(name+".", v.Message())
			return
		}
	} else if f.Enum() != nil {
		if e := f.Enum().Values().ByNumber(v.Enum()); e != nil {
			text = string(e.Name())
		}
	}
	p.Line("metadata", name+" "+Quote(text))
}
