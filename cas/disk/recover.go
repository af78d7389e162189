// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"encoding/hex"
	"errors"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A recovery fills the index of a Cache from the files of an earlier process.
type recovery struct {
	cache     *Cache
	instances int // number of known instances
	functions []cas.Function
	now       uint32

	earlier   checkpoint // of the earlier process
	powerLost bool       // there may have been a power failure since the last Open
	// flushFailed means that an earlier process did not write again what a failed flush may have lost.
	flushFailed bool
	orphans     []index.Key

	mu         sync.Mutex
	orders     map[index.Key]uint32 // guarded by mu; of results and chunk lists
	replaced   []index.Entry        // guarded by mu; superseded or duplicate results and chunk lists
	unreliable map[index.Key]bool   // guarded by mu; entries with no put but doubtful ones
	doubtful   map[uint32]uint32    // guarded by mu; first doubtful record by segment
	unreadable []*segment.Segment   // guarded by mu; their logs cannot be read
}

// replay reads the logs of all segments in parallel.
func (r *recovery) replay() error {
	r.orders, r.doubtful, r.unreliable = map[index.Key]uint32{}, map[uint32]uint32{}, map[index.Key]bool{}
	segments := make(chan *segment.Segment)
	errs := make([]error, runtime.GOMAXPROCS(0))
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			v := visitor{recovery: r, blobs: make([]index.Entry, 0, maxBlobs)}
			for g := range segments {
				damaged, lost, err := g.Replay(&v, r.expected(g))
				v.flush()
				if errors.Is(err, segment.ErrUnreadable) {
					r.setAside(g, err)
					continue
				}
				errs[i] = errors.Join(errs[i], err)
				r.cache.logDamage.Add(damaged)
				r.cache.logLost.Add(int64(lost))
			}
		})
	}
	for _, g := range r.cache.segments.Segments() {
		segments <- g
	}
	close(segments)
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, g := range r.unreadable {
		if err := r.cache.segments.Remove(g); err != nil {
			r.cache.config.Log.Warn("an unreadable segment cannot be removed; remove its files", "err", err)
		}
	}
	var top uint32
	for _, o := range r.orders {
		top = max(top, o)
	}
	r.cache.segments.SetOrder(top)
	for i := range r.replaced {
		r.cache.forget(&r.replaced[i])
	}
	return nil
}

// expected returns the length of the log of g in the last checkpoint, or of its durable part after a power failure.
func (r *recovery) expected(g *segment.Segment) uint32 {
	if r.powerLost {
		return r.earlier.logs[g.N].durable
	}
	return r.earlier.logs[g.N].all
}

// setAside gives up a segment whose log cannot be read.
func (r *recovery) setAside(g *segment.Segment, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unreadable = append(r.unreadable, g)
	r.cache.loseSegment(err)
}

// loseSegment reports that the blobs of a segment are lost because of err.
func (c *Cache) loseSegment(err error) {
	c.lostSegments.Add(1)
	c.config.Log.Warn("a segment is lost; its blobs are absent until they are uploaded or produced again", "err", err)
}

// A visitor receives the logs for a recovery. It adds blobs to the index in groups.
type visitor struct {
	*recovery
	blobs       []index.Entry
	lastDoubted uint32 // the last segment with a doubtful put
}

