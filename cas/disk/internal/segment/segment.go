// SPDX-License-Identifier: Apache-2.0

// Package segment stores small blobs in large append-only files. It knows where blobs are and when they are durable. It
// knows neither what they mean nor how long they are needed: the caller keeps the index and evicts.
//
// # Files
//
// Segment N is the pair NNNNNNNN.data and NNNNNNNN.log. The data holds the blobs, each at a multiple of Block and
// padded with zeros to the next: a file system image may refer to them without exposing their neighbours. The log
// records what the blobs are and what happens to them later; see record.go. Data is never overwritten, and segments
// are removed as a whole.
//
// # Commit points
//
// A put exists once its record is in the log, after its bytes are in the data; only then is it acknowledged. It then
// survives the end of the process. With Config.Sync both are synced, in this order, and it survives a power failure.
// Concurrent puts share a commit; see Appender.
//
// Open skips torn records and truncates data without records.
//
// # Locks
//
// In this order: Appender.writing, Segment.using, Segment.logging, Segment.viewing, Segment.dataMu. Functions passed by
// the caller run under these locks and must not use the Set, except for Visitor and the argument of Puts.
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

// Block is the alignment of blobs in the data, in bytes.
const Block = 512

// Padded returns the size of n bytes of content in the data of a segment.
func Padded(n int64) int64 { return (n + Block - 1) / Block * Block }

// ErrGone reports that a segment was removed.
var ErrGone = errors.New("segment was removed")

// Config describes a Set.
type Config struct {
	Dir string
	// Limit is the maximum size of a segment's data in bytes. A single commit may exceed it.
	Limit int64
	// Sync syncs data and log before a commit is acknowledged.
	Sync bool
}

// A Set is the segments of a directory. It is safe for concurrent use.
type Set struct {
	Config

	bytes atomic.Int64  // of all data and logs
	held  atomic.Int64  // of the data of removed segments that Views keep
	order atomic.Uint32 // last one assigned to a record

	mu       sync.RWMutex
	segments map[uint32]*Segment // guarded by mu
	next     uint32              // guarded by mu
	lost     error               // guarded by mu; why a flush failed
}

// SetOrder sets the order of the last record.
func (s *Set) SetOrder(order uint32) { s.order.Store(order) }

// Bytes returns the total size of data and logs.
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
	// Live is the number of bytes of live data, and Files the number of records of live files. The owner of the Set
	// counts them.
	Live, Files atomic.Int64

	set  *Set
	size atomic.Int64 // bytes of committed data

	logging sync.Mutex
	log     *os.File // guarded by logging
	units   uint32   // guarded by logging; length of the log
	durable uint32   // guarded by logging; length of the log that is known to be durable
	synced  uint32   // guarded by logging; when that was established, in seconds since 1970; 0 is never
	notes   uint32   // guarded by logging; units of records other than puts
	broken  bool     // guarded by logging; the log ends in a torn record that could not be truncated

	using sync.RWMutex // held for reading while data is read, for writing while the files are closed
	data  *os.File     // guarded by using; nil if the segment was removed

	growing atomic.Bool // an Appender may append to it

	dataMu  sync.RWMutex  // held for writing while this process writes to data
	written state         // guarded by dataMu; of data after the last write
	suspect atomic.Bool   // another process wrote to data
	revoked atomic.Uint32 // number of calls of Revoke

	viewing sync.Mutex
	shown   *os.File // guarded by viewing; data, open for reading; nil before the first View
	views   int      // guarded by viewing; not yet released
	closed  bool     // guarded by viewing; the last View closes shown
	removed bool     // guarded by viewing
}

// Open opens the segments in the directory, which must exist, and removes incomplete ones. The caller calls Replay on
// each segment before anything else.
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
			// A compaction was interrupted.
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

// number returns the number of the segment to which a file belongs.
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
	g.written = stateOf(g.data)
	return g, nil
}

// create creates the next segment, for an Appender.
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
		// Open would remove an incomplete segment as well.
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

// LogBytes returns the total size of the log files.
func (s *Set) LogBytes() (n int) {
	for _, g := range s.Segments() {
		if fi, err := g.log.Stat(); err == nil {
			n += int(fi.Size())
		}
	}
	return n
}

// Segments returns all segments, by number.
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

// Segment returns segment n, or nil.
func (s *Set) Segment(n uint32) *Segment {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.segments[n]
}

// Read fills b, of e.Length bytes, with the content of a packed entry. It returns ErrGone if the segment was removed;
// the caller then looks e up again.
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

// Size returns the size of data and log in bytes.
func (g *Segment) Size() (data, log int64) {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.size.Load(), int64(g.units) * unit
}

// Growing reports whether an Appender may append to the segment.
func (g *Segment) Growing() bool { return g.growing.Load() }

// Describe returns the position of an entry for messages.
func (g *Segment) Describe(e *index.Entry) string {
	return fmt.Sprintf("%s at %d", filepath.Base(g.set.path(g.N, ".data")), int64(e.Offset)*Block)
}

// Remove removes a segment without live entries. Ongoing reads finish first, and Views keep the data.
func (s *Set) Remove(g *Segment) error {
	s.mu.Lock()
	delete(s.segments, g.N)
	s.mu.Unlock()
	err := g.close(true)
	// The log goes first: data without a log is ignored.
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
	err := errors.Join(g.log.Close(), g.data.Close(), g.closeViews(removed))
	g.log, g.data = nil, nil
	return err
}

// Close closes all files except those of Views. The Set must not be used afterwards.
func (s *Set) Close() error {
	var errs []error
	for _, g := range s.Segments() {
		errs = append(errs, g.close(false))
	}
	return errors.Join(errs...)
}
