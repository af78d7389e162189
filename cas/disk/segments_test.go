// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBlobsAreAlignedAndPadded: a file system image may refer to a blob, so it starts at a multiple of 512 bytes and is
// padded with zeros.
func TestBlobsAreAlignedAndPadded(t *testing.T) {
	dir := t.TempDir()
	_, s := openStore(t, disk.Config{Dir: dir})
	sizes := []int{1, 511, 512, 513, 4095, 5000, 20_000, 17}
	var blobs []cas.Blob
	for i, size := range sizes {
		b, d := castest.Blob(byte(i), size)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
		putSize(t, s, byte(100+i), size)
	}
	must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
	seeds := []int{0, 100}
	for i, size := range sizes {
		for _, seed := range seeds {
			b, _ := castest.Blob(byte(seed+i), size)
			if size < 16 {
				continue // too short to be unique
			}
			path, at := find(t, dir, b)
			data := must.Get(os.ReadFile(path))(t)
			end := (at + size + 511) / 512 * 512
			expect.That(t, at%512 == 0 && len(data) >= end && bytes.Count(data[at+size:end], []byte{0}) == end-at-size,
				"blob of %d bytes at %d of %d: not aligned, or not padded with zeros", size, at, len(data))
		}
	}
}

// TestBlobsOfOneBatchAreAdjacent puts other blobs concurrently.
func TestBlobsOfOneBatchAreAdjacent(t *testing.T) {
	dir := t.TempDir()
	_, s := openStore(t, disk.Config{Dir: dir, MaxBytes: 8 << 20})
	done := make(chan struct{})
	go func() { // concurrent puts
		defer close(done)
		for i := range 200 {
			expect.Error(t, putOther(t, s, i), nil)
		}
	}()
	for round := range 10 {
		var blobs []cas.Blob
		for i := range 20 {
			b, d := castest.Blob(byte(round*20+i), 700)
			blobs = append(blobs, cas.Blob{Digest: d, Data: b})
		}
		must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
		path, at := find(t, dir, blobs[0].Data)
		for i, b := range blobs {
			if p, where := find(t, dir, b.Data); p != path || where != at+i*1024 {
				t.Errorf("blob %d of a batch: got %s at %d, the first one is in %s at %d", i, p, where, path, at)
			}
		}
	}
	<-done
}

// TestLargeBatchIsManySegments: no segment exceeds the space reserved for moving one.
func TestLargeBatchIsManySegments(t *testing.T) {
	const limit = 1 << 20 / 32
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir}), "")
	var blobs []cas.Blob
	for i := range byte(100) {
		b, d := castest.Blob(i, 3000)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
	for _, path := range segmentFiles(t, dir, ".data") {
		if fi, err := os.Stat(path); err != nil || fi.Size() > limit {
			t.Errorf("%s has %d bytes, %v", path, fi.Size(), err)
		}
	}
	for i := range byte(100) {
		read(t, s, i, 3000)
	}
}

// TestDataIsNeverOverwritten also reopens the store.
func TestDataIsNeverOverwritten(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), Lease: none}
	random := rand.New(rand.NewPCG(1, 1))
	sums := map[string][2]any{} // length and hash by path
	check := func() {
		t.Helper()
		for path, was := range sums {
			b, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				delete(sums, path)
				continue
			}
			if n := was[0].(int); len(b) < n || sha256.Sum256(b[:n]) != was[1] {
				t.Fatalf("%s was overwritten", path)
			}
		}
		for _, path := range segmentFiles(t, config.Dir, ".data") {
			b := must.Get(os.ReadFile(path))(t)
			sums[path] = [2]any{len(b), sha256.Sum256(b)}
		}
	}
	for range 4 {
		c, s := openStore(t, config)
		for i := range 150 {
			_, d := castest.Blob(byte(random.IntN(250)), 1+random.IntN(9000))
			putSize(t, s, byte(random.IntN(250)), 1+random.IntN(9000))
			must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
			if i%10 == 0 {
				check()
			}
		}
		closeStore(t, c)
	}
	expect.That(t, len(sums) >= 10, "got only %d segments", len(sums))
}

// snapshot reads all files of a directory. restore writes them to another one.
func snapshot(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for _, name := range list(t, dir) {
		fi := must.Get(os.Stat(filepath.Join(dir, name)))(t)
		if fi.IsDir() {
			files[name] = nil
			continue
		}
		b := must.Get(os.ReadFile(filepath.Join(dir, name)))(t)
		files[name] = append([]byte{}, b...)
	}
	return files
}

func restore(t *testing.T, files map[string][]byte) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, b := range files {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if b == nil {
			err = errors.Join(err, os.MkdirAll(path, 0o700))
		} else {
			err = errors.Join(err, os.WriteFile(path, b, 0o600))
		}
		must.Succeed(t, err)
	}
	return dir
}

const (
	firstData = "segments/00000001.data"
	firstLog  = "segments/00000001.log"
)

