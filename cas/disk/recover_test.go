// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

func openStore(t *testing.T, config Config) (*Cache, *Store) {
	t.Helper()
	if config.MaxBytes == 0 {
		config.MaxBytes = 1 << 20
	}
	c := must.Get(Open(config))(t)
	t.Cleanup(func() {
		if err := errors.Join(c.Check(context.Background()), c.Close()); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	in := must.Get(c.Instance(""))(t)
	return c, in.Store.(*Store)
}

// TestSweepToleratesVanishedFiles: a listed file may vanish before it is removed.
func TestSweepToleratesVanishedFiles(t *testing.T) {
	c, _ := openStore(t, Config{Dir: t.TempDir()})
	for i := range 500 {
		must.Succeed(t, os.WriteFile(filepath.Join(c.dir, "tmp", strconv.Itoa(i)), nil, 0o600))
	}
	// Each call removes files that the others have listed.
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if err := c.sweep(); err != nil && !vanished(err) && !errors.Is(err, os.ErrExist) {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

// An event is a record about one key.
type event struct {
	name string
	tell func(*visitor)
}

// orders calls visit with all interleavings of the logs.
func orders(logs [][]event, visit func([]event)) {
	var so []event
	var next func(rest [][]event)
	next = func(rest [][]event) {
		done := true
		for i, log := range rest {
			if len(log) == 0 {
				continue
			}
			done = false
			so = append(so, log[0])
			shorter := slices.Clone(rest)
			shorter[i] = log[1:]
			next(shorter)
			so = so[:len(so)-1]
		}
		if done {
			visit(so)
		}
	}
	next(logs)
}

// TestRecoveryDoesNotDependOnOrder: logs are read concurrently.
func TestRecoveryDoesNotDependOnOrder(t *testing.T) {
	_, d := castest.Blob(0, 100)
	entry := func(kind index.Kind, n uint32, stamp uint32) index.Entry {
		return index.Entry{Key: keyOf(0, kind, d), Position: index.Position{Segment: n}, Stamp: stamp, Length: 100}
	}
	put := func(kind index.Kind, n, stamp, order uint32, file bool) event {
		return event{fmt.Sprintf("put in %d at %d", n, stamp), func(r *visitor) {
			e := entry(kind, n, stamp)
			e.File = file
			r.Put(&segment.Record{Entry: e, Order: order}, false)
		}}
	}
	doubtful := func(kind index.Kind, n, stamp, order uint32) event {
		return event{fmt.Sprintf("doubtful put in %d at %d", n, stamp), func(r *visitor) {
			r.Put(&segment.Record{Entry: entry(kind, n, stamp), Order: order}, true)
		}}
	}
	drop := func(kind index.Kind, n, order uint32) event {
		return event{fmt.Sprintf("drop in %d", n), func(r *visitor) {
			r.Drop(&segment.Record{Entry: entry(kind, n, 1), Order: order})
		}}
	}
	touch := func(kind index.Kind, n, stamp uint32) event {
		return event{fmt.Sprintf("touch in %d at %d", n, stamp), func(r *visitor) {
			r.Touch(&segment.Record{Entry: entry(kind, n, 1)}, stamp)
		}}
	}
	for _, c := range []struct {
		name    string
		kind    index.Kind
		logs    [][]event
		segment uint32 // where the entry must be; 0 means absent
		stamp   uint32 // minimum stamp
	}{
		{"damaged and put again", blob, [][]event{{drop(blob, 1, 0)}, {put(blob, 2, 5, 0, false)}}, 2, 5},
		{"evicted file, then packed", blob, [][]event{{put(blob, 1, 5, 0, true)}, {put(blob, 2, 9, 0, false)}}, 2, 9},
		{
			"blob moved and used before and after", blob,
			[][]event{{put(blob, 1, 5, 0, false), touch(blob, 1, 7)}, {put(blob, 1, 6, 0, false), touch(blob, 1, 9)}},
			1, 9,
		},
		{
			"result moved, used before", result,
			[][]event{{put(result, 1, 5, 1, false), touch(result, 1, 9)}, {put(result, 1, 6, 1, false)}},
			1, 9,
		},
		{
			"result moved, used after", result,
			[][]event{{put(result, 1, 5, 1, false)}, {put(result, 1, 6, 1, false), touch(result, 1, 9)}},
			1, 9,
		},
		{"later result wins", result, [][]event{{put(result, 1, 5, 1, false)}, {put(result, 2, 5, 2, false)}, {put(result, 3, 5, 0, false)}}, 2, 5},
		{"earlier result does not come back", result, [][]event{{put(result, 1, 5, 1, false)}, {drop(result, 2, 2)}}, 0, 0},
		{"blob being moved", blob, [][]event{{put(blob, 1, 5, 0, false), touch(blob, 1, 9)}, {doubtful(blob, 2, 6, 0)}}, 1, 9},
		{"file, and packed but doubtful", blob, [][]event{{put(blob, 1, 5, 0, true)}, {doubtful(blob, 2, 6, 0)}}, 1, 6},
		{"blob that may be lost twice", blob, [][]event{{doubtful(blob, 2, 5, 0)}, {doubtful(blob, 2, 6, 0)}}, 2, 6},
		{"result being moved", result, [][]event{{put(result, 1, 5, 1, false)}, {doubtful(result, 2, 6, 1)}}, 1, 5},
		{"result moved, and its source noted as replaced", result, [][]event{{drop(result, 1, 1)}, {put(result, 2, 6, 1, false)}}, 2, 6},
		{"result being moved from what was lost", result, [][]event{{drop(result, 1, 1)}, {doubtful(result, 2, 6, 1)}}, 2, 6},
		{
			"earlier result, and copies of a later one", result,
			[][]event{{put(result, 1, 5, 1, false)}, {drop(result, 2, 2)}, {put(result, 3, 5, 2, false)}},
			3, 5,
		},
		{"later result may be lost", result, [][]event{{put(result, 1, 5, 1, false)}, {doubtful(result, 2, 6, 2)}}, 2, 6},
	} {
		orders(c.logs, func(events []event) {
			cache := &Cache{index: index.New()}
			r := &visitor{recovery: &recovery{
				cache: cache, powerLost: true, instances: 1, now: 100, functions: cas.Functions(), orders: map[index.Key]uint32{},
				doubtful: map[uint32]uint32{}, unreliable: map[index.Key]bool{},
			}}
			var names []string
			for _, e := range events {
				e.tell(r)
				r.flush()
				names = append(names, e.name)
			}
			e, ok := cache.index.Get(keyOf(0, c.kind, d))
			if ok != (c.segment != 0) || ok && (e.Segment != c.segment || e.Stamp < c.stamp) {
				t.Errorf("%s: after %q: got present %v, segment %d, stamp %d; want segment %d, stamp %d",
					c.name, names, ok, e.Segment, e.Stamp, c.segment, c.stamp)
			}
		})
	}
}

// TestBlobPutAgainAfterDamageSurvivesReopen reads a long log with the damaged blob and a short one with the new blob.
func TestBlobPutAgainAfterDamageSurvivesReopen(t *testing.T) {
	config := Config{Dir: t.TempDir(), MaxBytes: 8 << 20}
	c, s := openStore(t, config)
	for i := range 3000 {
		b := []byte(strconv.Itoa(i))
		must.Succeed(t, s.Put(t.Context(), cas.SHA256.Sum(b), bytes.NewReader(b)))
	}
	b, d := castest.Blob(0, 1000)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	e, _ := c.index.Get(keyOf(0, blob, d))
	_ = c.damaged(e, nil)
	c.seal(c.segments.Segment(e.Segment))
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	must.Succeed(t, c.Close())
	for range 5 {
		c, s := openStore(t, config)
		if got, err := cas.ReadAll(t.Context(), s, d, d.Size()); err != nil || !bytes.Equal(got, b) {
			t.Fatalf("got %d bytes, %v", len(got), err)
		}
		must.Succeed(t, c.Close())
	}
}

// TestLostPutStaysLost: a put whose data was lost must not reappear with the data of a later one.
func TestLostPutStaysLost(t *testing.T) {
	config := Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	b, d := castest.Blob(0, 1000)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	must.Succeed(t, c.Close())
	must.Succeed(t, os.Truncate(filepath.Join(c.dir, "segments", "00000001.data"), 0))
	c, s = openStore(t, config)
	other, o := castest.Blob(1, 1000)
	must.Succeed(t, s.Put(t.Context(), o, bytes.NewReader(other)))
	c.maintainOnce() // so that no put is doubtful
	must.Succeed(t, c.Close())
	c, s = openStore(t, config)
	if missing, err := s.Missing(t.Context(), []cas.Digest{d, o}); err != nil ||
		!slices.Equal(missing, []cas.Digest{d}) {
		t.Errorf("Missing: got %v, %v, want %v", missing, err, d)
	}
	expect.Error(t, c.Check(t.Context()), nil)
}

// TestFailingMaintenanceIsLogged when it begins to fail and when it succeeds again.
func TestFailingMaintenanceIsLogged(t *testing.T) {
	for _, file := range []string{"checkpoint", "segments/00000001.log"} {
		var log syncbuf.Buffer
		c, s := openStore(t, Config{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))})
		must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, []byte("x")))(t)
		x, _ := s.find(blob, cas.SHA256.Sum([]byte("x")))
		for range 100 { // so that the log is compacted
			e, _ := c.index.Get(x)
			c.touch([]index.Key{x}, e.Stamp+1)
		}
		stuck := filepath.Join(c.dir, file+".new")
		must.Succeed(t, os.Mkdir(stuck, 0o700))
		for range 3 {
			c.maintainOnce()
		}
		must.Succeed(t, os.Remove(stuck))
		for range 2 {
			c.maintainOnce()
		}
		text := log.String()
		expect.Equal(t, strings.Count(text, "store maintenance is failing"), 1, "%s: warnings in %s", file, text)
		expect.Equal(t, strings.Count(text, "store maintenance works again"), 1, "%s: recoveries in %s", file, text)
		expect.Text(t, text, filepath.Base(stuck))
	}
}

