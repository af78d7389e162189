// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// A quick is a backend that calls a function instead of running a command, with cheap workspaces for benchmarks.
type quick struct {
	sandbox.Backend
	dir  string
	run  func(out *os.Root)
	made int
	root *os.Root
}

func newQuick(b *testing.B, run func(out *os.Root)) *quick {
	dir, err := os.MkdirTemp("/dev/shm", "cloister-bench-")
	if err != nil {
		dir = b.TempDir()
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	return &quick{dir: dir, run: run}
}

func (q *quick) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	q.made++
	p := filepath.Join(q.dir, fmt.Sprint(q.made))
	if err := os.Mkdir(p, 0o755); err != nil {
		return nil, err
	}
	var err error
	q.root, err = os.OpenRoot(p)
	return scratch{space{root: q.root}}, err
}

func (q *quick) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	if q.run != nil {
		out, err := q.root.OpenRoot(outDir)
		if err != nil {
			return nil, err
		}
		defer out.Close()
		q.run(out)
	}
	return &sandbox.Result{}, nil
}

// A scratch is a workspace that is removed by Close.
type scratch struct{ space }

func (s scratch) Close() error {
	defer s.root.Close()
	return os.RemoveAll(s.Name())
}

// put stores m.
func put(b *testing.B, s cas.Store, m proto.Message) *repb.Digest {
	b.Helper()
	return must.Get(cas.PutProto(b.Context(), s, cas.SHA256, m))(b).Proto()
}

// A forest creates input roots of 2,000 files in 100 directories. Each root has 10 unique files.
type forest struct {
	b     *testing.B
	store cas.Store
	dirs  [100]*repb.Directory
	made  int
}

func newForest(b *testing.B, s cas.Store) *forest {
	f := &forest{b: b, store: s}
	for i := range f.dirs {
		f.dirs[i] = &repb.Directory{}
		for j := range 20 {
			f.dirs[i].Files = append(f.dirs[i].Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", j), Digest: f.file(i, j, 0)})
		}
	}
	return f
}

func (f *forest) file(i, j, version int) *repb.Digest {
	d, err := cas.PutBytes(f.b.Context(), f.store, cas.SHA256, fmt.Append(nil, "file ", i, " ", j, " ", version))
	must.Succeed(f.b, err)
	return d.Proto()
}

// next returns a new root.
func (f *forest) next() *repb.Digest {
	f.made++
	for i := range 10 {
		f.dirs[i*10].Files[7].Digest = f.file(i*10, 7, f.made)
	}
	root := &repb.Directory{}
	for i, d := range f.dirs {
		root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("d%02d", i), Digest: put(f.b, f.store, d)})
	}
	return put(f.b, f.store, root)
}

// action stores an action with unique arguments.
func action(b *testing.B, s cas.Store, n int, root *repb.Digest, outputs ...string) *Task {
	b.Helper()
	command := put(b, s, &repb.Command{Arguments: []string{"cc", fmt.Sprint(n)}, OutputPaths: outputs})
	d := must.Get(cas.FromProto(cas.SHA256, put(b, s, &repb.Action{CommandDigest: command, InputRootDigest: root})))(b)
	return &Task{Action: d}
}

func benchWorker(m *castest.Memory, backend sandbox.Backend) *Local {
	in := &cas.Instance{Store: m, Actions: m}
	toolchain, err := sandbox.HostToolchain()
	if err != nil {
		panic(err)
	}
	return newLocal(Config{
		Name: "w", Instances: func(string) (*cas.Instance, error) { return in, nil }, Backend: backend, Features: able, Toolchain: toolchain,
	})
}

// BenchmarkRequest measures an action before staging: Admit and fetch.
func BenchmarkRequest(b *testing.B) {
	for name, trees := range map[string]bool{"noop": false, "tree": true} {
		b.Run(name, func(b *testing.B) {
			m := castest.NewMemory()
			l := benchWorker(m, nil)
			f := newForest(b, m)
			root := put(b, m, &repb.Directory{})
			n := 0
			request := func() {
				n++
				if trees {
					root = f.next()
				}
				t := action(b, m, n, root, "o/x")
				b.StartTimer()
				must.Get(l.Admit(b.Context(), t))(b)
				if _, _, err := l.fetch(b.Context(), t); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
			}
			b.StopTimer()
			request()
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				request()
			}
		})
	}
}

// BenchmarkExecute measures an action from Admit to its result, without a sandbox: one without outputs, and one with
// 100 files and a directory of 20.
func BenchmarkExecute(b *testing.B) {
	for name, many := range map[string]bool{"noop": false, "outputs": true} {
		b.Run(name, func(b *testing.B) {
			m := castest.NewMemory()
			n := 0
			content := make([]byte, 1<<10)
			backend := newQuick(b, nil)
			var outputs []string
			if many {
				for i := range 100 {
					outputs = append(outputs, fmt.Sprintf("o%02d", i))
				}
				outputs = append(outputs, "t")
				backend.run = func(out *os.Root) {
					b.StopTimer()
					copy(content, fmt.Sprint("action ", n))
					for i := range 120 {
						name := fmt.Sprintf("o%02d", i)
						if i >= 100 {
							name = fmt.Sprintf("t/%d", i)
						}
						content[100] = byte(i)
						_ = out.MkdirAll(filepath.Dir(name), 0o755)
						must.Succeed(b, out.WriteFile(name, content, 0o644))
					}
					b.StartTimer()
				}
			}
			l := benchWorker(m, backend)
			root := put(b, m, &repb.Directory{})
			b.ReportAllocs()
			for b.Loop() {
				n++
				t := action(b, m, n, root, outputs...)
				must.Get(l.Admit(b.Context(), t))(b)
				must.Get(l.Execute(b.Context(), t, func(Stage) {}))(b)
			}
		})
	}
}
