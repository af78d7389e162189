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
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestRule070_MissingOrMalformedAction(t *testing.T) {
	b := newBench(t, nil)
	absent := cas.SHA256.Sum([]byte("absent"))
	if f := b.want("absent", absent, FaultMissing, absent.String()); !slices.Equal(f.Blobs, []cas.Digest{absent}) {
		t.Errorf("got missing %v, want the action", f.Blobs)
	}
	odd, err := cas.FromProto(cas.SHA256, b.raw(garbage))
	if err != nil {
		t.Fatal(err)
	}
	b.want("garbage", odd, FaultInvalid, odd.Hash())
	rootless := b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = nil })
	b.want("no input root", rootless, FaultInvalid, "input_root_digest")
	without, err := cas.FromProto(cas.SHA256, b.put(&repb.Action{}))
	if err != nil {
		t.Fatal(err)
	}
	b.want("no digests", without, FaultInvalid, "command_digest")
}

// A missing command is reported together with the other missing blobs.
func TestRule071_MissingOrMalformedCommand(t *testing.T) {
	b := newBench(t, nil)
	root := b.put(&repb.Directory{})
	odd, err := cas.FromProto(cas.SHA256, b.put(&repb.Action{CommandDigest: b.raw(garbage), InputRootDigest: root}))
	if err != nil {
		t.Fatal(err)
	}
	b.want("garbage", odd, FaultInvalid)
	absent := cas.SHA256.Sum([]byte("absent command"))
	file := cas.SHA256.Sum([]byte("absent file"))
	root = b.put(&repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: file.Proto()}}})
	action, err := cas.FromProto(cas.SHA256, b.put(&repb.Action{CommandDigest: absent.Proto(), InputRootDigest: root}))
	if err != nil {
		t.Fatal(err)
	}
	if f := b.want("absent", action, FaultMissing); !slices.Equal(f.Blobs, []cas.Digest{absent, file}) {
		t.Errorf("got missing %v, want %v", f.Blobs, []cas.Digest{absent, file})
	}
	b.want("arguments", b.action(command(func(c *repb.Command) { c.Arguments = nil })), FaultInvalid, "arguments")
	b.want("program", b.action(command(func(c *repb.Command) { c.Arguments = []string{""} })), FaultInvalid, "arguments")
	b.want("NUL", b.action(command(func(c *repb.Command) { c.Arguments = []string{"a\x00b"} })), FaultInvalid, "NUL")
}

func TestRule073_SymlinksAreStagedUnchanged(t *testing.T) {
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, _ sandbox.Stdio, out *os.Root) *sandbox.Result {
		for name, want := range map[string]string{"absolute": "/usr/lib", "above": "../../x", "dangling": "none"} {
			if got, err := out.Readlink(name); got != want {
				t.Errorf("%s: got target %q, %v, want %q", name, got, err, want)
			}
		}
		return &sandbox.Result{}
	})
	b.do(&Task{Action: b.action(func(a *repb.Action, c *repb.Command) {
		c.OutputPaths = nil
		a.InputRootDigest = b.put(&repb.Directory{Symlinks: []*repb.SymlinkNode{
			{Name: "above", Target: "../../x"}, {Name: "absolute", Target: "/usr/lib"}, {Name: "dangling", Target: "none"},
		}})
	})})
}

func TestRule074_DirectoryMustBeCanonical(t *testing.T) {
	b := newBench(t, nil)
	file := func(name string) *repb.FileNode { return &repb.FileNode{Name: name, Digest: b.raw("x")} }
	dir := func(name string) *repb.DirectoryNode {
		return &repb.DirectoryNode{Name: name, Digest: b.put(&repb.Directory{})}
	}
	link := func(name string) *repb.SymlinkNode { return &repb.SymlinkNode{Name: name, Target: "t"} }
	for what, d := range map[string]*repb.Directory{
		"files unsorted":       {Files: []*repb.FileNode{file("b"), file("a")}},
		"directories unsorted": {Directories: []*repb.DirectoryNode{dir("b"), dir("a")}},
		"symlinks unsorted":    {Symlinks: []*repb.SymlinkNode{link("b"), link("a")}},
		"twice in a list":      {Files: []*repb.FileNode{file("a"), file("a")}},
		"twice in two lists":   {Files: []*repb.FileNode{file("a")}, Symlinks: []*repb.SymlinkNode{link("a")}},
		"no name":              {Files: []*repb.FileNode{file("")}},
		"dot":                  {Directories: []*repb.DirectoryNode{dir(".")}},
		"dots":                 {Symlinks: []*repb.SymlinkNode{link("..")}},
		"slash":                {Files: []*repb.FileNode{file("a/b")}},
		"NUL":                  {Files: []*repb.FileNode{file("a\x00")}},
		"no digest":            {Files: []*repb.FileNode{{Name: "a"}}},
		"no digest below":      {Directories: []*repb.DirectoryNode{{Name: "a"}}},
		"no target":            {Symlinks: []*repb.SymlinkNode{{Name: "a"}}},
	} {
		root := b.put(d)
		b.want(what, b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = root }), FaultInvalid, root.Hash)
	}
}