// TestCompactionDuringPutLosesNothing compacts a log when a put is recorded but not yet in the index.
func TestCompactionDuringPutLosesNothing(t *testing.T) {
	config := Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	b, d := castest.Blob(0, 1000)
	k, err := s.key(blob, d)
	must.Succeed(t, err)
	must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, []byte("x")))(t)
	x, _ := s.find(blob, cas.SHA256.Sum([]byte("x")))
	for range 100 {
		e, _ := c.index.Get(x)
		c.touch([]index.Key{x}, e.Stamp+1)
	}
	g := c.segments.Segments()[0]
	must.Be(t, g.NeedsCompaction(), "the log does not need compaction")
	shortened := make(chan struct{})
	err = c.fresh.Append([]segment.Item{c.newItem(k, b)}, func(it *segment.Item) {
		go func() {
			c.maintainOnce()
			close(shortened)
		}()
		for range 10_000 { // long enough to finish, if compaction does not wait for the put
			runtime.Gosched()
			if !g.NeedsCompaction() {
				break
			}
		}
		c.committed(it)
	})
	must.Succeed(t, err)
	<-shortened
	expect.That(t, !g.NeedsCompaction(), "the log was not compacted")
	expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil)
	_, s = openStore(t, config)
	expect.Slices(t, must.Get(s.Missing(t.Context(), []cas.Digest{d, cas.SHA256.Sum([]byte("x"))}))(t), nil, "Missing")
}

