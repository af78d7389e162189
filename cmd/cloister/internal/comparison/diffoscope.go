// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// DiffoscopeHelp is the help text of --diffoscope.
const DiffoscopeHelp = "compare differing files with diffoscope(1) as well, outside the sandbox"

// CheckDiffoscope fails if diffoscope is requested but not installed.
func CheckDiffoscope(wanted bool) error {
	if !wanted {
		return nil
	}
	if _, err := exec.LookPath("diffoscope"); err != nil {
		return fmt.Errorf("--diffoscope: %w; install it, or omit the flag", compare.ErrNoDiffoscope)
	}
	return nil
}

// runDiffoscope runs diffoscope on two files or directories of this host, on copies of two blobs, or on copies of all
// differing files.
func (c *Config) runDiffoscope(ctx context.Context, r *diffReport, a, b operand) error {
	if !c.Diffoscope || len(r.Changes)+len(r.Differences) == 0 {
		return nil
	}
	var err error
	if a.digest.IsZero() && b.digest.IsZero() {
		r.Diffoscope, err = compare.Diffoscope(ctx, a.name, b.name)
		return err
	}
	dir, err := os.MkdirTemp("", "cloister-diff-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // plain files of ours
	var paths [2]string
	for i, t := range []operand{a, b} {
		if paths[i] = filepath.Join(dir, []string{"a", "b"}[i]); r.Kind != "blob" && r.Kind != "manifest" {
			continue
		}
		if err := c.copyTo(ctx, t, paths[i]); err != nil {
			return err
		}
	}
	if r.Kind == "blob" || r.Kind == "manifest" {
		r.Diffoscope, err = compare.Diffoscope(ctx, paths[0], paths[1])
		return err
	}
	pair := changed{left: maxChanged}
	if err := pair.write(ctx, r.Changes, paths); err != nil {
		return fmt.Errorf("--diffoscope: %w", err)
	}
	if pair.files > 0 {
		r.Diffoscope, err = compare.Diffoscope(ctx, paths[0], paths[1])
	}
	if pair.without > 0 {
		r.Diffoscope += fmt.Sprintf("diffoscope did not see %d files: %s\n", pair.without, pair.why)
	}
	return err
}

// maxChanged limits the bytes of differing files that are copied for diffoscope.
const maxChanged = 1 << 30

// A changed is a pair of directories with differing files.
type changed struct {
	left    int64 // bytes that may still be written
	files   int   // written
	without int   // omitted
	why     string
}

// write copies the differing files into two directories, which it makes. It counts files that are too large or have
// impossible names, since names and contents are hostile. Links and directories are covered by the changes themselves.
func (p *changed) write(ctx context.Context, all []shownChange, dirs [2]string) error {
	for i, dir := range dirs {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			return err
		}
		defer root.Close()
		for _, ch := range all {
			e := []*changes.Entry{ch.EntryA, ch.EntryB}[i]
			if e == nil || e.Open == nil {
				continue
			}
			// A result has outputs, and stdout and stderr, which have no path.
			if err := p.file(ctx, root, path.Join(strings.TrimPrefix(ch.What, "file"), ch.Path), e); err != nil {
				return err
			}
		}
	}
	return nil
}

// skip counts a file that was not copied.
func (p *changed) skip(name, why string) {
	if p.without++; p.without == 1 {
		p.why = fmt.Sprintf("%s is %s", render.Quote(name), why)
	}
}

func (p *changed) file(ctx context.Context, root *os.Root, name string, e *changes.Entry) error {
	if e.Digest.Size() > min(p.left, maxExplainedBytes) {
		p.skip(name, "too large")
		return nil
	}
	in, done, err := e.Open(ctx)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		p.skip(name, "absent from the server")
		return nil
	case err != nil:
		return err
	}
	defer done()
	if in.Size() > min(p.left, maxExplainedBytes) {
		p.skip(name, "too large")
		return nil
	}
	p.left -= in.Size()
	err = root.MkdirAll(path.Dir(name), 0o700)
	var out *os.File
	if err == nil {
		out, err = root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		p.skip(name, "not a valid file name here")
		return nil
	}
	p.files++
	_, err = io.Copy(out, in)
	// The time of the copy must not be a difference.
	return errors.Join(err, out.Close(), root.Chtimes(name, time.Unix(0, 0), time.Unix(0, 0)))
}

// copyTo copies the content of an operand to a new file.
func (c *Config) copyTo(ctx context.Context, t operand, path string) error {
	in, done, err := c.content(ctx, t)
	if err != nil {
		return err
	}
	defer done()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, in)
	return errors.Join(err, f.Close())
}
