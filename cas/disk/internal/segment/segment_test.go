// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// events is a Visitor that records its calls.
type events struct {
	puts     []Record
	doubtful []bool
	drops    []uint32
	stamps   map[uint32]uint32
}

func (h *events) Put(r *Record, doubtful bool) {
	h.puts, h.doubtful = append(h.puts, *r), append(h.doubtful, doubtful)
}
func (h *events) Drop(r *Record) { h.drops = append(h.drops, r.Position.Record) }
func (h *events) Touch(r *Record, stamp uint32) {
	if h.stamps == nil {
		h.stamps = map[uint32]uint32{}
	}
	h.stamps[r.Position.Record] = stamp
}

func openSet(t testing.TB, c Config) *Set {
	t.Helper()
	s := must.Get(Open(c))(t)
	t.Cleanup(func() {
		expect.Error(t, s.Close(), nil)
	})
	return s
}

// replay opens the directory and replays its segments.
func replay(t testing.TB, dir string) (*Set, *events) {
	t.Helper()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	h := &events{}
	for _, g := range s.Segments() {
		if _, _, err := g.Replay(h, 0); err != nil {
			t.Fatal(err)
		}
	}
	return s, h
}

func newItem(n byte, size int) Item {
	it := Item{Data: bytes.Repeat([]byte{n + 1}, size)}
	it.Hash[0], it.Size, it.Length, it.Stamp, it.Kind, it.Instance, it.Order = n, int64(size), uint32(size), 1000+uint32(n), 0x11, uint16(n), uint32(n)
	return it
}

func TestReplayReportsAppendedRecords(t *testing.T) {
	for _, sync := range []bool{false, true} {
		dir := t.TempDir()
		s := openSet(t, Config{Dir: dir, Limit: 1 << 20, Sync: sync})
		a := s.NewAppender(nil)
		var want []Record
		for i := range byte(10) {
			items := []Item{newItem(i, int(i)*300), newItem(100+i, 5)}
			items[1].File = i%2 == 0
			if items[1].File {
				items[1].Data, items[1].Length = nil, 0
			}
			err := a.Append(items, func(it *Item) { want = append(want, it.Record) })
			must.Succeed(t, err)
		}
		g := s.Segments()[0]
		where := func(n int) func() (uint32, bool) {
			return func() (uint32, bool) { return want[n].Position.Record, true }
		}
		if err := g.Touch([]index.Key{want[3].Key}, func(index.Key) (record, stamp uint32, ok bool) {
			record, ok = where(3)()
			return record, 7777, ok
		}); err != nil {
			t.Fatal(err)
		}
		must.Succeed(t, g.Drop(where(4)))
		s.Close()
		later, h := replay(t, dir)
		kept := slices.Delete(slices.Clone(want), 4, 5)
		for i := range h.puts {
			h.puts[i].Verified = kept[min(i, len(kept)-1)].Verified
		}
		if !slices.Equal(h.puts, kept) || !slices.Equal(h.drops, []uint32{want[4].Position.Record}) ||
			h.stamps[want[3].Position.Record] != 7777 {
			t.Errorf("sync %v: got\n%v, dropped %v, touched %v; want\n%v", sync, h.puts, h.drops, h.stamps, kept)
		}
		expect.That(t, !slices.Contains(h.doubtful, sync), "sync %v: got doubtful %v", sync, h.doubtful)
		for _, r := range h.puts {
			b := make([]byte, r.Length)
			if err := later.Read(&r.Entry, b); err != nil || !r.File &&
				bytes.Count(b, []byte{r.Hash[0] + 1}) != len(b) {
				t.Errorf("record %d: %v", r.Position.Record, err)
			}
		}
	}
}

// TestMarkDurable: records after a mark are doubtful.
func TestMarkDurable(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	put := func(n byte) {
		t.Helper()
		must.Succeed(t, a.Append([]Item{newItem(n, 10)}, func(*Item) {}))
	}
	put(0)
	flushed := 0
	// A put between flush and mark is not covered.
	flush := func() error {
		flushed++
		put(1)
		return nil
	}
	must.Succeed(t, s.MarkDurable(1, flush))
	s.Close()
	s, h := replay(t, dir)
	expect.That(t, slices.Equal(h.doubtful, []bool{false, true}), "got doubtful %v", h.doubtful)
	quiet := 0
	for range 3 { // a mark does not call for another
		must.Succeed(t, s.MarkDurable(1, func() error { quiet++; return nil }))
	}
	expect.That(t, quiet == 1 && flushed == 1, "flushed %d and then %d times, want 1 and 1", flushed, quiet)
}

