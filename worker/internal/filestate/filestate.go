// SPDX-License-Identifier: Apache-2.0

// Package filestate detects that a configuration file has changed and must be read again.
package filestate

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// A State identifies a version of a file by its inode, its size and its times of modification and of change. The inode
// and the time of change matter because tools that unpack, copy or edit files can give a new version the size and the
// modification time of the old one; nothing but the clock sets the time of change. The zero State is that of a missing
// file.
type State struct {
	info    os.FileInfo
	changed time.Time // zero where the system has no such time
	recent  bool      // another change could have the same time
}

// tick is more than the resolution of the times of files.
const tick = 20 * time.Millisecond

// Of returns the state of a file, or the zero State if the file cannot be examined.
func Of(file string) State {
	info, err := os.Stat(file)
	if err != nil {
		return State{}
	}
	return of(info)
}

func of(info os.FileInfo) State {
	changed := changeTime(info)
	return State{info, changed, !changed.IsZero() && time.Since(changed) < tick}
}

// Equal reports whether s and other are the same version of the same file, or both missing. A state from just after a
// change equals no other, since the file may have changed again without a new time.
func (s State) Equal(other State) bool {
	if s.info == nil || other.info == nil {
		return s.info == other.info
	}
	return !s.recent && !other.recent && os.SameFile(s.info, other.info) && s.changed.Equal(other.changed) &&
		s.info.ModTime().Equal(other.info.ModTime()) && s.info.Size() == other.info.Size()
}

// Read returns the contents and the state of a regular file of at most limit bytes. It does not wait for the writer of
// a pipe, but reading from a network can take any time.
func Read(file string, limit int64) ([]byte, State, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, State{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, State{}, err
	}
	if !info.Mode().IsRegular() {
		return nil, State{}, fmt.Errorf("%s is not a regular file", file)
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", file, limit)
	}
	return text, of(info), err
}

// Mode returns the mode of the file, or 0 if it is missing.
func (s State) Mode() os.FileMode {
	if s.info == nil {
		return 0
	}
	return s.info.Mode()
}
