// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"fmt"
	"io"
	"path"

	"github.com/cloister-build/cloister/cas"
)

// fileOf opens one file of the output of docker save, where links stand for repeated layers. The caller closes it.
func fileOf(open func() (io.ReadCloser, error), name string) (io.ReadCloser, error) {
	want := path.Clean(name)
	for range maxLinks {
		f, err := open()
		if err != nil {
			return nil, err
		}
		archive := tar.NewReader(f)
		h, err := seek(archive, want)
		switch {
		case err != nil:
			_ = f.Close() // nothing was written
			return nil, fmt.Errorf("%+.256q: %w", name, err)
		case h.Typeflag == tar.TypeReg:
			return &archived{archive, f}, nil
		}
		_ = f.Close()
		switch h.Typeflag {
		case tar.TypeSymlink:
			want = path.Join(path.Dir(want), h.Linkname)
		case tar.TypeLink:
			want = path.Clean(h.Linkname)
		default:
			return nil, refuse("%+.256q is not a file", name)
		}
	}
	return nil, refuse("%+.256q leads through more than %d links", name, maxLinks)
}

// seek returns the header of the entry called want, a clean path.
func seek(archive *tar.Reader, want string) (*tar.Header, error) {
	for {
		h, err := archive.Next()
		if err == io.EOF {
			return nil, cas.ErrNotFound
		}
		if err != nil || path.Clean(h.Name) == want {
			return h, err
		}
	}
}

// archived is a file in an archive.
type archived struct {
	io.Reader
	archive io.Closer
}

// Close closes the archive.
func (a *archived) Close() error { return a.archive.Close() }
