// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"fmt"
	"os"
)

// A state is what the file system says of a file of data, and changes with every write to it. A write within the same
// tick of its clock as the one before, and to the same size, may change nothing.
type state struct {
	size     int64
	modified int64 // in nanoseconds since 1970
}

// A View is the data of a segment, open for reading. It outlives the segment and the Set: what was committed when it
// was made stays where it is, and as it is, until Release. Its methods are safe for concurrent use, but for Release.
type View struct {
	// File is shared with other Views of the segment: closed by nobody but the last Release.
	File *os.File
	// Suspect says that somebody else has written to the data: what was known of it before is not to be trusted.
	Suspect bool

	g       *Segment
	revoked uint32 // Segment.revoked when it was made
}

// View returns a View of the segment, or ErrGone. What is to be asked of the segment's entries is asked after it: Revoke
// takes back what was said before.
func (g *Segment) View() (View, error) {
	g.using.RLock()
	defer g.using.RUnlock()
	if g.data == nil {
		return View{}, ErrGone
	}
	g.viewing.Lock()
	defer g.viewing.Unlock()
	if g.shown == nil {
		f, err := g.reopen()
		if err != nil {
			return View{}, err
		}
		g.shown = f
	}
	g.views++
	g.look(g.shown)
	// In this order: who sees that others have written sees that the data is suspect.
	revoked := g.revoked.Load()
	return View{File: g.shown, Suspect: g.suspect.Load(), g: g, revoked: revoked}, nil
}

// reopen opens the data for reading alone.
func (g *Segment) reopen() (*os.File, error) {
	path := g.set.path(g.N, ".data")
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	is, err := f.Stat()
	if err == nil {
		var was os.FileInfo
		if was, err = g.data.Stat(); err == nil && !os.SameFile(is, was) {
			err = fmt.Errorf("%s was replaced by another file: open the store anew", path)
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Valid reports whether what was known of the data when the View was made is so still: nobody else has written to it,
// and Revoke was not called.
func (v *View) Valid() bool {
	v.g.look(v.File)
	return v.g.revoked.Load() == v.revoked
}

// Release gives the View back. It is called once.
func (v *View) Release() {
	g := v.g
	g.viewing.Lock()
	defer g.viewing.Unlock()
	if g.views--; g.views > 0 || !g.closed {
		return
	}
	if g.removed {
		g.set.held.Add(-g.size.Load())
	}
	_ = g.shown.Close() // it was only read
}

// Revoke makes every View invalid that was made before. It is called after the index no longer tells of what was found
// damaged.
func (g *Segment) Revoke() { g.revoked.Add(1) }

// Held returns the bytes of data of removed segments that Views keep on the disk.
func (s *Set) Held() int64 { return s.held.Load() }

// look compares the data, open as f, with what this process left. While that writes there is nothing to compare: it
// has just done so.
func (g *Segment) look(f *os.File) {
	if !g.own.TryRLock() {
		return
	}
	left, now := g.left, stateOf(f)
	if now == left {
		g.own.RUnlock()
		return
	}
	g.suspect.Store(true)
	g.Revoke()
	g.own.RUnlock()
	g.own.Lock()
	defer g.own.Unlock()
	if g.left == left {
		g.left = now
	}
}

// change lets write change the data. The caller is the only one to do so.
func (g *Segment) change(write func() error) error {
	g.look(g.data)
	g.own.Lock()
	defer g.own.Unlock()
	defer func() { g.left = stateOf(g.data) }()
	return write()
}

// conclude ends what concerns Views when the segment is closed, because it was removed or not.
func (g *Segment) conclude(removed bool) error {
	g.viewing.Lock()
	defer g.viewing.Unlock()
	g.closed, g.removed = true, removed
	if g.shown == nil {
		return nil
	}
	if g.views == 0 {
		return g.shown.Close()
	}
	if removed {
		g.set.held.Add(g.size.Load())
	}
	return nil
}
