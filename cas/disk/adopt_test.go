// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestLostLogIsReported cuts a log at each of its records. Open reports it, and large files stay. A log that was not
// cut is not reported, whether the process was killed or not.
func TestLostLogIsReported(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, MaxBytes: 4 << 20})
	var small, files []cas.Digest
	for i := range byte(6) {
		small, files = append(small, putSize(t, s, i, 500)), append(files, putSize(t, s, i, large))
	}
	c.Maintain()
	killed := snapshot(t, dir)
	closeStore(t, c)
	closed := snapshot(t, dir)
	for name, state := range map[string]map[string][]byte{"killed": killed, "closed": closed} {
		log := state[firstLog]
		for n := 0; n <= len(log); n += 64 {
			state[firstLog] = log[:n]
			c, s := openStore(t, disk.Config{Dir: restore(t, state), MaxBytes: 4 << 20})
			expect.Equal(t, c.Stats().LogDamage, int64(len(log)-n), "%s, log cut by %d bytes: damage", name, len(log)-n)
			expect.Slices(t, missing(t, s, files...), nil,
				"%s, log cut to %d of %d bytes: lost large blobs", name, n, len(log))
			for i := range byte(6) {
				read(t, s, i, large)
			}
			if lost := missing(t, s, small...); len(lost) > 6-n/128 {
				t.Errorf("%s, log cut to %d of %d bytes: lost %d small blobs", name, n, len(log), len(lost))
			}
			closeStore(t, c)
		}
		state[firstLog] = log[:len(log)/64*64]
	}
}

// TestLostDataIsReported cuts the data of a segment. Open reports each record without bytes, also after a restart of
// the machine, and large files whose records are in the log stay.
func TestLostDataIsReported(t *testing.T) {
	const blobs = 6
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20}
	c, s := openStore(t, config)
	var small []cas.Digest
	for i := range byte(blobs) {
		small = append(small, putSize(t, s, i, 500))
	}
	file := putSize(t, s, blobs, large)
	closeStore(t, c)
	closed := snapshot(t, config.Dir)
	data := closed[firstData]
	for _, boot := range []string{string(closed["boot"]), "another start of the machine\n"} {
		closed["boot"] = []byte(boot)
		for kept := range blobs + 1 {
			closed[firstData] = data[:len(data)/blobs*kept]
			config.Dir = restore(t, closed)
			c, s := openStore(t, config)
			if got := c.Stats(); got.LogLost != int64(blobs-kept) || got.LogDamage != 0 {
				t.Errorf("%d of %d blobs kept: reported %d records without bytes and %d damaged bytes, want %d and 0",
					kept, blobs, got.LogLost, got.LogDamage, blobs-kept)
			}
			expect.Slices(t, missing(t, s, append(small, file)...), small[kept:], "%d of %d blobs kept", kept, blobs)
			closeStore(t, c)
		}
	}
}

// TestDamagedOrphanIsNotAdopted: a file without a record becomes a blob only if its content matches.
func TestDamagedOrphanIsNotAdopted(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20}
	c := open(t, config)
	d, sound := putSize(t, store(t, c, ""), 0, large), putSize(t, store(t, c, ""), 1, large)
	closeStore(t, c)
	must.Succeed(t, os.Truncate(filepath.Join(config.Dir, firstLog), 0))
	b, _ := castest.Blob(0, large)
	damageBlob(t, config.Dir, b)
	c = open(t, config)
	if got := missing(t, store(t, c, ""), d, sound); !slices.Equal(got, []cas.Digest{d}) || exists(filePath(config.Dir, d)) {
		t.Errorf("missing: got %v, want only the damaged one, removed", got)
	}
}

// TestOrphansAreAdoptedInTheBackground beyond a total size, even while they are put and after the store was closed.
func TestOrphansAreAdoptedInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk.SetAdoptAtOpen(t, 2*large)
		config := disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20}
		c := open(t, config)
		var ds []cas.Digest
		for i := range byte(9) {
			ds = append(ds, putSize(t, store(t, c, ""), i, large))
		}
		before := c.Stats().Bytes
		closeStore(t, c)
		must.Succeed(t, os.Truncate(filepath.Join(config.Dir, firstLog), 0))
		c = must.Get(disk.Open(config))(t)
		if now := c.Stats().Bytes; now < before-4096 {
			t.Errorf("files without a record count %d bytes, want %d", now, before)
		}
		putSize(t, store(t, c, ""), 8, large)
		must.Succeed(t, c.Close()) // some are left
		c = open(t, config)
		synctest.Wait()
		expect.Slices(t, missing(t, store(t, c, ""), ds...), nil, "lost")
		expect.Equal(t, c.Stats().Files, 9+2, "files")
	})
}

// TestOpenAdoptsOrphans checks that a blob whose file is to be adopted later can be read at once, and by several at a
// time: a caller that finds it absent would give it up for good, and it would appear afterwards.
func TestOpenAdoptsOrphans(t *testing.T) {
	disk.SetAdoptAtOpen(t, large)
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20}
	c := open(t, config)
	var ds []cas.Digest
	for i := range byte(20) {
		ds = append(ds, putSize(t, store(t, c, ""), i, large))
	}
	before := c.Stats()
	closeStore(t, c)
	must.Succeed(t, os.Truncate(filepath.Join(config.Dir, firstLog), 0))
	c = open(t, config)
	s := store(t, c, "")
	var group sync.WaitGroup
	for i := range slices.Backward(ds) {
		for range 2 {
			group.Go(func() {
				r, err := s.Open(t.Context(), ds[i], 0)
				if err != nil {
					t.Error(err)
					return
				}
				r.Close()
			})
		}
	}
	group.Wait()
	if got := c.Stats(); got.Bytes != before.Bytes || got.Files != before.Files {
		t.Errorf("got %d bytes and %d files, want %d and %d as before", got.Bytes, got.Files, before.Bytes, before.Files)
	}
}
