// SPDX-License-Identifier: Apache-2.0

// Package segment keeps small blobs in large files that only grow. It knows where bytes are and when they are
// safe, and neither what they mean nor how long they are wanted: its caller has the index and evicts.
//
// # Files
//
// Segment N is the pair NNNNNNNN.data and NNNNNNNN.log. The data is blobs one after the other, each at a multiple
// of Block and followed by zeros up to the next: so a file system image may point into it, and nothing of a
// neighbour shows behind the end of a blob. The log says what they are, and whatever happens to them later: see
// record.go. Data is never written over, and a segment goes away as a whole.
//
// # Commit points
//
// A put exists from the moment at which its record is in the log, which is after its bytes are in the data; only
// then is it acknowledged. That outlives the process. With Config.Sync both are flushed to the disk in this order,
// and it outlives a loss of power. Many puts share a commit: see Appender.
//
// A record that is torn is passed over at the next Open, and bytes that no record tells of are cut off.
//
// # Locks
//
// In this order: Appender.writing, Segment.using, Segment.logging, Segment.viewing, Segment.own. What the caller passes as a function is called
// under them, but for History and what Puts is given: it must not use the Set.
package segment

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/durable"
)

// Block is the unit in which data is aligned, in bytes.
const Block = 512

// Padded returns the bytes that n bytes take in the data of a segment.
func Padded(n int64) int64 { return (n + Block - 1) / Block * Block }

// ErrGone says that a segment was removed.
var ErrGone = errors.New("segment was removed")

// Config says where a Set is.
type Config struct {
	Dir string
	// Limit is how large the data of a segment grows, in bytes, unless a single commit is larger.
	Limit int64
	// Sync flushes data and log of a commit to the disk before it is acknowledged.
	Sync bool
}

// A Set is all segments of a directory. It is safe for concurrent use.
type Set struct {
	Config

	bytes atomic.Int64  // of all data and logs
	held  atomic.Int64  // of the data of removed segments that is in view
	order atomic.Uint32 // of the record that got one last

	mu       sync.RWMutex
	segments map[uint32]*Segment // guarded by mu
	next     uint32              // guarded by mu
	lost     error               // guarded by mu; why not all was flushed
}

// SetOrder says which order the last record had.
func (s *Set) SetOrder(order uint32) { s.order.Store(order) }

// Bytes returns the bytes of all data and all logs.
func (s *Set) Bytes() int64 { return s.bytes.Load() }

// Len returns the number of segments.
func (s *Set) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.segments)
}

// A Segment is one pair of files.
type Segment struct {
	N uint32
	// Live is how many bytes of its data are wanted, and Files how many of its records are of files that are, as
	// the owner of the Set counts them.
	Live, Files atomic.Int64

	set  *Set
	size atomic.Int64 // bytes of data that are committed

	logging sync.Mutex
	log     *os.File // guarded by logging
	units   uint32   // guarded by logging; where the log ends
	marked  uint32   // guarded by logging; where it ended when all of it was last known to be on disk
	mark    uint32   // guarded by logging; when that was, in seconds since 1970; 0 is never
	notes   uint32   // guarded by logging; units of records that are no puts
	broken  bool     // guarded by logging; the log ends in something that could not be taken back

	using sync.RWMutex // held for reading while data is read, for writing when the files are closed
	data  *os.File     // guarded by using; nil when the segment was removed

	growing atomic.Bool // an Appender may add to it

	own     sync.RWMutex // held for writing while this process writes to data
	left    state        // guarded by own; how its last write left data
	suspect atomic.Bool  // somebody else has written to data
	revoked atomic.Uint32

	viewing sync.Mutex
	shown   *os.File // guarded by viewing; data, open for reading; nil before the first View
	views   int      // guarded by viewing; those that were not released
	closed  bool     // guarded by viewing; the last View closes shown
	removed bool     // guarded by viewing
}

// Open opens what is in the directory, which must exist. It reads nothing yet: the caller replays each segment
// before it uses the Set for anything else. Halves of a segment, of one that was being made or removed, are removed.
func Open(c Config) (*Set, error) {
	s := &Set{Config: c, segments: map[uint32]*Segment{}, next: 1}
	files, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil, err
	}
	halves := map[uint32]int{}
	for _, f := range files {
		if n, ok := number(f.Name()); ok && f.Type().IsRegular() {
			halves[n]++
			s.next = max(s.next, n+1)
		} else if strings.HasSuffix(f.Name(), ".new") && f.Type().IsRegular() {
			// A log that was being rewritten.
			if err := os.Remove(filepath.Join(c.Dir, f.Name())); err != nil {
				return nil, err
			}
		}
	}
	for n, count := range halves {
		if count == 1 {
			for _, path := range []string{s.path(n, ".data"), s.path(n, ".log")} {
				if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
					return nil, errors.Join(err, s.Close())
				}
			}
			continue
		}
		g, err := s.open(n, 0)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.segments[n] = g
	}
	return s, nil
}