// TestReaderOfDamagedFileSparesItsSuccessor: a reader that finds damage must not drop a file put meanwhile.
func TestReaderOfDamagedFileSparesItsSuccessor(t *testing.T) {
	c, s := openStore(t, Config{Dir: t.TempDir(), Pack: -1})
	b, d := castest.Blob(0, 10_000)
	put := func() {
		t.Helper()
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	}
	put()
	path := must.Get(c.pathBelow("files", keyOf(0, blob, d)))(t)
	must.Succeed(t, errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, make([]byte, len(b)), 0o600)))
	slow := must.Get(s.Open(t.Context(), d, 0))(t)
	defer slow.Close()
	expect.Error(t, expect.Err(cas.ReadAll(t.Context(), s, d, d.Size())), cas.ErrCorrupt)
	put()
	// After compaction the second put has the position of the first.
	k := keyOf(0, blob, d)
	for n := uint32(1); n < 200; n++ {
		c.touch([]index.Key{k}, seconds(time.Now()))
	}
	c.maintainOnce()
	if e, ok := c.index.Get(k); !ok || e.Position != (index.Position{Segment: 1}) {
		t.Errorf("second put: got position %v, want that of the first", e.Position)
	}
	expect.Error(t, expect.Err(io.ReadAll(slow)), cas.ErrCorrupt)
	if missing, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) > 0 {
		t.Errorf("the sound file was dropped: %v", err)
	}
	expect.Equal(t, c.Stats().Corrupt, 1, "damaged blobs")
}

