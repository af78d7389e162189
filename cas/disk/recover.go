// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A recovery fills the index of a Cache from what an earlier process left.
type recovery struct {
	cache     *Cache
	instances int // that have a number
	functions []cas.Function

	power bool // may have been lost since the last Open

	mu       sync.Mutex
	orders   map[index.Key]uint32 // guarded by mu; of results and mappings
	replaced []index.Entry        // guarded by mu; those of which there is a later one, or the same again
	shaky    map[index.Key]bool   // guarded by mu; entries that are there by a doubtful put alone
	doubtful map[uint32]uint32    // guarded by mu; by segment, the first record whose bytes a loss of power may have taken
}

// replay reads the logs of all segments, some at a time.
func (r *recovery) replay() error {
	r.orders, r.doubtful, r.shaky = map[index.Key]uint32{}, map[uint32]uint32{}, map[index.Key]bool{}
	segments := make(chan *segment.Segment)
	errs := make([]error, runtime.GOMAXPROCS(0))
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			h := history{recovery: r, blobs: make([]index.Entry, 0, maxBlobs)}
			for g := range segments {
				damaged, lost, err := g.Replay(&h)
				h.flush()
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

// A history takes what the logs say to a recovery: puts of blobs many at a time.
type history struct {
	*recovery
	blobs   []index.Entry
	doubted uint32 // the last segment in which a put was doubtful
}

// Put implements segment.History. Logs are read in no order, so that of two puts of one blob either may stay: both
// are of the same bytes, and it is leased as long as the later one. Of two results the later one stays.
func (h *history) Put(p *segment.Record, doubtful bool) {
	if !h.known(p.Key) {
		return
	}
	if doubtful = doubtful && h.power; doubtful && h.doubted != p.Segment {
		h.doubted = p.Segment
		h.mu.Lock()
		h.doubtful[p.Segment] = p.Position.Record
		h.mu.Unlock()
	}
	if !isRecord(p.Key) && !doubtful {
		if h.blobs = append(h.blobs, p.Entry); len(h.blobs) == maxBlobs {
			h.flush()
		}
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if isRecord(p.Key) && !h.newest(p, doubtful) {
		return
	}
	h.replace(p.Entry, doubtful)
}

// newest reports whether the result p is to take the place of the one that is there, and notes which of them is not.
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
			delete(r.shaky, p.Key) // a later one takes its place, whatever is known of it
			r.cache.index.Remove(p.Key, func(*index.Entry) bool { return true })
		}
	}
	return true
}

// maxBlobs is how many puts are taken at a time.
const maxBlobs = 32 << 10

// flush takes the puts of blobs to the index.
func (h *history) flush() {
	present := h.cache.index.AddAll(h.blobs)
	h.blobs = h.blobs[:0]
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range present {
		h.replace(p, false)
	}
}

// replace puts p in the place of an earlier entry, and leaves it the later stamp. A file does not replace what is
// packed: it may have been evicted, of which no log tells. What is doubtful replaces nothing that is not. The caller
// holds mu.
func (r *recovery) replace(p index.Entry, doubtful bool) {
	if r.cache.index.Add(&p) {
		if doubtful {
			r.shaky[p.Key] = true
		}
		return
	}
	shaky := r.shaky[p.Key]
	r.cache.index.Update(p.Key, func(e *index.Entry) {
		stamp := max(e.Stamp, p.Stamp)
		if (e.File || !p.File || shaky) && (shaky || !doubtful) {
			*e = p
		}
		e.Stamp = stamp
	})
	if !doubtful {
		delete(r.shaky, p.Key)
	}
}

// known reports whether k can be the key of anything: a log that is damaged may say something else.
func (r *recovery) known(k index.Key) bool {
	kind := k.Kind & kindMask
	return int(k.Instance) < r.instances && (kind == blob || kind == result || kind == mapping) && k.Size >= 0 &&
		slices.Contains(r.functions, cas.Function(k.Kind>>kindBits))
}

// Touch implements segment.History.
func (h *history) Touch(p *segment.Record, stamp uint32) {
	h.flush()
	h.cache.index.Update(p.Key, func(e *index.Entry) { e.Stamp = max(e.Stamp, stamp) })
}

// Drop implements segment.History. An earlier result must not come back; the same, which was moved, is another matter.
func (h *history) Drop(p *segment.Record) {
	if !h.known(p.Key) || !isRecord(p.Key) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if order, ok := h.orders[p.Key]; ok && order >= p.Order {
		return
	}
	h.orders[p.Key] = p.Order
	h.cache.index.Remove(p.Key, func(*index.Entry) bool { return true })
}

