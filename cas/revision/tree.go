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
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Limits of a commit's tree, as of an input root.
const (
	maxDepth   = 1000
	maxTrees   = 200_000   // distinct
	maxEntries = 1_000_000 // of distinct trees
	maxName    = 255       // bytes
	maxTarget  = 4095      // bytes of a symlink's target
	maxTree    = 16 << 20  // bytes of one tree object
	smallFile  = 1 << 20   // bytes of a file that is hashed in memory
	blockSize  = 4096      // minimum size of a file in a store
)

// Modes of tree entries (gitformat-index(5)). Git reads 100664, from early versions, as 100644.
const (
	modeTree       = "40000"
	modeFile       = "100644"
	modeGroupWrite = "100664"
	modeExecutable = "100755"
	modeLink       = "120000"
	modeSubmodule  = "160000"
)

// peel selects the commit that a tag or another name refers to (gitrevisions(7)).
const peel = "^{commit}"

// A reader reads one commit.
type reader struct {
	Config
	*objects
	batch   *cas.Batch
	trees   map[string]*gitTree // by object name
	blobs   map[string]*gitBlob // by object name
	entries int
	bytes   int64 // in blocks
}

// A gitTree is a tree object.
type gitTree struct {
	entries []entry  // sorted by name, as in a Directory
	parent  *gitTree // the first found, nil for the root
	name    string   // in parent
	depth   int
	digest  cas.Digest
}

type entry struct{ mode, name, object string }

// A gitBlob is a blob object, used by files, symlinks or both.
type gitBlob struct {
	file, link bool
	parent     *gitTree // the first found
	name       string   // in parent
	digest     cas.Digest
	target     string
}

