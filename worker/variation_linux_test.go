// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A varied run sees its variation, can read its inputs and write its outputs, and does not affect the next run.
func TestVariedRunsInSandbox(t *testing.T) {
	c := newConfining(t, onDisk(t), 1<<20)
	given := sandbox.Conditions{Hostname: "elsewhere", User: "mallory", UID: 4711, Umask: 0o077, CPUs: 1, FixedLayout: true, SkippedPIDs: 9}
	if err := c.cfg.Features.Covers(&sandbox.Spec{Conditions: given, Limits: sandboxtest.Limits(), Network: sandbox.Network{Listen: true}}); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	root := &repb.Directory{}
	for i := range 2 * copyUpTo {
		name := fmt.Sprintf("f%02d", i)
		root.Files = append(root.Files, &repb.FileNode{Name: name, Digest: c.blob([]byte(name))})
	}
	sub := c.message(root)
	root.Directories = []*repb.DirectoryNode{{Name: "sub", Digest: sub}}
	script := "pwd; id -un; uname -n; umask; nproc; echo $$; echo $EXTRA; ls -U | tr '\\n' ' '; echo; ls -U sub | tr '\\n' ' '; echo; " +
		"cat f00 sub/f01; echo; echo text >o/x && ls -l o/x | cut -c 1-10"
	action, err := cas.FromProto(cas.SHA256, c.message(&repb.Action{
		CommandDigest:   c.message(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"o/x"}}),
		InputRootDigest: c.message(root), DoNotCache: true,
	}))
	must.Succeed(t, err)
	run := func(v *Variation) (lines []string, result *repb.ActionResult) {
		t.Helper()
		var text bytes.Buffer
		out, err := c.Execute(t.Context(), &Task{Action: action, Variation: v, Stdout: &text, Stderr: &text}, func(Stage) {})
		must.Succeed(t, err)
		must.Be(t, out.Result.ExitCode == 0 && len(out.Result.OutputFiles) == 1,
			"exit code %d, %d outputs: %s", out.Result.ExitCode, len(out.Result.OutputFiles), text.String())
		return strings.Split(strings.TrimSpace(text.String()), "\n"), out.Result
	}
	usual, first := run(nil)
	one, varied := run(&Variation{Conditions: given, Root: "/home/mallory/src", Order: 1, Env: []string{"EXTRA=more"}})
	two, _ := run(&Variation{Conditions: given, Root: "/home/mallory/src", Order: 2, Env: []string{"EXTRA=more"}})
	bare, whole := run(&Variation{Conditions: given})
	last, _ := run(nil)

	if want := []string{"/home/mallory/src", "mallory", "elsewhere", "0077", "1", "11", "more"}; strings.Join(one[:7], " ") != strings.Join(want, " ") {
		t.Errorf("varied run: got %q, want %q", one[:7], want)
	}
	if strings.Join(usual[:7], " ") == strings.Join(one[:7], " ") || usual[0] != ExecRoot || usual[1] != "build" || usual[2] != "cloister" {
		t.Errorf("normal run: got %q", usual)
	}
	for i, where := range map[int]string{7: "the root", 8: "a directory in it"} {
		expect.That(t, one[i] != two[i] && one[i] != usual[i],
			"order of %s: got %q, %q, normally %q, want three different ones", where, one[i], two[i], usual[i])
	}
	expect.That(t, one[9] == "f00f01" && one[10] == "-rw-------", "got content %q, mode %q", one[9], one[10])
	expect.That(t, strings.Join(last[:7], " ") == strings.Join(usual[:7], " "),
		"normal run after varied ones: got %q, want %q", last, usual)
	expect.That(t, first.OutputFiles[0].Digest.Hash == varied.OutputFiles[0].Digest.Hash,
		"the varied run has another output")
	expect.That(t, bare[0] == ExecRoot && bare[1] == "mallory", "run with conditions only: got %q", bare)
	usually := "copy"
	if c.why == nil {
		usually = "image"
	}
	for result, want := range map[*repb.ActionResult]string{varied: "copy", whole: usually, first: usually} {
		var m cloisterpb.Execution
		if err := result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m); err != nil || m.Sandbox.Inputs != want {
			t.Errorf("staged inputs: got %v, %v, want %s", m.Sandbox, err, want)
		}
	}
}

// A varied run sees another time and owner of each input, however it is staged, except of times that an input states.
func TestVariedRunSeesOtherTimesAndOwners(t *testing.T) {
	c := newConfining(t, onDisk(t), 1<<20)
	given := sandbox.Conditions{InputTime: 1_100_000_000, InputOwner: 30_001}
	if err := c.cfg.Features.Covers(&sandbox.Spec{Conditions: given, Limits: sandboxtest.Limits(), Network: sandbox.Network{Listen: true}}); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	dir := &repb.Directory{Files: []*repb.FileNode{{Name: "large", Digest: c.blob(make([]byte, 200_000))}}}
	for i := range 2 * copyUpTo {
		dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprintf("small%02d", i), Digest: c.blob([]byte{byte(i)})})
	}
	root := &repb.Directory{
		Directories: []*repb.DirectoryNode{{Name: "dir", Digest: c.message(dir)}},
		Files: []*repb.FileNode{{
			Name: "stated", Digest: c.blob([]byte("x")),
			NodeProperties: &repb.NodeProperties{Mtime: &timestamppb.Timestamp{Seconds: 1_200_000_000}},
		}},
		Symlinks: []*repb.SymlinkNode{{Name: "link", Target: "stated"}},
	}
	script := "touch made; stat -c '%Y %u %g' dir/large dir/small00 link stated; stat -c '0 %u %g' made"
	if !c.cfg.Features.SameUser { // else it is a directory of the run
		script += "; stat -c '%Y %u %g' dir"
	}
	action, err := cas.FromProto(cas.SHA256, c.message(&repb.Action{
		CommandDigest:   c.message(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}}),
		InputRootDigest: c.message(root), DoNotCache: true,
	}))
	must.Succeed(t, err)
	see := func(v Variation) []string {
		var text bytes.Buffer
		_, err := c.Execute(t.Context(), &Task{Action: action, Variation: &v, Stdout: &text, Stderr: &text}, func(Stage) {})
		must.Succeed(t, err)
		return strings.Split(strings.TrimSpace(text.String()), "\n")
	}
	usual := see(Variation{})
	for name, v := range map[string]Variation{
		"image": {Conditions: given}, "copy": {Conditions: given, Order: 1},
		"clock": {Conditions: sandbox.Conditions{InputTime: given.InputTime, FrozenClock: 1_700_000_000}},
	} {
		var want []string
		for _, line := range usual {
			at, owner, _ := strings.Cut(line, " ")
			if at != "0" && v.Conditions.InputOwner != 0 {
				owner = "30001 30001"
			}
			want = append(want, strings.Replace(at, "1000000000", "1100000000", 1)+" "+owner)
		}
		if got := see(v); !slices.Equal(got, want) || slices.Equal(got, usual) || len(usual) < 5 {
			t.Errorf("%s: got %q, want %q, usually %q", name, got, want, usual)
		}
	}
}
