// SPDX-License-Identifier: Apache-2.0

// Package revision puts the files of a Git commit into a store, as an input root: straight from the objects of a local
// repository, without a worktree, an index or a lock. It writes nothing into the repository and runs nothing that its
// configuration names: no hook, filter, textconv, file system monitor or transport.
//
// The objects are read by git itself, of which one process is asked for one object after the other (git-cat-file(1),
// "--batch"). Each must have the hash that names it, from the commit down, so that what runs is what its hash says.
// Files are as they are in the commit: attributes like export-ignore, eol and filter do not count, and a pointer of
// Git LFS stays a pointer. Replacements and grafts are not followed (git-replace(1)).
package revision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
)

var (
	// ErrNotFound says that there is no such repository, commit or object.
	ErrNotFound = errors.New("not found")
	// ErrTooLarge says that the files take more than Config.MaxBytes.
	ErrTooLarge = errors.New("too large")
)

// Config is what Read needs.
type Config struct {
	Store    cas.Store
	Function cas.Function
	// Dir is where large files lie while they are hashed, without a name where the system permits it.
	Dir string
	// MaxBytes is how much of a store the files may take, in blocks of 4096 bytes. Zero permits none but empty ones.
	MaxBytes int64
	// EmptySubmodules makes an empty directory of each submodule, whose files are in another repository. Without it a
	// submodule is an error.
	EmptySubmodules bool
}

// A Revision is a commit whose files are in the store.
type Revision struct {
	// Commit is the full name of the commit: 40 digits of SHA-1, or 64 of SHA-256.
	Commit string
	// Time is when it was committed.
	Time time.Time
	// Root is the input root.
	Root cas.Digest
	// Files and Bytes are how many files there are that differ, and their sizes together.
	Files int
	Bytes int64
}

// maxRevision bounds the text that names a commit, in bytes.
const maxRevision = 1000

// Split takes "REPOSITORY@REVISION" apart. Both parts may hold "@": the repository is the longest part that is a
// directory. Without "@REVISION" it is HEAD. A URL is an error that says to clone it.
func Split(spec string) (repository, rev string, err error) {
	for i := len(spec); i > 0; i = strings.LastIndexByte(spec[:i], '@') {
		if st, err := os.Stat(spec[:i]); err != nil || !st.IsDir() {
			continue
		}
		switch {
		case i == len(spec):
			return spec, "HEAD", nil
		case i == len(spec)-1:
			return "", "", fmt.Errorf("%+.256q names no revision after the @", spec)
		}
		return spec[:i], spec[i+1:], nil
	}
	if remote(spec) {
		return "", "", fmt.Errorf("%+.256q is no directory but an address, and nothing is fetched: clone it first (git clone --bare ADDRESS DIR) and name DIR", spec)
	}
	return "", "", fmt.Errorf("%+.256q: %w: write REPOSITORY@REVISION, where REPOSITORY is a directory", spec, ErrNotFound)
}

// remote reports whether spec is a URL, or an address of the form that scp takes (git-clone(1), "GIT URLS").
func remote(spec string) bool {
	host, _, ok := strings.Cut(spec, ":")
	return ok && len(host) > 1 && !strings.ContainsAny(host, `/\`)
}

// Read puts the files of a commit into c.Store, and returns once they are there. Repository is a directory in a
// repository or a bare one; rev is whatever names a commit in it (gitrevisions(7)). What is not there is ErrNotFound, and
// what does not fit ErrTooLarge; a tree that cannot be an input root is an error that names the path. When ctx ends, git is
// killed.
func Read(ctx context.Context, c Config, repository, rev string) (*Revision, error) {
	if rev == "" || len(rev) > maxRevision || strings.ContainsAny(rev, "\n\x00") {
		return nil, fmt.Errorf("%+.64q names no revision", rev)
	}
	dir, err := filepath.Abs(repository)
	if err != nil {
		return nil, err
	}
	var rv *Revision
	o, err := open(ctx, dir)
	if err == nil {
		r := &reader{Config: c, objects: o, batch: cas.NewBatch(c.Store), folders: map[string]*folder{}, contents: map[string]*content{}}
		rv, err = r.read(ctx, rev)
		err = o.close(err)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("revision %+.80q of %+.256q: %w", rev, dir, err)
	}
	return rv, nil
}

// A commit is what its object says.
type commit struct {
	tree string
	time time.Time
}

// maxCommit bounds the object of a commit, in bytes: messages are text, but signatures and more lie in it, too.
const maxCommit = 1 << 20

// parseCommit reads the header of a commit: lines up to an empty one, of which "tree" is the first.
func parseCommit(text string) (*commit, error) {
	head, _, _ := strings.Cut(text, "\n\n")
	var c commit
	for line := range strings.Lines(head + "\n") {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch key {
		case "tree":
			if c.tree == "" {
				c.tree = value
			}
		case "committer":
			// "Name <address> seconds zone"
			fields := strings.Fields(value[strings.LastIndexByte(value, '>')+1:])
			if len(fields) != 2 {
				return nil, fmt.Errorf("its committer has no time: %+.256q", value)
			}
			seconds, err := strconv.ParseInt(fields[0], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("its committer has no time: %w", err)
			}
			c.time = time.Unix(seconds, 0).UTC()
		}
	}
	if !objectName(c.tree) || c.time.IsZero() {
		return nil, errors.New("it states no tree, or no committer")
	}
	return &c, nil
}

// objectName reports whether s is the full name of an object.
func objectName(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == ""
}
