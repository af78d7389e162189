// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
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
