// SPDX-License-Identifier: Apache-2.0

package revision

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1" // the object names of most repositories
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

// objects is a git process that reads objects. It is not safe for concurrent use. The caller closes it.
type objects struct {
	dir    string
	kill   context.CancelFunc
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr head
}

// inherited are the environment variables that git needs: to find its programs, and the user's and the system's
// configuration, the only sources from which it accepts "safe.directory".
var inherited = []string{"PATH", "HOME", "XDG_CONFIG_HOME", "SUDO_UID", "SystemRoot"}

// open starts git in the directory dir. The first response reports errors of the repository.
func open(ctx context.Context, dir string) (*objects, error) {
	path, err := exec.LookPath("git")
	if err != nil {
		return nil, fmt.Errorf("git is not installed: %w", err)
	}
	ctx, kill := context.WithCancel(ctx)
	o := &objects{dir: dir, kill: kill}
	o.cmd = exec.CommandContext(ctx, path, "--no-pager", "-c", "core.bigFileThreshold=64m", "-C", dir, "cat-file",
		"--batch")
	o.cmd.Env = []string{
		"LC_ALL=C",
		"GIT_OPTIONAL_LOCKS=0",
		"GIT_NO_REPLACE_OBJECTS=1", "GIT_GRAFT_FILE=" + os.DevNull,
		// Limit memory. Files above the threshold are streamed.
		"GIT_ALLOC_LIMIT=1g",
		// Do not fetch what a partial clone lacks. Older versions only support the second variable, which permits no
		// existing transport, whatever the repository's configuration.
		"GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=none", "GIT_TERMINAL_PROMPT=0",
	}
	for _, name := range inherited {
		if value, ok := os.LookupEnv(name); ok {
			o.cmd.Env = append(o.cmd.Env, name+"="+value)
		}
	}
	o.cmd.Stderr = &o.stderr
	o.cmd.WaitDelay = time.Second // a child of git may keep stderr open
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
		kill()
		return nil, fmt.Errorf("start git: %w", err)
	}
	return o, nil
}

// errEnded is returned if git exits early. Its stderr has the reason.
var errEnded = errors.New("git exited early")

// close stops git and waits for it. It returns err, the first error of a read, or a better one from stderr.
func (o *objects) close(err error) error {
	if err != nil {
		o.kill() // it may block until its output is read
	}
	defer o.kill()
	exit := errors.Join(o.in.Close(), o.cmd.Wait())
	if err == nil {
		return exit
	}
	if !errors.Is(err, errEnded) {
		return err
	}
	text := o.stderr.String()
	switch {
	case strings.Contains(text, "dubious ownership"):
		dir := o.dir // or the parent that git names
		if _, rest, ok := strings.Cut(text, "repository at '"); ok {
			if at, _, ok := strings.Cut(rest, "'\n"); ok {
				dir = at
			}
		}
		return fmt.Errorf("git does not read the repository of another user; if you trust it, run "+
			"git config --global --add safe.directory %+.256q", dir)
	case strings.Contains(text, "not a git repository"), strings.Contains(text, "cannot change to"):
		return fmt.Errorf("%w: not a Git repository", ErrNotFound)
	case text != "":
		line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
		return fmt.Errorf("git: %+.256q", line)
	}
	return errors.Join(err, exit)
}

// An object is one response. Its body is only valid until the callback returns.
type object struct {
	name string // in full
	kind string // "commit", "tree", "blob" or "tag"
	size int64
	body io.Reader
}

// check returns an error unless ob has the kind.
func (ob *object) check(kind string) error {
	if ob.kind != kind {
		return fmt.Errorf("object %s is a %s, want a %s", ob.name, ob.kind, kind)
	}
	return nil
}

// each requests the objects names and calls f for each, in order. An absent object and an ambiguous name are
// ErrNotFound. A body that f reads in full is verified against its name.
func (o *objects) each(names []string, f func(i int, ob *object) error) error {
	if len(names) == 0 {
		return nil
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		// If git exits before it has read everything, its output ends, too.
		_, _ = io.WriteString(o.in, strings.Join(names, "\n")+"\n")
	}()
	defer func() { <-written }()
	for i := range names {
		if err := o.next(names[i], func(ob *object) error { return f(i, ob) }); err != nil {
			o.kill() // ends the writer
			return err
		}
	}
	return nil
}

// next reads one response: a line, and for a present object its content and a newline.
func (o *objects) next(name string, f func(*object) error) error {
	line, err := o.out.ReadSlice('\n')
	if errors.Is(err, io.EOF) {
		return errEnded
	}
	if err != nil {
		return fmt.Errorf("read from git: %w", err)
	}
	response := strings.TrimSuffix(string(line), "\n")
	if rest, ok := strings.CutPrefix(response, name+" "); ok && (rest == "missing" || rest == "ambiguous") {
		if at, ok := strings.CutSuffix(name, peel); ok && rest == "missing" {
			return fmt.Errorf("%w: %+.80q is not a commit of the repository", ErrNotFound, at)
		}
		return fmt.Errorf("%w: %+.80q is %s in the repository", ErrNotFound, strings.TrimSuffix(name, peel), rest)
	}
	fields := strings.Split(response, " ")
	if len(fields) != 3 || !isObjectName(fields[0]) {
		return fmt.Errorf("git responded %+.256q to a request for %+.80q", response, name)
	}
	ob := &object{name: fields[0], kind: fields[1]}
	if ob.size, err = strconv.ParseInt(fields[2], 10, 64); err != nil || ob.size < 0 {
		return fmt.Errorf("git responded %+.256q to a request for %+.80q", response, name)
	}
	if isObjectName(name) && ob.name != name {
		return fmt.Errorf("git returned object %s instead of %s", ob.name, name)
	}
	rest := &io.LimitedReader{R: o.out, N: ob.size}
	ob.body = verify(ob, rest)
	if err := f(ob); err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, o.out, rest.N+1); err != nil {
		return errEnded
	}
	return nil
}

// A verified reader reads the content of an object, and fails at the end if it does not match its name.
type verified struct {
	r    io.Reader
	h    hash.Hash
	left int64
	name string
}

// verify returns a verified reader. Git hashes the kind and the size, a NUL, and the content.
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
		return n, fmt.Errorf("object %s is damaged: its content has the name %s", v.name, sum)
	}
	return n, io.EOF
}

// A head keeps the first bytes that are written to it.
type head struct{ buf bytes.Buffer }

func (f *head) Write(p []byte) (int, error) {
	const limit = 4096
	f.buf.Write(p[:min(len(p), limit-f.buf.Len())])
	return len(p), nil
}

func (f *head) String() string { return f.buf.String() }
