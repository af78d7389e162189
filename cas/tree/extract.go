// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Extract writes the outputs of r below dir and creates parents as needed. Files have mode 0644 or 0755 less the umask;
// symlinks are kept unchanged. It replaces existing files and symlinks by a rename, merges into existing directories,
// and does not replace a directory by a file. It writes nothing outside dir, whatever r contains and whatever symlinks
// exist. An absent blob is a *MissingError, a malformed result cas.ErrInvalid. Concurrent calls must not share dir.
func Extract(ctx context.Context, store cas.Store, f cas.Function, r *repb.ActionResult, dir *os.Root) error {
	if store == nil {
		return errNoStore
	}
	if dir == nil {
		return errNoDirectory
	}
	x := &extractor{store: store, dir: dir}
	for _, o := range r.OutputFiles {
		d, err := cas.FromProto(f, o.Digest)
		if err != nil {
			return fmt.Errorf("output file %+.256q: %w", o.Path, err)
		}
		if err := x.output(ctx, o.Path, &entry{kind: File, digest: d, exec: o.IsExecutable}); err != nil {
			return err
		}
	}
	for _, o := range r.OutputDirectories {
		d, err := loadOutput(ctx, store, f, o)
		if err != nil {
			return fmt.Errorf("output directory %+.256q: %w", o.Path, err)
		}
		if err := x.output(ctx, o.Path, &entry{kind: Directory, dir: d}); err != nil {
			return err
		}
	}
	// The fields of API 2.0 repeat output_symlinks, or stand alone in the result of an old server.
	for _, o := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		if err := x.output(ctx, o.Path, &entry{kind: Symlink, target: o.Target}); err != nil {
			return err
		}
	}
	return nil
}

// loadOutput reads the directory that o describes.
func loadOutput(ctx context.Context, store cas.Store, f cas.Function, o *repb.OutputDirectory) (*directory, error) {
	if o.TreeDigest == nil {
		root, err := cas.FromProto(f, o.RootDirectoryDigest)
		if err != nil {
			return nil, err
		}
		in, err := Load(ctx, store, root)
		if err != nil {
			return nil, err
		}
		return in.root, nil
	}
	d, err := cas.FromProto(f, o.TreeDigest)
	if err != nil {
		return nil, err
	}
	var t repb.Tree
	if err := cas.ReadProto(ctx, store, d, &t); err != nil {
		return nil, notFound(d, err)
	}
	return fromTree(f, &t)
}

// fromTree decodes and checks t.
func fromTree(f cas.Function, t *repb.Tree) (*directory, error) {
	dirs := map[cas.Digest]*directory{}
	decode := func(m *repb.Directory) (*directory, error) {
		_, digest, err := cas.MarshalProto(f, m)
		if err != nil {
			return nil, err
		}
		d := &directory{digest: digest}
		dirs[digest] = d
		return d, d.decode(m)
	}
	for _, m := range t.Children {
		if _, err := decode(m); err != nil {
			return nil, err
		}
	}
	root, err := decode(t.GetRoot())
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		for i := range d.entries {
			if e := &d.entries[i]; e.kind == Directory {
				if e.dir = dirs[e.digest]; e.dir == nil {
					return nil, errorf(cas.ErrInvalid, "the Tree lacks the Directory %s of %+.256q", e.digest, e.name)
				}
			}
		}
	}
	return root, root.measure(0)
}

type extractor struct {
	store cas.Store
	dir   *os.Root
	// ahead are the small files of the directory being written, in order, and ready is how many of them were fetched.
	ahead []cas.Digest
	ready int
}

// Small files are fetched many at a time, which matters if the store is on another machine.
const (
	maxFetchedFile = 1 << 20
	maxFetched     = 8 << 20 // bytes together
)

// fetch fetches the next small files, of which the first is about to be written.
func (x *extractor) fetch(ctx context.Context) error {
	if x.ready == 0 {
		for bytes := int64(0); x.ready < len(x.ahead) && bytes < maxFetched; x.ready++ {
			bytes += x.ahead[x.ready].Size()
		}
		if x.ready > 1 {
			if err := cas.Fetch(ctx, x.store, x.ahead[:x.ready]); err != nil {
				return err
			}
		}
	}
	x.ahead, x.ready = x.ahead[1:], x.ready-1
	return nil
}

// output writes e as the output that the result spells as spelled.
func (x *extractor) output(ctx context.Context, spelled string, e *entry) error {
	p, err := resolve(".", spelled)
	if err != nil {
		return err
	}
	if e.kind == Directory {
		return x.tree(ctx, p, e.dir)
	}
	if err := x.dir.MkdirAll(path.Dir(p), 0o755); err != nil {
		return err
	}
	parent, err := x.dir.OpenRoot(path.Dir(p))
	if err != nil {
		return err
	}
	defer parent.Close()
	return x.replace(ctx, parent, path.Base(p), e)
}

// tree writes the directory root to p.
func (x *extractor) tree(ctx context.Context, p string, root *directory) error {
	x.ahead, x.ready = nil, 0
	for _, d := range root.all(p) {
		for i := range d.entries {
			if e := &d.entries[i]; e.kind == File && e.digest.Size() <= maxFetchedFile {
				x.ahead = append(x.ahead, e.digest)
			}
		}
	}
	for at, d := range root.all(p) {
		if err := x.level(ctx, at, d); err != nil {
			return err
		}
	}
	return nil
}

// level writes d at p, without its subdirectories.
func (x *extractor) level(ctx context.Context, p string, d *directory) error {
	if err := x.dir.MkdirAll(p, 0o755); err != nil {
		return err
	}
	into, err := x.dir.OpenRoot(p)
	if err != nil {
		return err
	}
	defer into.Close()
	for i := range d.entries {
		if e := &d.entries[i]; e.kind != Directory {
			if e.kind == File && e.digest.Size() <= maxFetchedFile {
				if err := x.fetch(ctx); err != nil {
					return err
				}
			}
			if err := x.replace(ctx, into, e.name, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// replace writes the file or symlink e as name in dir.
func (x *extractor) replace(ctx context.Context, dir *os.Root, name string, e *entry) (err error) {
	const temp = ".cloister-extract"
	if name == temp {
		return errorf(cas.ErrInvalid, "output %+.256q has the name of a temporary file", name)
	}
	if err := dir.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("extract %+.256q: %w", name, err)
			if gone := dir.Remove(temp); !errors.Is(gone, fs.ErrNotExist) {
				err = errors.Join(err, gone)
			}
		}
	}()
	if e.kind == Symlink {
		err = dir.Symlink(e.target, temp)
	} else {
		err = x.file(ctx, dir, temp, e)
	}
	if err != nil {
		return err
	}
	return dir.Rename(temp, name) // the commit point: name is the old or the new file, never a part
}

func (x *extractor) file(ctx context.Context, dir *os.Root, name string, e *entry) error {
	mode := fs.FileMode(0o644)
	if e.exec {
		mode = 0o755
	}
	w, err := dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	return errors.Join(copyBlob(ctx, x.store, e.digest, w), w.Close())
}
