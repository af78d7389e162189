// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// A Run is a Spec with paths of this host, whose files are in place.
type Run struct {
	Args, Env []string
	Dir       string
	// Readable are the files and directories of this host that the run may read, Writable the directories that it may
	// write to.
	Readable, Writable []string
	// Fixed are the inputs below Writable, which it may not change, and Holders the directories below Writable with such
	// inputs, which it may neither rename nor remove.
	Fixed, Holders []string

	spec    *sandbox.Spec
	ws      *workspace
	temps   []string // the directories of spec.Temp
	targets []target
	placed  []placed
	holders map[string]bool // relative to the workspace
	made    []string        // of holders, those that were missing, parents first
}

// A target is a path of the Spec and where it is on this host.
type target struct{ spec, host string }

// A placed is an input in an output.
type placed struct {
	name string // relative to the workspace
	from string // where it was in the workspace, or "" if it was copied
	info fs.FileInfo
	size int64 // with attributes, in bytes
}

// Place checks that spec needs no mounts and puts its inputs in place. The error is sandbox.ErrUnsupported for an input
// whose Target is neither its path on this host nor in an output. The caller calls Restore when the run has ended.
func (h *Host) Place(spec *sandbox.Spec) (*Run, error) {
	r := &Run{spec: spec, holders: map[string]bool{}}
	if spec.Workspace != "" {
		if r.ws = h.workspace(spec.Workspace); r.ws == nil {
			return nil, fmt.Errorf("%w: no open workspace of this backend is named %s", sandbox.ErrSpec, spec.Workspace)
		}
	}
	err := r.place(h)
	if err != nil {
		return nil, errors.Join(err, r.Restore())
	}
	return r, nil
}

func (r *Run) place(h *Host) error {
	for _, o := range r.spec.Outputs {
		host := filepath.Join(r.ws.dir, filepath.FromSlash(o.Source))
		if err := r.makeOutput(o.Source); err != nil {
			return fmt.Errorf("source %s of output %s: %w", o.Source, o.Target, err)
		}
		r.targets, r.Writable = append(r.targets, target{o.Target, host}), append(r.Writable, host)
	}
	for _, t := range r.spec.Temp {
		host, err := h.mkdir("temp-")
		if err != nil {
			return fmt.Errorf("temporary directory: %w", err)
		}
		r.temps = append(r.temps, host)
		r.targets, r.Writable = append(r.targets, target{t.Target, host}), append(r.Writable, host)
	}
	for i := range r.spec.Inputs {
		if err := r.input(&r.spec.Inputs[i]); err != nil {
			return fmt.Errorf("source %s of input %s: %w", r.spec.Inputs[i].Source, r.spec.Inputs[i].Target, err)
		}
	}
	for i := range r.spec.Lower { // the topmost first: what is there already hides the rest
		l := &r.spec.Lower[i]
		if l.Image != "" {
			return fmt.Errorf("%w: this backend mounts no images", sandbox.ErrSpec)
		}
		if err := r.lower(l.Source, r.output(l.Target)); err != nil {
			return fmt.Errorf("lower directory %s of %s: %w", l.Source, l.Target, err)
		}
	}
	for _, p := range r.placed {
		r.Fixed = append(r.Fixed, filepath.Join(r.ws.dir, p.name))
	}
	for name := range r.holders {
		r.Holders = append(r.Holders, filepath.Join(r.ws.dir, name))
	}
	slices.Sort(r.Fixed)
	slices.Sort(r.Holders)
	return r.command()
}

// makeOutput creates the directory of an output if it is missing. No link leads out of the workspace.
func (r *Run) makeOutput(source string) error {
	for p := source; p != "."; p = path.Dir(p) {
		if info, err := r.ws.root.Lstat(p); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return fmt.Errorf("%w: %s is a symbolic link: use the path that it leads to", sandbox.ErrSpec, p)
		}
	}
	info, err := r.ws.root.Lstat(source)
	if err == nil && !info.IsDir() {
		return fmt.Errorf("%w: it is not a directory", sandbox.ErrSpec)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = r.ws.root.MkdirAll(source, 0o700)
	}
	return err
}

// output returns the Source of the output with that Target.
func (r *Run) output(t string) string {
	for _, o := range r.spec.Outputs {
		if o.Target == t {
			return o.Source
		}
	}
	return ""
}

