// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestRule070_MissingOrMalformedAction(t *testing.T) {
	b := newBench(t, nil)
	absent := cas.SHA256.Sum([]byte("absent"))
	expect.Slices(t, b.want("absent", absent, FaultMissing, absent.String()).Blobs, []cas.Digest{absent}, "missing")
	odd := must.Get(cas.FromProto(cas.SHA256, b.raw(garbage)))(t)
	b.want("garbage", odd, FaultInvalid, odd.Hash())
	rootless := b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = nil })
	b.want("no input root", rootless, FaultInvalid, "input_root_digest")
	without := must.Get(cas.FromProto(cas.SHA256, b.put(&repb.Action{})))(t)
	b.want("no digests", without, FaultInvalid, "command_digest")
}

// A missing command is reported together with the other missing blobs.
func TestRule071_MissingOrMalformedCommand(t *testing.T) {
	b := newBench(t, nil)
	root := b.put(&repb.Directory{})
	odd, err := cas.FromProto(cas.SHA256, b.put(&repb.Action{CommandDigest: b.raw(garbage), InputRootDigest: root}))
	must.Succeed(t, err)
	b.want("garbage", odd, FaultInvalid)
	absent := cas.SHA256.Sum([]byte("absent command"))
	file := cas.SHA256.Sum([]byte("absent file"))
	root = b.put(&repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: file.Proto()}}})
	action, err := cas.FromProto(cas.SHA256, b.put(&repb.Action{CommandDigest: absent.Proto(), InputRootDigest: root}))
	must.Succeed(t, err)
	expect.Slices(t, b.want("absent", action, FaultMissing).Blobs, []cas.Digest{absent, file}, "missing")
	b.want("arguments", b.action(command(func(c *repb.Command) { c.Arguments = nil })), FaultInvalid, "arguments")
	b.want("program", b.action(command(func(c *repb.Command) { c.Arguments = []string{""} })), FaultInvalid, "arguments")
	b.want("NUL", b.action(command(func(c *repb.Command) { c.Arguments = []string{"a\x00b"} })), FaultInvalid, "NUL")
}

func TestRule076_Environment(t *testing.T) {
	b := newBench(t, nil)
	vars := func(pairs ...string) cas.Digest {
		return b.action(command(func(c *repb.Command) {
			for i := 0; i < len(pairs); i += 2 {
				c.EnvironmentVariables = append(c.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: pairs[i], Value: pairs[i+1]})
			}
		}))
	}
	b.want("twice", vars("A", "1", "B", "2", "A", "1"), FaultInvalid, "A is set twice")
	b.want("no name", vars("", "1"), FaultInvalid, "environment variable")
	b.want("equals sign", vars("A=B", "1"), FaultInvalid, "A=B")
	b.want("NUL in a name", vars("A\x00", "1"), FaultInvalid)
	b.want("NUL in a value", vars("A", "\x00"), FaultInvalid)
	expect.Error(t, expect.Err(b.Admit(t.Context(), &Task{Action: vars("B", "1", "A", "2")})), nil, "unsorted")
	if got := environment(nil, &repb.Command{EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "B", Value: "1"}, {Name: "A", Value: "="}}}); !slices.IsSorted(got) || !slices.Contains(got, "A==") {
		t.Errorf("got environment %q, want it sorted", got)
	}
}

func TestRule081_Timeout(t *testing.T) {
	b := newBench(t, nil)
	with := func(d *durationpb.Duration) cas.Digest {
		return b.action(func(a *repb.Action, _ *repb.Command) { a.Timeout = d })
	}
	b.want("negative", with(durationpb.New(-time.Second)), FaultInvalid, "timeout -1s is negative")
	b.want("above the maximum", with(durationpb.New(time.Hour+1)), FaultInvalid, "timeout of 1h0m0.000000001s", "maximum of 1h0m0s")
	b.want("out of range", with(&durationpb.Duration{Seconds: 1 << 60}), FaultInvalid, "timeout")
	b.want("malformed", with(&durationpb.Duration{Seconds: 1, Nanos: -1}), FaultInvalid, "timeout")
	in := must.Get(b.cfg.Instances(""))(t)
	for _, c := range []struct {
		asked *durationpb.Duration
		want  time.Duration
	}{{nil, time.Hour}, {durationpb.New(0), time.Hour}, {durationpb.New(time.Hour), time.Hour}, {durationpb.New(1), 1}} {
		expect.Equal(t, must.Get(b.resolveHere(t.Context(), in, with(c.asked)))(t).Timeout, c.want, "timeout %v",
			c.asked)
	}
}

// Even an empty platform of the action wins.
func TestRule083_PlatformOfTheActionWins(t *testing.T) {
	named := platform("name", "action")
	of := func(a, c *repb.Platform) []Property {
		return (&request{Action: &repb.Action{Platform: a}, Command: &repb.Command{Platform: c}}).properties()
	}
	other := platform("name", "command")
	for _, c := range []struct {
		action, command *repb.Platform
		want            []Property
	}{
		{named, other, []Property{{Name: "name", Value: "action"}}}, {&repb.Platform{}, other, nil}, {nil, other, []Property{{Name: "name", Value: "command"}}}, {nil, nil, nil},
	} {
		expect.Slices(t, of(c.action, c.command), c.want, "properties")
	}
}

