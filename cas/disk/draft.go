// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
)

// leastRoom is the room of a draft, in bytes, before anything has arrived. From there it grows to twice of
// what has: what a client only states costs nobody else an entry.
const leastRoom = 64 << 10

// A draft is a file in tmp on its way into the store, and the room that it takes in the budget.
type draft struct {
	cache *Cache
	file  *os.File
	size  int64 // bytes that it is to have
	n     int64 // bytes that Write has written
	room  int64 // bytes reserved; charge(size) as soon as n is size
}

// reserve makes room for the first n bytes, and for as many more.
func (d *draft) reserve(n int64) error {
	room := min(charge(d.size), max(leastRoom, charge(2*n)))
	if room <= d.room {
		return nil
	}
	if err := d.cache.reserve(room - d.room); err != nil {
		return err
	}
	d.room = room
	return nil
}

// Write implements io.Writer. The caller writes no more than size bytes.
func (d *draft) Write(p []byte) (int, error) {
	if err := d.reserve(d.n + int64(len(p))); err != nil {
		return 0, err
	}
	n, err := d.file.Write(p)
	d.n += int64(n)
	if err != nil {
		err = d.cache.writeError(err)
	}
	return n, err
}

// put makes the file of k, which write fills with size bytes, and returns its entry, pinned if pin.
func (c *Cache) put(k key, size int64, pin bool, write func(*draft) error) (e *entry, err error) {
	if charge(size) > c.index.max {
		return nil, fmt.Errorf("store %s: %d bytes are more than its whole budget of %d: %w",
			c.dir, size, c.index.max, cas.ErrFull)
	}
	d := &draft{cache: c, size: size}
	kept := false
	defer func() {
		if !kept {
			c.index.give(d.room)
		}
	}()
	if err := d.reserve(0); err != nil {
		return nil, err
	}
	if d.file, err = os.CreateTemp(filepath.Join(c.dir, "tmp"), ""); err != nil {
		return nil, c.writeError(err)
	}
	defer func() {
		if !kept {
			err = errors.Join(err, os.Remove(d.file.Name()))
		}
	}()
	err = write(d)
	if closeErr := d.file.Close(); err == nil && closeErr != nil {
		err = c.writeError(closeErr)
	}
	if err != nil {
		return nil, err
	}
	e, kept, err = c.commit(d.file.Name(), k, d.room, pin)
	return e, err
}