// input makes one input visible.
func (r *Run) input(in *sandbox.Input) error {
	if in.Image != "" {
		return fmt.Errorf("%w: this backend mounts no images", sandbox.ErrSpec)
	}
	var inside string // the path in the workspace
	for _, o := range r.spec.Outputs {
		if rest, ok := strings.CutPrefix(in.Target, o.Target+"/"); ok {
			inside = path.Join(o.Source, rest)
		}
	}
	if inside == "" {
		return r.hostInput(in)
	}
	var from *os.File
	var err error
	if filepath.IsAbs(in.Source) {
		if err := checkSource(in.Source); err != nil {
			return err
		}
		from, err = os.Open(in.Source)
	} else {
		from, err = r.ws.root.Open(in.Source)
	}
	if err != nil {
		return err
	}
	defer from.Close()
	return r.copy(from, inside)
}

// hostInput permits an input of this host at its own path.
func (r *Run) hostInput(in *sandbox.Input) error {
	if !filepath.IsAbs(in.Source) {
		return r.unplaced()
	}
	if err := checkSource(in.Source); err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks(filepath.FromSlash(in.Target))
	if err != nil || real != filepath.Clean(in.Source) {
		return r.unplaced()
	}
	r.Readable = append(r.Readable, real)
	r.targets = append(r.targets, target{in.Target, real})
	return nil
}

func (r *Run) unplaced() error {
	return fmt.Errorf("%w: this backend cannot mount: an input is in an output, or at its own path", sandbox.ErrUnsupported)
}

// checkSource returns an error for a source that does not exist or leads through a symbolic link.
func checkSource(source string) error {
	real, err := filepath.EvalSymlinks(source)
	if err == nil && real != filepath.Clean(source) {
		err = fmt.Errorf("%w: it leads through a symbolic link to %s: use that path", sandbox.ErrSpec, real)
	}
	return err
}

// copy copies a file to name in the workspace, over the empty file that marks its place.
func (r *Run) copy(from *os.File, name string) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%w: this backend cannot mount: an input in an output is a regular file", sandbox.ErrUnsupported)
	}
	if old, err := r.ws.root.Lstat(name); err == nil {
		if !old.Mode().IsRegular() || old.Size() > 0 {
			return fmt.Errorf("%w: this backend cannot mount over %s, which is not an empty file", sandbox.ErrUnsupported, name)
		}
		if err := r.ws.root.Remove(name); err != nil {
			return err
		}
	}
	if err := r.hold(path.Dir(name)); err != nil {
		return err
	}
	to, err := r.ws.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	err = errors.Join(err, to.Close())
	if err == nil {
		err = r.ws.root.Chtimes(name, info.ModTime(), info.ModTime())
	}
	if err == nil {
		err = r.ws.root.Chmod(name, info.Mode().Perm()&^0o222)
	}
	return r.record(name, "", err)
}

// record remembers that the input name is in place, even if that failed in part.
func (r *Run) record(name, from string, failed error) error {
	info, err := r.ws.root.Lstat(name)
	if err == nil {
		size, sizeErr := fileBytes(verbatim(filepath.Join(r.ws.dir, filepath.FromSlash(name))))
		r.placed = append(r.placed, placed{name, from, info, size})
		err = sizeErr
	}
	return errors.Join(failed, err)
}

// hold marks a directory of the workspace and its parents in the output, and creates those that are missing.
func (r *Run) hold(dir string) error {
	if r.holders[dir] || dir == "." {
		return nil
	}
	if err := r.hold(path.Dir(dir)); err != nil {
		return err
	}
	r.holders[dir] = true
	err := r.ws.root.Mkdir(dir, 0o700)
	if err == nil {
		r.made = append(r.made, dir)
	}
	if errors.Is(err, fs.ErrExist) {
		var info fs.FileInfo
		if info, err = r.ws.root.Lstat(dir); err == nil && !info.IsDir() {
			// Fixed would name the inputs by paths that the kernel does not see.
			err = fmt.Errorf("%w: %s has inputs, but is not a directory", sandbox.ErrSpec, dir)
		}
	}
	return err
}

