// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/environment"
)

// ProgramDir is the directory of ActionFlags.Program in the working directory.
const ProgramDir = ".cloister"

// addProgram returns an input root with a program in ProgramDir, under the name that an environment needs.
func addProgram(ctx context.Context, store cas.Store, root cas.Digest, file string) (cas.Digest, error) {
	program, err := os.Open(file)
	if err != nil {
		return cas.Digest{}, err
	}
	defer program.Close()
	d, err := cas.PutSeeker(ctx, store, cas.SHA256, program)
	if err != nil {
		return cas.Digest{}, fmt.Errorf("store %s: %w", file, err)
	}
	node := &repb.FileNode{Name: environment.Program, Digest: d.Proto(), IsExecutable: true}
	dir, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Directory{Files: []*repb.FileNode{node}})
	if err != nil {
		return cas.Digest{}, err
	}
	var top repb.Directory
	if err := cas.ReadProto(ctx, store, root, &top); err != nil {
		return cas.Digest{}, err
	}
	has := func(name string) bool { return name == ProgramDir }
	if slices.ContainsFunc(top.Directories, func(n *repb.DirectoryNode) bool { return has(n.Name) }) ||
		slices.ContainsFunc(top.Files, func(n *repb.FileNode) bool { return has(n.Name) }) ||
		slices.ContainsFunc(top.Symlinks, func(n *repb.SymlinkNode) bool { return has(n.Name) }) {
		return cas.Digest{}, fmt.Errorf("the inputs have an entry %s, which the sandbox needs for its own program", ProgramDir)
	}
	top.Directories = append(top.Directories, &repb.DirectoryNode{Name: ProgramDir, Digest: dir.Proto()})
	slices.SortFunc(top.Directories, func(a, b *repb.DirectoryNode) int { return strings.Compare(a.Name, b.Name) })
	return cas.PutProto(ctx, store, cas.SHA256, &top)
}