// TestTornWrites: committed blobs survive a torn write, and the blob being written is complete or absent.
func TestTornWrites(t *testing.T) {
	t.Parallel() // after tests that fork: between fork and exec, children hold the lock
	dir := t.TempDir()
	config := disk.Config{Dir: dir}
	c, s := openStore(t, config)
	put(t, s, 0)
	putSize(t, s, 1, 70_000)
	closeStore(t, c)
	before := snapshot(t, dir)
	c, s = openStore(t, config)
	var blobs []cas.Blob
	for i := range byte(3) {
		b, d := castest.Blob(10+i, 600)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
	closeStore(t, c)
	after := snapshot(t, dir)

	try := func(what, name string, content []byte, all bool) {
		t.Helper()
		files := map[string][]byte{}
		maps.Copy(files, after)
		files[name] = content
		config := disk.Config{Dir: restore(t, files), MaxBytes: 1 << 20}
		for range 2 {
			c, err := disk.Open(config)
			must.Be(t, err == nil, "%s: %v", what, err)
			s := store(t, c, "")
			read(t, s, 0, block)
			read(t, s, 1, 70_000)
			for i, b := range blobs {
				got, err := cas.ReadAll(t.Context(), s, b.Digest, b.Digest.Size())
				if err == nil && !bytes.Equal(got, b.Data) || err != nil && (all || !errors.Is(err, cas.ErrNotFound)) {
					t.Errorf("%s: blob %d: %v", what, i, err)
				}
				if err != nil {
					expect.Error(t, s.Put(t.Context(), b.Digest, bytes.NewReader(b.Data)), nil, "%s: put again", what)
				}
			}
			expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil, "%s", what)
		}
	}
	for n := len(before[firstLog]); n <= len(after[firstLog]); n++ {
		try(fmt.Sprintf("log cut to %d", n), firstLog, after[firstLog][:n], n == len(after[firstLog]))
		if n%4 == 0 {
			zeros := append(bytes.Clone(after[firstLog][:n]), make([]byte, 4096-n)...)
			try(fmt.Sprintf("log cut to %d, and zeros", n), firstLog, zeros, n == len(after[firstLog]))
		}
	}
	for n := len(before[firstData]); n <= len(after[firstData]); n += 37 {
		try(fmt.Sprintf("data cut to %d", n), firstData, after[firstData][:n], false)
	}
	try("whole data", firstData, after[firstData], true)
	try("longer data", firstData, append(bytes.Clone(after[firstData]), "garbage without a record"...), true)
}

// TestFlippedBitInLog: a flipped bit loses at most the entry of its record, and never leads to wrong content.
func TestFlippedBitInLog(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir})
	for i := range byte(4) {
		putSize(t, s, i, 1000)
	}
	putSize(t, s, 4, 70_000)
	_, action := castest.Blob(0, 10)
	for i := range int32(3) {
		must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: i}))
	}
	c.Maintain()
	closeStore(t, c)
	files := snapshot(t, dir)
	log := files[firstLog]
	if len(log) != 8*64+2*16+16 { // puts, two drops, a mark
		t.Fatalf("the log has %d bytes", len(log))
	}
	for bit := 0; bit < 8*len(log); bit += 7 { // one or two of each byte
		flipped := bytes.Clone(log)
		flipped[bit/8] ^= 1 << (bit % 8)
		// In place: only the log differs from what Open left.
		files[firstLog] = flipped
		for _, name := range []string{firstLog, firstData, "checkpoint"} {
			must.Succeed(t, os.WriteFile(filepath.Join(dir, name), files[name], 0o600))
		}
		c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
		must.Be(t, err == nil, "bit %d: %v", bit, err)
		s := store(t, c, "")
		lost := 0
		for i, size := range []int{1000, 1000, 1000, 1000, 70_000} {
			want, d := castest.Blob(byte(i), size)
			got, err := cas.ReadAll(t.Context(), s, d, d.Size())
			if err == nil && !bytes.Equal(got, want) || err != nil && !errors.Is(err, cas.ErrNotFound) {
				t.Errorf("bit %d: blob %d: %v", bit, i, err)
			}
			if err != nil {
				lost++
			}
		}
		r, err := s.Lookup(t.Context(), action)
		if err != nil || r.ExitCode != 2 {
			lost++
		}
		expect.That(t, c.Stats().LogDamage != 0, "bit %d: got no damaged bytes", bit)
		expect.That(t, lost <= 1, "bit %d: got %d lost puts", bit, lost)
		expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil, "bit %d", bit)
	}
}

