// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// manyFiles is 2,000 distinct files of 4 KiB in 100 directories, four levels deep.
func manyFiles() *node {
	root := dirNode()
	for i := range 2000 {
		content, _ := castest.Blob(byte(i), 4<<10-i/256)
		root.set(fmt.Sprintf("a/%d/%d/src/f%d", i%10, i/10%10, i), &node{content: string(content)})
	}
	return root
}

// memoryDir returns a directory on a memory-backed file system, where workspaces are, if there is one.
func memoryDir(b *testing.B) string {
	dir, err := os.MkdirTemp("/dev/shm", "cloister-bench-")
	if err != nil {
		return b.TempDir()
	}
	b.Cleanup(func() { must.Succeed(b, os.RemoveAll(dir)) })
	return dir
}

func BenchmarkLoad(b *testing.B) {
	store := castest.NewMemory()
	root := manyFiles().put(b, store)
	for b.Loop() {
		must.Get(tree.Load(b.Context(), store, root))(b)
	}
}

func BenchmarkCapture(b *testing.B) {
	store := castest.NewMemory()
	out := must.Get(os.OpenRoot(memoryDir(b)))(b)
	defer out.Close()
	manyFiles().make(b, out)
	w := tree.OutputSpec{Paths: []string{"a"}}
	for b.Loop() {
		batch := cas.NewBatch(store)
		must.Get(tree.Capture(b.Context(), batch, cas.SHA256, out, w, &repb.ActionResult{}))(b)
		must.Succeed(b, batch.Flush(b.Context()))
	}
}
