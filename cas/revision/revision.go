// SPDX-License-Identifier: Apache-2.0

// Package revision stores the files of a Git commit as an input root. It reads the objects of a local repository,
// without a worktree, an index or a lock. It writes nothing to the repository and runs nothing from its configuration:
// no hook, filter, textconv, file system monitor or transport.
//
// One git process reads all objects (git-cat-file(1), "--batch"). Every object from the commit down is verified against
// its hash. Files are as in the commit: attributes such as export-ignore, eol and filter have no effect, and Git LFS
// pointers stay pointers. Replacements and grafts are ignored (git-replace(1)).
//
// Git reads its own formats (packs, alternates, worktrees, SHA-256 repositories). A Git library in Go would be a large
// module that may read them differently. Git archive applies attributes, and git worktree writes to the repository. Git
// does not verify the hash of a loose blob; this package does, so the revision in a manifest is a statement about
// bytes. A submodule is an error or an empty directory: only a file that anyone may have written says where its commit
// is. URLs are refused: a run does not decide what to fetch with which credentials.
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
	// ErrNotFound is returned if the repository, the commit or an object does not exist.
	ErrNotFound = errors.New("not found")
	// ErrTooLarge is returned if the files exceed Config.MaxBytes.
	ErrTooLarge = errors.New("too large")
	// ErrSubmodule is returned for a submodule, unless Config.EmptySubmodules is set.
	ErrSubmodule = errors.New("submodule")
)

// Config configures Read.
type Config struct {
	Store    cas.Store    // required
	Function cas.Function // required
	// Dir is the directory for temporary files, which hold large files while they are hashed.
	Dir string
	// MaxBytes limits the size of the files, in blocks of 4096 bytes. Zero permits only empty files.
	MaxBytes int64
	// EmptySubmodules turns each submodule into an empty directory, since its files are in another repository.
	// Otherwise a submodule is ErrSubmodule.
	EmptySubmodules bool
}

// A Revision is a commit whose files are in the store.
type Revision struct {
	// Commit is the full name of the commit: 40 digits of SHA-1, or 64 of SHA-256.
	Commit string
	// Time is the commit time.
	Time time.Time
	// Root is the input root.
	Root cas.Digest
	// Files and Bytes are the number and the total size of distinct files.
	Files int
	Bytes int64
}

// maxRevision is the maximum length of a revision in bytes.
const maxRevision = 1000

// Split splits "REPOSITORY@REVISION". Both parts may contain "@": the repository is the longest prefix that is a
// directory. The default revision is HEAD. A URL is an error with advice to clone it.
func Split(spec string) (repository, rev string, err error) {
	for i := len(spec); i > 0; i = strings.LastIndexByte(spec[:i], '@') {
		if st, err := os.Stat(spec[:i]); err != nil || !st.IsDir() {
			continue
		}
		switch {
		case i == len(spec):
			return spec, "HEAD", nil
		case i == len(spec)-1:
			return "", "", fmt.Errorf("%+.256q has no revision after the @", spec)
		}
		return spec[:i], spec[i+1:], nil
	}
	if remote(spec) {
		return "", "", fmt.Errorf("%+.256q is a remote repository: clone it (git clone --bare URL DIR) and use DIR",
			spec)
	}
	return "", "", fmt.Errorf("%+.256q: %w: write REPOSITORY@REVISION, where REPOSITORY is a directory", spec,
		ErrNotFound)
}

// remote reports whether spec is a URL or an scp-like address (git-clone(1), "GIT URLS").
func remote(spec string) bool {
	host, _, ok := strings.Cut(spec, ":")
	return ok && len(host) > 1 && !strings.ContainsAny(host, `/\`)
}

// Read stores the files of a commit in c.Store. repository is a directory in a repository, or a bare one; rev is any
// name of a commit (gitrevisions(7)). Read fails with ErrNotFound, ErrTooLarge or ErrSubmodule, and with an error that
// names the path for a tree that cannot be an input root. When ctx ends, it kills git.
func Read(ctx context.Context, c Config, repository, rev string) (*Revision, error) {
	switch {
	case c.Store == nil:
		return nil, errors.New("revision: Config.Store is nil")
	case c.Function == 0:
		return nil, errors.New("revision: Config.Function is missing")
	}
	if rev == "" || len(rev) > maxRevision || strings.ContainsAny(rev, "\n\x00") {
		return nil, fmt.Errorf("%+.64q is not a revision", rev)
	}
	dir, err := filepath.Abs(repository)
	if err != nil {
		return nil, err
	}
	var rv *Revision
	o, err := open(ctx, dir)
	if err == nil {
		r := &reader{
			Config: c, objects: o, batch: cas.NewBatch(c.Store), trees: map[string]*gitTree{},
			blobs: map[string]*gitBlob{},
		}
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

// A commit is the parsed header of a commit object.
type commit struct {
	tree string
	time time.Time
}

// maxCommit is the maximum size of a commit object in bytes, with its message and signatures.
const maxCommit = 1 << 20

// parseCommit parses the header of a commit, the lines before the first empty one.
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
				return nil, fmt.Errorf("the committer has no time: %+.256q", value)
			}
			seconds, err := strconv.ParseInt(fields[0], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("the committer has no time: %w", err)
			}
			c.time = time.Unix(seconds, 0).UTC()
		}
	}
	if !isObjectName(c.tree) || c.time.IsZero() {
		return nil, errors.New("it has no tree or no committer")
	}
	return &c, nil
}

// isObjectName reports whether s is the full name of an object.
func isObjectName(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == ""
}