// TestNoMarkAfterFailedFlush: the kernel may have dropped data, and a later flush does not report that. Later puts go
// to another segment, unless they are files that were written before.
func TestNoMarkAfterFailedFlush(t *testing.T) {
	dir := t.TempDir()
	var reported []error
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20, Distrusted: func(err error) { reported = append(reported, err) }})
	a := s.NewAppender(nil)
	failed := errors.New("no")
	before := s.Failures()
	for i, flushed := range []error{failed, nil, nil} {
		must.Succeed(t, a.Append([]Item{newItem(byte(i), 10)}, func(*Item) {}))
		expect.Error(t, s.MarkDurable(7, func() error { return flushed }), flushed)
		if err := s.Failure(); !errors.Is(err, failed) || len(reported) != 1 {
			t.Errorf("Failure: got %v, %d times", err, len(reported))
		}
	}
	if lost := s.Lost(); len(lost) != 1 || lost[0].N != 1 || lost[0].DurableSince() != 0 {
		t.Errorf("got lost segments %v", lost)
	}
	expect.That(t, !s.Trust(before) && s.Trust(before+1) && s.Failure() == nil,
		"Trust: want true for the last failure only")
	file := newItem(9, 0)
	file.File, file.Failures = true, before
	expect.Error(t, a.Append([]Item{file}, func(*Item) { t.Error("committed") }), ErrDistrusted,
		"a file that was written before")
	file.Failures = s.Failures()
	must.Succeed(t, a.Append([]Item{file}, func(*Item) {}))
	s.Close()
	if _, h := replay(t, dir); !slices.Equal(h.doubtful, []bool{true, false, false, true}) {
		t.Errorf("got doubtful %v", h.doubtful)
	}
}

// breakFlush makes syncing the log of g fail until the end of the test. Writes succeed.
func breakFlush(t *testing.T, g *Segment) {
	t.Helper()
	null := must.Get(os.OpenFile(os.DevNull, os.O_RDWR, 0))(t)
	if flush(null) == nil {
		t.Skip("this system can sync " + os.DevNull)
	}
	log := g.log
	g.log = null
	t.Cleanup(func() {
		if err := null.Close(); g.log == null {
			g.log = log
		} else if err := errors.Join(err, log.Close()); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
}

// TestFailedFlushStays: Flush fails until its data is rewritten, so that no caller removes the source of moved data.
func TestFailedFlushStays(t *testing.T) {
	s := openSet(t, Config{Dir: t.TempDir(), Limit: 1 << 20})
	a := s.NewAppender(nil)
	a.Flushed = true
	append := func() {
		t.Helper()
		must.Succeed(t, a.Append([]Item{newItem(0, 10)}, func(*Item) {}))
	}
	append()
	must.Succeed(t, a.Flush())
	breakFlush(t, s.Segments()[0])
	append()
	for range 2 {
		expect.That(t, a.Flush() != nil, "Flush succeeded after a failure")
	}
	a.Seal(s.Segments()[0])
	append() // to another segment, which can be flushed
	expect.Error(t, a.Flush(), ErrDistrusted, "Flush after a failure")
	a.Abandon(s.Segments()[0])
	must.Succeed(t, a.Flush())
}

// TestFlushToo: Flush also syncs what an earlier process appended, unless that is known to be durable.
func TestFlushToo(t *testing.T) {
	for _, marked := range []bool{false, true} {
		dir := t.TempDir()
		s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
		must.Succeed(t, s.NewAppender(nil).Append([]Item{newItem(0, 10)}, func(*Item) {}))
		if marked {
			must.Succeed(t, s.MarkDurable(7, func() error { return nil }))
		}
		s.Close()
		s, _ = replay(t, dir)
		a := s.NewAppender(nil)
		g := s.Segments()[0]
		a.FlushToo(g)
		breakFlush(t, g)
		if err := a.Flush(); (err == nil) != marked {
			t.Errorf("marked %v: got %v", marked, err)
		}
	}
}

// TestDataCountsAfterFailedFlush of its records.
func TestDataCountsAfterFailedFlush(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20, Sync: true})
	a := s.NewAppender(nil)
	must.Succeed(t, a.Append([]Item{newItem(0, 10)}, func(*Item) {}))
	g := s.Segments()[0]
	breakFlush(t, g)
	must.Be(t, a.Append([]Item{newItem(1, 5000)}, func(*Item) { t.Error("committed") }) != nil,
		"the flush did not fail")
	fi := must.Get(os.Stat(filepath.Join(dir, "00000001.data")))(t)
	if data, log := g.Size(); data != fi.Size() || s.Bytes() != data+log {
		t.Errorf("the file has %d bytes; got %d bytes in total, %d of data", fi.Size(), s.Bytes(), data)
	}
	expect.Equal(t, fi.Size(), Padded(10)+Padded(5000), "bytes of the file, since the record may be durable")
	items := []Item{newItem(2, 100)}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment == g.N {
		t.Errorf("next item: got segment %d, %v", items[0].Segment, err)
	}
}