// lower moves the contents of a lower directory into an output, where other entries hide them. Inputs that were copied
// are over their places.
func (r *Run) lower(source, output string) error {
	dir, err := r.ws.root.Open(source)
	if err != nil {
		return err
	}
	entries, err := dir.ReadDir(-1)
	if err = errors.Join(err, dir.Close()); err != nil {
		return err
	}
	if err := r.hold(output); err != nil {
		return err
	}
	for _, e := range entries {
		from, to := path.Join(source, e.Name()), path.Join(output, e.Name())
		upper, err := r.ws.root.Lstat(to)
		switch {
		case err == nil && (!e.IsDir() || !upper.IsDir()):
			continue // hidden
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		case e.IsDir():
			err = r.lower(from, to)
		default:
			err = r.move(from, to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Run) move(from, to string) error {
	if err := r.writable(path.Dir(to), path.Dir(from), func() error { return r.ws.root.Rename(from, to) }); err != nil {
		return err
	}
	return r.record(to, from, nil)
}

// writable calls f while the directories are writable.
func (r *Run) writable(a, b string, f func() error) error {
	for _, dir := range []string{a, b} {
		info, err := r.ws.root.Lstat(dir)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o200 == 0 {
			if err := r.ws.root.Chmod(dir, 0o700); err != nil {
				return err
			}
			defer func() { _ = r.ws.root.Chmod(dir, info.Mode()) }() // the workspace is removed with it
		}
	}
	return f()
}

// Restore takes the inputs out of the outputs and removes the temporary directories. It returns an error if the run
// changed, removed or replaced an input, in which case its result is worthless.
func (r *Run) Restore() error {
	var errs []error
	for _, p := range slices.Backward(r.placed) {
		info, err := r.ws.root.Lstat(p.name)
		if err != nil || !os.SameFile(info, p.info) || info.Mode() != p.info.Mode() || info.Size() != p.info.Size() ||
			!info.ModTime().Equal(p.info.ModTime()) {
			errs = append(errs, fmt.Errorf("the run changed its input %s", p.name))
			continue
		}
		if p.from == "" {
			err = r.writable(path.Dir(p.name), ".", func() error { return r.ws.root.Remove(p.name) })
		} else {
			err = r.writable(path.Dir(p.name), path.Dir(p.from), func() error { return r.ws.root.Rename(p.name, p.from) })
		}
		errs = append(errs, err)
	}
	for _, dir := range slices.Backward(r.made) {
		_ = r.ws.root.Remove(dir) // it may have outputs now
	}
	for _, dir := range r.temps {
		_ = removeTree(dir) // Close reports what is left
	}
	r.placed, r.made, r.temps = nil, nil, nil
	return errors.Join(errs...)
}

// command translates what the Spec says about the process. A program without a directory is looked up in the PATH of
// the run; what Args name besides the program is the run's own business.
func (r *Run) command() error {
	dir, ok := r.host(r.spec.Dir)
	if !ok {
		return fmt.Errorf("%w: working directory %s is in no output, temporary directory or input", sandbox.ErrUnsupported, r.spec.Dir)
	}
	r.Dir, r.Args = dir, slices.Clone(r.spec.Args)
	for _, kv := range r.spec.Env {
		k, v, _ := strings.Cut(kv, "=")
		if host, ok := r.host(v); ok {
			v = host
		}
		r.Env = append(r.Env, k+"="+v)
	}
	if host, ok := r.host(r.Args[0]); ok {
		r.Args[0] = host
	}
	return nil
}

// host returns the path on this host of a path of the Spec.
func (r *Run) host(p string) (string, bool) {
	best := target{}
	for _, t := range r.targets {
		if (p == t.spec || strings.HasPrefix(p, t.spec+"/")) && len(t.spec) > len(best.spec) {
			best = t
		}
	}
	if best.spec == "" {
		return "", false
	}
	return filepath.Join(best.host, filepath.FromSlash(strings.TrimPrefix(p, best.spec))), true
}

// program returns the path of the program, or NotExecuted if it does not exist (127) or is not executable (126).
func (r *Run) program() (string, error) {
	name := r.Args[0]
	tries := []string{name}
	switch {
	case filepath.IsAbs(name):
	case strings.ContainsAny(name, `/`+string(filepath.Separator)):
		tries[0] = filepath.Join(r.Dir, name)
	default:
		tries = nil
		for _, kv := range r.Env {
			list, ok := strings.CutPrefix(kv, "PATH=")
			if !ok {
				continue
			}
			for _, dir := range filepath.SplitList(list) {
				if !filepath.IsAbs(dir) {
					dir = filepath.Join(r.Dir, dir)
				}
				tries = append(tries, filepath.Join(dir, name))
			}
		}
	}
	missing := &NotExecuted{127, name + ": not found"}
	for _, try := range tries {
		found, err := exec.LookPath(try)
		if err == nil {
			return found, nil
		}
		if errors.Is(err, fs.ErrPermission) {
			missing = &NotExecuted{126, name + ": not executable"}
		}
	}
	return "", missing
}
