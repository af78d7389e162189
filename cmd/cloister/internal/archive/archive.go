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
)

// Pack writes the file or directory name, without its name. Symbolic links stay links, except name itself; special files
// are an error.
func Pack(w io.Writer, name string) error {
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	err = filepath.WalkDir(real, func(file string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(real, file)
		if err != nil {
			return err
		}
		return add(t, file, filepath.ToSlash(rel), e)
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

// top is the name of the file or directory itself in an archive.
const top = "."

// errForged means that a stream has what Pack never writes.
var errForged = errors.New("invalid archive")

// ErrIncomplete means that a stream ended before its archive did, because its sender failed.
var ErrIncomplete = errors.New("incomplete archive")

// Base returns the file name of path, or "" if that is the current directory, its parent or the root.
func Base(name string) string {
	if base := path.Base(filepath.ToSlash(name)); base != "." && base != ".." && base != "/" {
		return base
	}
	return ""
}

// Unpack creates what Pack wrote as name, or as base in name if that is a directory and base is not "". The receiver
// chooses base: if the archive did, it could replace any file of the directory. Unpack replaces files and adds to
// directories.
func Unpack(r io.Reader, name, base string) error {
	err := unpack(tar.NewReader(r), name, base)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	return err
}

func unpack(t *tar.Reader, name, base string) error {
	h, err := t.Next()
	if err == io.EOF {
		return fmt.Errorf("%w: nothing was copied", ErrIncomplete)
	}
	if err != nil {
		return err
	}
	if h.Name != top {
		return fmt.Errorf("%w: it begins with %q", errForged, h.Name)
	}
	if fi, err := os.Stat(name); err == nil && fi.IsDir() && base != "" {
		name = filepath.Join(name, base)
		if fi, err := os.Lstat(name); err == nil && fi.Mode().Type() == fs.ModeSymlink && h.Typeflag == tar.TypeDir {
			return fmt.Errorf("%s is a symbolic link: remove it, or write where it leads to", name)
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		parent, err := os.OpenRoot(filepath.Dir(name))
		if err != nil {
			return err
		}
		defer parent.Close()
		if fi, err := os.Lstat(name); err == nil && fi.IsDir() {
			return fmt.Errorf("%s is a directory, and a file was sent", name)
		}
		return createFile(parent, filepath.Base(name), t, h)
	case tar.TypeDir:
		if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return unpackInto(name, t, h)
	}
	return fmt.Errorf("%w: it has neither a file nor a directory", errForged)
}

// unpackInto creates the rest of an archive in a directory, outside of which no link leads.
func unpackInto(dir string, t *tar.Reader, first *tar.Header) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	modes := []*tar.Header{first} // set at the end: a directory may be read-only
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := h.Name
		if name == top || !filepath.IsLocal(name) {
			return fmt.Errorf("%w: it has %q", errForged, name)
		}
		switch h.Typeflag {
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