// TestHashIsNotARecord: part of a damaged record must not be taken for a note, since clients choose hashes.
func TestHashIsNotARecord(t *testing.T) {
	dir := t.TempDir()
	first, forged, last := newItem(0, 10), newItem(1, 10), newItem(2, 10)
	for _, kind := range []byte{typeDrop, typeTouch, typeDurable} {
		var log []byte
		log = appendPut(log, &first.Record)
		at := len(log)
		// The hash begins 4 bytes before the third unit of its record.
		copy(forged.Hash[4:], appendNote(nil, kind, 1<<31, 0))
		if kind == typeDurable {
			copy(forged.Hash[4:], appendNote(nil, kind, 1<<31, 1000))
		}
		log = appendPut(log, &forged.Record)
		log = appendPut(log, &last.Record)
		log[at+9] ^= 1
		err := errors.Join(os.WriteFile(filepath.Join(dir, "00000001.log"), log, 0o600),
			os.WriteFile(filepath.Join(dir, "00000001.data"), make([]byte, Block), 0o600))
		must.Succeed(t, err)
		s, h := replay(t, dir)
		if len(h.puts) != 2 || h.puts[0].Key != first.Key || h.puts[1].Key != last.Key || len(h.drops) > 0 || len(h.stamps) > 0 ||
			!slices.Equal(h.doubtful, []bool{true, true}) {
			t.Errorf("forged %d: got %v, doubtful %v, dropped %v, touched %v", kind, h.puts, h.doubtful, h.drops, h.stamps)
		}
		s.Close()
	}
}

// TestLostPutIsDropped: a put with missing data is reported as a drop, every time. Otherwise an earlier result could
// reappear.
func TestLostPutIsDropped(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	items := []Item{newItem(0, 10), newItem(1, 10)}
	must.Succeed(t, s.NewAppender(nil).Append(items, func(*Item) {}))
	s.Close()
	must.Succeed(t, os.Truncate(filepath.Join(dir, "00000001.data"), Block))
	for round := range 2 {
		s, h := replay(t, dir)
		expect.That(t, len(h.puts) == 1 && slices.Equal(h.drops, []uint32{items[1].Position.Record}),
			"round %d: got %v, dropped %v", round, h.puts, h.drops)
		s.Close()
	}
}

// TestCompactKeepsStamps: Compact keeps stamps that the index does not know yet, and clamps those from the future.
func TestCompactKeepsStamps(t *testing.T) {
	compactAt(t, 8000, 7000)
	compactAt(t, 6500, 6500)
}

func compactAt(t *testing.T, now, want uint32) {
	t.Helper()
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	items := []Item{newItem(0, 10), newItem(1, 10)}
	must.Succeed(t, s.NewAppender(nil).Append(items, func(*Item) {}))
	g := s.Segments()[0]
	for _, stamp := range []uint32{5000, 7000, 6000} {
		must.Succeed(t, g.Touch([]index.Key{items[1].Key}, func(index.Key) (uint32, uint32, bool) { return items[1].Position.Record, stamp, true }))
	}
	live := func(r *Record) bool { return r.Hash[0] == 1 }
	if err := g.Compact(now, live, func(from index.Position, to *Record) {
		expect.That(t, from == items[1].Position && to.Position.Record == 0,
			"moved from %v to %v", from, to.Position)
	}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, h := replay(t, dir); len(h.puts) != 1 || h.puts[0].Stamp != want || len(h.stamps) > 0 {
		t.Errorf("at %d: got %v, touched %v, want stamp %d", now, h.puts, h.stamps, want)
	}
}

// TestConcurrentAppends also checks the size of segments.
func TestConcurrentAppends(t *testing.T) {
	dir := t.TempDir()
	const limit, writers, rounds = 16 << 10, 8, 50
	s := openSet(t, Config{Dir: dir, Limit: limit})
	a := s.NewAppender(nil)
	var mu sync.Mutex
	var all []Record
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for range rounds {
				size := 1 + rand.IntN(1000)
				committed := false
				err := a.Append([]Item{newItem(byte(w), size)}, func(it *Item) {
					mu.Lock()
					defer mu.Unlock()
					all, committed = append(all, it.Record), true
				})
				expect.That(t, err == nil && committed, "Append: got %v, committed %v", err, committed)
			}
		})
	}
	wg.Wait()
	expect.That(t, len(all) == writers*rounds && s.Len() >= 5, "got %d records in %d segments", len(all), s.Len())
	var total int64
	for _, g := range s.Segments() {
		data, log := g.Size()
		total += data + log
		expect.That(t, data <= limit, "segment %d has %d bytes, limit %d", g.N, data, limit)
	}
	expect.Equal(t, s.Bytes(), total, "Bytes")
	seen := map[[2]uint32]bool{}
	for _, r := range all {
		at := [2]uint32{r.Segment, r.Offset}
		b := make([]byte, r.Length)
		if err := s.Read(&r.Entry, b); err != nil || seen[at] || bytes.Count(b, []byte{r.Hash[0] + 1}) != len(b) {
			t.Errorf("Read of %v: got %v, duplicate position: %v", r, err, seen[at])
		}
		seen[at] = true
	}
}

