// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"errors"
	"os"
	"sync"
)

// An imageFile is an unnamed file that holds one image at a time. It is reused, since creating a file costs more than
// writing to one.
type imageFile struct {
	*os.File
	size int // of the largest image that it has held
}

func (f *imageFile) write(image []byte) error {
	f.size = max(f.size, len(image))
	_, err := f.WriteAt(image, 0)
	return err
}

// imageFiles is a pool of idle image files.
type imageFiles struct {
	dir  string
	mu   sync.Mutex
	idle []*imageFile // guarded by mu
}

// Limits of the pool.
const (
	maxImageFiles    = 64
	maxImageFileSize = 4 << 20 // bytes; creating a larger file takes little of the time that its tree takes
)

// get returns an unnamed file.
func (s *imageFiles) get() (*imageFile, error) {
	s.mu.Lock()
	if n := len(s.idle); n > 0 {
		defer s.mu.Unlock()
		f := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return f, nil
	}
	s.mu.Unlock()
	f, err := os.CreateTemp(s.dir, "image-")
	if err != nil {
		return nil, err
	}
	return &imageFile{File: f}, os.Remove(f.Name())
}

// put returns a file to the pool. If it is not reusable, put closes it.
func (s *imageFiles) put(f *imageFile, reusable bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if reusable && len(s.idle) < maxImageFiles && f.size <= maxImageFileSize {
		s.idle = append(s.idle, f)
		return
	}
	f.Close() // it has no name, so an error loses nothing
}

func (s *imageFiles) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, f := range s.idle {
		err = errors.Join(err, f.Close())
	}
	s.idle = nil
	return err
}
