// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// losePower returns a directory as a power failure may leave it. Everything in before is there. Of what was written
// since, any block of 512 bytes may be zero, the file may end early, or its name may be missing.
func losePower(t *testing.T, random *rand.Rand, before, after map[string][]byte) (dir string) {
	t.Helper()
	files := map[string][]byte{}
	for name, b := range after {
		if b == nil {
			files[name] = nil
			continue
		}
		was, old := before[name]
		if name == "boot" || name == "instances" || name == "version" || name == "lock" {
			files[name] = b // always synced
			continue
		}
		if !old && random.IntN(4) == 0 {
			continue
		}
		b = bytes.Clone(b)
		kept := 0
		if old && bytes.HasPrefix(b, was) {
			kept = len(was)
		}
		if random.IntN(2) == 0 {
			b = b[:kept+random.IntN(len(b)-kept+1)]
		}
		for at := kept; at < len(b); {
			end := min((at/512+1)*512, len(b))
			switch random.IntN(3) {
			case 0:
				clear(b[at:end])
			case 1: // the name refers to an earlier file
				for i := at; i < end; i++ {
					b[i] = byte(random.Uint32())
				}
			}
			at = end
		}
		files[name] = b
	}
	for name, b := range before { // a removal that was not yet durable
		if _, there := files[name]; !there && after[name] == nil {
			files[name] = b
		}
	}
	files["boot"] = []byte("another start of the machine\n")
	return restore(t, files)
}

// TestPowerLoss: durable data survives, and nothing damaged is reported as present.
func TestPowerLoss(t *testing.T) {
	t.Parallel() // after tests that fork: between fork and exec, children hold the lock
	for _, pack := range []int64{0, everyFile} {
		for round := range 30 {
			random := rand.New(rand.NewPCG(uint64(round), 7))
			dir := t.TempDir()
			c, s := openStore(t, disk.Config{Dir: dir, Pack: pack})
			for i := range byte(8) {
				putSize(t, s, i, 2000)
			}
			large := putSize(t, s, 0, 70_000)
			_, other := castest.Blob(0, 10)
			for _, action := range []cas.Digest{large, other} {
				must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: 1}))
			}
			c.Maintain() // durable from here on
			before := snapshot(t, dir)
			for i := byte(8); i < 16; i++ {
				putSize(t, s, i, 2000)
				if i%3 == 0 {
					putSize(t, s, i, 70_000)
				}
			}
			must.Succeed(t, s.Record(t.Context(), large, &repb.ActionResult{ExitCode: 2}))
			closeStore(t, c)

			config := disk.Config{Dir: losePower(t, random, before, snapshot(t, dir)), MaxBytes: 1 << 20, Pack: pack}
			for range 2 { // also after reopening
				c, err := disk.Open(config)
				must.Be(t, err == nil, "round %d: %v", round, err)
				s := store(t, c, "")
				for i := range byte(8) {
					read(t, s, i, 2000)
				}
				read(t, s, 0, 70_000)
				if r, err := s.Lookup(t.Context(), other); err != nil || r.ExitCode != 1 {
					t.Errorf("round %d: got %v, %v", round, r, err)
				}
				// The replacement may be lost, and then there is none.
				r, err := s.Lookup(t.Context(), large)
				if err != nil && !errors.Is(err, cas.ErrNotFound) || err == nil && r.ExitCode != 1 && r.ExitCode != 2 {
					t.Errorf("round %d: got %v, %v", round, r, err)
				}
				for i := byte(8); i < 16; i++ {
					for _, size := range []int{2000, 70_000} {
						if has(t, s, digestOfBlob(i, size)) {
							read(t, s, i, size)
						}
					}
				}
				expect.Error(t, c.Check(t.Context()), nil, "round %d", round)
				for i := byte(16); i < 20; i++ { // written where lost data was
					putSize(t, s, i, 2000)
				}
				expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil, "round %d", round)
			}
		}
	}
}

// TestFilePutAgainAfterEvictionMayBeLost: the old record of an evicted file does not vouch for a new one.
func TestFilePutAgainAfterEvictionMayBeLost(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, Lease: none})
	d := putSize(t, s, 0, 70_000)
	put(t, s, 1) // keeps the segment
	c.Maintain()
	r, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: c.Stats().Bytes - 1})
	must.Be(t, err == nil && r.Files == 1 && r.Segments == 0, "Collect: got %+v, %v", r, err)
	c.Maintain()
	before := snapshot(t, dir)
	putSize(t, s, 0, 70_000)
	closeStore(t, c)
	files := snapshot(t, dir)
	files[firstLog] = before[firstLog]
	name := must.Get(filepath.Rel(dir, filePath(dir, d)))(t)
	files["boot"] = []byte("another start of the machine\n")
	for _, size := range []int{70_000, 0} {
		files[name] = make([]byte, size) // the name is durable, the content is not
		s := store(t, open(t, disk.Config{Dir: restore(t, files)}), "")
		expect.That(t, !has(t, s, d), "a file of %d zeros is present", size)
		read(t, s, 1, block)
	}
}

// TestOpenWithSyncMakesEarlierPutsDurable opens a store that was written without Sync.
func TestOpenWithSyncMakesEarlierPutsDurable(t *testing.T) {
	needsDisk(t)
	config := disk.Config{Dir: t.TempDir()}
	c := open(t, config)
	d := putSize(t, store(t, c, ""), 0, 70_000)
	put(t, store(t, c, ""), 1)
	closeStore(t, c)
	config.Sync = true
	open(t, config)
	for _, path := range append(segmentFiles(t, config.Dir, ".data"), filePath(config.Dir, d)) {
		expect.Equal(t, unwritten(t, path), 0, "pages of %s that are not durable", path)
	}
}

