// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// An imageWorker executes attacks as actions whose inputs are in mounted images, and limits their output files.
type imageWorker struct {
	*testing.T
	dir   string // on a disk; hidden from runs
	cache *disk.Cache
	in    *cas.Instance
	local *worker.Local
	root  *repb.Digest
}

func newImageWorker(t *testing.T) *imageWorker {
	t.Helper()
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
	stager, why := worker.NewStager(t.Context(), backend, tree.StagerConfig{Dir: dir, Budget: 64 << 20})
	if why != nil {
		sandboxtest.Unavailable(t, "namespaces", why)
	}
	t.Cleanup(func() { stager.Close() })
	w := &imageWorker{T: t, dir: dir, cache: cache, in: must.Get(cache.Instance(""))(t)}
	w.local, err = worker.New(worker.Config{
		Name: "w", Instances: cache.Instance, Backend: backend, Features: features, Stager: stager,
		Toolchain: must.Get(sandbox.HostToolchain())(t), MaxTimeout: 5 * time.Minute,
		Policy: must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles:\n  build: {output_files: 2000}\n")))(t),
	})
	must.Succeed(t, err)

	sub := &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "empty", Digest: w.message(&repb.Directory{})}}}
	for i := range 30 {
		sub.Files = append(sub.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: w.put([]byte("original"))})
	}
	for name, size := range padded {
		text := make([]byte, size)
		copy(text, "original")
		sub.Files = append(sub.Files, &repb.FileNode{Name: name, Digest: w.put(text)})
	}
	slices.SortFunc(sub.Files, func(a, b *repb.FileNode) int { return strings.Compare(a.Name, b.Name) })
	w.root = w.message(&repb.Directory{
		Files: []*repb.FileNode{
			{Name: "file", Digest: w.put([]byte("original"))},
			{Name: "hostile", Digest: w.put(must.Get(os.ReadFile(program))(t)), IsExecutable: true},
		},
		Directories: []*repb.DirectoryNode{{Name: "dir", Digest: w.message(sub)}},
	})
	return w
}

// padded maps the names of inputs that are padded with zeros to their sizes. One is in an image, the other is mounted
// from the store.
var padded = map[string]int{"medium": tree.LargeFile - 1, "large": tree.LargeFile + 8}

func (w *imageWorker) put(b []byte) *repb.Digest {
	w.Helper()
	return must.Get(cas.PutBytes(w.Context(), w.in.Store, cas.SHA256, b))(w).Proto()
}

func (w *imageWorker) message(m proto.Message) *repb.Digest {
	w.Helper()
	b, _, err := cas.MarshalProto(cas.SHA256, m)
	must.Succeed(w, err)
	return w.put(b)
}

// attack executes an attack with declared outputs, which must print that it held.
func (w *imageWorker) attack(attack []string, round int, outputs ...string) *worker.Outcome {
	w.Helper()
	action := must.Get(cas.FromProto(cas.SHA256, w.message(&repb.Action{
		InputRootDigest: w.root, DoNotCache: true,
		CommandDigest: w.message(&repb.Command{
			Arguments:            append([]string{"./hostile"}, attack...),
			EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "ROUND", Value: fmt.Sprint(round)}},
			OutputPaths:          outputs,
		}),
	})))(w)
	var output bytes.Buffer
	out, err := w.local.Execute(w.Context(), &worker.Task{Action: action, Stdout: &output, Stderr: &output}, nil)
	must.Be(w, err == nil, "%v: %v", attack, err)
	expect.That(w, strings.HasPrefix(output.String(), "held:") && out.Result.ExitCode == 0,
		"%v, round %d: got exit code %d, %.200q, want \"held: ...\"", attack, round, out.Result.ExitCode, output.String())
	return out
}

// TestEscapesFromImages attacks a worker whose inputs are in mounted images, twice so that the second run reuses the
// image, and then verifies the store.
func TestEscapesFromImages(t *testing.T) {
	w := newImageWorker(t)
	files := []string{"/build/file", "/build/dir/f07"}
	for _, attack := range [][]string{
		append([]string{"input-write"}, files...),
		append([]string{"input-metadata"}, files...),
		{"input-tree", "/build/dir/f07", "/build/dir", "/build/dir/empty"},
		{"input-tree", "/build/dir/large", "/build/dir", "/build/dir/empty"},
		{"input-copy", "/build/dir/medium", "/build/dir", fmt.Sprint(padded["medium"])},
		{"input-copy", "/build/dir/large", "/build/dir", fmt.Sprint(padded["large"])},
		{"input-lease", "/build/dir/f07", "/build/dir"},
		{"files", "/build/dir", "3000", "/build/dir/f07", "/build/dir/medium"},
		{"outside", "/etc", "/"},
	} {
		for round := range 2 {
			out := w.attack(attack, round)
			var m cloisterpb.Execution
			must.Succeed(t, out.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m))
			expect.That(t, m.Sandbox.Inputs == string(tree.FormImage),
				"%v: inputs were staged by %q, because %q", attack, m.Sandbox.Inputs, m.Sandbox.InputsReason)
		}
	}
	report := must.Get(w.cache.Verify(t.Context(), disk.VerifyOptions{}))(t)
	expect.That(t, len(report.Damaged) == 0 && report.Blobs != 0,
		"of %d blobs, these are damaged: %v", report.Blobs, report.Damaged)
}

// TestOutputsLeadNowhere lets a worker collect the outputs of attacks that put links in their places. The targets of
// the links must not be stored.
func TestOutputsLeadNowhere(t *testing.T) {
	w := newImageWorker(t)
	secret := filepath.Join(w.dir, "elsewhere", "secret")
	text := []byte("a secret of this host")
	must.Succeed(t, os.Mkdir(filepath.Dir(secret), 0o755))
	must.Succeed(t, os.WriteFile(secret, text, 0o644))
	long := strings.Repeat("n", 255)
	links, swap := []string{"links", secret, filepath.Dir(secret)}, []string{"swap", secret, "x"}
	for _, c := range []struct {
		attack, outputs, want []string // want lists the collected outputs, unless they depend on timing
	}{
		{
			links,
			[]string{"link0", "link1", "link1/secret", "link2", "link3", "link4", "fifo", "socket"},
			[]string{"link0", "link1", "link2", "link3", "link4"},
		},
		{links, []string{""}, []string{""}},
		{swap, []string{"swap"}, nil},
		{swap, []string{"swap", "swap/secret"}, nil},
		{[]string{"names"}, []string{"deep", long, "odd\x01"}, []string{long, "odd\x01"}},
	} {
		for round := range 5 {
			r := w.attack(c.attack, round, c.outputs...).Result
			var got []string
			for _, o := range r.OutputFiles {
				got = append(got, o.Path)
			}
			for _, o := range r.OutputDirectories {
				got = append(got, o.Path)
			}
			for _, o := range r.OutputSymlinks {
				got = append(got, o.Path)
			}
			slices.Sort(got)
			expect.That(t, c.want == nil || slices.Equal(got, c.want), "%v: got outputs %q, want %q", c.attack, got, c.want)
		}
	}
	missing := must.Get(w.in.Store.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum(text)}))(t)
	expect.That(t, len(missing) == 1, "the worker stored the file that the links lead to")
}
