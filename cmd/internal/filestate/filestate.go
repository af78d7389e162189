// SPDX-License-Identifier: Apache-2.0

// Package filestate detects that a configuration file has changed and must be read again.
package filestate

import "os"

// A State identifies a version of a file by its inode, size and modification time. The inode matters because tools that
// unpack or copy files can give a new file the size and the time of the old one. The zero State is that of a missing
// file.
type State struct{ info os.FileInfo }

// Of returns the state of a file, or the zero State if the file cannot be examined.
func Of(file string) State {
	info, err := os.Stat(file)
	if err != nil {
		return State{}
	}
	return State{info}
}

// Equal reports whether s and other are the same version of the same file, or both missing.
func (s State) Equal(other State) bool {
	if s.info == nil || other.info == nil {
		return s.info == other.info
	}
	return os.SameFile(s.info, other.info) && s.info.ModTime().Equal(other.info.ModTime()) && s.info.Size() == other.info.Size()
}
