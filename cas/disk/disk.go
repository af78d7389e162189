// SPDX-License-Identifier: Apache-2.0

// Package disk keeps blobs and action results as files of a local directory, and evicts what was used
// least recently. It is neither shared between processes nor served: one process holds the directory,
// and casserver speaks for it.
//
// # Layout
//
//	DIR/version                                         one line, "cloister-store v1"
//	DIR/lock                                            locked by its holder, whose process id it states
//	DIR/tmp/                                            files being written; swept by Open
//	DIR/instances/INSTANCE/blobs/sha256/ab/HASH-SIZE    a blob, mode 0444
//	DIR/instances/INSTANCE/execs/sha256/ab/HASH-SIZE    its copy with mode 0555, made when first asked for
//	DIR/instances/INSTANCE/results/sha256/ab/HASH-SIZE  an action result: 32 bytes of SHA-256 of the rest,
//	                                                    then the deterministic message
//
// INSTANCE is "@" and the name of the instance with all but a-z, 0-9, "-" and "_" written as "%xx"; see
// escape for long names. The two digits are the first of HASH. Everything after DIR is made of checked
// digests and escaped names, so no file name is a client's words.
//
// # Guarantees
//
//   - A file under instances is whole: it is written in tmp, checked against its digest, and renamed
//     into place. That survives the death of the process at any point. It does not survive a loss of
//     power: nothing is synced. What such a loss leaves behind is found by its size at Open, or by
//     its hash when it is read, and is then removed.
//   - Files in tmp and under instances together never exceed the budget. A Put reserves room, and
//     evicts to make it, before it writes: not its stated size at once but twice what has arrived, and
//     64 KiB to begin with. So large Puts that do not fit beside each other may all fail. A file counts with
//     its size rounded up to blocks of 4 KiB, as most file systems allocate; directories are not
//     counted.
//   - A file that Filer.File handed out is not evicted before its release. A blob that is open for
//     reading may be evicted and is still read to its end.
//   - What an earlier process left is not trusted: a file is handed out, or read from within, only
//     after this process has read it whole, once, and found its hash right. A read from the start
//     always checks the hash, and fails where the end would be if it is wrong: who stops before has
//     unverified bytes. An action result always checks its own hash. Damage done to a file after it
//     was verified, by a failing disk or by somebody with access to the directory, is noticed by the
//     next read from start to end, and by the next process.
//   - An entry that is found damaged becomes absent, so that a client can put it again.
//
// # Locks
//
// The index in memory is guarded by one mutex, under which no file is touched. A file changes its name
// or goes away only under the lock of its shard, the first two digits, and the index says so before
// that lock is given back. Order: making room or verifying an entry, shard, index.
package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// ErrLocked says that another process, or another Cache of this one, holds the directory.
var ErrLocked = errors.New("store is in use")

// version is the content of DIR/version. A change of the layout changes it.
const version = "cloister-store v1\n"

// Config says where a Cache lives and how large it may grow.
type Config struct {
	// Dir is the directory of the store. It is made if it is absent; if it is present it must be a
	// store, or empty.
	Dir string
	// MaxBytes is the budget in bytes over all instances, blobs and action results. It must be
	// positive: no budget is not an unlimited one.
	MaxBytes int64
}

// A Cache is an open directory. It is safe for concurrent use; whoever opened it closes it.
type Cache struct {
	dir   string // absolute
	index index
	lock  *os.File // holds the lock of the directory as long as it is open

	mu     sync.Mutex     // orders begin and Close
	closed atomic.Bool    // set under mu
	calls  sync.WaitGroup // those under way; added to under mu while not closed

	room   sync.Mutex      // held while entries are evicted to make room
	shards [256]sync.Mutex // by the first two digits of a hash; see the package comment
}

// Open opens the store in c.Dir, makes it if need be, removes what a previous life left unfinished, and
// evicts down to c.MaxBytes. It reads the name and size of every file, not its content. If the
// directory is held by another process the error is ErrLocked and names that process; a directory that
// is not a store, or one of another version, is refused untouched.
func Open(c Config) (*Cache, error) {
	if c.MaxBytes <= 0 {
		return nil, fmt.Errorf("open store: budget of %d bytes: state a positive number of bytes", c.MaxBytes)
	}
	if c.Dir == "" {
		return nil, errors.New("open store: no directory stated")
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", c.Dir, err)
	}
	cache := &Cache{dir: dir, index: index{max: c.MaxBytes, entries: map[key]*entry{}}}
	if err := cache.open(); err != nil {
		if cache.lock != nil {
			err = errors.Join(err, cache.lock.Close())
		}
		return nil, err
	}
	return cache, nil
}

// Instance returns the instance of a name; it is a cas.Instances. The Store and the Actions of the
// result are the same *Store. A name that no instance may have is cas.ErrInvalid. Naming an instance
// costs nothing until something is put into it.
func (c *Cache) Instance(name string) (*cas.Instance, error) {
	if err := cas.CheckInstanceName(name); err != nil {
		return nil, err
	}
	s := &Store{cache: c, instance: escape(name)}
	return &cas.Instance{Name: name, Store: s, Actions: s}, nil
}

// Stats says how full a Cache is.
type Stats struct {
	Blobs    int   // blobs of all instances
	Results  int   // action results of all instances
	Bytes    int64 // what counts against the budget, Puts under way included
	MaxBytes int64 // the budget
}