func TestRule068_CachedFailureIsIgnored(t *testing.T) {
	b := newBench(t, ended(0))
	action := b.action(nil)
	must.Succeed(t, b.store.Record(t.Context(), action, &repb.ActionResult{ExitCode: 1}))
	if out := b.do(&Task{Action: action}); out.Cached || out.Result.ExitCode != 0 {
		t.Errorf("got %+v, want a new run", out)
	}
}

func TestRule108_TimeoutHasResult(t *testing.T) {
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		expect.That(t, spec.Timeout == time.Second || spec.Timeout == time.Hour, "got timeout %v", spec.Timeout)
		std.Stdout.Write([]byte("partial"))
		expect.Error(t, out.WriteFile("o/x", []byte("half"), 0o644), nil)
		return &sandbox.Result{ExitCode: 143, Signal: 15, Stopped: true}
	})
	for _, c := range []struct {
		asked *durationpb.Duration
		says  string
	}{{durationpb.New(time.Second), "its timeout of 1s"}, {nil, "the default timeout of 1h0m0s"}} {
		action := b.action(func(a *repb.Action, _ *repb.Command) { a.Timeout = c.asked })
		out := b.do(&Task{Action: action})
		want := &repb.ActionResult{
			ExitCode:     143,
			StdoutDigest: cas.SHA256.Sum([]byte("partial")).Proto(), StderrDigest: cas.SHA256.Sum(nil).Proto(),
			OutputFiles: []*repb.OutputFile{{Path: "o/x", Digest: cas.SHA256.Sum([]byte("half")).Proto()}},
		}
		if diff := cmp.Diff(want, out.Result, protocmp.Transform(), protocmp.IgnoreFields(&repb.ActionResult{}, "execution_metadata")); diff != "" {
			t.Errorf("result (-want +got):\n%s", diff)
		}
		if out.Status != StatusTimedOut || !strings.Contains(out.Message, c.says) || out.Result.ExecutionMetadata == nil {
			t.Errorf("got status %v, message %q, metadata %v", out.Status, out.Message, out.Result.ExecutionMetadata)
		}
		expect.That(t, !b.recorded(action), "the result of a timeout was cached")
	}
}

func TestRule120_OnlySuccessIsRecorded(t *testing.T) {
	for _, c := range []struct {
		name   string
		result sandbox.Result
		want   bool
	}{
		{"success", sandbox.Result{}, true},
		{"exit code", sandbox.Result{ExitCode: 1}, false},
		{"timeout", sandbox.Result{ExitCode: 143, Stopped: true}, false},
		{"timeout with exit code 0", sandbox.Result{Stopped: true}, false},
		{"limit", sandbox.Result{Exceeded: &sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitMemory)}}, false},
	} {
		b := newBench(t, returns(c.result))
		action := b.action(nil)
		b.do(&Task{Action: action})
		expect.Equal(t, b.recorded(action), c.want, "%s: cached", c.name)
	}
}

// It is a success and cached, but Siso takes it for a failure.
func TestRule123_WarnsAboutSuccessWithoutOutputs(t *testing.T) {
	for _, c := range []struct {
		name   string
		make   string
		change func(*repb.Command)
		warns  bool
	}{
		{"none of one", "", nil, true},
		{"none of two, API 2.0", "", func(c *repb.Command) { c.OutputPaths, c.OutputFiles = nil, []string{"o/x", "o/y"} }, true},
		{"one of two", "o/x", func(c *repb.Command) { c.OutputPaths = []string{"o/x", "o/y"} }, false},
		{"none declared", "", func(c *repb.Command) { c.OutputPaths = nil }, false},
		{"a directory", "", func(c *repb.Command) { c.OutputPaths, c.OutputDirectories = nil, []string{"o"} }, false},
	} {
		b := newBench(t, func(_ context.Context, _ *sandbox.Spec, _ sandbox.Stdio, out *os.Root) *sandbox.Result {
			if c.make != "" {
				expect.Error(t, out.WriteFile(c.make, nil, 0o644), nil)
			}
			return &sandbox.Result{}
		})
		action := b.action(func(_ *repb.Action, m *repb.Command) {
			if c.change != nil {
				c.change(m)
			}
		})
		out := b.do(&Task{Action: action})
		if got := strings.Contains(out.Message, `produced none of its declared outputs`) && strings.Contains(out.Message, `"o/x"`); got != c.warns {
			t.Errorf("%s: got message %q, want a warning: %v", c.name, out.Message, c.warns)
		}
		if out.Status != StatusOK || out.Reproduce != "" || !b.recorded(action) || out.Result.ExecutionMetadata.GetWorker() == "" {
			t.Errorf("%s: got %+v, want a cached success", c.name, out)
		}
	}
}
