// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/digest"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// A step is an action of a build.
type step struct {
	invocation, target, mnemonic, script, input string
}

// perform executes a step without a cache lookup. It returns the action's digest and its output.
func (r *remote) perform(t *testing.T, s step) (string, string) {
	t.Helper()
	who, err := proto.Marshal(&repb.RequestMetadata{ToolInvocationId: s.invocation, TargetId: s.target, ActionMnemonic: s.mnemonic})
	if err != nil {
		t.Fatal(err)
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", string(who))
	put := func(m proto.Message) *repb.Digest {
		d, err := r.WriteProto(ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		return d.ToProto()
	}
	blob, err := r.WriteBlob(ctx, []byte(s.input))
	if err != nil {
		t.Fatal(err)
	}
	action := put(&repb.Action{
		CommandDigest:   put(&repb.Command{Arguments: []string{"/bin/sh", "-c", s.script}, OutputPaths: []string{"out"}}),
		InputRootDigest: put(&repb.Directory{Files: []*repb.FileNode{{Name: "input", Digest: blob.ToProto()}}}),
	})
	op, err := r.ExecuteAndWait(ctx, &repb.ExecuteRequest{InstanceName: r.InstanceName, ActionDigest: action, SkipCacheLookup: true})
	if err != nil {
		t.Fatal(err)
	}
	var response repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&response); err != nil || len(response.GetResult().GetOutputFiles()) != 1 {
		t.Fatalf("got response %v, %v, want one output file", &response, err)
	}
	return digest.NewFromProtoUnvalidated(action).String(), r.read(t, response.Result.OutputFiles[0].Digest)
}

// TestDiffOfAServer checks the reported differences between actions, builds and results, and their origins.
func TestDiffOfAServer(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string { return append(args, "--cas", r.cas, "--instance", "main") }
	build := func(id, source string) (compile, link string) {
		compile, object := r.perform(t, step{id, "//:x", "Compile", "cat input > out; echo object >> out", source})
		r.perform(t, step{id, "//:x", "Stamp", "head -c 16 /dev/urandom | od > out", "same"})
		link, _ = r.perform(t, step{id, "//:x", "Link", "cat input > out", object})
		r.perform(t, step{id, "//:x", "Test", "echo ok > out", "same"})
		return compile, link
	}
	compile1, link1 := build("one", "int x = 1;\n")
	compile2, _ := build("two", "int x = 2;\n")

	// Why was this a cache miss?
	wantOutput(t, 1, at("diff", compile1, compile2), "action\n", "\ninput input\n  - ", "int x = 1;", "int x = 2;")
	wantOutput(t, 1, at("diff", compile1[:12], compile2[:12], "--names"), "\ninput input\n")
	wantOutput(t, 1, at("diff", "^4", link1), "\nargument 3\n", "\ninput input\n")
	wantOutput(t, 0, at("diff", compile1, compile1))
	wantOutput(t, 1, at("diff", compile1, compile2, "--results"), "result\n", "\noutput out\n", "int x = 1;")
	wantOutput(t, 0, at("diff", "^1", "^1", "--results"))
	wantOutput(t, 1, at("diff", compile1, compile2, "--as", "blob"), "blob\n")

	s := wantOutput(t, 1, at("diff", "--invocation", "one", "two"), "actions: 1 same, 1 not reproducible, 1 changed, 1 follows\n",
		"\nnot reproducible: 'Stamp //:x'\n", "\nchanged: 'Compile //:x'\n  - "+compile1+"\n  + "+compile2+"\n    input input\n",
		"\nfollows: 'Link //:x'\n  - "+link1, "\n  from "+compile1+"\n")
	if strings.Index(s.out, "changed:") > strings.Index(s.out, "follows:") {
		t.Errorf("got a consequence before its cause:\n%s", s.out)
	}
	var report struct {
		Same  bool
		Count map[string]int
		Pairs []struct {
			Relation string
			Follows  []string
		}
	}
	s = wantOutput(t, 1, at("diff", "--invocation", "one", "two", "--json"))
	if err := json.Unmarshal([]byte(s.out), &report); err != nil || report.Same || report.Count["same"] != 1 || len(report.Pairs) != 3 || len(report.Pairs[2].Follows) != 1 {
		t.Errorf("--json: got %s, %v, want one same, one following and three pairs", s.out, err)
	}
	wantOutput(t, 0, at("diff", "--invocation", "one", "one"))
	wantOutput(t, 2, at("diff", "--invocation", "one", "three"), "three")
	wantOutput(t, 0, at("action", "ls", "--invocation", "one", "--mnemonic", "Stamp"), "Stamp //:x")

	// Manifests named by the history.
	var rows []struct{ Manifest string }
	s = wantOutput(t, 0, at("action", "ls", "--all", "--mnemonic", "Stamp", "--json"))
	if err := json.Unmarshal([]byte(s.out), &rows); err != nil || len(rows) != 2 {
		t.Fatalf("action ls --json: got %s, %v, want two rows", s.out, err)
	}
	if s := wantOutput(t, 1, at("diff", rows[1].Manifest, rows[0].Manifest), "manifest\n", "\nline\n  - "); !strings.Contains(s.out, "out") || strings.Contains(s.out, "command") {
		t.Errorf("two manifests: got\n%s\nwant only the output to differ", s.out)
	}

	// Directories and files, on the server and local.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "input"), []byte("int x = 1;\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	root, _, _ := strings.Cut(wantOutput(t, 0, at("cas", "put", dir)).out, " ")
	wantOutput(t, 0, at("diff", root, dir))
	if err := os.WriteFile(filepath.Join(dir, "input"), []byte("int x = 3;\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	wantOutput(t, 1, at("diff", root, dir), "directory\n", "\nfile input\n", "int x = 3;")

	// diffoscope sees only the files that differ.
	script := "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\ncd \"$2/..\" && find a b -type f | sort | xargs head -n 1\nexit 1\n"
	if err := os.WriteFile(filepath.Join(dir, "diffoscope"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", t.TempDir())
	wantOutput(t, 1, at("diff", compile1, compile2, "--diffoscope"), "\n==> a/input/input <==\nint x = 1;\n\n==> b/input/input <==\nint x = 2;\n")
	wantOutput(t, 1, at("diff", compile1, compile2, "--results", "--diffoscope"), "\n==> b/output/out <==\nint x = 2;\n")
	wantOutput(t, 1, at("diff", root, dir, "--diffoscope"), "\n==> a/input <==\nint x = 1;\n", "\n==> b/diffoscope <==\n", "\n==> b/input <==\nint x = 3;\n")
	wantOutput(t, 0, at("diff", compile1, compile1, "--diffoscope"))
	if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) > 0 {
		t.Errorf("left behind %v, %v, want nothing", left, err)
	}

	wantOutput(t, 2, at("diff", compile1, root), "of different kinds")
	wantOutput(t, 2, at("diff", compile1, strings.Repeat("0", 64)+"/7"))
	wantOutput(t, 2, []string{"diff", compile1, compile2, "--cas", "grpc://" + unused(t)})
}