// path returns the first path found of the entry name in t.
func (t *gitTree) path(name string) string {
	names := []string{name}
	for ; t != nil && t.parent != nil; t = t.parent {
		names = append(names, t.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

// read reads the commit rev.
func (r *reader) read(ctx context.Context, rev string) (*Revision, error) {
	var rv Revision
	var c *commit
	err := r.each([]string{rev + peel}, func(_ int, ob *object) error {
		text, err := readAll(ob, "commit", maxCommit)
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
	if err := r.readTrees(c.tree); err != nil {
		return nil, err
	}
	if rv.Files, rv.Bytes, err = r.readBlobs(ctx); err != nil {
		return nil, err
	}
	if err := r.encode(ctx, r.trees[c.tree], 0); err != nil {
		return nil, err
	}
	rv.Root = r.trees[c.tree].digest
	return &rv, r.batch.Flush(ctx)
}

// readAll returns the content of an object, which must have the kind and at most limit bytes.
func readAll(ob *object, kind string, limit int64) ([]byte, error) {
	if err := ob.check(kind); err != nil {
		return nil, err
	}
	if ob.size > limit {
		return nil, fmt.Errorf("%s %s has %d bytes, more than %d", kind, ob.name, ob.size, limit)
	}
	var b bytes.Buffer
	b.Grow(int(ob.size) + bytes.MinRead)
	_, err := b.ReadFrom(ob.body)
	return b.Bytes(), err
}

// readTrees reads the tree with the name root and all trees below it, breadth first and each once.
func (r *reader) readTrees(root string) error {
	r.trees[root] = &gitTree{}
	for level := []string{root}; len(level) > 0; {
		var next []string
		err := r.each(level, func(i int, ob *object) error {
			t := r.trees[level[i]]
			text, err := readAll(ob, "tree", maxTree)
			if err == nil {
				err = r.parse(t, text, len(root)/2)
			}
			if err != nil {
				return fmt.Errorf("%+.256q: %w", cmp.Or(t.parent.path(t.name), "."), err)
			}
			for _, e := range t.entries {
				if e.mode != modeTree || r.trees[e.object] != nil {
					continue
				}
				r.trees[e.object] = &gitTree{parent: t, name: e.name, depth: t.depth + 1}
				next = append(next, e.object)
			}
			if len(r.trees) > maxTrees {
				return fmt.Errorf("it has more than %d distinct directories", maxTrees)
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

// parse parses a tree object: for each entry its mode, a space, its name, a NUL, and the object name of size bytes.
func (r *reader) parse(t *gitTree, text []byte, size int) error {
	for len(text) > 0 {
		head, rest, ok := bytes.Cut(text, []byte{0})
		mode, name, spaced := strings.Cut(string(head), " ")
		if !ok || !spaced || len(rest) < size {
			return errors.New("the tree object is truncated")
		}
		e := entry{strings.TrimLeft(mode, "0"), name, hex.EncodeToString(rest[:size])}
		text = rest[size:]
		if why := badName(name); why != "" {
			return fmt.Errorf("%+.300q cannot be an input: its name %s", t.path(name), why)
		}
		switch e.mode {
		case modeTree:
		case modeSubmodule:
			if !r.EmptySubmodules {
				return fmt.Errorf("%+.256q is a %w, whose files are in another repository (commit %s)",
					t.path(name), ErrSubmodule, e.object)
			}
		case modeFile, modeGroupWrite, modeExecutable, modeLink:
			r.add(t, e)
		default:
			return fmt.Errorf("%+.256q has the unknown mode %+.16q", t.path(name), mode)
		}
		t.entries = append(t.entries, e)
		if r.entries++; r.entries > maxEntries {
			return fmt.Errorf("it has more than %d entries", maxEntries)
		}
	}
	// Git sorts them differently, and only git-fsck(1) checks that.
	slices.SortFunc(t.entries, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for i := range t.entries[min(1, len(t.entries)):] {
		if name := t.entries[i].name; name == t.entries[i+1].name {
			return fmt.Errorf("%+.256q is a duplicate", t.path(name))
		}
	}
	return nil
}

// add adds the blob of e.
func (r *reader) add(t *gitTree, e entry) {
	b := r.blobs[e.object]
	if b == nil {
		b = &gitBlob{parent: t, name: e.name}
		r.blobs[e.object] = b
	}
	if e.mode == modeLink {
		b.link = true
	} else {
		b.file = true
	}
}

// badName returns what is wrong with the name of an entry, or "".
func badName(name string) string {
	switch {
	case name == "" || name == "." || name == ".." || strings.Contains(name, "/"):
		return "is not a file name"
	case len(name) > maxName:
		return fmt.Sprintf("is longer than %d bytes", maxName)
	case !utf8.ValidString(name):
		return "is not UTF-8, as the Remote Execution API requires"
	}
	return ""
}

// readBlobs stores all files and reads the targets of symlinks. It returns the number and the total size of distinct
// files.
func (r *reader) readBlobs(ctx context.Context) (files int, size int64, err error) {
	// The order only determines which of several errors is returned.
	names := slices.SortedFunc(maps.Keys(r.blobs), func(a, b string) int {
		x, y := r.blobs[a], r.blobs[b]
		return cmp.Or(cmp.Compare(x.parent.depth, y.parent.depth), cmp.Compare(x.name, y.name), cmp.Compare(a, b))
	})
	err = r.each(names, func(i int, ob *object) error {
		b := r.blobs[names[i]]
		if b.file {
			files++
			size += ob.size
		}
		if err := r.readBlob(ctx, b, ob); err != nil {
			return fmt.Errorf("%+.256q: %w", b.parent.path(b.name), err)
		}
		return nil
	})
	return files, size, err
}

// readBlob reads one blob.
func (r *reader) readBlob(ctx context.Context, b *gitBlob, ob *object) error {
	if b.link && ob.size > maxTarget {
		return fmt.Errorf("a symlink of %d bytes: at most %d are possible", ob.size, maxTarget)
	}
	r.bytes += max(blockSize, (min(ob.size, math.MaxInt64/2)+blockSize-1)/blockSize*blockSize)
	if b.file && ob.size > 0 && r.bytes > r.MaxBytes {
		return fmt.Errorf("%w: the files take at least %d bytes, more than %d", ErrTooLarge, r.bytes, r.MaxBytes)
	}
	if ob.size > smallFile {
		return r.spool(ctx, b, ob)
	}
	text, err := readAll(ob, "blob", smallFile)
	if err != nil {
		return err
	}
	if b.link {
		b.target = string(text)
		if b.target == "" || strings.Contains(b.target, "\x00") || !utf8.ValidString(b.target) {
			return fmt.Errorf("a symlink to %+.64q: the Remote Execution API requires UTF-8 without NUL", b.target)
		}
	}
	if b.file {
		b.digest, err = r.batch.AddBytes(ctx, r.Function, text)
	}
	return err
}

// spool stores a large blob by way of a temporary file, since a store needs the digest before the content.
func (r *reader) spool(ctx context.Context, b *gitBlob, ob *object) (err error) {
	if err := ob.check("blob"); err != nil {
		return err
	}
	f, err := os.CreateTemp(r.Dir, "blob-")
	if err != nil {
		return err
	}
	removed := os.Remove(f.Name()) // on some systems, only closed files can be removed
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
	b.digest, err = r.batch.AddSeeker(ctx, r.Function, f)
	return err
}

// encode stores the Directory messages of t and of all trees below it.
func (r *reader) encode(ctx context.Context, t *gitTree, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%.64q...: it has more than %d nested directories", t.path(""), maxDepth)
	}
	var m repb.Directory
	for _, e := range t.entries {
		switch e.mode {
		case modeTree:
			below := r.trees[e.object]
			if below.digest.IsZero() {
				if err := r.encode(ctx, below, depth+1); err != nil {
					return err
				}
			}
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: below.digest.Proto()})
		case modeSubmodule:
			empty, err := r.put(ctx, &repb.Directory{})
			if err != nil {
				return err
			}
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: empty.Proto()})
		case modeLink:
			m.Symlinks = append(m.Symlinks, &repb.SymlinkNode{Name: e.name, Target: r.blobs[e.object].target})
		default:
			m.Files = append(m.Files, &repb.FileNode{
				Name: e.name, Digest: r.blobs[e.object].digest.Proto(), IsExecutable: e.mode == modeExecutable,
			})
		}
	}
	var err error
	t.digest, err = r.put(ctx, &m)
	return err
}

func (r *reader) put(ctx context.Context, m *repb.Directory) (cas.Digest, error) {
	data, digest, err := cas.MarshalProto(r.Function, m)
	if err != nil {
		return digest, err
	}
	return digest, r.batch.Add(ctx, cas.Blob{Digest: digest, Data: data})
}