// unwritten returns the number of dirty pages of a file.
func unwritten(t *testing.T, path string) uint64 {
	t.Helper()
	f := must.Get(os.OpenFile(path, os.O_RDONLY, 0))(t)
	defer f.Close()
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &st, 0); err != nil {
		sandboxtest.Unavailable(t, "disk", fmt.Sprintf("cachestat(2): %v", err))
	}
	return st.Dirty + st.Writeback
}

// needsDisk skips a test on a file system for which the kernel does not report dirty pages.
func needsDisk(t *testing.T) {
	t.Helper()
	probe := filepath.Join(t.TempDir(), "probe")
	write(t, probe, strings.Repeat("x", 1<<20))
	f, err := os.OpenFile(probe, os.O_RDWR, 0)
	must.Succeed(t, err)
	err = errors.Join(f.Sync(), f.Close())
	if err != nil || unwritten(t, probe) > 0 {
		sandboxtest.Unavailable(t, "disk", fmt.Sprintf("this file system has no disk, or does not report dirty pages: %v", err))
	}
}

// TestSyncIsDurable: with Sync all acknowledged content has been written, as far as the kernel reports. Without Sync
// the content marked as durable has.
func TestSyncIsDurable(t *testing.T) {
	needsDisk(t)
	check := func(what string, paths ...string) {
		t.Helper()
		must.Be(t, len(paths) != 0, "%s: no files", what)
		for _, path := range paths {
			expect.Equal(t, unwritten(t, path), 0, "%s: pages of %s that are not durable", what, path)
		}
	}
	for _, pack := range []int64{0, everyFile} {
		t.Run(fmt.Sprintf("pack=%d", pack), func(t *testing.T) {
			dir := t.TempDir()
			_, s := openStore(t, disk.Config{Dir: dir, Sync: true, Lease: none, Pack: pack})
			segments := func() []string {
				return slices.Concat(segmentFiles(t, dir, ".data"), segmentFiles(t, dir, ".log"))
			}
			for i := range byte(20) {
				d := put(t, s, i)
				check("Put", segments()...)
				if pack == everyFile {
					check("Put", filePath(dir, d))
				}
				d = putSize(t, s, i, 70_000)
				check("Put of a large one", append(segments(), filePath(dir, d))...)
				must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{}))
				check("Record", segments()...)
			}
			b, d := castest.Blob(99, 5000)
			must.Succeed(t, errors.Join(s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...))
			check("PutAll", segments()...)
			check("instances", filepath.Join(dir, "instances"))
		})
	}
	t.Run("mark", func(t *testing.T) {
		dir := t.TempDir()
		c, s := openStore(t, disk.Config{Dir: dir})
		put(t, s, 0)
		d := putSize(t, s, 0, 70_000)
		c.Maintain()
		check("upkeep", append(segmentFiles(t, dir, ".data"), filePath(dir, d))...)
	})
}

// TestMovedDataIsDurableBeforeRemoval: moved data is synced before its old segment is removed.
func TestMovedDataIsDurableBeforeRemoval(t *testing.T) {
	needsDisk(t)
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Hour
		dir := t.TempDir()
		c, s := openStore(t, disk.Config{Dir: dir, Lease: lease})
		for i := range byte(40) {
			put(t, s, i)
		}
		time.Sleep(lease)
		for i := byte(0); i < 40; i += 2 {
			read(t, s, i, block)
		}
		time.Sleep(lease)
		before := segmentFiles(t, dir, ".data")
		if r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease}); err != nil || r.Moved != 20*block {
			t.Errorf("Collect: got %+v, %v", r, err)
		}
		moved := 0
		for _, suffix := range []string{".data", ".log"} {
			for _, path := range segmentFiles(t, dir, suffix) {
				expect.That(t, !slices.Contains(before, strings.TrimSuffix(path, suffix)+".data"),
					"%s still exists", path)
				if moved++; unwritten(t, path) > 0 {
					t.Errorf("%s is not durable", path)
				}
			}
		}
		expect.That(t, moved >= 4, "got only %d files", moved)
	})
}

// TestDataMovedByKilledProcessIsDurableBeforeRemoval: the process that moved the data was killed before it synced it.
func TestDataMovedByKilledProcessIsDurableBeforeRemoval(t *testing.T) {
	needsDisk(t)
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir})
	var ds []cas.Digest
	for i := range byte(3) {
		ds = append(ds, put(t, s, i))
	}
	moved := map[string][]byte{} // a segment with the same records
	for _, suffix := range []string{".data", ".log"} {
		b := must.Get(os.ReadFile(filepath.Join(dir, "segments", "00000001"+suffix)))(t)
		moved[filepath.Join(dir, "segments", "00000002"+suffix)] = b
	}
	c.Maintain() // the first segment is durable
	closeStore(t, c)
	for path, b := range moved {
		write(t, path, string(b))
	}
	// With one processor logs are read in order: the later one wins.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	c = open(t, disk.Config{Dir: dir})
	if r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Hour}); err != nil || r.Segments != 1 ||
		exists(filepath.Join(dir, firstLog)) {
		t.Errorf("Collect: got %+v, %v", r, err)
	}
	for path := range moved {
		expect.Equal(t, unwritten(t, path), 0, "pages of %s that are not durable", path)
	}
	expect.Slices(t, missing(t, store(t, c, ""), ds...), nil, "lost")
}
