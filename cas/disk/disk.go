// SPDX-License-Identifier: Apache-2.0

// Package disk keeps blobs and action results in a local directory, promises how long they stay, and evicts what
// was used least recently. It is neither shared between processes nor served: one process holds the directory, and
// casserver speaks for it.
//
// # Layout
//
//	DIR/version                              one line, "cloister-store v2"
//	DIR/lock                                 locked by its holder, whose process id it states
//	DIR/boot                                 since which start of the machine nothing can have been lost but by its end
//	DIR/instances                            a line for each instance: its number, and its name
//	DIR/segments/                            blobs below Config.Pack, all action results and mappings: see internal/segment
//	DIR/files/INSTANCE/sha256/ab/HASH-SIZE   a larger blob, mode 0444
//	DIR/copies/INSTANCE/sha256/ab/HASH-SIZE  a copy for File, with ".x" and mode 0555 to be executed; gone after Open
//	DIR/quarantine/                          blobs that were found damaged, for a person to look at
//	DIR/verify                               how far Verify has come
//	DIR/tmp/                                 files being written; swept by Open
//
// INSTANCE is "@" and the name of the instance with all but a-z, 0-9, "-" and "_" written as "%xx"; see escape for
// long names. The two digits are the first of HASH. Everything after DIR is made of checked digests and escaped
// names, so no file name is a client's words.
//
// An action result in a segment is 32 bytes of SHA-256 of the rest, then the deterministic message. A mapping, which
// says of which chunks a blob consists, is 32 bytes likewise, the number of the chunking function, and for each chunk its
// hash and its size; numbers are unsigned varints.
//
// # What is promised
//
//   - What was put, opened, looked up or asked for by Missing is leased: for Config.Lease it is not evicted. If
//     all that there is is leased, a Put is cas.ErrFull. The lease outlives the process.
//   - A blob exists from the moment when its record is in the log of a segment, and was checked against its
//     digest before. Put returns after that, so the death of the process at any point loses nothing that was
//     acknowledged. With Config.Sync neither does a loss of power. Without it, what was put in the last half
//     minute may be lost, and what of it is damaged is found by Open, which reads it all: nothing is called
//     present that is not.
//   - Segments, files, copies and what is being written together exceed neither Config.MaxBytes nor
//     Config.MaxFiles. A Put reserves room before it writes, and evicts to make it. A file counts with its size
//     rounded up to blocks of 4 KiB, as most file systems allocate; directories are not counted, and neither is a
//     segment that was removed but is in a placement.
//   - What an earlier process left is not trusted: a file is handed out, or read from within, only after this
//     process has read it whole, once, and found its hash right. A read from the start always checks the hash.
//   - A blob that is found damaged becomes absent at once, so that a client can put it again, and is kept in
//     quarantine. Config.Corrupt is told.
//   - A file that File handed out is not evicted before its release. A blob that is open for reading may be evicted
//     and is still read to its end.
//   - Where Place says that a blob is, it stays until the placement is released, whatever becomes of the blob or the
//     store: data is never written over, and what was removed stays open.
//
// # Locks
//
// In this order: making a copy (copies.making), making room (Cache.room), reading a file (Cache.reading), one file
// (Cache.files), a placement (placement.mu), what internal/segment holds, one part of the index, and names of
// instances, counts and pins, which are held for moments.
package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// ErrLocked says that another process, or another Cache of this one, holds the directory.
var ErrLocked = errors.New("store is in use")

// version is the content of DIR/version. A change of the layout changes it.
const version = "cloister-store v2\n"

// DefaultLease is how long blobs are kept at least: as long as Bazel and Buck2 take for granted.
const DefaultLease = 3 * time.Hour

// DefaultPack is the size, in bytes, from which a blob is a file of its own.
const DefaultPack = 64 << 10

// Config says where a Cache lives, how large it may grow and what it promises.
type Config struct {
	// Dir is the directory of the store. It is made if it is absent; if it is present it must be a
	// store, or empty.
	Dir string
	// MaxBytes is the budget in bytes over all instances, blobs and action results. It must be
	// positive: no budget is not an unlimited one. What the file system has not is cas.ErrFull, too, and
	// nothing is evicted for it.
	MaxBytes int64
	// MaxFiles is the budget of files. 0 is a tenth of what the file system can hold, or none where it
	// does not say.
	MaxFiles int64
	// Lease is how long a blob stays at least after it was used. 0 is DefaultLease; with a negative one
	// anything may be evicted at any time.
	Lease time.Duration
	// Pack is the size in bytes below which blobs share segments. 0 is DefaultPack; with a negative one
	// every blob is a file of its own.
	Pack int64
	// Sync writes what a Put stores to the disk before the Put returns.
	Sync bool
	// Corrupt, if not nil, is told of each blob that is found damaged, and where it was. Many goroutines
	// may call it at once; it must not use the Cache. The digest is zero if it is of a function whose hashes
	// are longer than 32 bytes: the store keeps only what it needs to know them again.
	Corrupt func(instance string, d cas.Digest, where string)
}