// TestOrphansAreSwept: Open removes data without records, halves of segments, and entries without files. It adopts a
// file without a record if its content is right.
func TestOrphansAreSwept(t *testing.T) {
	dir := t.TempDir()
	config := disk.Config{Dir: dir}
	c, s := openStore(t, config)
	put(t, s, 0)
	kept, vanished := putSize(t, s, 1, 70_000), putSize(t, s, 2, 70_000)
	closeStore(t, c)
	b, orphan := castest.Blob(3, 70_000)
	must.Succeed(t, os.MkdirAll(filepath.Dir(filePath(dir, orphan)), 0o700))
	write(t, filePath(dir, orphan), string(b))
	_, wrong := castest.Blob(4, 70_000)
	must.Succeed(t, os.MkdirAll(filepath.Dir(filePath(dir, wrong)), 0o700))
	write(t, filePath(dir, wrong), string(b))
	log := must.Get(os.ReadFile(filepath.Join(dir, firstLog)))(t)
	for name, content := range map[string]string{
		"00000002.data": "data of a segment that was being made, or removed", "00000003.log": string(log), "00000001.log.new": "half a log",
	} {
		write(t, filepath.Join(dir, "segments", name), content)
	}
	foreign := filepath.Join(dir, "segments", "letter.txt")
	write(t, foreign, "dear")
	must.Succeed(t, os.Remove(filePath(dir, vanished)))
	_, s = openStore(t, config)
	read(t, s, 0, block)
	read(t, s, 1, 70_000)
	expect.That(t, has(t, s, kept) && !has(t, s, vanished) && has(t, s, orphan) && !has(t, s, wrong),
		"the wrong blobs are present")
	expect.That(t, !exists(filePath(dir, wrong)), "the file without a record and with wrong content still exists")
	got := list(t, filepath.Join(dir, "segments"))
	expect.Slices(t, got, []string{".", "00000001.data", "00000001.log", "letter.txt"}, "segments")
	// Segment numbers are not reused: an old position must not refer to a new segment.
	for i := byte(10); i < 40; i++ {
		put(t, s, i)
	}
	expect.That(t, !slices.Contains(list(t, filepath.Join(dir, "segments")), "00000003.data"),
		"the number of a removed segment was reused")
}

// TestTornInstance: a torn line is ignored, and the next one replaces it.
func TestTornInstance(t *testing.T) {
	dir := t.TempDir()
	config := disk.Config{Dir: dir}
	c := open(t, config)
	put(t, store(t, c, ""), 0)
	put(t, store(t, c, "second/of/a/long/name"), 1)
	closeStore(t, c)
	path := filepath.Join(dir, "instances")
	whole := must.Get(os.ReadFile(path))(t)
	last := bytes.Index(whole, []byte("\n")) + 1
	for n := last; n < len(whole); n++ {
		write(t, path, string(whole)+string(whole[last:n]))
		c := open(t, config)
		expect.Slices(t, present(t, store(t, c, "second/of/a/long/name"), 2), []byte{1},
			"torn after %d bytes: second instance", n)
		put(t, store(t, c, "third"), 2)
		closeStore(t, c)
		c = open(t, config)
		expect.Slices(t, present(t, store(t, c, "third"), 3), []byte{2}, "torn after %d bytes: third instance", n)
		expect.Error(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1})), nil)
		closeStore(t, c)
		write(t, path, string(whole))
		must.Succeed(t, os.RemoveAll(filepath.Join(dir, "segments")))
		c = open(t, config)
		put(t, store(t, c, ""), 0)
		put(t, store(t, c, "second/of/a/long/name"), 1)
		closeStore(t, c)
	}
	// A whole but wrong line is an error: the name of the instance is unknown.
	write(t, path, "7 \"x\"\n")
	if _, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20}); err == nil ||
		!strings.Contains(err.Error(), "line 1: damaged") {
		t.Errorf("got %v, want an error naming line 1", err)
	}
}

// TestDuplicatesAreOneBlob: concurrent puts, or a process killed during a move, leave two copies.
func TestDuplicatesAreOneBlob(t *testing.T) {
	dir := t.TempDir()
	config := disk.Config{Dir: dir}
	c, s := openStore(t, config)
	b, d := castest.Blob(0, block)
	err := errors.Join(s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}, {Digest: d, Data: b}, {Digest: d, Data: b}})...)
	must.Succeed(t, err)
	expect.Equal(t, c.Stats().Blobs, 1, "blobs")
	closeStore(t, c)
	// A copy of the whole segment.
	for _, suffix := range []string{".data", ".log"} {
		b := must.Get(os.ReadFile(filepath.Join(dir, "segments/00000001"+suffix)))(t)
		write(t, filepath.Join(dir, "segments/00000005"+suffix), string(b))
	}
	c = open(t, config)
	if got := c.Stats(); got.Blobs != 1 || got.Segments != 2 {
		t.Errorf("Stats: got %+v", got)
	}
	read(t, store(t, c, ""), 0, block)
}

// TestPackMayChange: existing blobs stay where they are.
func TestPackMayChange(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	for i, pack := range []int64{0, everyFile, 1 << 20, 2000, 0} {
		config.Pack = pack
		c, s := openStore(t, config)
		for j := range byte(i) {
			read(t, s, j, 3000)
			read(t, s, j, 70_000)
		}
		putSize(t, s, byte(i), 3000)
		putSize(t, s, byte(i), 70_000)
		closeStore(t, c)
	}
}
