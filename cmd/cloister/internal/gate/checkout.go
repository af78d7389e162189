// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// git runs git in a directory and returns its output. Git then neither prompts, nor fetches from other hosts, nor takes
// optional locks. A repository of our own ignores the configuration of the user, whose filters would run programs; the
// user's repository needs it for safe.directory.
func git(ctx context.Context, dir string, own bool, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{"--no-pager", "-C", dir}, args...)...)
	cmd.Env = []string{
		"LC_ALL=C", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_REPLACE_OBJECTS=1", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=file",
		"GIT_TERMINAL_PROMPT=0", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=core.logAllRefUpdates", "GIT_CONFIG_VALUE_0=false",
	}
	for _, name := range []string{"PATH", "HOME", "XDG_CONFIG_HOME", "SUDO_UID"} {
		if v, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	if own {
		cmd.Env = append(cmd.Env, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL="+os.DevNull)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if text := strings.TrimSpace(stderr.String()); err != nil && text != "" {
		err = fmt.Errorf("git %s: %s", args[0], text)
	}
	return strings.TrimSpace(stdout.String()), err
}

// A source has the files of a step: a clean checkout of a commit, with a repository of its own, or a directory.
type source struct {
	dir    string
	commit string
	time   time.Time // of all files
}

// describe returns what a report calls the source, whose files have a hash.
func (s *source) describe(sum string) string {
	if s.commit != "" {
		return "commit " + s.commit
	}
	return "directory " + sum
}

// resolve returns the hash of the commit that a revision names.
func resolve(ctx context.Context, repository, revision string) (string, error) {
	commit, err := git(ctx, repository, false, "rev-parse", "--verify", "--quiet", "--end-of-options", revision+"^{commit}")
	if exitErr, ok := errors.AsType[*exec.ExitError](err); ok && exitErr.ExitCode() == 1 {
		err = errors.New("not a commit of this repository")
	}
	return commit, err
}

// checkOut makes a clean checkout of a commit in a directory. It reads the repository and does not write to it. Package
// revision would store the files only, but steps such as "make gen && git diff --exit-code" need a repository.
func checkOut(ctx context.Context, repository, commit, dir string) (*source, error) {
	from, err := git(ctx, repository, false, "rev-parse", "--path-format=absolute", "--git-common-dir")
	if err != nil {
		return nil, err
	}
	format, err := git(ctx, repository, false, "rev-parse", "--show-object-format")
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	s := &source{dir: dir, commit: commit}
	for _, c := range []struct {
		own  bool
		args []string
	}{
		{true, []string{"init", "--quiet", "--template=", "--object-format=" + format}},
		{false, []string{
			"fetch", "--quiet", "--depth=1", "--no-tags", "--no-auto-maintenance", "--no-write-fetch-head", from, commit,
		}},
		{true, []string{"-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit}},
	} {
		if _, err := git(ctx, dir, c.own, c.args...); err != nil {
			return nil, err
		}
	}
	seconds, err := git(ctx, dir, true, "show", "--no-patch", "--format=%ct", commit)
	if err != nil {
		return nil, err
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	s.time = time.Unix(n, 0)
	return s, err
}

// walk calls f for each file and directory of a source, parents first. Of a directory it omits repositories: their
// configuration may contain credentials of the pipeline.
func (s *source) walk(f func(p string, e fs.DirEntry) error) error {
	return filepath.WalkDir(s.dir, func(p string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case s.commit != "" || e.Name() != ".git":
			return f(p, e)
		case e.IsDir():
			return fs.SkipDir
		}
		return nil
	})
}

// measure returns the size of the files of a source in blocks, and the number of its files and directories.
func (s *source) measure() (size, files int64, err error) {
	err = s.walk(func(_ string, e fs.DirEntry) error {
		fi, err := e.Info()
		if err != nil {
			return err
		}
		const block = 4096
		if files++; fi.Mode().IsRegular() {
			size += (fi.Size() + block - 1) / block * block
		}
		return nil
	})
	return size, files, err
}

// copyTo copies the files into a new directory. It returns their names below root, for Spec.Owned, and a hash of their
// names, kinds and contents.
func (s *source) copyTo(root *os.Root, to string) (names []string, sum string, err error) {
	h := sha256.New()
	var dirs []string
	err = s.walk(func(p string, e fs.DirEntry) error {
		rel, err := filepath.Rel(s.dir, p)
		if err != nil {
			return err
		}
		name := path.Join(to, filepath.ToSlash(rel))
		names = append(names, name)
		switch e.Type() {
		case fs.ModeDir:
			dirs = append(dirs, name)
			fmt.Fprintf(h, "directory %q\n", rel)
			return errors.Join(root.Mkdir(name, 0o755), root.Chmod(name, 0o755)) // whatever the umask
		case fs.ModeSymlink:
			target, err := os.Readlink(p)
			fmt.Fprintf(h, "link %q %q\n", rel, target)
			return errors.Join(err, root.Symlink(target, name))
		case 0:
			return s.copyFile(root, name, p, rel, h)
		}
		return fmt.Errorf("%q is neither a file, a directory nor a link", p)
	})
	for _, name := range dirs { // after their last entry
		err = errors.Join(err, root.Chtimes(name, s.time, s.time))
	}
	return names, hex.EncodeToString(h.Sum(nil)), err
}

func (s *source) copyFile(root *os.Root, name, from, rel string, h hash.Hash) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o644)
	if fi.Mode()&0o100 != 0 {
		mode = 0o755
	}
	out, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	fmt.Fprintf(h, "file %q %o %d\n", rel, mode, fi.Size())
	_, err = io.Copy(io.MultiWriter(out, h), in)
	return errors.Join(err, out.Close(), root.Chmod(name, mode), root.Chtimes(name, s.time, s.time))
}
