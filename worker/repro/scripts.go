// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/internal/shell"
	"google.golang.org/protobuf/proto"
)

// Limits of the scripts to which fixes are applied.
const (
	maxScripts     = 8
	maxScriptBytes = 1 << 20
	maxNamed       = 64 // paths that a command may name
)

// An inputScript is a shell script that the command of an action executes and that is one of its inputs.
type inputScript struct {
	path string // below the input root
	text string
}

// scripts returns the scripts that the command executes, and those that they execute.
func (c *check) scripts(ctx context.Context) ([]inputScript, error) {
	i := slices.IndexFunc(c.Executors, func(x Executor) bool { return x.Features != nil && x.Action.IsZero() })
	if i < 0 || !c.TryFixes {
		return nil, nil // nothing can be tried
	}
	store := c.Executors[i].Store
	a, err := changes.ReadAction(ctx, store, c.task.Action)
	if err != nil {
		return nil, readFault(err)
	}
	root, err := a.Root()
	if err != nil {
		return nil, readFault(err)
	}
	var all []inputScript
	var seen []string
	names := shell.Files(a.Command.GetArguments())
	for len(names) > 0 && len(all) < maxScripts && len(seen) < maxNamed {
		name := path.Join(a.Command.WorkingDirectory, names[0])
		absolute := path.IsAbs(names[0])
		names = names[1:]
		if absolute || slices.Contains(seen, name) {
			continue
		}
		seen = append(seen, name)
		text, err := readScript(ctx, store, root, name)
		if err != nil {
			return nil, err
		}
		if text != "" {
			all = append(all, inputScript{name, text})
			names = append(names, shell.FilesOf(text)...)
		}
	}
	return all, nil
}

// readScript returns the text of a shell script among the inputs, or "" if there is none at the path.
func readScript(ctx context.Context, store cas.Store, root cas.Digest, name string) (string, error) {
	dirs, err := readPath(ctx, store, root, name)
	if err != nil || dirs == nil {
		return "", err
	}
	f := fileOf(dirs[len(dirs)-1], path.Base(name))
	if f == nil {
		return "", nil
	}
	d, err := cas.FromProto(root.Function(), f.Digest)
	if err != nil || d.Size() > maxScriptBytes {
		return "", nil
	}
	b, err := cas.ReadAll(ctx, store, d, maxScriptBytes)
	if err != nil {
		return "", absentIsNone(err)
	}
	text := string(b)
	if shell.Interpreter(text) == 0 && (strings.HasPrefix(text, "#!") || strings.ContainsRune(text, 0)) {
		return "", nil // another program
	}
	return text, nil
}

// readPath returns the directories on the way to a path, the root first; nil if one is not among the inputs.
func readPath(ctx context.Context, store cas.Store, root cas.Digest, name string) ([]*repb.Directory, error) {
	var all []*repb.Directory
	elements := strings.Split(name, "/")
	for d := root; ; {
		dir := &repb.Directory{}
		if err := cas.ReadProto(ctx, store, d, dir); err != nil {
			return nil, absentIsNone(err)
		}
		all = append(all, dir)
		if len(all) == len(elements) {
			return all, nil
		}
		i := slices.IndexFunc(dir.Directories, func(n *repb.DirectoryNode) bool { return n.Name == elements[len(all)-1] })
		if i < 0 {
			return nil, nil
		}
		var err error
		if d, err = cas.FromProto(root.Function(), dir.Directories[i].Digest); err != nil {
			return nil, nil
		}
	}
}

// absentIsNone returns nil for errors of blobs that are absent or invalid: scripts only serve to find fixes.
func absentIsNone(err error) error {
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) {
		return nil
	}
	return readFault(err)
}

func fileOf(dir *repb.Directory, name string) *repb.FileNode {
	for _, f := range dir.Files {
		if f.Name == name {
			return f
		}
	}
	return nil
}

// fixScript applies a fix to the first script that it fits. It returns the new input root and the path of the script,
// or "" if the fix fits none.
func fixScript(ctx context.Context, store cas.Store, function cas.Function, a *changes.Action, f *compare.Fix, scripts []inputScript) (cas.Digest, string, error) {
	for _, s := range scripts {
		first := shell.Interpreter(s.text)
		args, ok := f.Apply([]string{"sh", "-c", s.text[first:]})
		if !ok {
			continue
		}
		root, err := a.Root()
		if err != nil {
			return root, "", readFault(err)
		}
		root, err = replaceFile(ctx, store, function, root, s.path, s.text[:first]+args[2])
		return root, s.path, err
	}
	return cas.Digest{}, "", nil
}

// replaceFile stores an input root in which an existing file has another text.
func replaceFile(ctx context.Context, store cas.Store, function cas.Function, root cas.Digest, name, text string) (_ cas.Digest, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("script with a fix: %w", err)
		}
	}()
	dirs, err := readPath(ctx, store, root, name)
	if err != nil {
		return cas.Digest{}, err
	}
	if dirs == nil {
		return cas.Digest{}, cas.ErrNotFound
	}
	d, err := cas.PutBytes(ctx, store, function, []byte(text))
	if err != nil {
		return cas.Digest{}, err
	}
	elements := strings.Split(name, "/")
	for i, old := range slices.Backward(dirs) {
		dir := proto.CloneOf(old)
		for _, n := range dir.Files {
			if i == len(dirs)-1 && n.Name == elements[i] {
				n.Digest = d.Proto()
			}
		}
		for _, n := range dir.Directories {
			if i < len(dirs)-1 && n.Name == elements[i] {
				n.Digest = d.Proto()
			}
		}
		if d, err = cas.PutProto(ctx, store, function, dir); err != nil {
			return cas.Digest{}, err
		}
	}
	return d, nil
}
