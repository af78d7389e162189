// SPDX-License-Identifier: Apache-2.0

package revision

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Limits of a commit's tree: those of an input root, before anything of it is decoded twice.
const (
	maxDepth   = 1000
	maxFolders = 200_000   // that differ
	maxEntries = 1_000_000 // of folders that differ
	maxName    = 255       // bytes
	maxTarget  = 4095      // bytes of a symlink's target
	maxFolder  = 16 << 20  // bytes of one tree object
	small      = 1 << 20   // bytes of a file that is hashed in memory
	block      = 4096      // what a file takes in a store, at least
)

// Modes of the entries of a tree (gitformat-index(5); 100664 is of early versions, which git reads as 100644).
const (
	modeFolder  = "40000"
	modeFile    = "100644"
	modeGroup   = "100664"
	modeProgram = "100755"
	modeLink    = "120000"
	modeModule  = "160000"
)

// peel asks for the commit that a tag or another name stands for (gitrevisions(7)).
const peel = "^{commit}"

// A reader reads one commit.
type reader struct {
	Config
	*objects
	batch    *cas.Batch
	folders  map[string]*folder  // by name of the object
	contents map[string]*content // likewise
	entries  int
	taken    int64
}

// A folder is one tree object, wherever it is.
type folder struct {
	entries []entry // in the order of their names, as the API has them
	above   *folder // the first that names it, nil for the root
	name    string  // in above
	height  int     // of the root 0
	digest  cas.Digest
}

type entry struct{ mode, name, object string }

// A content is one blob, as a file or as what a symlink says.
type content struct {
	file, link bool
	in         *folder // the first that names it
	name       string
	digest     cas.Digest
	target     string
}