func TestRemovedSegmentIsGone(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	it := newItem(1, 100)
	items := []Item{it}
	must.Succeed(t, a.Append(items, func(*Item) {}))
	g := s.Segments()[0]
	a.Seal(g)
	must.Succeed(t, s.Remove(g))
	expect.Error(t, s.Read(&items[0].Entry, make([]byte, 100)), ErrGone, "Read")
	expect.Error(t, g.Puts(0, func(*Record) bool { return true }), ErrGone, "Puts")
	expect.Error(t, errors.Join(g.Drop(func() (uint32, bool) { return 0, true }), g.Compact(1<<31, nil, nil)), nil)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || s.Bytes() != 0 || s.Len() != 0 {
		t.Errorf("got files %v, %d bytes, %v, want none", left, s.Bytes(), err)
	}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment != 2 {
		t.Errorf("next item: got segment %d, %v", items[0].Segment, err)
	}
}

// TestFailedWriteLeavesLogUnchanged: once writes succeed again, the log can be written as before.
func TestFailedWriteLeavesLogUnchanged(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	must.Succeed(t, a.Append([]Item{newItem(1, 100)}, func(*Item) {}))
	g := s.Segments()[0]
	log := g.log
	readOnly := must.Get(os.Open(log.Name()))(t)
	g.log = readOnly
	before := s.Bytes()
	called := false
	if err := a.Append([]Item{newItem(2, 100)}, func(*Item) { called = true }); err == nil || called ||
		s.Bytes() != before {
		t.Errorf("Append: got %v, committed %v, %d bytes, want %d", err, called, s.Bytes(), before)
	}
	g.log = log
	items := []Item{newItem(3, 100)}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment != g.N {
		t.Errorf("next item: got segment %d, %v", items[0].Segment, err)
	}
	// A torn record that could not be truncated.
	g.broken = true
	must.Get(g.log.WriteAt([]byte("torn"), int64(g.units)*unit))(t)
	touch := func() error {
		return g.Touch([]index.Key{{}}, func(index.Key) (uint32, uint32, bool) { return 0, 5000, true })
	}
	g.log = readOnly
	expect.That(t, touch() != nil, "Touch succeeded on a log that cannot be truncated")
	g.log = log
	expect.Error(t, errors.Join(touch(), readOnly.Close()), nil)
	s.Close()
	_, h := replay(t, dir)
	expect.That(t, len(h.puts) == 2 && h.stamps[0] == 5000,
		"got %d puts, touched %v, want 2 puts", len(h.puts), h.stamps)
}

