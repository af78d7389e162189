// SPDX-License-Identifier: Apache-2.0

// Package disk stores blobs and action results in a local directory. It guarantees how long they stay, and evicts the
// least recently used. Only one process at a time can open a directory; casserver serves it to others.
//
// # Layout
//
//	DIR/version                              one line, "cloister-store v2"
//	DIR/lock                                 locked by the process that has the store open; holds its process ID
//	DIR/boot                                 the boot ID of the machine when the store was last known to be intact, or
//	                                         "flush failed"
//	DIR/instances                            a line for each instance: its number and its name
//	DIR/segments/                            blobs below Config.Pack, action results, chunk lists; see internal/segment
//	DIR/files/INSTANCE/sha256/ab/HASH-SIZE   a larger blob, mode 0644
//	DIR/copies/INSTANCE/sha256/ab/HASH-SIZE  a copy for File, with ".x" and mode 0755 if executable; removed by Open
//	DIR/quarantine/                          damaged blobs, for inspection
//	DIR/verify                               position of an interrupted Verify
//	DIR/checkpoint                           clock and lengths of logs; see checkpoint.go
//	DIR/tmp/                                 files being written; cleared by Open
//
// INSTANCE is "@" and the name of the instance, with all bytes except a-z, 0-9, "-" and "_" are written as "%xx"; see
// escape for long names. The two digits are the first of HASH. File names consist of validated digests and escaped
// names, so clients cannot choose them.
//
// An action result in a segment is the SHA-256 of the rest and the deterministic message. A chunk list is the SHA-256
// of the rest, the number of the chunking function, and hash and size of each chunk; numbers are unsigned varints.
//
// # Guarantees
//
//   - Lease: an entry is not evicted within Config.Lease after it was put, opened, looked up or listed in a call of
//     Missing. If everything is leased, Put returns cas.ErrFull. Leases survive the end of the process.
//   - Durability: a blob exists once it was verified and its record is in the log of a segment. Put returns after
//     that, so a crash of the process loses nothing that was acknowledged, nor does a power failure with Config.Sync.
//     Without it, a power failure may lose the puts of the last half minute; Open reads these and drops damaged ones.
//     The store never reports an absent blob as present. After a failed flush it accepts puts again when it has written
//     again what the kernel may have dropped; see flush.go.
//   - Budget: segments, files, copies and writes in progress together never exceed Config.MaxBytes or
//     Config.MaxFiles. A Put reserves room before it writes, and evicts if necessary. The size of a file is rounded
//     up to 4 KiB, as in most file systems. Directories do not count. Removed segments that cas.Locations
//     still use count up to a quarter of Config.MaxBytes; see SetHolder.
//   - Integrity: a file of an earlier process is handed out or read from an offset only after this process has read and
//     verified it. A read from the start is always verified.
//   - Damage: a damaged blob becomes absent at once, so that a client can put it again. It is kept in quarantine and
//     reported to Config.Corrupt.
//   - Files from File are not evicted before they are released. A blob may be evicted while it is being read; the
//     reader still gets all of it.
//   - Extents from Locate stay valid until they are released, even if the blob is evicted or the store closed: data is
//     never overwritten, and removed files stay open.
//
// # Chunk lists
//
// A chunk list makes a blob out of other blobs of the store. It is part of the store rather than a decorator, because
// leases, damage and placement are decided here. Using the blob uses its list and its chunks; the blob is absent while
// a chunk is. Lists are flat: a chunk that is itself a list is replaced by its chunks. A store in front of an upstream
// keeps lists locally and whole blobs upstream, whose other users need not know about lists.
//
// # Locks
//
// In this order: copies.making, Cache.room, Cache.reading, Cache.files, location.mu, the locks of internal/segment, an
// index shard, and the locks of instances, budget and pins, which are held briefly.
package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// ErrLocked reports that another process, or another Cache of this process, has the directory open.
var ErrLocked = errors.New("store is in use")

// version is the content of DIR/version. A change of the layout changes it.
const version = "cloister-store v2\n"

// DefaultLease is the default of Config.Lease. Bazel and Buck2 rely on leases of about this length.
const DefaultLease = 3 * time.Hour

// defaultPack is the default of Config.Pack, in bytes.
const defaultPack = 64 << 10

// Config configures a Cache.
type Config struct {
	// Dir is the directory of the store. It is created if necessary. An existing directory must be a store or empty.
	Dir string
	// MaxBytes is the budget in bytes for all instances. It must be positive. A full file system also returns
	// cas.ErrFull, but causes no eviction.
	MaxBytes int64
	// MaxFiles is the budget of files. 0 means a tenth of the inodes of the file system, or no limit if that number is
	// unknown.
	MaxFiles int64
	// Lease is the minimum time that a blob stays after its last use. 0 means DefaultLease. If negative, anything may
	// be evicted at any time.
	Lease time.Duration
	// Pack is the size in bytes below which blobs are packed into segments. 0 means 64 KiB. If negative, every
	// blob is a separate file.
	Pack int64
	// Sync makes Put return only when the data survives a power failure.
	Sync bool
	// Corrupt, if not nil, is called with each damaged blob and its location. Calls may be concurrent, and must not use
	// the Cache. The digest is zero if its hash is longer than 32 bytes: the store does not keep those.
	Corrupt func(instance string, d cas.Digest, where string)
	// Log receives all other problems of the directory, and when they end; nil discards it.
	Log *slog.Logger
}