// number returns the number of the segment that a file belongs to.
func number(name string) (n uint32, ok bool) {
	digits, suffix, _ := strings.Cut(name, ".")
	v, err := strconv.ParseUint(digits, 10, 32)
	return uint32(v), err == nil && v > 0 && v < math.MaxUint32 && (suffix == "data" || suffix == "log") &&
		fmt.Sprintf("%08d", v) == digits
}

func (s *Set) path(n uint32, suffix string) string {
	return filepath.Join(s.Dir, fmt.Sprintf("%08d%s", n, suffix))
}

func (s *Set) open(n uint32, flag int) (*Segment, error) {
	g := &Segment{N: n, set: s}
	var err error
	if g.data, err = os.OpenFile(s.path(n, ".data"), os.O_RDWR|flag, 0o600); err != nil {
		return nil, err
	}
	if g.log, err = os.OpenFile(s.path(n, ".log"), os.O_RDWR|flag, 0o600); err != nil {
		return nil, errors.Join(err, g.data.Close())
	}
	g.left = stateOf(g.data)
	return g, nil
}

// create makes the next segment, for an Appender to add to.
func (s *Set) create() (*Segment, error) {
	s.mu.Lock()
	n := s.next
	s.next++
	s.mu.Unlock()
	g, err := s.open(n, os.O_CREATE|os.O_EXCL)
	if err == nil && s.Sync {
		err = durable.SyncDir(s.Dir)
	}
	if err != nil {
		if g != nil {
			err = errors.Join(err, g.log.Close(), g.data.Close())
		}
		// Whichever half is there: Open would remove it as well.
		_ = os.Remove(s.path(n, ".data"))
		_ = os.Remove(s.path(n, ".log"))
		return nil, err
	}
	commit.Point("segment made")
	g.growing.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.segments[n] = g
	return g, nil
}

// LogBytes returns the bytes of all logs, as far as files tell: as much as what is to be replayed.
func (s *Set) LogBytes() (n int) {
	for _, g := range s.Segments() {
		if fi, err := g.log.Stat(); err == nil {
			n += int(fi.Size())
		}
	}
	return n
}

// Segments returns all segments by number.
func (s *Set) Segments() []*Segment {
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := make([]*Segment, 0, len(s.segments))
	for _, g := range s.segments {
		all = append(all, g)
	}
	slices.SortFunc(all, func(a, b *Segment) int { return cmp.Compare(a.N, b.N) })
	return all
}

// Segment returns the segment n, or nil if it is gone.
func (s *Set) Segment(n uint32) *Segment {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.segments[n]
}

// Read fills b, of e.Length bytes, with the bytes of a packed entry. It is ErrGone if the segment of e was removed:
// the caller looks e up again.
func (s *Set) Read(e *index.Entry, b []byte) error {
	g := s.Segment(e.Segment)
	if g == nil {
		return ErrGone
	}
	g.using.RLock()
	defer g.using.RUnlock()
	if g.data == nil {
		return ErrGone
	}
	if _, err := g.data.ReadAt(b, int64(e.Offset)*Block); err != nil {
		return fmt.Errorf("segment %d at %d: %w", g.N, int64(e.Offset)*Block, err)
	}
	return nil
}

// Size returns the bytes of data and of log.
func (g *Segment) Size() (data, log int64) {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.size.Load(), int64(g.units) * unit
}

// Growing reports whether an Appender may add to the segment.
func (g *Segment) Growing() bool { return g.growing.Load() }

// Where names the place of an entry in messages.
func (g *Segment) Where(e *index.Entry) string {
	return fmt.Sprintf("%s at %d", filepath.Base(g.set.path(g.N, ".data")), int64(e.Offset)*Block)
}

// Touch notes that entries of the segment were used at stamp. Where is asked for each key, and says which record it
// has now, and whether it is still in this segment.
func (g *Segment) Touch(keys []index.Key, stamp uint32, where func(index.Key) (record uint32, ok bool)) error {
	return g.note(typeTouch, stamp, func(yield func(uint32)) {
		for _, k := range keys {
			if record, ok := where(k); ok {
				yield(record)
			}
		}
	})
}

// Marked returns when all of the segment was last known to be on disk, in seconds since 1970; 0 is never.
func (g *Segment) Marked() uint32 {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.mark
}

