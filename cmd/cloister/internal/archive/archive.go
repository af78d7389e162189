// SPDX-License-Identifier: Apache-2.0

// Package archive copies a file or directory through a tar stream, whose sender the receiver need not trust: what it
// creates is the destination or lies below it.
package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Pack writes the file or directory name. Symbolic links stay links, except name itself; special files are an error.
func Pack(w io.Writer, name string) error {
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	base := filepath.Base(filepath.Clean(name))
	err = filepath.WalkDir(real, func(file string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(real, file)
		if err != nil {
			return err
		}
		return add(t, file, path.Join(base, filepath.ToSlash(rel)), e)
	})
	return errors.Join(err, t.Close())
}

// add writes one entry.
func add(t *tar.Writer, file, name string, e fs.DirEntry) error {
	fi, err := e.Info()
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime(), Format: tar.FormatPAX}
	switch fi.Mode().Type() {
	case 0:
		return addFile(t, file, h)
	case fs.ModeDir:
		h.Typeflag = tar.TypeDir
	case fs.ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(file); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%s is neither a file nor a directory nor a symbolic link", file)
	}
	return t.WriteHeader(h)
}

// addFile writes the contents of a file that does not grow meanwhile.
func addFile(t *tar.Writer, file string, h *tar.Header) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if _, err := io.CopyN(t, f, h.Size); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// errForged means that a stream has what Pack never writes.
var errForged = errors.New("invalid archive")

// Unpack creates what Pack wrote as name, or in name if that is a directory. It replaces files and adds to directories.
func Unpack(r io.Reader, name string) error {
	t := tar.NewReader(r)
	h, err := t.Next()
	if err == io.EOF {
		return errors.New("nothing was copied")
	}
	if err != nil {
		return err
	}
	base := h.Name
	if !filepath.IsLocal(base) || strings.ContainsAny(base, `/\`) || base == "." {
		return fmt.Errorf("%w: it begins with %q", errForged, base)
	}
	if fi, err := os.Stat(name); err == nil && fi.IsDir() {
		name = filepath.Join(name, base)
	}
	switch h.Typeflag {
	case tar.TypeReg:
		parent, err := os.OpenRoot(filepath.Dir(name))
		if err != nil {
			return err
		}
		defer parent.Close()
		return createFile(parent, filepath.Base(name), t, h)
	case tar.TypeDir:
		if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return unpackInto(name, base, t, h)
	}
	return fmt.Errorf("%w: %q is neither a file nor a directory", errForged, base)
}

// unpackInto creates the rest of an archive in a directory, outside of which no link leads.
func unpackInto(dir, base string, t *tar.Reader, top *tar.Header) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	modes := []*tar.Header{top} // set at the end: a directory may be read-only
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(h.Name, base+"/")
		if !ok || !filepath.IsLocal(name) {
			return fmt.Errorf("%w: %q is not in %q", errForged, h.Name, base)
		}
		switch h.Name = name; h.Typeflag {
		case tar.TypeReg:
			err = createFile(root, name, t, h)
		case tar.TypeSymlink:
			if err = remove(root, name); err == nil {
				err = root.Symlink(h.Linkname, name)
			}
		case tar.TypeDir:
			if err = root.Mkdir(name, 0o755); errors.Is(err, os.ErrExist) {
				err = nil
			}
			modes = append(modes, h)
		default:
			err = fmt.Errorf("%w: %q is of type %q", errForged, name, h.Typeflag)
		}
		if err != nil {
			return err
		}
	}
	top.Name = "."
	for _, h := range slices.Backward(modes) {
		if err := root.Chmod(h.Name, permissions(h)); err != nil {
			return err
		}
	}
	return nil
}

// permissions are those of an entry, never with set-user-ID.
func permissions(h *tar.Header) fs.FileMode { return fs.FileMode(h.Mode) & fs.ModePerm }

// createFile creates or replaces a file: it writes to no file that had the name before, nor to where a link leads.
func createFile(root *os.Root, name string, r io.Reader, h *tar.Header) error {
	if err := remove(root, name); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, permissions(h)|0o200)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Chmod(permissions(h)), f.Close())
}

// remove removes a file or link if there is one.
func remove(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