// A Cache is an open store directory. It is safe for concurrent use. Use Open, whose caller closes
// the Cache; the zero Cache is not usable.
type Cache struct {
	config Config
	dir    string   // absolute
	lock   *os.File // locks the directory while open

	index            *index.Index
	segments         *segment.Set
	fresh            *segment.Appender // for puts
	moved            *segment.Appender // for entries moved from evicted segments
	budget           budget
	holder           atomic.Pointer[func() bool] // see SetHolder
	instances        instances
	copies           copies
	pins             pins
	quarantined      atomic.Int64 // files in quarantine
	quarantinedBytes atomic.Int64 // their charges
	orphans          orphans
	refusal          refusal
	failing          atomic.Bool   // the last maintenance failed
	unflushed        chan struct{} // receives a value when a flush has failed
	flushing         sync.Mutex    // held by makeDurable
	unmarked         bool          // guarded by flushing; DIR/boot does not record a recovery yet
	recovering       atomic.Bool   // set while flushing is held: makeDurable retries

	lease, grain int64 // seconds; see lease.go
	clock        clock

	saving  sync.Mutex
	saved   []byte // guarded by saving; lengths of logs in the checkpoint
	savedAt int64  // guarded by saving; its time

	mu     sync.Mutex     // orders begin and Close
	closed atomic.Bool    // set under mu
	calls  sync.WaitGroup // calls in progress; added to under mu while not closed
	stop   chan struct{}  // closed by Close
	upkeep sync.WaitGroup // the goroutine of maintain

	room sync.Mutex // held during eviction and compaction

	files     [256]sync.Mutex // by first byte of the hash; held while a file is renamed or removed
	reading   [256]sync.Mutex // by first byte of the hash; held while a file is read for verification
	verifying chan struct{}   // full while a Verify runs

	rewinds atomic.Int64 // number of compactions

	evictedBlobs, evictedBytes, corrupt atomic.Int64
	logDamage, logLost, lostSegments    atomic.Int64
}

// Open opens the store in c.Dir and creates it if necessary. It removes unfinished files. It reads logs and file names,
// and those blobs that may have been damaged by a power failure. If the budget was larger before, the store evicts down
// to it at the first put or after half a minute; until then the caller can use blobs whose leases expired while the
// store was closed.
//
// If another process has the store open, Open returns ErrLocked and names that process. It refuses a directory that is
// not a store, has another version, or is owned or writable by other users. It makes the directory private.
func Open(c Config) (*Cache, error) {
	if c.MaxBytes <= 0 {
		return nil, fmt.Errorf("open store: budget of %d bytes: it must be positive", c.MaxBytes)
	}
	if c.MaxFiles < 0 {
		return nil, fmt.Errorf("open store: budget of %d files: it must be positive, or 0 for a tenth of the inodes", c.MaxFiles)
	}
	if c.Dir == "" {
		return nil, errors.New("open store: no directory given")
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", c.Dir, err)
	}
	c.Lease = cmp.Or(c.Lease, DefaultLease)
	c.Pack = cmp.Or(c.Pack, defaultPack)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	// A packed blob must fit into a segment.
	c.Pack = min(c.Pack, segmentLimit(c.MaxBytes)-recordBytes)
	cache := &Cache{
		config: c, dir: dir, index: index.New(), stop: make(chan struct{}), verifying: make(chan struct{}, 1),
		unflushed: make(chan struct{}, 1),
	}
	cache.setLease(c.Lease)
	cache.clock.begin()
	rest, err := cache.open()
	if err != nil {
		if isFull(err) {
			err = cache.writeError(err)
		}
		if cache.segments != nil {
			err = errors.Join(err, cache.segments.Close())
		}
		err = errors.Join(err, cache.instances.close())
		if cache.lock != nil {
			err = errors.Join(err, cache.lock.Close())
		}
		return nil, err
	}
	cache.upkeep.Go(cache.maintain)
	if len(rest) > 0 {
		cache.upkeep.Go(func() { cache.adoptRest(rest) })
	}
	return cache, nil
}

// segmentLimit returns the maximum size of a segment in bytes, a small part of the budget. The same amount is kept free
// for moves.
func segmentLimit(budget int64) int64 { return min(max(budget/32, 16<<10), 256<<20) }

