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

// DiffoscopeHelp is what the flag --diffoscope says of itself.
const DiffoscopeHelp = "compare differing files with diffoscope(1) as well, outside the sandbox"

// CheckDiffoscope returns what is wrong with asking for it.
func CheckDiffoscope(wanted bool) error {
	if !wanted {
		return nil
	}
	if _, err := exec.LookPath("diffoscope"); err != nil {
		return fmt.Errorf("--diffoscope: %w; install it, or leave the flag out", compare.ErrNoDiffoscope)
	}
	return nil
}

// lookDeeper has diffoscope compare two files or directories of this host where they are, blobs as copies, and of all else
// copies of the files that differ.
func (c *Config) lookDeeper(ctx context.Context, r *diffReport, a, b operand) error {
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
		r.Diffoscope += fmt.Sprintf("%d files were not shown to diffoscope: %s\n", pair.without, pair.why)
	}
	return err
}

// maxChanged is how many bytes of files that differ are copied for diffoscope.
const maxChanged = 1 << 30

// A changed is two directories of files that differ.
type changed struct {
	left    int64 // how many bytes may still be written
	files   int   // that are there
	without int   // that are not
	why     string
}

// write writes the files that changes speak of below two directories, which it makes. Links and directories are not among
// them: what there is to say of these the changes say. Names and contents are foreign: what cannot be written, or is too large, is counted.
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

// skip counts a file that is not there.
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
		p.skip(name, "no name that a file can be written by")
		return nil
	}
	p.files++
	_, err = io.Copy(out, in)
	// When it was copied is no difference.
	return errors.Join(err, out.Close(), root.Chtimes(name, time.Unix(0, 0), time.Unix(0, 0)))
}

// copyTo writes what a thing holds to a new file.
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
