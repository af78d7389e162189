// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// newer are lines of later versions than the pinned one.
var newer = []string{
	"message buildbarn.runner.CheckReadinessRequest",
	"buildbarn.runner.CheckReadinessRequest.path = 1 optional string",
	"buildbarn.runner.RunRequest.server_logs_directory = 8 optional string",
	"buildbarn.runner.Runner/CheckReadiness .buildbarn.runner.CheckReadinessRequest false -> .google.protobuf.Empty false",
}

// without are prefixes of lines that Cloister lacks: one replaced by newer, and messages it does not use.
var without = []string{
	"buildbarn.runner.Runner/CheckReadiness ",
	"buildbarn.resourceusage.FilePoolResourceUsage",
	"buildbarn.resourceusage.MonetaryResourceUsage",
}

// TestProtocolsMatchBuildbarns in every message, field, value and method.
func TestProtocolsMatchBuildbarns(t *testing.T) {
	program, err := programs[peers.BBDescriptors.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out := must.Get(exec.CommandContext(ctx, program).Output())(t)
	theirs := &descriptorpb.FileDescriptorSet{}
	must.Succeed(t, proto.Unmarshal(out, theirs))
	ours := &descriptorpb.FileDescriptorSet{}
	for _, file := range []protoreflect.FileDescriptor{
		remoteworkerpb.File_buildbarn_remoteworker_remoteworker_proto,
		resourceusagepb.File_buildbarn_resourceusage_resourceusage_proto,
		runnerpb.File_buildbarn_runner_runner_proto,
	} {
		ours.File = append(ours.File, protodesc.ToFileDescriptorProto(file))
	}
	want := slices.Clone(newer)
	for _, l := range lines(theirs) {
		begins := func(prefix string) bool { return strings.HasPrefix(strings.TrimPrefix(l, "message "), prefix) }
		if !slices.ContainsFunc(without, begins) {
			want = append(want, l)
		}
	}
	got := lines(ours)
	for _, l := range want {
		expect.That(t, slices.Contains(got, l), "only Buildbarn has: %s", l)
	}
	for _, l := range got {
		expect.That(t, slices.Contains(want, l), "only Cloister has: %s", l)
	}
	expect.That(t, len(want) >= 50, "compared %d lines, want at least 50", len(want))
}

// lines describes the wire format of each message, field, value and method in a line.
func lines(set *descriptorpb.FileDescriptorSet) []string {
	var ls []string
	var message func(string, *descriptorpb.DescriptorProto)
	enum := func(in string, e *descriptorpb.EnumDescriptorProto) {
		for _, v := range e.Value {
			ls = append(ls, fmt.Sprintf("%s.%s.%s = %d", in, e.GetName(), v.GetName(), v.GetNumber()))
		}
	}
	message = func(in string, m *descriptorpb.DescriptorProto) {
		name := in + "." + m.GetName()
		ls = append(ls, "message "+name)
		for _, f := range m.Field {
			l := fmt.Sprintf("%s.%s = %d %s", name, f.GetName(), f.GetNumber(), kind(f))
			if f.OneofIndex != nil {
				l += " of " + m.OneofDecl[f.GetOneofIndex()].GetName()
			}
			ls = append(ls, l)
		}
		for _, n := range m.NestedType {
			message(name, n)
		}
		for _, e := range m.EnumType {
			enum(name, e)
		}
	}
	for _, file := range set.File {
		in := file.GetPackage()
		for _, m := range file.MessageType {
			message(in, m)
		}
		for _, e := range file.EnumType {
			enum(in, e)
		}
		for _, s := range file.Service {
			for _, m := range s.Method {
				ls = append(ls, fmt.Sprintf("%s.%s/%s %s %t -> %s %t", in, s.GetName(), m.GetName(),
					m.GetInputType(), m.GetClientStreaming(), m.GetOutputType(), m.GetServerStreaming()))
			}
		}
	}
	return ls
}

// kind describes the encoding of a field.
func kind(f *descriptorpb.FieldDescriptorProto) string {
	k := strings.ToLower(strings.TrimPrefix(f.GetLabel().String(), "LABEL_") + " " + strings.TrimPrefix(f.GetType().String(), "TYPE_"))
	if f.TypeName != nil {
		k += " " + f.GetTypeName()
	}
	if f.GetProto3Optional() {
		k += " with presence"
	}
	if f.GetOptions() != nil && f.GetOptions().Packed != nil {
		k += fmt.Sprintf(" packed=%t", f.GetOptions().GetPacked())
	}
	return k
}