// matchFiles makes absent what has no file, removes the files of nothing, and counts everything.
func (r *recovery) matchFiles() error {
	c := r.cache
	found := map[index.Key]bool{}
	err := c.walkFiles(func(path string, k index.Key, ok bool) error {
		if !ok {
			return nil // not ours: neither counted nor touched
		}
		if e, ok := c.index.Get(k); ok && e.File {
			found[k] = true
			return nil
		}
		// It was given its name, and the process ended before that was in a log.
		return os.Remove(path)
	})
	if err != nil {
		return err
	}
	var gone []index.Key
	live := map[uint32]*[2]int64{} // bytes and files, by segment
	for _, g := range c.segments.Segments() {
		live[g.N] = new([2]int64)
	}
	now, ahead := seconds(time.Now()), false
	c.index.Each(func(e *index.Entry) bool {
		ahead = ahead || e.Stamp > now
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
	if ahead {
		c.putBack(now)
	}
	return nil
}

// walkFiles calls visit with what is below DIR/files but directories. Ok is false if it is no file at the place of a key.
func (c *Cache) walkFiles(visit func(path string, k index.Key, ok bool) error) error {
	root := filepath.Join(c.dir, "files")
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		k, ok := c.parsePath(filepath.ToSlash(rel))
		return visit(path, k, ok && entry.Type().IsRegular())
	})
}

// parsePath is the inverse of what pathBelow appends to DIR/files.
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

// askPower says whether power may have been lost since the last Open.
func (r *recovery) askPower() error {
	before, err := os.ReadFile(r.bootPath())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	now := bootID()
	r.power = now == "" || string(before) != now+"\n"
	return nil
}

func (r *recovery) bootPath() string { return filepath.Join(r.cache.dir, "boot") }

// checkDoubtful reads what a loss of power may have damaged, if there can have been one since it was written, and
// makes absent what it has.
func (r *recovery) checkDoubtful() error {
	if !r.power {
		return nil
	}
	for n, from := range r.doubtful {
		if err := r.checkPuts(r.cache.segments.Segment(n), from); err != nil {
			return err
		}
	}
	if err := r.checkNewFiles(); err != nil {
		return err
	}
	// What was read came from the disk: from here on only the next end of the machine can take anything.
	return replaceFile(r.bootPath(), bootID()+"\n")
}

// checkPuts reads what the log of g tells of from a record on: also what the index has elsewhere, since some day this
// one may be all that there is.
func (r *recovery) checkPuts(g *segment.Segment, from uint32) error {
	c := r.cache
	var failed error
	err := g.Puts(from, func(p *segment.Record) bool {
		e, ok := c.index.Get(p.Key)
		switch {
		case ok && e.Position == p.Position:
			failed = c.check(context.Background(), e)
		case !p.File:
			b := make([]byte, p.Length)
			if err := c.segments.Read(&p.Entry, b); err != nil || !c.sound(&p.Entry, b) {
				failed = g.Forget(&p.Entry)
			}
		}
		if errors.Is(failed, cas.ErrCorrupt) || errors.Is(failed, cas.ErrNotFound) {
			failed = nil // it is absent now
		}
		return failed == nil
	})
	return errors.Join(failed, err)
}

// checkNewFiles reads the files that got their names after all was last known to be on disk: the record of an earlier
// one, which was evicted, may vouch for them.
func (r *recovery) checkNewFiles() error {
	c := r.cache
	var marked uint32
	for _, g := range c.segments.Segments() {
		marked = max(marked, g.DurableSince())
	}
	var files []index.Entry
	c.index.Each(func(e *index.Entry) bool {
		if e.File && !e.Verified {
			files = append(files, *e)
		}
		return true
	})
	for _, e := range files {
		path, err := c.pathBelow("files", e.Key)
		if err != nil {
			return err
		}
		fi, err := os.Lstat(path)
		// A clock has whole seconds here.
		if err == nil && fi.Size() == e.Size && namedAt(fi).Unix()+1 < int64(marked) {
			continue
		}
		if err := c.check(context.Background(), e); err != nil && !errors.Is(err, cas.ErrCorrupt) && !errors.Is(err, cas.ErrNotFound) {
			return err
		}
	}
	return nil
}

// check reads e whole, and makes it absent if it is not what its key says: then it is cas.ErrCorrupt. One that is
// gone is cas.ErrNotFound.
func (c *Cache) check(ctx context.Context, e index.Entry) error {
	if !e.File {
		b, err := c.read(e)
		if err == nil && !c.sound(&e, b) {
			err = c.damaged(e, b)
		}
		if err == nil {
			c.setVerified(e)
		}
		return err
	}
	path, err := c.pathBelow("files", e.Key)
	if err != nil {
		return err
	}
	err = readWhole(ctx, path, e.Key)
	switch {
	case errors.Is(err, cas.ErrCorrupt):
		return c.damaged(e, nil)
	case vanished(err):
		c.lose(e)
		return cas.ErrNotFound
	case err == nil:
		c.setVerified(e)
	}
	return err
}