func TestRule075_MalformedTree(t *testing.T) {
	b := newBench(t, nil)
	for what, root := range map[string]*repb.Digest{
		"garbage at the root": b.raw(garbage),
		"garbage below":       b.put(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: b.raw(garbage)}}}),
	} {
		b.want(what, b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = root }), FaultInvalid)
	}
	nested := func(depth int, name string) *repb.Digest {
		d := b.put(&repb.Directory{})
		for range depth {
			d = b.put(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: name, Digest: d}}})
		}
		return d
	}
	for _, c := range []struct {
		what, words string
		root        *repb.Digest
	}{
		{"much too deep", "deeper than 1000", nested(5000, "d")},
		{"too deep", "deeper than 1000", nested(1001, "d")},
		{"path too long", "longer than 4000", nested(40, strings.Repeat("d", 100))},
	} {
		b.want(c.what, b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = c.root }), FaultInvalid, c.words)
	}
	deepest := nested(1000, "d")
	if _, err := b.Admit(t.Context(), &Task{Action: b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = deepest })}); err != nil {
		t.Errorf("maximum depth: %v", err)
	}
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
	if _, err := b.Admit(t.Context(), &Task{Action: vars("B", "1", "A", "2")}); err != nil {
		t.Errorf("unsorted: %v", err)
	}
	if got := environment(nil, &repb.Command{EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "B", Value: "1"}, {Name: "A", Value: "="}}}); !slices.IsSorted(got) || !slices.Contains(got, "A==") {
		t.Errorf("got environment %q, want it sorted", got)
	}
}

// Without output_paths, the fields of API 2.0 apply.
func TestRule078_OutputPathsReplaceTheOldFields(t *testing.T) {
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, _ sandbox.Stdio, out *os.Root) *sandbox.Result {
		for _, name := range []string{"new", "old"} {
			if err := out.WriteFile(name, []byte(name), 0o644); err != nil {
				t.Error(err)
			}
		}
		return &sandbox.Result{}
	})
	for _, c := range []struct {
		paths []string
		want  string
	}{{[]string{"new"}, "new"}, {nil, "old"}} {
		out := b.do(&Task{Action: b.action(command(func(m *repb.Command) { m.OutputPaths, m.OutputFiles = c.paths, []string{"old"} }))})
		if got := out.Result.OutputFiles; len(got) != 1 || got[0].Path != c.want {
			t.Errorf("output_paths %q: got %v, want %s", c.paths, got, c.want)
		}
	}
}

func TestRule080_WorkingDirectory(t *testing.T) {
	b := newBench(t, nil)
	for _, dir := range []string{"/d", "../d", "..", "d/../..", "none", "d/none", "a", "\x00"} {
		b.want(dir, b.action(command(func(c *repb.Command) { c.WorkingDirectory = dir })), FaultInvalid, "working")
	}
	for _, dir := range []string{"", "d"} {
		if _, err := b.Admit(t.Context(), &Task{Action: b.action(command(func(c *repb.Command) { c.WorkingDirectory = dir }))}); err != nil {
			t.Errorf("%q: %v", dir, err)
		}
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
	in, err := b.cfg.Instances("")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		asked *durationpb.Duration
		want  time.Duration
	}{{nil, time.Hour}, {durationpb.New(0), time.Hour}, {durationpb.New(time.Hour), time.Hour}, {durationpb.New(1), 1}} {
		if req, err := b.resolveHere(t.Context(), in, with(c.asked)); err != nil || req.Timeout != c.want {
			t.Errorf("timeout %v: got %v, %v, want %v", c.asked, req.Timeout, err, c.want)
		}
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
		if got := of(c.action, c.command); !slices.Equal(got, c.want) {
			t.Errorf("properties: got %v, want %v", got, c.want)
		}
	}
}

func TestRule085_PolicyRefusesBeforeQueueing(t *testing.T) {
	b := newBench(t, nil)
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.Platform = platform("cloister-memory", "1TiB") })
	if f := b.want("memory", action, FaultUnmet, "cloister-memory", "1TiB"); len(f.Blobs) > 0 {
		t.Errorf("got missing blobs %v, want none", f.Blobs)
	}
}

func TestRule068_CachedFailureIsIgnored(t *testing.T) {
	b := newBench(t, ended(0))
	action := b.action(nil)
	if err := b.store.Record(t.Context(), action, &repb.ActionResult{ExitCode: 1}); err != nil {
		t.Fatal(err)
	}
	if out := b.do(&Task{Action: action}); out.Cached || out.Result.ExitCode != 0 {
		t.Errorf("got %+v, want a new run", out)
	}
}

