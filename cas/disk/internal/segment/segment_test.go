// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// told is a History that remembers what it was told.
type told struct {
	puts     []Record
	doubtful []bool
	drops    []uint32
	stamps   map[uint32]uint32
}

func (h *told) Put(r *Record, doubtful bool) {
	h.puts, h.doubtful = append(h.puts, *r), append(h.doubtful, doubtful)
}
func (h *told) Drop(r *Record) { h.drops = append(h.drops, r.Position.Record) }
func (h *told) Touch(r *Record, stamp uint32) {
	if h.stamps == nil {
		h.stamps = map[uint32]uint32{}
	}
	h.stamps[r.Position.Record] = stamp
}

func openSet(t testing.TB, c Config) *Set {
	t.Helper()
	s, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// replay opens the directory and replays its only segment.
func replay(t testing.TB, dir string) (*Set, *told) {
	t.Helper()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	h := &told{}
	for _, g := range s.Segments() {
		if _, _, err := g.Replay(h); err != nil {
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

// What is appended is told in order, with all that was said of it, and its bytes are where it says.
func TestReplayTellsWhatWasAppended(t *testing.T) {
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
			if err != nil {
				t.Fatal(err)
			}
		}
		g := s.Segments()[0]
		where := func(n int) func() (uint32, bool) {
			return func() (uint32, bool) { return want[n].Position.Record, true }
		}
		if err := g.Touch([]index.Key{want[3].Key}, 7777, func(index.Key) (uint32, bool) { return where(3)() }); err != nil {
			t.Fatal(err)
		}
		if err := g.Drop(where(4)); err != nil {
			t.Fatal(err)
		}
		s.Close()
		later, h := replay(t, dir)
		kept := slices.Delete(slices.Clone(want), 4, 5)
		for i := range h.puts {
			h.puts[i].Verified = kept[min(i, len(kept)-1)].Verified
		}
		if !slices.Equal(h.puts, kept) || !slices.Equal(h.drops, []uint32{want[4].Position.Record}) || h.stamps[want[3].Position.Record] != 7777 {
			t.Errorf("sync %v: told of\n%v, dropped %v, touched %v; want\n%v", sync, h.puts, h.drops, h.stamps, kept)
		}
		if slices.Contains(h.doubtful, sync) {
			t.Errorf("sync %v: doubtful are %v", sync, h.doubtful)
		}
		for _, r := range h.puts {
			b := make([]byte, r.Length)
			if err := later.Read(&r.Entry, b); err != nil || !r.File && bytes.Count(b, []byte{r.Hash[0] + 1}) != len(b) {
				t.Errorf("record %d: %v", r.Position.Record, err)
			}
		}
	}
}

// What is before a mark is on disk; what is behind it may not be.
func TestMarkDurable(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	put := func(n byte) {
		t.Helper()
		if err := a.Append([]Item{newItem(n, 10)}, func(*Item) {}); err != nil {
			t.Fatal(err)
		}
	}
	put(0)
	flushed := 0
	// What comes between the flush and the mark is not covered.
	flush := func() error {
		flushed++
		put(1)
		return nil
	}
	if err := s.MarkDurable(1, flush); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s, h := replay(t, dir)
	if !slices.Equal(h.doubtful, []bool{false, true}) {
		t.Errorf("doubtful are %v", h.doubtful)
	}
	quiet := 0
	for range 3 { // a mark is no reason for another
		if err := s.MarkDurable(1, func() error { quiet++; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if quiet != 1 || flushed != 1 {
		t.Errorf("flushed %d and then %d times, want 1 and 1", flushed, quiet)
	}
}

// What was not written when a flush failed may be forgotten by the kernel, and the next flush says nothing of that: so
// there are no more marks.
func TestNoMarkAfterFailedFlush(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	failed := errors.New("no")
	for _, flushed := range []error{failed, nil, nil} {
		if err := a.Append([]Item{newItem(0, 10)}, func(*Item) {}); err != nil {
			t.Fatal(err)
		}
		if err := s.MarkDurable(7, func() error { return flushed }); !errors.Is(err, failed) {
			t.Errorf("got %v", err)
		}
	}
	if at := s.Segments()[0].DurableSince(); at != 0 {
		t.Errorf("marked at %d", at)
	}
	s.Close()
	if _, h := replay(t, dir); !slices.Equal(h.doubtful, []bool{true, true, true}) {
		t.Errorf("doubtful are %v", h.doubtful)
	}
}

// breakFlush lets all that is written to the log of g succeed, and its flush fail, until the end of the test.
func breakFlush(t *testing.T, g *Segment) {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if flush(null) == nil {
		t.Skip("this system flushes everything")
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

// An Appender that could not flush says so for good: whoever would remove the sources of what was appended must not.
func TestFailedFlushIsFinal(t *testing.T) {
	s := openSet(t, Config{Dir: t.TempDir(), Limit: 1 << 20})
	a := s.NewAppender(nil)
	a.Flushed = true
	append := func() {
		t.Helper()
		if err := a.Append([]Item{newItem(0, 10)}, func(*Item) {}); err != nil {
			t.Fatal(err)
		}
	}
	append()
	if err := a.Flush(); err != nil {
		t.Fatal(err)
	}
	breakFlush(t, s.Segments()[0])
	append()
	for range 2 {
		if err := a.Flush(); err == nil {
			t.Error("the second part is said to be on disk")
		}
	}
	a.Seal(s.Segments()[0])
	append() // to another segment, which can be flushed
	if err := a.Flush(); err == nil {
		t.Error("all is said to be on disk")
	}
}

// Flush writes also what an earlier process has appended, unless that is known to be on disk.
func TestRememberedIsFlushed(t *testing.T) {
	for _, marked := range []bool{false, true} {
		dir := t.TempDir()
		s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
		if err := s.NewAppender(nil).Append([]Item{newItem(0, 10)}, func(*Item) {}); err != nil {
			t.Fatal(err)
		}
		if marked {
			if err := s.MarkDurable(7, func() error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		s.Close()
		s, _ = replay(t, dir)
		a := s.NewAppender(nil)
		g := s.Segments()[0]
		a.FlushToo(g)
		breakFlush(t, g)
		if err := a.Flush(); (err == nil) != marked {
			t.Errorf("marked %v: %v", marked, err)
		}
	}
}

// Bytes that are there count, also if the flush of their records has failed.
func TestBytesCountAfterFailedFlush(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20, Sync: true})
	a := s.NewAppender(nil)
	if err := a.Append([]Item{newItem(0, 10)}, func(*Item) {}); err != nil {
		t.Fatal(err)
	}
	g := s.Segments()[0]
	breakFlush(t, g)
	if err := a.Append([]Item{newItem(1, 5000)}, func(*Item) { t.Error("committed") }); err == nil {
		t.Fatal("the flush did not fail")
	}
	fi, err := os.Stat(filepath.Join(dir, "00000001.data"))
	if err != nil {
		t.Fatal(err)
	}
	if data, log := g.Size(); data != fi.Size() || s.Bytes() != data+log {
		t.Errorf("%d bytes of data are there, and of %d in all %d are data", fi.Size(), s.Bytes(), data)
	}
	if want := Padded(10) + Padded(5000); fi.Size() != want {
		t.Errorf("the record may be on disk, and of %d bytes %d are there", want, fi.Size())
	}
	items := []Item{newItem(2, 100)}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment == g.N {
		t.Errorf("the next one is in segment %d, %v", items[0].Segment, err)
	}
}

// Of a record that is damaged no part is taken for another one: its hash is a client's choice.
func TestHashIsNoRecord(t *testing.T) {
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
		if err != nil {
			t.Fatal(err)
		}
		s, h := replay(t, dir)
		if len(h.puts) != 2 || h.puts[0].Key != first.Key || h.puts[1].Key != last.Key || len(h.drops) > 0 || len(h.stamps) > 0 ||
			!slices.Equal(h.doubtful, []bool{true, true}) {
			t.Errorf("forged %d: told of %v, doubtful %v, dropped %v, touched %v", kind, h.puts, h.doubtful, h.drops, h.stamps)
		}
		s.Close()
	}
}

// A put whose data is not there is told as one that is absent, the first time as well as the next: if it is a result,
// an earlier one must not come back in between.
func TestLostPutIsDropped(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	items := []Item{newItem(0, 10), newItem(1, 10)}
	if err := s.NewAppender(nil).Append(items, func(*Item) {}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := os.Truncate(filepath.Join(dir, "00000001.data"), Block); err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		s, h := replay(t, dir)
		if len(h.puts) != 1 || !slices.Equal(h.drops, []uint32{items[1].Position.Record}) {
			t.Errorf("round %d: told of %v, dropped %v", round, h.puts, h.drops)
		}
		s.Close()
	}
}

// A use that is in the log, and that the index does not know yet, is in the shorter log as well. One in the future, by a
// clock that was ahead, is one of now.
func TestShortenKeepsUses(t *testing.T) {
	shortenAt(t, 8000, 7000)
	shortenAt(t, 6500, 6500)
}

func shortenAt(t *testing.T, now, want uint32) {
	t.Helper()
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	items := []Item{newItem(0, 10), newItem(1, 10)}
	if err := s.NewAppender(nil).Append(items, func(*Item) {}); err != nil {
		t.Fatal(err)
	}
	g := s.Segments()[0]
	for _, stamp := range []uint32{5000, 7000, 6000} {
		if err := g.Touch([]index.Key{items[1].Key}, stamp, func(index.Key) (uint32, bool) { return items[1].Position.Record, true }); err != nil {
			t.Fatal(err)
		}
	}
	wanted := func(r *Record) bool { return r.Hash[0] == 1 }
	if err := g.Compact(now, wanted, func(from index.Position, to *Record) {
		if from != items[1].Position || to.Position.Record != 0 {
			t.Errorf("moved from %v to %v", from, to.Position)
		}
	}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, h := replay(t, dir); len(h.puts) != 1 || h.puts[0].Stamp != want || len(h.stamps) > 0 {
		t.Errorf("at %d: told of %v, touched %v", now, h.puts, h.stamps)
	}
}

// Many who append at once are all put, into segments that do not grow beyond the limit.
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
				if err != nil || !committed {
					t.Errorf("%v, committed %v", err, committed)
				}
			}
		})
	}
	wg.Wait()
	if len(all) != writers*rounds || s.Len() < 5 {
		t.Errorf("%d records in %d segments", len(all), s.Len())
	}
	var total int64
	for _, g := range s.Segments() {
		data, log := g.Size()
		total += data + log
		if data > limit {
			t.Errorf("segment %d has %d bytes", g.N, data)
		}
	}
	if total != s.Bytes() {
		t.Errorf("%d bytes are counted of %d", s.Bytes(), total)
	}
	seen := map[[2]uint32]bool{}
	for _, r := range all {
		at := [2]uint32{r.Segment, r.Offset}
		b := make([]byte, r.Length)
		if err := s.Read(&r.Entry, b); err != nil || seen[at] || bytes.Count(b, []byte{r.Hash[0] + 1}) != len(b) {
			t.Errorf("%v: %v, seen %v", r, err, seen[at])
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
	if err := a.Append(items, func(*Item) {}); err != nil {
		t.Fatal(err)
	}
	g := s.Segments()[0]
	a.Seal(g)
	if err := s.Remove(g); err != nil {
		t.Fatal(err)
	}
	if err := s.Read(&items[0].Entry, make([]byte, 100)); !errors.Is(err, ErrGone) {
		t.Errorf("Read: got %v, want ErrGone", err)
	}
	if err := g.Puts(0, func(*Record) bool { return true }); !errors.Is(err, ErrGone) {
		t.Errorf("Puts: got %v, want ErrGone", err)
	}
	if err := errors.Join(g.Drop(func() (uint32, bool) { return 0, true }), g.Compact(1<<31, nil, nil)); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || s.Bytes() != 0 || s.Len() != 0 {
		t.Errorf("left are %v, %d bytes, %v", left, s.Bytes(), err)
	}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment != 2 {
		t.Errorf("the next one is in segment %d, %v", items[0].Segment, err)
	}
}

// A log is at most this long: what is written to it is whole records, and a failure leaves it as it was.
func TestFailedWriteLeavesTheLog(t *testing.T) {
	dir := t.TempDir()
	s := openSet(t, Config{Dir: dir, Limit: 1 << 20})
	a := s.NewAppender(nil)
	if err := a.Append([]Item{newItem(1, 100)}, func(*Item) {}); err != nil {
		t.Fatal(err)
	}
	g := s.Segments()[0]
	log := g.log
	readOnly, err := os.Open(log.Name())
	if err != nil {
		t.Fatal(err)
	}
	g.log = readOnly
	before := s.Bytes()
	called := false
	if err := a.Append([]Item{newItem(2, 100)}, func(*Item) { called = true }); err == nil || called || s.Bytes() != before {
		t.Errorf("got %v, committed %v, %d bytes of %d", err, called, s.Bytes(), before)
	}
	g.log = log
	// It could not even be cut: nothing is added to it again, and the next goes to another segment.
	items := []Item{newItem(3, 100)}
	if err := a.Append(items, func(*Item) {}); err != nil || items[0].Segment == g.N {
		t.Errorf("the next one is in segment %d, %v", items[0].Segment, err)
	}
	// Uses cannot be noted in it, until it is written anew.
	touch := func() error {
		return g.Touch([]index.Key{{}}, 5000, func(index.Key) (uint32, bool) { return 0, true })
	}
	if err := touch(); err == nil {
		t.Error("a use was noted behind what could not be cut")
	}
	if err := g.Compact(8000, func(*Record) bool { return true }, func(index.Position, *Record) {}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(touch(), readOnly.Close()); err != nil {
		t.Error(err)
	}
	s.Close()
	_, h := replay(t, dir)
	if len(h.puts) != 2 || h.stamps[0] != 5000 {
		t.Errorf("told of %d, touched %v", len(h.puts), h.stamps)
	}
}

// FuzzReplay: whatever a log says, nothing outside the data is told of, both files end where the log does, and the
// next Replay says the same.
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
	f.Add(appendNote(nil, typeDrop, 0, 1), uint16(0)) // of what is put next
	f.Fuzz(func(t *testing.T, log []byte, data uint16) {
		dir := t.TempDir()
		// So that the fuzzer need not find the checksums.
		log = bytes.Clone(log)
		for at, n := 0, unit; at+unit <= len(log); at += n {
			n = unit
			if kind := log[at+4] &^ syncedBit; kind == typePacked || kind == typeFile {
				n = putBytes
			}
			if at+n <= len(log) && log[at] != 0xff {
				sum := appendSummed(nil, log[at:at+n])
				binary.LittleEndian.PutUint32(log[at:], binary.LittleEndian.Uint32(sum))
			}
		}
		err := errors.Join(os.WriteFile(filepath.Join(dir, "00000001.log"), log, 0o600),
			os.WriteFile(filepath.Join(dir, "00000001.data"), bytes.Repeat([]byte{1}, int(data)), 0o600))
		if err != nil {
			t.Fatal(err)
		}
		s, first := replay(t, dir)
		for _, r := range first.puts {
			if end := int64(r.Offset)*Block + int64(r.Length); !r.File && end > int64(data) {
				t.Errorf("told of %d bytes at %d, of %d", r.Length, int64(r.Offset)*Block, data)
			}
		}
		size, units := s.Segments()[0].Size()
		fi, err := os.Stat(filepath.Join(dir, "00000001.log"))
		if err != nil || fi.Size() != units || size+units != s.Bytes() {
			t.Errorf("the log has %d bytes of %d, %v", fi.Size(), units, err)
		}
		fi, err = os.Stat(filepath.Join(dir, "00000001.data"))
		if err != nil || fi.Size() != size {
			t.Errorf("the data has %d bytes of %d, %v", fi.Size(), size, err)
		}
		// New bytes do not take the place of those that are told of.
		a := s.NewAppender(s.Segments()[0])
		items := []Item{newItem(200, 700)}
		if err := a.Append(items, func(*Item) {}); err != nil {
			t.Fatal(err)
		}
		if items[0].Segment == 1 && int64(items[0].Offset)*Block < size {
			t.Errorf("written at block %d, of %d bytes", items[0].Offset, size)
		}
		s.Close()
		_, second := replay(t, dir)
		if got, want := fmt.Sprint(second.puts[:min(len(first.puts), len(second.puts))]), fmt.Sprint(first.puts); got != want || len(second.puts) != len(first.puts)+1 {
			t.Errorf("told of\n%v\nand then of\n%v", want, got)
		}
	})
}