// Forget is Drop of a put, of which the caller knows no more where it is: it may have gone.
func (g *Segment) Forget(r *index.Entry) error {
	return g.note(typeDrop, 0, func(yield func(uint32)) {
		b := make([]byte, putBytes)
		if _, err := g.log.ReadAt(b, int64(r.Record)*unit); err != nil {
			return
		}
		if kind, _ := parse(b); kind != typePacked && kind != typeFile {
			return
		}
		if now := decodePut(b, g.N, r.Record); now.Key == r.Key && now.Offset == r.Offset {
			yield(r.Record)
		}
	})
}

// Drop notes that an entry of the segment is absent. Record says which it was, or that this is no longer so.
func (g *Segment) Drop(record func() (uint32, bool)) error {
	return g.note(typeDrop, 0, func(yield func(uint32)) {
		if r, ok := record(); ok {
			yield(r)
		}
	})
}

// note appends records of one unit, of the records that each yields. Each is called while the log is locked, so
// that what it yields is still so when it is written.
func (g *Segment) note(kind byte, stamp uint32, each func(yield func(record uint32))) error {
	g.logging.Lock()
	defer g.logging.Unlock()
	if g.log == nil {
		return nil // gone, and with it what was to be noted
	}
	var b []byte
	each(func(record uint32) { b = appendNote(b, kind, stamp, record) })
	if len(b) == 0 {
		return nil
	}
	if err := g.write(b); err != nil {
		return err
	}
	g.notes += uint32(len(b) / unit)
	return nil
}

// write appends b to the log, or leaves it as it was. The caller holds logging.
func (g *Segment) write(b []byte) error {
	if int64(g.units)+int64(len(b)/unit) > math.MaxUint32 {
		return fmt.Errorf("log of segment %d is as long as it can be", g.N)
	}
	if g.broken {
		return fmt.Errorf("log of segment %d could not be written before", g.N)
	}
	if _, err := g.log.WriteAt(b, int64(g.units)*unit); err != nil {
		// Whole records among what was written would tell of data that others may be written over.
		if g.log.Truncate(int64(g.units)*unit) != nil {
			g.broken = true
			g.growing.Store(false)
		}
		return err
	}
	g.units += uint32(len(b) / unit)
	g.set.bytes.Add(int64(len(b)))
	return nil
}

// MarkDurable makes everything that was committed before it, at the time now, outlive a loss of power, and notes that.
// Flush must write all of the store to the disk. If that has failed once, MarkDurable fails for good: what the kernel
// has not written it may have forgotten, and would not say so again.
func (s *Set) MarkDurable(now uint32, flush func() error) error {
	s.mu.RLock()
	lost := s.lost
	s.mu.RUnlock()
	if lost != nil {
		return lost
	}
	type mark struct {
		g     *Segment
		units uint32
	}
	var marks []mark
	for _, g := range s.Segments() {
		g.logging.Lock()
		if g.log != nil && g.units > g.marked {
			marks = append(marks, mark{g, g.units})
		}
		g.logging.Unlock()
	}
	if len(marks) == 0 {
		return nil
	}
	if err := flush(); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.lost = err
		return err
	}
	commit.Point("flushed")
	var first error
	for _, m := range marks {
		err := m.g.note(typeDurable, now, func(yield func(uint32)) { yield(m.units) })
		if err != nil {
			first = cmp.Or(first, err)
			continue
		}
		m.g.logging.Lock()
		// The mark itself is no reason for another.
		m.g.mark = now
		if m.g.marked = m.units; m.g.units == m.units+1 {
			m.g.marked = m.g.units
		}
		m.g.logging.Unlock()
	}
	return first
}

// Remove removes a segment of which nothing is wanted any more. Who reads from it reads to the end first; who has a
// View of it keeps its data.
func (s *Set) Remove(g *Segment) error {
	s.mu.Lock()
	delete(s.segments, g.N)
	s.mu.Unlock()
	err := g.close(true)
	// The log first: data without a log holds nothing.
	for _, suffix := range []string{".log", ".data"} {
		if e := os.Remove(s.path(g.N, suffix)); e != nil && !errors.Is(e, os.ErrNotExist) {
			err = errors.Join(err, e)
		}
		commit.Point("segment removed" + suffix)
	}
	return err
}

func (g *Segment) close(removed bool) error {
	g.using.Lock()
	defer g.using.Unlock()
	g.logging.Lock()
	defer g.logging.Unlock()
	if g.data == nil {
		return nil
	}
	g.set.bytes.Add(-g.size.Load() - int64(g.units)*unit)
	err := errors.Join(g.log.Close(), g.data.Close(), g.conclude(removed))
	g.log, g.data = nil, nil
	return err
}

// Close closes all files but those of Views. The Set is not used after it.
func (s *Set) Close() error {
	var errs []error
	for _, g := range s.Segments() {
		errs = append(errs, g.close(false))
	}
	return errors.Join(errs...)
}