// A Cache is an open directory. It is safe for concurrent use; whoever opened it closes it.
type Cache struct {
	Config
	dir  string   // absolute
	lock *os.File // holds the lock of the directory as long as it is open

	index            *index.Index
	segments         *segment.Set
	fresh            *segment.Appender // of what is put
	moved            *segment.Appender // of what stays when a segment goes
	budget           budget
	instances        instances
	copies           copies
	pins             pins
	quarantined      atomic.Int64 // files in quarantine
	quarantinedBytes atomic.Int64 // their charges

	lease, grain int64 // seconds; see lease.go

	mu     sync.Mutex     // orders begin and Close
	closed atomic.Bool    // set under mu
	calls  sync.WaitGroup // those under way; added to under mu while not closed
	stop   chan struct{}  // closed by Close
	upkeep sync.WaitGroup // the goroutine that maintain is

	room       sync.Mutex // held while entries are evicted
	maintained uint32     // guarded by room; when maintainOnce was called last

	files     [256]sync.Mutex // by the first byte of a hash: held while a file gets its name, or loses it
	reading   [256]sync.Mutex // likewise: held while a file is read to verify it
	verifying chan struct{}   // full while a Verify runs

	rewinds atomic.Int64 // how often a log was about to be written anew

	evictedBlobs, evictedBytes, corrupt atomic.Int64
	logDamage, logLost                  atomic.Int64
}

// Open opens the store in c.Dir, makes it if need be, removes what a previous life left unfinished, and evicts down
// to the budget, as far as leases permit. It reads the logs, and the names of files; blobs it reads only if they were
// written shortly before a loss of power. If the directory is held by another process the error is ErrLocked and
// names that process; a directory that is not a store, one of another version,
// and one that others own or could change, is refused untouched. Nobody else can read it afterwards.
func Open(c Config) (*Cache, error) {
	if c.MaxBytes <= 0 {
		return nil, fmt.Errorf("open store: budget of %d bytes: state a positive number of bytes", c.MaxBytes)
	}
	if c.MaxFiles < 0 {
		return nil, fmt.Errorf("open store: budget of %d files: state a positive number, or 0 for a tenth of the file system's", c.MaxFiles)
	}
	if c.Dir == "" {
		return nil, errors.New("open store: no directory stated")
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", c.Dir, err)
	}
	if c.Lease == 0 {
		c.Lease = DefaultLease
	}
	if c.Pack == 0 {
		c.Pack = DefaultPack
	}
	// What is packed fits into a segment.
	c.Pack = min(c.Pack, segmentLimit(c.MaxBytes)-recordBytes)
	cache := &Cache{Config: c, dir: dir, index: index.New(), stop: make(chan struct{}), verifying: make(chan struct{}, 1)}
	cache.setLease(c.Lease)
	if err := cache.open(); err != nil {
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
	return cache, nil
}

// segmentLimit returns how large segments grow, in bytes: so that one of them is a small part of the budget. As much
// is kept free for what stays when a segment goes.
func segmentLimit(budget int64) int64 { return min(max(budget/32, 16<<10), 256<<20) }

// Instance returns the instance of a name; it is a cas.Instances. The Store and the Actions of the
// result are the same *Store. A name that no instance may have is cas.ErrInvalid. Naming an instance
// costs nothing until something is put into it.
func (c *Cache) Instance(name string) (*cas.Instance, error) {
	if err := cas.CheckInstanceName(name); err != nil {
		return nil, err
	}
	s := &Store{cache: c, name: name}
	return &cas.Instance{Name: name, Store: s, Actions: s}, nil
}

// Stats says how full a Cache is, and what became of what it held.
type Stats struct {
	Blobs    int   // blobs of all instances; one that is kept as chunks counts beside them
	Results  int   // action results of all instances
	Bytes    int64 // what counts against the budget, Puts under way included
	MaxBytes int64 // the budget
	Files    int64 // files that count against the budget of files
	MaxFiles int64 // that budget; 0 is none
	Segments int
	// HeldBytes is what removed segments take for as long as somebody has what Place returned. It does not count
	// against the budget.
	HeldBytes int64
	Lease     time.Duration // negative: nothing is promised

	// Since Open:
	EvictedBlobs, EvictedBytes int64
	Corrupt                    int64 // blobs that were found damaged

	// What Open found of the logs: bytes that were not readable, beside a torn end, and records of bytes that are
	// not there. Each such place is a blob or a result less, and no other.
	LogDamage, LogLost int64
}

// Stats returns the state of the moment.
func (c *Cache) Stats() Stats {
	s := Stats{
		MaxBytes: c.MaxBytes, MaxFiles: c.MaxFiles, Segments: c.segments.Len(), HeldBytes: c.segments.Held(), Lease: c.Lease,
		EvictedBlobs: c.evictedBlobs.Load(), EvictedBytes: c.evictedBytes.Load(), Corrupt: c.corrupt.Load(),
		LogDamage: c.logDamage.Load(), LogLost: c.logLost.Load(),
	}
	s.Bytes, s.Files = c.used()
	s.Blobs, s.Results = c.budget.counts()
	return s
}

// Close waits for the calls under way and gives the directory back. A Put among them fails as soon as its
// reader returns, and every later call at once, with os.ErrClosed; what File handed out is never
// released. Readers that are open may be read to their end, and placements until they are released.
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
	return errors.Join(c.segments.Close(), c.instances.close(), c.lock.Close())
}