// Instance returns the instance with this name, or cas.ErrInvalid for an invalid name. It is a cas.Instances. Store and
// Actions of the result are the same *Store. An instance takes no resources before its first put.
func (c *Cache) Instance(name string) (*cas.Instance, error) {
	if err := cas.CheckInstanceName(name); err != nil {
		return nil, err
	}
	s := &Store{cache: c, name: name}
	return &cas.Instance{Name: name, Store: s, Actions: s}, nil
}

// Stats are the statistics of a Cache.
type Stats struct {
	Blobs    int   // blobs of all instances, including chunks and chunk lists
	Results  int   // action results of all instances
	Bytes    int64 // bytes that count against the budget, including writes in progress
	MaxBytes int64 // the budget
	Files    int64 // files that count against the budget of files
	MaxFiles int64 // that budget; 0 means no limit
	Segments int
	// HeldBytes is the size of removed segments that a cas.Location still uses. Bytes includes it, up to a quarter of
	// MaxBytes.
	HeldBytes int64
	Lease     time.Duration // negative means none

	// Since Open:
	EvictedBlobs, EvictedBytes int64
	Corrupt                    int64 // damaged blobs found
	FailedFlushes              int64 // attempts to make data durable that failed

	// Found by Open: unreadable or missing bytes of logs, not counting a torn end, and records of data that is missing or
	// in a directory that cannot be read. Each loses only the affected blob or result.
	LogDamage, LogLost int64
	// LostSegments is the number of segments that Open could not use at all.
	LostSegments int64
}

// Stats returns the current statistics.
func (c *Cache) Stats() Stats {
	s := Stats{
		MaxBytes: c.config.MaxBytes, MaxFiles: c.config.MaxFiles, Lease: c.config.Lease,
		Segments: c.segments.Len(), HeldBytes: c.segments.Held(),
		EvictedBlobs: c.evictedBlobs.Load(), EvictedBytes: c.evictedBytes.Load(), Corrupt: c.corrupt.Load(),
		FailedFlushes: int64(c.segments.Failures()),
		LogDamage:     c.logDamage.Load(), LogLost: c.logLost.Load(), LostSegments: c.lostSegments.Load(),
	}
	s.Bytes, s.Files = c.used()
	s.Blobs, s.Results = c.budget.counts()
	return s
}

// Close waits for calls in progress and unlocks the directory. A Put in progress fails with os.ErrClosed when its
// reader returns, and later calls fail at once. Files from File are not released. Open readers and cas.Locations stay
// usable.
func (c *Cache) Close() error {
	c.mu.Lock()
	again := c.closed.Swap(true)
	c.mu.Unlock()
	if again {
		return c.closedError()
	}
	close(c.stop)
	c.calls.Wait()
	c.upkeep.Wait()
	c.saveNow()
	return errors.Join(c.segments.Close(), c.instances.close(), c.lock.Close())
}

// begin registers a call until end is called, or fails with os.ErrClosed.
func (c *Cache) begin() (end func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return nil, c.closedError()
	}
	c.calls.Add(1)
	return c.calls.Done, nil
}

// beginWith is begin for a call with a context.
func (c *Cache) beginWith(ctx context.Context) (end func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return c.begin()
}

func (c *Cache) closedError() error { return fmt.Errorf("store %s: %w", c.dir, os.ErrClosed) }

// now returns the time as a stamp.
func (c *Cache) now() uint32 { return c.clock.now() }

// seal ends appending to g.
func (c *Cache) seal(g *segment.Segment) {
	c.fresh.Seal(g)
	c.moved.Seal(g)
}

// isLive reports whether r is the record of an entry, and sets its stamp to that of the entry.
func (c *Cache) isLive(r *segment.Record) bool {
	e, ok := c.index.Get(r.Key)
	if !ok || e.Position != r.Position {
		return false
	}
	r.Stamp = e.Stamp
	return true
}

// recordMoved updates the position of an entry after compaction.
func (c *Cache) recordMoved(from index.Position, to *segment.Record) {
	c.index.Update(to.Key, func(e *index.Entry) {
		if e.Position == from {
			e.Position = to.Position
		}
	})
}

// writeError adds context to err, and makes it cas.ErrFull if the disk is full.
func (c *Cache) writeError(err error) error {
	if isFull(err) {
		return &cas.FullError{Limit: cas.LimitDisk, Err: fmt.Errorf(
			"store %s: %w: %w: free space or inodes on its file system, or lower the store's budget", c.dir, cas.ErrFull, err)}
	}
	if why := c.noteFailure(err); why != nil {
		return c.unwritableError(why)
	}
	if errors.Is(err, segment.ErrDistrusted) {
		return fmt.Errorf("store %s: %w: %w; retry", c.dir, cas.ErrUnwritable, err)
	}
	return fmt.Errorf("store %s: %w", c.dir, err)
}
