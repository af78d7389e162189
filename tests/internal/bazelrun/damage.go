// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"
)

// extent is the alignment of blobs in a segment. The first byte of each extent belongs to a blob, possibly an unused
// one.
const extent = 512

// DamageFiles damages a fraction of the large blobs of the store at dir, chosen by rnd: it flips a bit in half of them
// and removes the others, at least one each. A server may use the store meanwhile.
func DamageFiles(dir string, rnd *rand.Rand, fraction float64) (flipped, removed int, err error) {
	files, err := largeBlobs(dir)
	if err != nil {
		return 0, 0, err
	}
	if len(files) < 2 {
		return 0, 0, fmt.Errorf("damage: store %s has %d large blobs, want at least 2", dir, len(files))
	}
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	n := max(2, int(fraction*float64(len(files))))
	for _, path := range files[:n/2] {
		info, err := os.Stat(path)
		if err == nil {
			err = flip(path, rnd.Int64N(info.Size()))
		}
		if err != nil {
			return flipped, removed, fmt.Errorf("damage: %w", err)
		}
		flipped++
	}
	for _, path := range files[n/2 : n] {
		if err := os.Remove(path); err != nil {
			return flipped, removed, fmt.Errorf("damage: %w", err)
		}
		removed++
	}
	return flipped, removed, nil
}

// LoseFiles removes a fraction of the large blobs of the store at dir, chosen by rnd, but at least one. A server may
// use the store meanwhile.
func LoseFiles(dir string, rnd *rand.Rand, fraction float64) error {
	files, err := largeBlobs(dir)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("damage: store %s has no large blobs", dir)
	}
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	for _, path := range files[:max(1, int(fraction*float64(len(files))))] {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("damage: %w", err)
		}
	}
	return nil
}

// largeBlobs returns the paths of the large blobs of the store at dir.
func largeBlobs(dir string) (files []string, err error) {
	err = filepath.WalkDir(filepath.Join(dir, "files"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("damage: %w", err)
	}
	return files, nil
}

// DamageSegments flips a bit in a fraction of the used extents of the segments of the store at dir, chosen by rnd, but
// in at least one, and returns their number. A server may use the store meanwhile.
func DamageSegments(dir string, rnd *rand.Rand, fraction float64) (int, error) {
	segments, err := filepath.Glob(filepath.Join(dir, "segments", "*.data"))
	if err != nil {
		return 0, err
	}
	type location struct {
		path string
		off  int64
	}
	var used []location
	for _, path := range segments {
		data, err := os.ReadFile(path)
		if err != nil {
			return 0, fmt.Errorf("damage: %w", err)
		}
		for off := 0; off+extent <= len(data); off += extent {
			// An extent of zeros may be unused.
			if !bytes.Equal(data[off:off+extent], make([]byte, extent)) {
				used = append(used, location{path, int64(off)})
			}
		}
	}
	if len(used) == 0 {
		return 0, fmt.Errorf("damage: store %s has no small blobs", dir)
	}
	rnd.Shuffle(len(used), func(i, j int) { used[i], used[j] = used[j], used[i] })
	n := max(1, int(fraction*float64(len(used))))
	for _, p := range used[:n] {
		if err := flip(p.path, p.off); err != nil {
			return 0, fmt.Errorf("damage: %w", err)
		}
	}
	return n, nil
}

// flip changes one bit of a file, which may be read-only, and preserves its mode and modification time, as a failing
// disk would.
func flip(path string, off int64) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		return err
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b[:], off); err != nil {
		return err
	}
	if err := f.Chmod(info.Mode().Perm()); err != nil {
		return err
	}
	return os.Chtimes(path, time.Time{}, info.ModTime())
}