// FuzzReplay: whatever the log, Replay reports nothing outside the data, truncates both files to what it reports, and
// reports the same next time.
func FuzzReplay(f *testing.F) {
	var whole []byte
	for i := range byte(3) {
		it := newItem(i, 600)
		it.Offset = uint32(i) * 2
		whole = appendPut(whole, &it.Record)
	}
	f.Add(bytes.Clone(whole), uint16(2*1024))
	whole = appendNote(whole, typeTouch, 99, 4)
	whole = appendNote(whole, typeDrop, 0, 8)
	whole = appendNote(whole, typeDurable, 0, 8)
	f.Add(whole, uint16(3*1024))
	f.Add(whole, uint16(2*1024))
	f.Add(whole[:len(whole)-1], uint16(1))
	f.Add(append(make([]byte, 48), whole...), uint16(3*1024))
	f.Add(appendNote(nil, typeTouch, 1, 1<<32-1), uint16(0))
	f.Add(appendNote(nil, typeDurable, 0, 1<<32-1), uint16(0))
	f.Add(appendNote(nil, typeDrop, 0, 1), uint16(0)) // of the next put
	f.Fuzz(func(t *testing.T, log []byte, data uint16) {
		dir := t.TempDir()
		// Fix the checksums, which the fuzzer would not find.
		log = bytes.Clone(log)
		for at := 0; at+unit <= len(log); {
			n := unit
			if kind := log[at+4] &^ syncedBit; kind == typePacked || kind == typeFile {
				n = putBytes
			}
			if at+n <= len(log) && log[at] != 0xff {
				sum := appendSummed(nil, log[at:at+n])
				binary.LittleEndian.PutUint32(log[at:], binary.LittleEndian.Uint32(sum))
			}
			at += n
		}
		err := errors.Join(os.WriteFile(filepath.Join(dir, "00000001.log"), log, 0o600),
			os.WriteFile(filepath.Join(dir, "00000001.data"), bytes.Repeat([]byte{1}, int(data)), 0o600))
		must.Succeed(t, err)
		s, first := replay(t, dir)
		for _, r := range first.puts {
			if end := int64(r.Offset)*Block + int64(r.Length); !r.File && end > int64(data) {
				t.Errorf("got %d bytes at %d of %d bytes of data", r.Length, int64(r.Offset)*Block, data)
			}
		}
		size, units := s.Segments()[0].Size()
		fi, err := os.Stat(filepath.Join(dir, "00000001.log"))
		if err != nil || fi.Size() != units || size+units != s.Bytes() {
			t.Errorf("log: got %d bytes, %v, want %d", fi.Size(), err, units)
		}
		fi, err = os.Stat(filepath.Join(dir, "00000001.data"))
		if err != nil || fi.Size() != size {
			t.Errorf("data: got %d bytes, %v, want %d", fi.Size(), err, size)
		}
		// New data must not overwrite reported data.
		a := s.NewAppender(s.Segments()[0])
		items := []Item{newItem(200, 700)}
		must.Succeed(t, a.Append(items, func(*Item) {}))
		expect.That(t, items[0].Segment != 1 || int64(items[0].Offset)*Block >= size,
			"written at block %d, of %d bytes", items[0].Offset, size)
		s.Close()
		_, second := replay(t, dir)
		if got, want := fmt.Sprint(second.puts[:min(len(first.puts), len(second.puts))]), fmt.Sprint(first.puts); got != want || len(second.puts) != len(first.puts)+1 {
			t.Errorf("first Replay:\n%v\nsecond:\n%v", want, got)
		}
	})
}

// A badFile is a file with bad sectors.
type badFile struct {
	*os.File
	from, to int64
}

func (f badFile) ReadAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) <= f.from || off >= f.to {
		return f.File.ReadAt(p, off)
	}
	n, err := f.File.ReadAt(p[:max(f.from-off, 0)], off)
	return n, cmp.Or(err, error(syscall.EIO))
}

// TestLogIsReadAroundBadSectors: they count as zeros, unless there are too many.
func TestLogIsReadAroundBadSectors(t *testing.T) {
	content := bytes.Repeat([]byte("log"), 300_000)
	path := filepath.Join(t.TempDir(), "log")
	must.Succeed(t, os.WriteFile(path, content, 0o600))
	f := must.Get(os.Open(path))(t)
	defer f.Close()
	size := int64(len(content))
	for _, c := range []struct{ from, to, zeroFrom, zeroTo int64 }{
		{0, 0, 0, 0},
		{0, 1, 0, 4096},
		{5000, 5001, 4096, 8192},
		{8191, 12_289, 4096, 16_384},
		{size - 1, size, size / 4096 * 4096, size},
	} {
		want := bytes.Clone(content)
		clear(want[c.zeroFrom:c.zeroTo])
		if got, err := readWhole(badFile{f, c.from, c.to}); err != nil || !bytes.Equal(got, want) {
			t.Errorf("bad from %d to %d: got %d bytes, %v, want zeros from %d to %d", c.from, c.to, len(got), err, c.zeroFrom, c.zeroTo)
		}
	}
	expect.Error(t, expect.Err(readWhole(badFile{f, 0, size})), syscall.EIO, "all bad")
}