// TestSoundFileStaysDuringRecheck: a file that a reader reports as damaged is read again, and stays if it is sound,
// even if its log is compacted meanwhile.
func TestSoundFileStaysDuringRecheck(t *testing.T) {
	config := Config{Dir: t.TempDir(), MaxBytes: 8 << 20}
	c, s := openStore(t, config)
	b, d := castest.Blob(0, 2<<20)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	e, _ := c.index.Get(keyOf(0, blob, d))
	g := c.segments.Segments()[0]
	c.seal(g)
	done := make(chan struct{})
	var group sync.WaitGroup
	until := func(do func() bool) {
		group.Go(func() {
			for do() {
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	until(func() bool {
		missing, err := s.Missing(t.Context(), []cas.Digest{d})
		if err != nil || len(missing) > 0 {
			t.Errorf("Missing: got %v, %v, want none", missing, err)
			return false
		}
		return true
	})
	until(func() bool {
		if err := g.Compact(seconds(time.Now()), c.isLive, c.recordMoved); err != nil {
			t.Error(err)
			return false
		}
		return true
	})
	for range 20 {
		_ = c.damaged(e, nil)
	}
	close(done)
	group.Wait()
	expect.Equal(t, c.Stats().Corrupt, 0, "damaged blobs")
	expect.Error(t, c.Close(), nil)
	_, s = openStore(t, config)
	expect.Slices(t, must.Get(s.Missing(t.Context(), []cas.Digest{d}))(t), nil, "Missing after Open")
}

// TestUseDuringMoveIsKept: a use after an entry was read for moving, and before it moved, is in the new log.
func TestUseDuringMoveIsKept(t *testing.T) {
	synctest.Test(t, useBetweenReadAndMove)
}

func useBetweenReadAndMove(t *testing.T) {
	config := Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	b, d := castest.Blob(0, 1000)
	large, ld := castest.Blob(1, 70_000)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	must.Succeed(t, s.Put(t.Context(), ld, bytes.NewReader(large)))
	keys := []index.Key{keyOf(0, blob, d), keyOf(0, blob, ld)}
	g := c.segments.Segments()[0]
	c.seal(g)
	m := mover{cache: c}
	err := g.Puts(0, func(r *segment.Record) bool {
		e, ok := c.index.Get(r.Key)
		if err := m.add(r, e); err != nil || !ok {
			t.Error(err, ok)
		}
		return true
	})
	must.Succeed(t, err)
	time.Sleep(time.Hour)
	used := seconds(time.Now())
	expect.Slices(t, c.touch(keys, used), nil, "absent")
	must.Succeed(t, m.flush())
	must.Succeed(t, c.removeSegment(&plan{census: c.takeCensus(0)}, g))
	must.Succeed(t, errors.Join(c.Check(t.Context()), c.Close()))
	c, _ = openStore(t, config)
	for _, k := range keys {
		if e, ok := c.index.Get(k); !ok || e.Stamp < used {
			t.Errorf("got present %v, stamp %d, want %d", ok, e.Stamp, used)
		}
	}
}

// recorder returns a function that records results of an action, and a check that the action has no result, now and
// after Open. The check closes c.
func recorder(t *testing.T, c *Cache, s *Store, config Config) (record func(int32), absent func()) {
	_, action := castest.Blob(0, 10)
	record = func(n int32) {
		t.Helper()
		must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: n}))
	}
	return record, func() {
		t.Helper()
		expect.Error(t, expect.Err(s.Lookup(t.Context(), action)), cas.ErrNotFound)
		must.Succeed(t, c.Close())
		_, s := openStore(t, config)
		expect.Error(t, expect.Err(s.Lookup(t.Context(), action)), cas.ErrNotFound, "after Open")
	}
}

// moveAll adds everything in a segment to a mover.
func moveAll(c *Cache, g *segment.Segment) (*mover, error) {
	m := &mover{cache: c}
	return m, g.Puts(0, func(r *segment.Record) bool {
		e, _ := c.index.Get(r.Key)
		return m.add(r, e) == nil
	})
}

// evictAllOf evicts everything in a segment.
func evictAllOf(t *testing.T, c *Cache, g *segment.Segment) error {
	c.room.Lock()
	defer c.room.Unlock()
	p := &plan{census: c.takeCensus(0)}
	p.cutoff = p.now
	return c.evacuate(t.Context(), p, g)
}

// TestResultReplacedWhileMoved: the replaced result does not reappear when its successor is evicted.
func TestResultReplacedWhileMoved(t *testing.T) {
	config := Config{Dir: t.TempDir(), Lease: -1}
	c, s := openStore(t, config)
	record, absent := recorder(t, c, s, config)
	record(1)
	g := c.segments.Segments()[0]
	c.seal(g)
	m, err := moveAll(c, g)
	record(2)
	must.Succeed(t, errors.Join(err, m.flush(), c.removeSegment(&plan{}, g), evictAllOf(t, c, c.segments.Segment(2))))
	absent()
}

// TestResultEvictedFromKeptSegment: a result evicted from a segment that stays does not reappear when its successor is
// evicted.
func TestResultEvictedFromKeptSegment(t *testing.T) {
	config := Config{Dir: t.TempDir(), Lease: -1}
	c, s := openStore(t, config)
	record, absent := recorder(t, c, s, config)
	record(1)
	g := c.segments.Segments()[0]
	g.Files.Add(1) // keeps the segment
	must.Be(t, evictAllOf(t, c, g) != nil, "the segment was removed")
	g.Files.Add(-1)
	record(2)
	must.Succeed(t, evictAllOf(t, c, c.segments.Segment(2)))
	absent()
}

// TestBudgetHoldsDuringMove moves a whole segment of a full store. With small blobs the log is large.
func TestBudgetHoldsDuringMove(t *testing.T) {
	c, s := openStore(t, Config{Dir: t.TempDir()})
	var full error
	for i := 0; full == nil; i++ {
		b := []byte(strconv.Itoa(i))
		full = s.Put(t.Context(), cas.SHA256.Sum(b), bytes.NewReader(b))
	}
	if !errors.Is(full, cas.ErrFull) {
		t.Fatal(full)
	}
	c.room.Lock()
	defer c.room.Unlock()
	g := c.segments.Segments()[0]
	g.Files.Add(1) // keeps the segment
	defer g.Files.Add(-1)
	if err := c.evacuate(t.Context(), &plan{census: c.takeCensus(0)}, g); err == nil || g.Live.Load() > 0 {
		t.Errorf("some entries were not moved, or the segment was removed: %v", err)
	}
	if used, _ := c.used(); used > c.config.MaxBytes {
		t.Errorf("got %d bytes, budget %d", used, c.config.MaxBytes)
	}
}

// TestFileHandedOutDuringEvictionStays: a file or copy may be handed out after it was selected for eviction.
func TestFileHandedOutDuringEvictionStays(t *testing.T) {
	for _, executable := range []bool{false, true} {
		c, s := openStore(t, Config{Dir: t.TempDir(), Pack: -1, Lease: -1})
		b, d := castest.Blob(0, 1000)
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
		_, release, err := s.File(t.Context(), d, executable)
		must.Succeed(t, err)
		release()
		p := plan{census: c.takeCensus(0), bytes: math.MaxInt64, files: math.MaxInt64}
		p.cutoff = p.now
		path, release, err := s.File(t.Context(), d, executable)
		must.Succeed(t, err)
		expect.Error(t, c.execute(t.Context(), &p), nil)
		expect.Error(t, expect.Err(os.Lstat(path)), nil)
		release()
	}
}

// TestVerifyDuringCompaction: Verify skips nothing if a log is compacted while it reads, or before or after it stops.
func TestVerifyDuringCompaction(t *testing.T) {
	for _, when := range []string{"reading", "stopped", "stopping"} {
		c, s := openStore(t, Config{Dir: t.TempDir()})
		var ds []cas.Digest
		var keys []index.Key
		for i := range byte(20) {
			b, d := castest.Blob(i, 1000)
			must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
			ds, keys = append(ds, d), append(keys, keyOf(0, blob, d))
		}
		g := c.segments.Segments()[0]
		shorten := func() {
			for _, k := range keys[:10] { // so that the others move to earlier records
				e, _ := c.index.Get(k)
				_ = c.damaged(e, nil)
			}
			for i := range uint32(10) {
				c.touch(keys[10:], seconds(time.Now())+i)
			}
			if c.maintainOnce(); g.NeedsCompaction() {
				t.Error("the log was not compacted")
			}
		}
		e, _ := c.index.Get(keys[11])
		f, err := os.OpenFile(filepath.Join(c.dir, "segments", "00000001.data"), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteAt(make([]byte, 100), int64(e.Offset)*segment.Block)
		}
		must.Succeed(t, errors.Join(err, f.Close()))
		if when != "reading" {
			// After the first ten: later records end before this position.
			must.Succeed(t, os.WriteFile(filepath.Join(c.dir, "verify"), fmt.Appendf(nil, "segment %d record %d\n", g.N, e.Record), 0o600))
		}
		if when == "stopped" {
			shorten()
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first := when != "stopped"
		r, err := c.Verify(ctx, VerifyOptions{Progress: func(VerifyReport) {
			if !first {
				return
			}
			first = false
			if shorten(); when == "stopping" {
				cancel()
			}
		}})
		if when == "stopping" {
			expect.That(t, errors.Is(err, context.Canceled) && r.Blobs <= 0, "Verify: got %+v, %v", r, err)
			r, err = c.Verify(t.Context(), VerifyOptions{})
		}
		expect.That(t, err == nil && len(r.Damaged) == 1 && r.Damaged[0].Digest == ds[11],
			"%s: got %+v, %v", when, r, err)
	}
}

// TestMovedButNotRemoved: the process ended after a move and before it removed the source, so both exist. After a power
// failure the new record may refer to missing or zeroed data; it must not replace the sound entry at any later Open.
func TestMovedButNotRemoved(t *testing.T) {
	for _, power := range []string{"stays", "leaves zeros", "leaves nothing"} {
		config := Config{Dir: t.TempDir(), MaxBytes: 1 << 20}
		c, s := openStore(t, config)
		b, d := castest.Blob(0, 1000)
		must.Succeed(t, errors.Join(s.Put(t.Context(), d, bytes.NewReader(b)), s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1})))
		c.maintainOnce()
		g := c.segments.Segments()[0]
		c.seal(g)
		m, err := moveAll(c, g)
		must.Succeed(t, errors.Join(err, m.flush(), c.Close()))
		moved := filepath.Join(c.dir, "segments", "00000002.data")
		fi, err := os.Stat(moved)
		if err != nil || fi.Size() == 0 {
			t.Fatal(fi, err)
		}
		if power != "stays" {
			zeros := make([]byte, fi.Size())
			if power == "leaves nothing" {
				zeros = nil
			}
			must.Succeed(t, errors.Join(os.WriteFile(moved, zeros, 0o600),
				os.WriteFile(filepath.Join(c.dir, "boot"), []byte("another start of the machine\n"), 0o600)))
		}
		for round := range 3 {
			c, s = openStore(t, config)
			if got, err := cas.ReadAll(t.Context(), s, d, d.Size()); err != nil || !bytes.Equal(got, b) {
				t.Errorf("power %s, round %d: blob: got %d bytes, %v", power, round, len(got), err)
			}
			if r, err := s.Lookup(t.Context(), d); err != nil || r.ExitCode != 1 {
				t.Errorf("power %s, round %d: result: got %v, %v", power, round, r, err)
			}
			expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil)
		}
	}
}

