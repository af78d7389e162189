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
// In this order: Appender.writing, Set.appending, Segment.using, Segment.logging, Segment.viewing, Segment.dataMu.
// Functions passed by the caller run under these locks and must not use the Set, except for Visitor and the argument of
// Puts.
package segment

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
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
	// Distrusted, if not nil, is called with the error of each failed flush. It must not use the Set.
	Distrusted func(error)
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

	appending sync.RWMutex // held for reading during a commit, for writing by Distrust
	failures  uint32       // guarded by appending; number of failed flushes
	failure   error        // guarded by appending; of the last one, until Trust
	trusted   uint32       // guarded by appending; failures at the last Trust

	// Unusable lists the segments that Open removed because a file of theirs was missing or could not be opened.
	Unusable []error
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
	puts    uint32   // guarded by logging; where the last put ends
	lost    bool     // guarded by logging; a flush of its last puts failed
	broken  bool     // guarded by logging; the log may end in a torn record that could not be truncated

	using sync.RWMutex // held for reading while data is read, for writing while the files are closed
	data  *os.File     // guarded by using; nil if the segment was removed

	growing atomic.Bool // an Appender may append to it
	hidden  atomic.Bool // Hide was called

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

// Open opens the segments in the directory, which must exist, and removes those without data, without a log, or with a
// file that cannot be opened; see Set.Unusable. If too many files cannot be opened, it fails, because these files are
// probably intact and the permissions wrong. The caller calls Replay on each segment before anything else.
func Open(c Config) (*Set, error) {
	s := &Set{Config: c, segments: map[uint32]*Segment{}, next: 1}
	halves, err := s.list()
	if err != nil {
		return nil, err
	}
	unreadable := map[uint32]error{}
	for n, h := range halves {
		g, err := s.openHalves(n, h)
		switch {
		case g != nil:
			s.segments[n] = g
			_ = os.Remove(s.path(n, ".log.new")) // of an interrupted compaction, which replaces it
		case err == nil || errors.Is(err, errHalf):
			if err = errors.Join(err, s.unlink(n)); err != nil {
				s.Unusable = append(s.Unusable, err)
			}
		case fault.Unreadable(err):
			unreadable[n] = err
		default:
			return nil, errors.Join(err, s.Close())
		}
	}
	if len(unreadable) > max(1, len(halves)/8) {
		first := unreadable[slices.Min(slices.Collect(maps.Keys(unreadable)))]
		return nil, errors.Join(fmt.Errorf("%d of %d segments cannot be opened; make them readable for this user, "+
			"or move %s away to start without small blobs: %w", len(unreadable), len(halves), c.Dir, first), s.Close())
	}
	for n, err := range unreadable {
		// If the files cannot be removed either, the next Open tries again.
		s.Unusable = append(s.Unusable, errors.Join(err, s.unlink(n)))
	}
	return s, nil
}

// errHalf reports that one of the two files of a segment is missing.
var errHalf = errors.New("the other file of the segment is missing")

// halves are the files of a segment that exist.
type halves struct {
	data, log int64 // sizes in bytes, or -1
	removing  bool  // Remove was interrupted
}

// list returns the segments in the directory.
func (s *Set) list() (map[uint32]halves, error) {
	files, err := os.ReadDir(s.Dir)
	if err != nil {
		return nil, err
	}
	all := map[uint32]halves{}
	for _, f := range files {
		name, isNew := strings.CutSuffix(f.Name(), ".new")
		n, ok := number(name)
		if !ok {
			continue
		}
		h, known := all[n]
		if !known {
			h.data, h.log = -1, -1
		}
		var size int64
		if fi, err := f.Info(); err == nil {
			size = fi.Size()
		}
		switch {
		case isNew:
			h.removing = true
		case filepath.Ext(name) == ".data":
			h.data = size
		default:
			h.log = size
		}
		all[n] = h
		s.next = max(s.next, n+1)
	}
	return all, nil
}

// openHalves opens segment n. It returns nil if the segment was being created or removed, and errHalf if a file is
// missing.
func (s *Set) openHalves(n uint32, h halves) (*Segment, error) {
	switch {
	case h.data >= 0 && h.log >= 0:
		return s.open(n, 0)
	case h.removing || h.data <= 0 && h.log <= 0:
		return nil, nil
	case h.log < 0:
		return nil, fmt.Errorf("%s: %w", s.path(n, ".data"), errHalf)
	default:
		return nil, fmt.Errorf("%s: %w", s.path(n, ".log"), errHalf)
	}
}

// unlink removes the files of segment n, in the order of Remove.
func (s *Set) unlink(n uint32) error {
	for _, suffix := range []string{".data", ".log", ".log.new"} {
		if err := os.Remove(s.path(n, suffix)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
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
	if g.data, err = durable.OpenFile(s.path(n, ".data"), os.O_RDWR|flag, 0o600); err != nil {
		return nil, err
	}
	if g.log, err = durable.OpenFile(s.path(n, ".log"), os.O_RDWR|flag, 0o600); err != nil {
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
	return slices.SortedFunc(maps.Values(s.segments), func(a, b *Segment) int { return cmp.Compare(a.N, b.N) })
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
	// Open removes data whose log was renamed, while data without a log is damage.
	log := s.path(g.N, ".log")
	renamed := os.Rename(log, log+".new")
	commit.Point("segment log renamed")
	removed := os.Remove(s.path(g.N, ".data"))
	commit.Point("segment data removed")
	for _, e := range []error{renamed, removed, os.Remove(log + ".new")} {
		if e != nil && !errors.Is(e, os.ErrNotExist) {
			err = errors.Join(err, e)
		}
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
	err := errors.Join(g.log.Close(), g.data.Close(), g.closeViews(removed))
	g.set.bytes.Add(-g.size.Load() - int64(g.units)*unit) // after Held has grown
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