// path returns where name, in f, is first met.
func (f *folder) path(name string) string {
	names := []string{name}
	for ; f != nil && f.above != nil; f = f.above {
		names = append(names, f.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

func (r *reader) read(ctx context.Context, rev string) (*Revision, error) {
	var rv Revision
	var c *commit
	err := r.each([]string{rev + peel}, func(_ int, ob *object) error {
		text, err := all(ob, "commit", maxCommit)
		if err != nil {
			return err
		}
		rv.Commit = ob.name
		if c, err = parseCommit(string(text)); err != nil {
			err = fmt.Errorf("commit %s: %w", ob.name, err)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	rv.Time = c.time
	if err := r.readFolders(c.tree); err != nil {
		return nil, err
	}
	if rv.Files, rv.Bytes, err = r.readContents(ctx); err != nil {
		return nil, err
	}
	if err := r.encode(ctx, r.folders[c.tree], 0); err != nil {
		return nil, err
	}
	rv.Root = r.folders[c.tree].digest
	return &rv, r.batch.Flush(ctx)
}

// all returns the bytes of an object of one kind.
func all(ob *object, kind string, most int64) ([]byte, error) {
	if ob.kind != kind {
		return nil, fmt.Errorf("object %s is a %s, where a %s is needed", ob.name, ob.kind, kind)
	}
	if ob.size > most {
		return nil, fmt.Errorf("%s %s has %d bytes, and at most %d are read", kind, ob.name, ob.size, most)
	}
	var b bytes.Buffer
	b.Grow(int(ob.size) + bytes.MinRead)
	_, err := b.ReadFrom(ob.body)
	return b.Bytes(), err
}

// readFolders reads the tree of this name and those below, a level at a time and each once.
func (r *reader) readFolders(root string) error {
	r.folders[root] = &folder{}
	for level := []string{root}; len(level) > 0; {
		var next []string
		err := r.each(level, func(i int, ob *object) error {
			f := r.folders[level[i]]
			text, err := all(ob, "tree", maxFolder)
			if err == nil {
				err = r.parse(f, text, len(root)/2)
			}
			if err != nil {
				return fmt.Errorf("%+.256q: %w", cmp.Or(f.above.path(f.name), "."), err)
			}
			for _, e := range f.entries {
				if e.mode != modeFolder || r.folders[e.object] != nil {
					continue
				}
				r.folders[e.object] = &folder{above: f, name: e.name, height: f.height + 1}
				next = append(next, e.object)
			}
			if len(r.folders) > maxFolders {
				return fmt.Errorf("it has more than %d directories that differ", maxFolders)
			}
			return nil
		})
		if err != nil {
			return err
		}
		level = next
	}
	return nil
}

// parse reads a tree object: for each entry its mode, a space, its name, a NUL, and the size bytes of the name of an
// object (git-mktree(1) says the same in text).
func (r *reader) parse(f *folder, text []byte, size int) error {
	for len(text) > 0 {
		head, rest, ok := bytes.Cut(text, []byte{0})
		mode, name, spaced := strings.Cut(string(head), " ")
		if !ok || !spaced || len(rest) < size {
			return errors.New("the tree object is cut short")
		}
		e := entry{strings.TrimLeft(mode, "0"), name, hex.EncodeToString(rest[:size])}
		text = rest[size:]
		if why := badName(name); why != "" {
			return fmt.Errorf("%+.300q cannot be an input: its name %s", f.path(name), why)
		}
		switch e.mode {
		case modeFolder:
		case modeModule:
			if !r.EmptySubmodules {
				return fmt.Errorf("%+.256q is a submodule, whose files are in another repository (commit %s): "+
					"run without it by --submodules empty, or make a commit that has its files", f.path(name), e.object)
			}
		case modeFile, modeGroup, modeProgram, modeLink:
			r.note(f, e)
		default:
			return fmt.Errorf("%+.256q has the mode %+.16q, and is neither file, directory, symlink nor submodule", f.path(name), mode)
		}
		f.entries = append(f.entries, e)
		if r.entries++; r.entries > maxEntries {
			return fmt.Errorf("it has more than %d entries", maxEntries)
		}
	}
	// Git has an order for them, of which only git-fsck(1) complains.
	slices.SortFunc(f.entries, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for i := range f.entries[min(1, len(f.entries)):] {
		if name := f.entries[i].name; name == f.entries[i+1].name {
			return fmt.Errorf("%+.256q is there twice", f.path(name))
		}
	}
	return nil
}

// note remembers that the blob of e is needed, and as what.
func (r *reader) note(f *folder, e entry) {
	c := r.contents[e.object]
	if c == nil {
		c = &content{in: f, name: e.name}
		r.contents[e.object] = c
	}
	if e.mode == modeLink {
		c.link = true
	} else {
		c.file = true
	}
}

// badName says what is wrong with the name of an entry, "" if nothing is.
func badName(name string) string {
	switch {
	case name == "" || name == "." || name == ".." || strings.Contains(name, "/"):
		return "is no name of a file"
	case len(name) > maxName:
		return fmt.Sprintf("is longer than %d bytes", maxName)
	case !utf8.ValidString(name):
		return "is not UTF-8, as the Remote Execution API requires"
	}
	return ""
}

// readContents puts all blobs that are files into the store and reads what symlinks say. It returns how many files
// there are and their sizes together.
func (r *reader) readContents(ctx context.Context) (files int, size int64, err error) {
	names := make([]string, 0, len(r.contents))
	for name := range r.contents {
		names = append(names, name)
	}
	// The order decides on nothing but which of several errors is told.
	slices.SortFunc(names, func(a, b string) int {
		x, y := r.contents[a], r.contents[b]
		return cmp.Or(cmp.Compare(x.in.height, y.in.height), cmp.Compare(x.name, y.name), cmp.Compare(a, b))
	})
	err = r.each(names, func(i int, ob *object) error {
		c := r.contents[names[i]]
		if c.file {
			files++
			size += ob.size
		}
		if err := r.content(ctx, c, ob); err != nil {
			return fmt.Errorf("%+.256q: %w", c.in.path(c.name), err)
		}
		return nil
	})
	return files, size, err
}

// content takes one blob.
func (r *reader) content(ctx context.Context, c *content, ob *object) error {
	if c.link && ob.size > maxTarget {
		return fmt.Errorf("a symlink of %d bytes, and at most %d are possible", ob.size, maxTarget)
	}
	r.taken += max(block, (min(ob.size, math.MaxInt64/2)+block-1)/block*block)
	if c.file && ob.size > 0 && r.taken > r.MaxBytes {
		return fmt.Errorf("%w: with it the files take %d bytes or more, and %d are permitted", ErrTooLarge, r.taken, r.MaxBytes)
	}
	if ob.size > small {
		return r.large(ctx, c, ob)
	}
	text, err := all(ob, "blob", small)
	if err != nil {
		return err
	}
	if c.link {
		if c.target = string(text); c.target == "" || strings.Contains(c.target, "\x00") || !utf8.ValidString(c.target) {
			return fmt.Errorf("a symlink to %+.64q, which is not UTF-8 without NUL, as the Remote Execution API requires", c.target)
		}
	}
	if c.file {
		c.digest, err = r.batch.AddBytes(ctx, r.Function, text)
	}
	return err
}

// large puts a blob that is first written to a file, since a store needs its name before its bytes.
func (r *reader) large(ctx context.Context, c *content, ob *object) (err error) {
	if ob.kind != "blob" {
		return fmt.Errorf("object %s is a %s, where a blob is needed", ob.name, ob.kind)
	}
	f, err := os.CreateTemp(r.Dir, "blob-")
	if err != nil {
		return err
	}
	removed := os.Remove(f.Name()) // which some systems permit only once it is closed
	defer func() {
		err = errors.Join(err, f.Close())
		if removed != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if _, err := io.Copy(f, ob.body); err != nil {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	c.digest, err = r.batch.AddSeeker(ctx, r.Function, f)
	return err
}

// encode puts the Directory messages of f and of all below it.
func (r *reader) encode(ctx context.Context, f *folder, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%.64q...: it has more than %d directories above one another", f.path(""), maxDepth)
	}
	var m repb.Directory
	for _, e := range f.entries {
		switch e.mode {
		case modeFolder:
			below := r.folders[e.object]
			if below.digest.IsZero() {
				if err := r.encode(ctx, below, depth+1); err != nil {
					return err
				}
			}
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: below.digest.Proto()})
		case modeModule:
			empty, err := r.put(ctx, &repb.Directory{})
			if err != nil {
				return err
			}
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: empty.Proto()})
		case modeLink:
			m.Symlinks = append(m.Symlinks, &repb.SymlinkNode{Name: e.name, Target: r.contents[e.object].target})
		default:
			m.Files = append(m.Files, &repb.FileNode{Name: e.name, Digest: r.contents[e.object].digest.Proto(), IsExecutable: e.mode == modeProgram})
		}
	}
	var err error
	f.digest, err = r.put(ctx, &m)
	return err
}

func (r *reader) put(ctx context.Context, m *repb.Directory) (cas.Digest, error) {
	data, digest, err := cas.MarshalProto(r.Function, m)
	if err != nil {
		return digest, err
	}
	return digest, r.batch.Add(ctx, cas.Blob{Digest: digest, Data: data})
}
