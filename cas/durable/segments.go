// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Segments is a directory of logs that together are one long log. Each is named by the number of its first record, in
// 20 decimal digits, and Suffix. Files with other names are ignored.
type Segments struct {
	Dir, Suffix string
}

// Path returns the file of the segment that begins with record number first.
func (s Segments) Path(first uint64) string {
	return filepath.Join(s.Dir, s.name(first))
}

func (s Segments) name(first uint64) string { return fmt.Sprintf("%020d%s", first, s.Suffix) }

// List returns the numbers of the first records, in ascending order.
func (s Segments) List() ([]uint64, error) {
	files, err := os.ReadDir(s.Dir)
	if err != nil {
		return nil, err
	}
	var firsts []uint64
	for _, f := range files {
		n, err := strconv.ParseUint(strings.TrimSuffix(f.Name(), s.Suffix), 10, 64)
		if err == nil && f.Name() == s.name(n) {
			firsts = append(firsts, n)
		}
	}
	slices.Sort(firsts)
	return firsts, nil
}

// Create creates an empty segment, or fails with fs.ErrExist. With sync the segment and its records survive a power
// failure. If it fails it can be repeated. The caller closes the Log.
func (s Segments) Create(first uint64, sync bool) (*Log, error) {
	f, err := os.OpenFile(s.Path(first), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	l := &Log{Config: Config{Path: s.Path(first), Sync: sync}, file: f, unsynced: true}
	if err := l.syncName(); err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(l.Path))
	}
	return l, nil
}

// Excess returns the segments to delete, oldest first, so that the others have at most limit bytes and were written
// at the time oldest or later. It assumes a size of newest bytes for the newest segment, which it never returns. Next
// is the first segment that stays.
func (s Segments) Excess(newest, limit int64, oldest time.Time) (excess []uint64, next uint64, err error) {
	all, err := s.List()
	if err != nil {
		return nil, 0, err
	}
	total := newest
	for i := len(all) - 2; i >= 0; i-- {
		fi, err := os.Stat(s.Path(all[i]))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted by someone else
		}
		if err != nil {
			return nil, 0, err
		}
		if total += fi.Size(); total > limit || fi.ModTime().Before(oldest) {
			return all[:i+1], all[i+1], nil
		}
	}
	return nil, 0, nil
}
