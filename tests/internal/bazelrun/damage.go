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

// extent is the alignment of the blobs of a segment, so that the first byte of each extent is a byte of a
// blob, be it one that is no longer used.
const extent = 512

// DamageFiles damages a share, between 0 and 1, of the large blobs of the store at dir: of some that rnd picks it
// flips a bit, and as many or one more it removes, but at least one of each. A server may use the store meanwhile.
func DamageFiles(dir string, rnd *rand.Rand, share float64) (flipped, removed int, err error) {
	files, err := largeBlobs(dir)
	if err != nil {
		return 0, 0, err
	}
	if len(files) < 2 {
		return 0, 0, fmt.Errorf("damage: store %s has %d large blobs, want at least 2", dir, len(files))
	}
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	n := max(2, int(share*float64(len(files))))
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

// LoseFiles removes a share, between 0 and 1, of the large blobs of the store at dir, picked by rnd, but at least one.
// A server may use the store meanwhile.
func LoseFiles(dir string, rnd *rand.Rand, share float64) error {
	files, err := largeBlobs(dir)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("damage: store %s has no large blobs", dir)
	}
	rnd.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	for _, path := range files[:max(1, int(share*float64(len(files))))] {
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

// DamageSegments flips a bit in a share, between 0 and 1, of the extents of the segments of the store at dir that
// hold anything, picked by rnd, but in at least one, and returns in how many. A server may use the store meanwhile.
func DamageSegments(dir string, rnd *rand.Rand, share float64) (int, error) {
	segments, err := filepath.Glob(filepath.Join(dir, "segments", "*.data"))
	if err != nil {
		return 0, err
	}
	type place struct {
		path string
		off  int64
	}
	var places []place
	for _, path := range segments {
		data, err := os.ReadFile(path)
		if err != nil {
			return 0, fmt.Errorf("damage: %w", err)
		}
		for off := 0; off+extent <= len(data); off += extent {
			// One of zeros may be room that no blob has taken yet.
			if !bytes.Equal(data[off:off+extent], make([]byte, extent)) {
				places = append(places, place{path, int64(off)})
			}
		}
	}
	if len(places) == 0 {
		return 0, fmt.Errorf("damage: store %s has no small blobs", dir)
	}
	rnd.Shuffle(len(places), func(i, j int) { places[i], places[j] = places[j], places[i] })
	n := max(1, int(share*float64(len(places))))
	for _, p := range places[:n] {
		if err := flip(p.path, p.off); err != nil {
			return 0, fmt.Errorf("damage: %w", err)
		}
	}
	return n, nil
}

// flip changes one bit of a file, whose mode need not permit that, and leaves no trace but the bit: a disk
// that fails does not tell the time.
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
