// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// Check reads the whole store and reports every inconsistency: entries whose content does not match or whose record
// is not in a log, files without an entry, wrong counts, and files left in tmp. It changes nothing. Nothing else may
// use the store meanwhile.
func (c *Cache) Check(ctx context.Context) error {
	end, err := c.begin()
	if err != nil {
		return err
	}
	defer end()
	k := checker{cache: c, ctx: ctx}
	k.entries()
	k.logs()
	k.names()
	k.counts()
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(k.wrong) > 0 {
		return fmt.Errorf("store %s: %w", c.dir, errors.Join(k.wrong...))
	}
	return nil
}

type checker struct {
	cache *Cache
	ctx   context.Context
	wrong []error

	records map[index.Position]index.Key // of entries
	live    map[uint32][2]int64          // bytes and files, by segment
	bytes   int64                        // of files
	files   int64
	blobs   int
	result  int
}

func (k *checker) report(format string, args ...any) {
	if len(k.wrong) < 100 {
		k.wrong = append(k.wrong, fmt.Errorf(format, args...))
	}
}

// entries reads the content of every entry.
func (k *checker) entries() {
	c := k.cache
	k.records, k.live = map[index.Position]index.Key{}, map[uint32][2]int64{}
	var all []index.Entry
	c.index.Each(func(e *index.Entry) bool {
		all = append(all, *e)
		return true
	})
	for _, e := range all {
		k.records[e.Position] = e.Key
		live := k.live[e.Segment]
		if isResult(e.Key) {
			k.result++
		} else {
			k.blobs++
		}
		f, err := functionOf(e.Key)
		if err != nil {
			k.report("%v", err)
			continue
		}
		name := f.String() + " " + nameOf(f, e.Key)
		if e.File {
			live[1]++
			k.bytes += charge(e.Size)
			k.files++
			path, err := c.pathBelow("files", e.Key)
			if err == nil {
				err = readWhole(k.ctx, path, e.Key)
			}
			if err != nil {
				k.report("%s: %w", path, err)
			}
		} else {
			live[0] += segment.Padded(int64(e.Length))
			b := make([]byte, e.Length)
			if err := c.segments.Read(&e, b); err != nil {
				k.report("%s: %w", name, err)
			} else if !c.sound(&e, b) {
				k.report("%s in segment %d at %d: content does not match the digest", name, e.Segment, e.Offset)
			}
		}
		k.live[e.Segment] = live
	}
}

// logs looks for the record of every entry.
func (k *checker) logs() {
	for _, g := range k.cache.segments.Segments() {
		err := g.Puts(0, func(r *segment.Record) bool {
			if k.records[r.Position] == r.Key {
				delete(k.records, r.Position)
			}
			return true
		})
		if err != nil {
			k.report("%w", err)
		}
		if live := k.live[g.N]; g.Live.Load() != live[0] || g.Files.Load() != live[1] {
			k.report("segment %d: counted %d bytes and %d files, found %d and %d",
				g.N, g.Live.Load(), g.Files.Load(), live[0], live[1])
		}
	}
	for p := range k.records {
		k.report("segment %d has no record of an entry at %d", p.Segment, p.Record)
	}
}

// names looks for files without an entry.
func (k *checker) names() {
	c := k.cache
	err := c.walkFiles(func(path string, key index.Key, _ fs.DirEntry, ok bool) error {
		if !ok {
			k.report("%s: not a file of the store", path)
		} else if c.orphans.has(key) {
			k.bytes += charge(key.Size)
			k.files++
		} else if e, ok := c.index.Get(key); !ok || !e.File {
			k.report("%s: not in the index", path)
		}
		return nil
	}, func(dir string, err error) error { k.report("%w", err); return fs.SkipDir })
	if err != nil {
		k.report("%w", err)
	}
	unfinished, err := os.ReadDir(filepath.Join(c.dir, "tmp"))
	if err != nil {
		k.report("%w", err)
	}
	for _, f := range unfinished {
		if strings.HasPrefix(f.Name(), probePrefix) {
			continue // a probe may be running
		}
		k.report("%s: unfinished", filepath.Join(c.dir, "tmp", f.Name()))
	}
	for _, sub := range []string{"quarantine", "copies"} {
		err := filepath.WalkDir(filepath.Join(c.dir, sub), func(_ string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			fi, err := entry.Info()
			if err == nil {
				k.bytes += charge(fi.Size())
				k.files++
			}
			return err
		})
		if err != nil {
			k.report("%w", err)
		}
	}
}

// counts compares the counters with what was found.
func (k *checker) counts() {
	c := k.cache
	var segments int64
	for _, g := range c.segments.Segments() {
		data, log := g.Size()
		segments += data + log
	}
	if segments != c.segments.Bytes() {
		k.report("segments have %d bytes, counted %d", segments, c.segments.Bytes())
	}
	s := c.Stats()
	if want := k.bytes + segments; s.Bytes != want {
		k.report("found %d bytes, counted %d", want, s.Bytes)
	}
	if s.Bytes > s.MaxBytes {
		k.report("%d bytes exceed the budget of %d", s.Bytes, s.MaxBytes)
	}
	if want := k.files + 2*int64(s.Segments); s.Files != want {
		k.report("found %d files, counted %d", want, s.Files)
	}
	if s.Blobs != k.blobs || s.Results != k.result {
		k.report("found %d blobs and %d results, counted %d and %d", k.blobs, k.result, s.Blobs, s.Results)
	}
}