// TestRule094_SkippedLookupReplacesTheEntry also checks rule 96: do_not_cache neither reads nor writes the cache.
func TestRule094_SkippedLookupReplacesTheEntry(t *testing.T) {
	runs := 0
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, std sandbox.Stdio, _ *os.Root) *sandbox.Result {
		runs++
		std.Stdout.Write([]byte{byte('0' + runs)})
		return &sandbox.Result{}
	})
	stdout := func(r *repb.ActionResult) string {
		d, err := cas.FromProto(cas.SHA256, r.StdoutDigest)
		if err != nil {
			t.Fatal(err)
		}
		text, err := cas.ReadAll(t.Context(), b.store, d, 100)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	action := b.action(nil)
	first := b.do(&Task{Action: action})
	hit := b.do(&Task{Action: action})
	// Rule 122: the metadata are those of the run that made the result.
	if diff := cmp.Diff(first.Result, hit.Result, protocmp.Transform()); diff != "" || !hit.Cached {
		t.Errorf("cached: %v, result (-run +hit):\n%s", hit.Cached, diff)
	}
	if again := b.do(&Task{Action: action, SkipCacheLookup: true}); again.Cached || stdout(again.Result) != "2" {
		t.Errorf("got %+v, want a second run", again)
	}
	if r, err := b.store.Lookup(t.Context(), action); err != nil || stdout(r) != "2" {
		t.Errorf("cached: got %v, %v, want the result of the second run", r, err)
	}

	private := b.action(func(a *repb.Action, _ *repb.Command) { a.DoNotCache = true })
	b.do(&Task{Action: private})
	if b.recorded(private) {
		t.Error("rule 96: a result with do_not_cache was cached")
	}
	if err := b.store.Record(t.Context(), private, hit.Result); err != nil {
		t.Fatal(err)
	}
	if out := b.do(&Task{Action: private}); out.Cached {
		t.Error("rule 96: got a cached result for do_not_cache")
	}
	if a, err := b.Admit(t.Context(), &Task{Action: private}); err != nil || !a.DoNotMerge {
		t.Errorf("rule 96: got %+v, %v, want DoNotMerge", a, err)
	}
}

func TestRule108_TimeoutHasResult(t *testing.T) {
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		if spec.Timeout != time.Second && spec.Timeout != time.Hour {
			t.Errorf("got timeout %v", spec.Timeout)
		}
		std.Stdout.Write([]byte("partial"))
		if err := out.WriteFile("o/x", []byte("half"), 0o644); err != nil {
			t.Error(err)
		}
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
		if b.recorded(action) {
			t.Error("the result of a timeout was cached")
		}
	}
}

func TestRule109_MessageNamesSignal(t *testing.T) {
	b := newBench(t, returns(sandbox.Result{ExitCode: 139, Signal: 11}))
	action := b.action(nil)
	out := b.do(&Task{Action: action})
	if out.Status != StatusOK || out.Result.ExitCode != 139 || !strings.Contains(out.Message, "killed by signal 11") || b.recorded(action) {
		t.Errorf("got %+v", out)
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
		if got := b.recorded(action); got != c.want {
			t.Errorf("%s: got cached %v, want %v", c.name, got, c.want)
		}
	}
}

func TestRule121_MetadataIsComplete(t *testing.T) {
	b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
		now := time.Now()
		return &sandbox.Result{Start: now, End: now.Add(time.Millisecond)}
	})
	m := b.do(&Task{Action: b.action(nil), Queued: time.Now()}).Result.ExecutionMetadata
	if m.Worker != "w" {
		t.Errorf("got worker %q, want w", m.Worker)
	}
	moments := []*timestamppb.Timestamp{
		m.QueuedTimestamp, m.WorkerStartTimestamp, m.InputFetchStartTimestamp, m.InputFetchCompletedTimestamp,
		m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp,
		m.OutputUploadStartTimestamp, m.OutputUploadCompletedTimestamp, m.WorkerCompletedTimestamp,
	}
	for i, s := range moments {
		if s == nil || i > 0 && s.AsTime().Before(moments[i-1].AsTime()) {
			t.Errorf("timestamp %d: got %v after %v", i, s, moments[max(0, i-1)])
		}
	}
	if d := m.VirtualExecutionDuration.AsDuration(); d <= 0 || d > m.ExecutionCompletedTimestamp.AsTime().Sub(m.ExecutionStartTimestamp.AsTime()) {
		t.Errorf("got virtual_execution_duration %v", d)
	}
	for _, aux := range m.AuxiliaryMetadata {
		if _, err := aux.UnmarshalNew(); err != nil {
			t.Errorf("auxiliary metadata: %v", err)
		}
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
				if err := out.WriteFile(c.make, nil, 0o644); err != nil {
					t.Error(err)
				}
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
