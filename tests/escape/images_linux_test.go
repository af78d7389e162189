// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// TestEscapesFromImages attacks a worker whose inputs are in mounted images, twice so that the second run reuses the
// image, and then verifies the store.
func TestEscapesFromImages(t *testing.T) {
	program := must.Get(build())(t)
	dir, err := os.MkdirTemp("/var/tmp", "cloister-escape-") // images need a disk
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
	t.Cleanup(func() { backend.Close() })
	features, err := backend.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	cache := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 256 << 20}))(t)
	t.Cleanup(func() { cache.Close() })
	in := must.Get(cache.Instance(""))(t)
	stager, why := worker.NewStager(t.Context(), backend, tree.StagerConfig{Dir: dir, Budget: 64 << 20})
	if why != nil {
		sandboxtest.Unavailable(t, "namespaces", why)
	}
	t.Cleanup(func() { stager.Close() })
	toolchain := must.Get(sandbox.HostToolchain())(t)
	local, err := worker.New(worker.Config{
		Name: "w", Instances: cache.Instance, Backend: backend, Features: features, Stager: stager, Toolchain: toolchain,
	})
	must.Succeed(t, err)

	put := func(b []byte) *repb.Digest {
		d := must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, b))(t)
		return d.Proto()
	}
	message := func(m proto.Message) *repb.Digest {
		b, _, err := cas.MarshalProto(cas.SHA256, m)
		must.Succeed(t, err)
		return put(b)
	}
	text := must.Get(os.ReadFile(program))(t)
	sub := &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "empty", Digest: message(&repb.Directory{})}}}
	for i := range 30 {
		sub.Files = append(sub.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: put([]byte("original"))})
	}
	sub.Files = append(sub.Files, &repb.FileNode{
		Name: "large", Digest: put(append([]byte("original"), make([]byte, tree.LargeFile)...)),
	})
	root := &repb.Directory{
		Files: []*repb.FileNode{
			{Name: "file", Digest: put([]byte("original"))},
			{Name: "hostile", Digest: put(text), IsExecutable: true},
		},
		Directories: []*repb.DirectoryNode{{Name: "dir", Digest: message(sub)}},
	}
	files := []string{"/build/file", "/build/dir/f07"}
	for _, attack := range [][]string{
		append([]string{"input-write"}, files...),
		append([]string{"input-metadata"}, files...),
		{"input-tree", "/build/dir/f07", "/build/dir", "/build/dir/empty"},
		{"input-tree", "/build/dir/large", "/build/dir", "/build/dir/empty"},
		{"input-lease", "/build/dir/f07", "/build/dir"},
		{"outside", "/etc", "/"},
	} {
		for round := range 2 {
			action, err := cas.FromProto(cas.SHA256, message(&repb.Action{
				InputRootDigest: message(root), DoNotCache: true,
				CommandDigest: message(&repb.Command{
					Arguments:            append([]string{"./hostile"}, attack...),
					EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "ROUND", Value: fmt.Sprint(round)}},
				}),
			}))
			must.Succeed(t, err)
			var output bytes.Buffer
			out, err := local.Execute(t.Context(), &worker.Task{Action: action, Stdout: &output, Stderr: &output}, func(worker.Stage) {})
			must.Be(t, err == nil, "%v: %v", attack, err)
			if !strings.HasPrefix(output.String(), "held:") || out.Result.ExitCode != 0 {
				t.Errorf("%v, round %d: got exit code %d, %.200q, want \"held: ...\"", attack, round, out.Result.ExitCode, output.String())
			}
			var m cloisterpb.Execution
			must.Succeed(t, out.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m))
			expect.That(t, m.Sandbox.Inputs == string(tree.FormImage),
				"%v: inputs were staged by %q, because %q", attack, m.Sandbox.Inputs, m.Sandbox.InputsReason)
		}
	}
	report := must.Get(cache.Verify(t.Context(), disk.VerifyOptions{}))(t)
	expect.That(t, len(report.Damaged) == 0 && report.Blobs != 0,
		"of %d blobs, these are damaged: %v", report.Blobs, report.Damaged)
}
