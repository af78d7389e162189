// SPDX-License-Identifier: Apache-2.0

package revision

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1" // what names objects in most repositories
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// objects is a process of git that is asked for objects. It is for one goroutine, which closes it.
type objects struct {
	dir  string
	stop context.CancelFunc
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said first
}

// passed are the variables of this process that git needs: to be found, and to know which repositories of other owners
// the user trusts ("safe.directory", which it reads from the user's and the system's configuration alone).
var passed = []string{"PATH", "HOME", "XDG_CONFIG_HOME", "SUDO_UID", "SystemRoot"}

// open starts git in the directory dir. What is wrong with the repository is told by the first answer.
func open(ctx context.Context, dir string) (*objects, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return nil, fmt.Errorf("commits are read by git, which is not installed: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	o := &objects{dir: dir, stop: stop, cmd: exec.CommandContext(ctx, path, "--no-pager", "-c", "core.bigFileThreshold=64m", "-C", dir, "cat-file", "--batch")}
	o.cmd.Env = []string{
		"LC_ALL=C",
		"GIT_OPTIONAL_LOCKS=0",
		"GIT_NO_REPLACE_OBJECTS=1", "GIT_GRAFT_FILE=" + os.DevNull,
		// What it holds in memory is at most so much at a time: files above the threshold pass through.
		"GIT_ALLOC_LIMIT=1g",
		// What a partial clone lacks is not fetched. Older versions know the second alone: no transport is called
		// so, so that none is allowed, whatever the repository's configuration says.
		"GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=none", "GIT_TERMINAL_PROMPT=0",
	}
	for _, name := range passed {
		if value, ok := os.LookupEnv(name); ok {
			o.cmd.Env = append(o.cmd.Env, name+"="+value)
		}
	}
	o.cmd.Stderr = &o.said
	o.cmd.WaitDelay = time.Second // a child of git's may hold its stderr open
	in, err := o.cmd.StdinPipe()
	if err == nil {
		o.in = in
		var out io.Reader
		if out, err = o.cmd.StdoutPipe(); err == nil {
			o.out = bufio.NewReaderSize(out, 64<<10)
			err = o.cmd.Start()
		}
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("start git: %w", err)
	}
	return o, nil
}

// errEnded says that git has ended before it answered; why is in what it said.
var errEnded = errors.New("git has ended")

// close ends git, waits for it, and returns err, the first error of whoever asked, as a person needs it.
func (o *objects) close(err error) error {
	if err != nil {
		o.stop() // it may wait for us to read
	}
	defer o.stop()
	ended := errors.Join(o.in.Close(), o.cmd.Wait())
	if err == nil {
		return ended
	}
	if !errors.Is(err, errEnded) {
		return err
	}
	said := o.said.String()
	switch {
	case strings.Contains(said, "dubious ownership"):
		dir := o.dir // or one above it, which git names
		if _, rest, ok := strings.Cut(said, "repository at '"); ok {
			if at, _, ok := strings.Cut(rest, "'\n"); ok {
				dir = at
			}
		}
		return fmt.Errorf("the repository belongs to another user, so that git does not read it; if you trust it: git config --global --add safe.directory %+.256q", dir)
	case strings.Contains(said, "not a git repository"), strings.Contains(said, "cannot change to"):
		return fmt.Errorf("%w: there is no Git repository", ErrNotFound)
	case said != "":
		line, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
		return fmt.Errorf("git says %+.256q", line)
	}
	return errors.Join(err, ended)
}

// An object is one answer. Its bytes must be read before the function returns that is given it, or are skipped.
type object struct {
	name string // in full
	kind string // "commit", "tree", "blob" or "tag"
	size int64
	body io.Reader
}

// each asks for all of names and calls got with the answers, in order. An object that is absent is ErrNotFound, and so
// is a name of several objects. Whatever got reads in full has the hash of its name, or is an error.
func (o *objects) each(names []string, got func(i int, ob *object) error) error {
	if len(names) == 0 {
		return nil
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		// If git goes away before it has read all, its answers end, too.
		_, _ = io.WriteString(o.in, strings.Join(names, "\n")+"\n")
	}()
	defer func() { <-written }()
	for i := range names {
		if err := o.next(names[i], func(ob *object) error { return got(i, ob) }); err != nil {
			o.stop() // so that the writer ends
			return err
		}
	}
	return nil
}

// next reads one answer: a line, and for an object that is there its bytes and a line end.
func (o *objects) next(name string, got func(*object) error) error {
	line, err := o.out.ReadSlice('\n')
	if errors.Is(err, io.EOF) {
		return errEnded
	}
	if err != nil {
		return fmt.Errorf("read from git: %w", err)
	}
	answer := strings.TrimSuffix(string(line), "\n")
	if rest, ok := strings.CutPrefix(answer, name+" "); ok && (rest == "missing" || rest == "ambiguous") {
		if at, ok := strings.CutSuffix(name, peel); ok && rest == "missing" {
			return fmt.Errorf("%w: %+.80q names no commit in the repository", ErrNotFound, at)
		}
		return fmt.Errorf("%w: %+.80q is %s in the repository", ErrNotFound, strings.TrimSuffix(name, peel), rest)
	}
	fields := strings.Split(answer, " ")
	if len(fields) != 3 || !objectName(fields[0]) {
		return fmt.Errorf("git answers %+.256q when asked for %+.80q", answer, name)
	}
	ob := &object{name: fields[0], kind: fields[1]}
	if ob.size, err = strconv.ParseInt(fields[2], 10, 64); err != nil || ob.size < 0 {
		return fmt.Errorf("git answers %+.256q when asked for %+.80q", answer, name)
	}
	if objectName(name) && ob.name != name {
		return fmt.Errorf("git answers with object %s when asked for %s", ob.name, name)
	}
	rest := &io.LimitedReader{R: o.out, N: ob.size}
	ob.body = verify(ob, rest)
	if err := got(ob); err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, o.out, rest.N+1); err != nil {
		return errEnded
	}
	return nil
}

// verified is the bytes of an object, which fail where the end should be if they are not those of its name.
type verified struct {
	r    io.Reader
	h    hash.Hash
	left int64
	name string
}

// verify hashes an object as Git does: its kind and size, a NUL, its bytes.
func verify(ob *object, r io.Reader) io.Reader {
	h := sha1.New()
	if len(ob.name) == 64 {
		h = sha256.New()
	}
	fmt.Fprintf(h, "%s %d\x00", ob.kind, ob.size)
	return &verified{r, h, ob.size, ob.name}
}

func (v *verified) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	v.h.Write(p[:n])
	v.left -= int64(n)
	if !errors.Is(err, io.EOF) {
		return n, err
	}
	if v.left != 0 {
		return n, errEnded
	}
	if sum := fmt.Sprintf("%x", v.h.Sum(nil)); sum != v.name {
		return n, fmt.Errorf("object %s is damaged: its bytes have the name %s", v.name, sum)
	}
	return n, io.EOF
}

// first keeps the first bytes that are written to it.
type first struct{ buf bytes.Buffer }

func (f *first) Write(p []byte) (int, error) {
	const most = 4096
	f.buf.Write(p[:min(len(p), most-f.buf.Len())])
	return len(p), nil
}

func (f *first) String() string { return f.buf.String() }