// begin counts a call as under way until its end, or fails with os.ErrClosed.
func (c *Cache) begin() (end func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return nil, c.closedError()
	}
	c.calls.Add(1)
	return c.calls.Done, nil
}

// beginWith is begin for a call with a context that may have ended.
func (c *Cache) beginWith(ctx context.Context) (end func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return c.begin()
}

func (c *Cache) closedError() error { return fmt.Errorf("store %s: %w", c.dir, os.ErrClosed) }

// upkeepEvery is how often the store is made to outlive a loss of power: what was put since the last time would
// have to be read after one.
const upkeepEvery = 30 * time.Second

// maintain does what is to be done now and then, until Close.
func (c *Cache) maintain() {
	tick := time.NewTicker(upkeepEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.stop:
			return
		case <-tick.C:
		}
		c.maintainOnce()
	}
}

// maintainOnce makes the store outlive a loss of power, and shortens logs. What fails is read again after one, or
// tried again the next time.
func (c *Cache) maintainOnce() {
	now := seconds(time.Now())
	_ = c.segments.MarkDurable(now, c.flush)
	if !c.room.TryLock() {
		return // a segment may be read for its removal
	}
	defer c.room.Unlock()
	if now < c.maintained {
		c.putBack(now)
	}
	c.maintained = now
	for _, g := range c.segments.Segments() {
		if g.NeedsCompaction() {
			c.seal(g)
			if c.rewindVerify(g.N) == nil {
				_ = g.Compact(now, c.wanted, c.rerecord)
			}
		}
	}
}

// seal makes g a segment that nothing is added to.
func (c *Cache) seal(g *segment.Segment) {
	c.fresh.Seal(g)
	c.moved.Seal(g)
}

// flush writes the file system of the store to its disk.
func (c *Cache) flush() error { return syncFileSystem(c.lock) }

// wanted reports whether the put r is what the index tells of, and gives it the stamp of that.
func (c *Cache) wanted(r *segment.Record) bool {
	e, ok := c.index.Get(r.Key)
	if !ok || e.Position != r.Position {
		return false
	}
	r.Stamp = e.Stamp
	return true
}

// rerecord tells the index that the record of an entry is at another place of the same log.
func (c *Cache) rerecord(from index.Position, to *segment.Record) {
	c.index.Update(to.Key, func(e *index.Entry) {
		if e.Position == from {
			e.Position = to.Position
		}
	})
}

// writeError returns err with what to do about it, and as cas.ErrFull if there is no space.
func (c *Cache) writeError(err error) error {
	if isFull(err) {
		return fmt.Errorf("store %s: %w: %w: free space or inodes on its file system, or give the store a budget that fits",
			c.dir, cas.ErrFull, err)
	}
	return fmt.Errorf("store %s: %w", c.dir, err)
}