// Stats returns the state of the moment.
func (c *Cache) Stats() Stats { return c.index.stats() }

// Close waits for the calls under way and gives the directory back. A Put among them fails as soon as its
// reader returns, and every later call at once, with os.ErrClosed; what File handed out is never
// released. Readers that are open may be read to their end.
func (c *Cache) Close() error {
	c.mu.Lock()
	again := c.closed.Swap(true)
	c.mu.Unlock()
	if again {
		return c.closedError()
	}
	c.calls.Wait()
	return c.lock.Close()
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

func (c *Cache) closedError() error { return fmt.Errorf("store %s: %w", c.dir, os.ErrClosed) }

// reserve makes room for n bytes, evicting as need be, or fails with cas.ErrFull. The caller gives the
// room to an entry by commit, or back by index.give.
func (c *Cache) reserve(n int64) error {
	if c.index.take(n) {
		return nil
	}
	c.room.Lock()
	defer c.room.Unlock()
	// An entry that cannot be removed must not stop the others from being.
	var stuck []*entry
	var first error
	defer func() {
		for _, e := range stuck {
			c.index.spare(e)
		}
	}()
	for !c.index.take(n) {
		e := c.index.doomOldest()
		if e == nil {
			err := fmt.Errorf("store %s: no room for %d bytes, all of its %d are in use: %w",
				c.dir, n, c.index.max, cas.ErrFull)
			return errors.Join(err, first)
		}
		if err := c.bury(e); err != nil {
			stuck = append(stuck, e)
			if first == nil {
				first = err
			}
		}
	}
	return nil
}

// bury removes the file and the entry of e, unless e was put again or is pinned.
func (c *Cache) bury(e *entry) error {
	mu := c.shard(e.key)
	mu.Lock()
	defer mu.Unlock()
	if !c.index.isDoomed(e) {
		return nil
	}
	if err := os.Remove(c.path(e.key)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	c.index.remove(e)
	return nil
}

// verify returns nil if the file of e was verified, and else reads it whole: then cas.ErrCorrupt says that
// it is not what its key says. Of several callers at once one reads.
func (c *Cache) verify(ctx context.Context, e *entry) error {
	e.reading.Lock()
	defer e.reading.Unlock()
	if c.index.isVerified(e) {
		return nil
	}
	if err := readWhole(ctx, c.path(e.key), e.key.digest); err != nil {
		return err
	}
	c.index.setVerified(e, true)
	return nil
}

// lose makes e absent, because its file is damaged or gone. If the file cannot be removed, the entry
// stays doomed: absent to everyone, and replaced by the next Put.
func (c *Cache) lose(e *entry) {
	c.index.doom(e)
	_ = c.bury(e)
}

// commit makes the finished file tmp the file of k, in n bytes reserved for it, and returns its entry,
// pinned once more if pin. If a blob k is present already, that one is kept: then, as after an error,
// tmp and the reservation are left to the caller.
func (c *Cache) commit(tmp string, k key, n int64, pin bool) (e *entry, kept bool, err error) {
	mu := c.shard(k)
	mu.Lock()
	defer mu.Unlock()
	now := time.Now()
	if k.kind != result {
		if e, _ := c.index.use(k, now, pin); e != nil {
			return e, false, nil
		}
	}
	access, modification := stampTimes(now)
	if err := os.Chtimes(tmp, access, modification); err != nil {
		return nil, false, c.writeError(err)
	}
	path := c.path(k)
	// Commit point: from here on the entry is present, also to whoever opens the store next.
	err = os.Rename(tmp, path)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = os.Rename(tmp, path)
		}
	}
	if err != nil {
		return nil, false, c.writeError(err)
	}
	return c.index.put(k, n, now, pin), true, nil
}

// release undoes one pin of e, and removes its file if that had to wait for it.
func (c *Cache) release(e *entry) {
	if c.index.unpin(e) {
		_ = c.bury(e) // left doomed if it fails; see lose
	}
}

// use returns the entry of k, marked as used and pinned if pin, or nil.
func (c *Cache) use(k key, pin bool) *entry {
	now := time.Now()
	e, stale := c.index.use(k, now, pin)
	if stale {
		c.stamp(k, now)
	}
	return e
}

// stamp records on disk that k was used. A failure is of no consequence but that, after the next Open,
// k is taken for older than it is.
func (c *Cache) stamp(k key, now time.Time) {
	access, modification := stampTimes(now)
	_ = os.Chtimes(c.path(k), access, modification)
}

// writeError returns err with what to do about it, and as cas.ErrFull if there is no space.
func (c *Cache) writeError(err error) error {
	if isFull(err) {
		return fmt.Errorf("store %s: %w: %w: free space on its file system, or give the store a budget that fits",
			c.dir, cas.ErrFull, err)
	}
	return fmt.Errorf("store %s: %w", c.dir, err)
}

func (c *Cache) shard(k key) *sync.Mutex {
	// A Digest has been checked to be hexadecimal.
	n, _ := strconv.ParseUint(k.digest.Hash()[:2], 16, 8)
	return &c.shards[n]
}

func (c *Cache) path(k key) string {
	h := k.digest.Hash()
	return filepath.Join(c.dir, "instances", k.instance, k.kind.String(), k.digest.Function().String(), h[:2],
		h+"-"+strconv.FormatInt(k.digest.Size(), 10))
}
