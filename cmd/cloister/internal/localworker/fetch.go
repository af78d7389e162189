// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"context"
	"fmt"
	"math"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// Limits of a fetched input tree, the same as for a worker.
const (
	maxDirectories = 200_000 // distinct
	maxFiles       = 1_000_000
)

// A budget limits the space that blobs may take.
type budget struct{ most, taken int64 }

// take reserves space for blobs, by their stated sizes and in the blocks of a store.
func (b *budget) take(ds []cas.Digest) error {
	const block = 4096
	for _, d := range ds {
		size := max(block, (min(d.Size(), math.MaxInt64-block)+block-1)/block*block)
		b.taken += min(size, math.MaxInt64-b.taken)
	}
	if b.taken > b.most {
		return fmt.Errorf("its inputs take %s (%d bytes) or more, and %s (%d bytes) are permitted: a fifth of the disk of the temporary directory; "+
			"set TMPDIR to a larger disk", sandbox.Bytes(b.taken), b.taken, sandbox.Bytes(b.most), b.most)
	}
	return nil
}

// Fetch copies a stored action with its inputs from a server, and returns its task. The action may take a fifth of the
// disk.
func (w *Worker) Fetch(ctx context.Context, from *client.Server, action cas.Digest) (*worker.Task, error) {
	size, err := flags.DiskBytes(w.Dir)
	if err != nil {
		return nil, err
	}
	instance, err := fetch(ctx, w.Store, size/5, from, action)
	return &worker.Task{Action: action, Instance: instance}, err
}

// fetch copies a stored action and everything that it refers to into the instance of the same name, and returns that
// name. Blobs beyond most bytes, and messages of implausible size, are rejected before they are fetched.
func fetch(ctx context.Context, to *disk.Cache, most int64, server *client.Server, digest cas.Digest) (instance string, err error) {
	from, err := server.Open(ctx)
	if err != nil {
		return "", err
	}
	defer from.Close()
	in, err := to.Instance(from.Name())
	if err != nil {
		return "", err
	}
	var absent []cas.Digest
	room := budget{most: most}
	// present copies blobs and returns those that the server has.
	present := func(ds ...cas.Digest) ([]cas.Digest, error) {
		if err := room.take(ds); err != nil {
			return nil, fmt.Errorf("action %s: %w", digest, err)
		}
		lost, err := from.Fetch(ctx, in.Store, ds)
		absent = append(absent, lost...)
		gone := make(map[cas.Digest]bool, len(lost))
		for _, d := range lost {
			gone[d] = true
		}
		return slices.DeleteFunc(ds, func(d cas.Digest) bool { return gone[d] }), err
	}
	// messages copies messages of one kind.
	messages := func(kind string, ds ...cas.Digest) ([]cas.Digest, error) {
		for _, d := range ds {
			if d.Size() > cas.MaxMessage {
				return nil, fmt.Errorf("%s %s is too large: %d bytes, want at most %d", kind, d, d.Size(), cas.MaxMessage)
			}
		}
		return present(ds...)
	}
	if _, err := messages("Action", digest); err != nil {
		return "", err
	}
	if len(absent) > 0 {
		return "", server.AbsentError(digest, absent)
	}
	var action repb.Action
	if err := cas.ReadProto(ctx, in.Store, digest, &action); err != nil {
		return "", err
	}
	command, err := cas.FromProto(digest.Function(), action.CommandDigest)
	if err != nil {
		return "", fmt.Errorf("action %s: command: %w", digest, err)
	}
	root, err := cas.FromProto(digest.Function(), action.InputRootDigest)
	if err != nil {
		return "", fmt.Errorf("action %s: input root: %w", digest, err)
	}
	if _, err := messages("Command", command); err != nil {
		return "", err
	}
	// Fetch one level of directories at a time, each directory once, and then all files. Report everything absent at
	// the end.
	var files []cas.Digest
	known, listed := map[cas.Digest]bool{root: true}, map[cas.Digest]bool{}
	for level := []cas.Digest{root}; len(level) > 0; {
		if level, err = messages("Directory", level...); err != nil {
			return "", err
		}
		var next []cas.Digest
		for _, d := range level {
			var dir repb.Directory
			if err := cas.ReadProto(ctx, in.Store, d, &dir); err != nil {
				return "", err
			}
			if files, err = appendNew(d.Function(), dir.Files, listed, files); err == nil {
				next, err = appendNew(d.Function(), dir.Directories, known, next)
			}
			if err != nil {
				return "", fmt.Errorf("Directory %s: %w", d, err)
			}
			if len(known) > maxDirectories || len(files) > maxFiles {
				return "", fmt.Errorf("action %s: its input tree has at least %d directories and %d distinct files; at most %d and %d are permitted",
					digest, len(known), len(files), maxDirectories, maxFiles)
			}
		}
		level = next
	}
	lost, err := from.Missing(ctx, files)
	if err != nil {
		return "", err
	}
	if absent = append(absent, lost...); len(absent) == 0 {
		_, err = present(files...)
	}
	if err == nil && len(absent) > 0 {
		err = server.AbsentError(digest, absent)
	}
	return from.Name(), err
}

// appendNew appends the digests of nodes that are not known yet to ds, and makes them known.
func appendNew[N interface{ GetDigest() *repb.Digest }](f cas.Function, nodes []N, known map[cas.Digest]bool, ds []cas.Digest) ([]cas.Digest, error) {
	for _, n := range nodes {
		d, err := cas.FromProto(f, n.GetDigest())
		if err != nil {
			return nil, err
		}
		if !known[d] {
			known[d] = true
			ds = append(ds, d)
		}
	}
	return ds, nil
}