// Put implements segment.Visitor. Logs are read in no particular order. Of two puts of a blob either may win, with the
// later stamp. Of two results the later one wins.
func (v *visitor) Put(p *segment.Record, doubtful bool) {
	if !v.valid(p.Key) {
		return
	}
	if doubtful = doubtful && v.powerLost; doubtful && v.lastDoubted != p.Segment {
		v.lastDoubted = p.Segment
		v.mu.Lock()
		v.doubtful[p.Segment] = p.Position.Record
		v.mu.Unlock()
	}
	if !isRecord(p.Key) && !doubtful {
		if v.blobs = append(v.blobs, p.Entry); len(v.blobs) == maxBlobs {
			v.flush()
		}
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if isRecord(p.Key) && !v.newest(p, doubtful) {
		return
	}
	v.replace(p.Entry, doubtful)
}

// newest reports whether the result p supersedes the entry in the index, and remembers which of the two is obsolete.
func (r *recovery) newest(p *segment.Record, doubtful bool) bool {
	order, known := r.orders[p.Key]
	old, ok := r.cache.index.Get(p.Key)
	if known && (order > p.Order || order == p.Order && doubtful && ok) {
		r.replaced = append(r.replaced, p.Entry)
		return false
	}
	r.orders[p.Key] = p.Order
	if ok {
		r.replaced = append(r.replaced, old)
		if order != p.Order {
			delete(r.unreliable, p.Key) // the later result wins even if it is doubtful
			r.cache.index.Remove(p.Key, func(*index.Entry) bool { return true })
		}
	}
	return true
}

// maxBlobs is the size of a group.
const maxBlobs = 32 << 10

// flush adds the waiting blobs to the index.
func (v *visitor) flush() {
	present := v.cache.index.AddAll(v.blobs)
	v.blobs = v.blobs[:0]
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range present {
		v.replace(p, false)
	}
}

// replace adds p to the index. If there is an entry, it keeps the later stamp and the better put: a packed blob is
// better than a file, which may have been evicted without a trace in the logs, and a doubtful put never replaces
// another. The caller holds mu.
func (r *recovery) replace(p index.Entry, doubtful bool) {
	if r.cache.index.Add(&p) {
		if doubtful {
			r.unreliable[p.Key] = true
		}
		return
	}
	unreliable := r.unreliable[p.Key]
	r.cache.index.Update(p.Key, func(e *index.Entry) {
		stamp := max(e.Stamp, p.Stamp)
		if (e.File || !p.File || unreliable) && (unreliable || !doubtful) {
			*e = p
		}
		e.Stamp = stamp
	})
	if !doubtful {
		delete(r.unreliable, p.Key)
	}
}

// valid reports whether k can be a key. A damaged log may contain others.
func (r *recovery) valid(k index.Key) bool {
	kind := k.Kind & kindMask
	return int(k.Instance) < r.instances && (kind == blob || kind == result || kind == chunkList) && k.Size >= 0 &&
		slices.Contains(r.functions, cas.Function(k.Kind>>kindBits))
}

// Touch implements segment.Visitor.
func (v *visitor) Touch(p *segment.Record, stamp uint32) {
	v.flush()
	v.cache.index.Update(p.Key, func(e *index.Entry) {
		if e.Stamp <= v.now { // otherwise restamp replaced a stamp from the future
			stamp = max(e.Stamp, stamp)
		}
		e.Stamp = stamp
	})
}

// Drop implements segment.Visitor. An earlier result must not reappear, but a moved copy of this one may follow.
func (v *visitor) Drop(p *segment.Record) {
	if !v.valid(p.Key) || !isRecord(p.Key) {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if order, ok := v.orders[p.Key]; ok && order >= p.Order {
		return
	}
	v.orders[p.Key] = p.Order
	v.cache.index.Remove(p.Key, func(*index.Entry) bool { return true })
}

// matchFiles drops entries whose file is missing, finds files without an entry, and counts everything.
func (r *recovery) matchFiles() error {
	c := r.cache
	found := map[index.Key]bool{}
	unread := map[string]bool{} // directories
	err := c.walkFiles(func(path string, k index.Key, entry fs.DirEntry, ok bool) error {
		if !ok {
			return nil // not a file of the store
		}
		e, known := c.index.Get(k)
		if known && e.File {
			found[k] = true
			return nil
		}
		if fi, err := entry.Info(); known || err != nil && !fault.Ours(err) {
			c.discard(path)
		} else {
			r.orphan(path, k, fi)
		}
		return nil
	}, func(dir string, err error) error {
		c.config.Log.Warn("a directory of the store cannot be read; its blobs are absent", "err", err)
		unread[dir] = true
		return fs.SkipDir
	})
	if err != nil {
		return err
	}
	var gone []index.Key
	live := map[uint32]*[2]int64{} // bytes and files, by segment
	for _, g := range c.segments.Segments() {
		live[g.N] = new([2]int64)
	}
	now, newest, ahead := c.now(), int64(0), false
	c.index.Each(func(e *index.Entry) bool {
		ahead = ahead || e.Stamp > now
		if stamp := int64(e.Stamp); stamp > newest && stamp <= min(r.earlier.until, int64(now)) {
			newest = stamp
		}
		switch {
		case !e.File:
			live[e.Segment][0] += segment.Padded(int64(e.Length))
		case found[e.Key]:
			live[e.Segment][1]++
			c.budget.bytes += charge(e.Size)
			c.budget.files++
		default:
			gone = append(gone, e.Key)
			return true
		}
		if isResult(e.Key) {
			c.budget.results++
		} else {
			c.budget.blobs++
		}
		return true
	})
	for _, g := range c.segments.Segments() {
		g.Live.Store(live[g.N][0])
		g.Files.Store(live[g.N][1])
	}
	for _, k := range gone {
		c.index.Remove(k, func(*index.Entry) bool { return true })
	}
	c.countUnread(unread, gone)
	r.restamp(newest, ahead)
	return nil
}

// countUnread counts the entries of gone whose files are below unread directories.
func (c *Cache) countUnread(unread map[string]bool, gone []index.Key) {
	if len(unread) == 0 {
		return
	}
	for _, k := range gone {
		dir, err := c.pathBelow("files", k)
		for err == nil && !unread[dir] && len(dir) > len(c.dir) {
			dir = filepath.Dir(dir)
		}
		if unread[dir] {
			c.logLost.Add(1)
		}
	}
}

// walkFiles calls visit with everything below DIR/files except directories. Ok reports whether it is a file of key k.
// It calls skip with each directory that cannot be read.
func (c *Cache) walkFiles(
	visit func(path string, k index.Key, entry fs.DirEntry, ok bool) error, skip func(dir string, err error) error,
) error {
	root := filepath.Join(c.dir, "files")
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil && path != root && fault.Unreadable(err) {
			return skip(path, err)
		}
		if err != nil || entry.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		k, ok := c.parsePath(filepath.ToSlash(rel))
		return visit(path, k, entry, ok && entry.Type().IsRegular())
	})
}

// parsePath is the inverse of pathBelow for a path relative to DIR/files.
func (c *Cache) parsePath(rel string) (k index.Key, ok bool) {
	part := strings.Split(rel, "/")
	if len(part) != 4 {
		return k, false
	}
	n, ok := c.instances.findEscaped(part[0])
	if !ok {
		return k, false
	}
	hash, size, _ := strings.Cut(part[3], "-")
	bytes, err := strconv.ParseInt(size, 10, 64)
	if err != nil || strconv.FormatInt(bytes, 10) != size || len(part[2]) != 2 || !strings.HasPrefix(hash, part[2]) {
		return k, false
	}
	f, err := cas.ParseFunction(part[1])
	if err != nil {
		return k, false
	}
	k = index.Key{Size: bytes, Instance: n, Kind: blob | index.Kind(f)<<kindBits}
	if len(hash) != 2*min(f.Size(), len(k.Hash)) || strings.ToLower(hash) != hash {
		return k, false
	}
	_, err = hex.Decode(k.Hash[:], []byte(hash))
	return k, err == nil && bytes >= 0
}