// TestMarkDurableDuringCollection: a long collection does not delay it.
func TestMarkDurableDuringCollection(t *testing.T) {
	c, s := openStore(t, Config{Dir: t.TempDir()})
	b, d := castest.Blob(0, 1000)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	c.room.Lock()
	defer c.room.Unlock()
	c.maintainOnce()
	expect.That(t, c.segments.Segments()[0].DurableSince() != 0, "nothing is marked as durable during eviction")
}

// TestConcurrentResultsAreOrdered: of two concurrent results the same one wins before and after Open, because the later
// one in the log has the greater order.
func TestConcurrentResultsAreOrdered(t *testing.T) {
	const writers, rounds = 8, 300
	c, s := openStore(t, Config{Dir: t.TempDir(), MaxBytes: 64 << 20})
	_, action := castest.Blob(0, 10)
	var group sync.WaitGroup
	for w := range writers {
		group.Go(func() {
			for i := range rounds {
				expect.Error(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: int32(w*rounds + i)}), nil)
			}
		})
	}
	group.Wait()
	var last uint32
	n := 0
	for _, g := range c.segments.Segments() {
		err := g.Puts(0, func(r *segment.Record) bool {
			expect.That(t, r.Order == last+1, "record %d: got order %d after %d", n, r.Order, last)
			last = r.Order
			n++
			return true
		})
		must.Succeed(t, err)
	}
	expect.That(t, n == writers*rounds, "got %d records, want %d", n, writers*rounds)
}

// TestVerifyWhileRecordOfFileMoves: Verify reads a file of an earlier process even if its record moves meanwhile.
func TestVerifyWhileRecordOfFileMoves(t *testing.T) {
	config := Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	var d cas.Digest
	for i, size := range []int{1000, 70_000} {
		var b []byte
		b, d = castest.Blob(byte(i), size)
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	}
	path := must.Get(c.pathBelow("files", keyOf(0, blob, d)))(t)
	must.Succeed(t, errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, make([]byte, 70_000), 0o600)))
	must.Succeed(t, c.Close())
	c, _ = openStore(t, config)
	first := true
	r, err := c.Verify(t.Context(), VerifyOptions{Progress: func(VerifyReport) {
		if !first {
			return
		}
		first = false
		c.room.Lock()
		defer c.room.Unlock()
		expect.Error(t, c.evacuate(t.Context(), &plan{census: c.takeCensus(0)}, c.segments.Segments()[0]), nil)
	}})
	expect.That(t, err == nil && len(r.Damaged) == 1 && r.Damaged[0].Digest == d && !first,
		"Verify: got %+v, %v", r, err)
}
