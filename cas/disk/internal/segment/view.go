// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/durable"
)

// A state identifies the content of a data file: every write changes it, except perhaps a write of the same size within
// one tick of the file system's clock.
type state struct {
	size     int64
	modified int64 // in nanoseconds since 1970
}

// A View is the data of a segment, open for reading. It may outlive the segment and the Set: what was committed before
// stays in place unchanged until Release. Its methods except Release are safe for concurrent use.
type View struct {
	// File is shared with other Views of the segment. The last Release closes it.
	File *os.File
	// Suspect means that another process wrote to the data: earlier verification is void.
	Suspect bool

	g       *Segment
	revoked uint32 // Segment.revoked when the View was made
}

// View returns a View of the segment, ErrGone or ErrHidden. The caller looks entries up after it, so that Revoke
// invalidates their positions.
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
	g.detectWrites(g.shown)
	// In this order: a caller that sees the revocation also sees that the data is suspect.
	revoked := g.revoked.Load()
	return View{File: g.shown, Suspect: g.suspect.Load(), g: g, revoked: revoked}, nil
}

// ErrHidden reports that the path of a segment's data leads to another file, or cannot be opened. Read still works.
var ErrHidden = errors.New("cannot be opened again")

// reopen opens the data read-only.
func (g *Segment) reopen() (*os.File, error) {
	path := g.set.path(g.N, ".data")
	f, err := durable.OpenFile(path, os.O_RDONLY, 0)
	if fault.Unreadable(err) || errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", err, ErrHidden)
	} else if err != nil {
		return nil, err
	}
	is, err := f.Stat()
	if err == nil {
		var was os.FileInfo
		if was, err = g.data.Stat(); err == nil && !os.SameFile(is, was) {
			err = fmt.Errorf("%s was replaced by another file: %w", path, ErrHidden)
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Hide reports whether this is its first call, so that a hidden segment is reported only once.
func (g *Segment) Hide() bool { return !g.hidden.Swap(true) }

// Valid reports whether the data is unchanged since the View was made: no other process wrote to it, and Revoke was not
// called.
func (v *View) Valid() bool {
	v.g.detectWrites(v.File)
	return v.g.revoked.Load() == v.revoked
}

// Removed reports whether the segment was removed, so that only Views keep its data on the disk.
func (v *View) Removed() bool {
	v.g.viewing.Lock()
	defer v.g.viewing.Unlock()
	return v.g.removed
}

// Release releases the View. It is called once.
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
	_ = g.shown.Close() // opened for reading
}

// Revoke invalidates all Views. It is called after damaged entries left the index.
func (g *Segment) Revoke() { g.revoked.Add(1) }

// Held returns the bytes of removed segments that Views keep on disk.
func (s *Set) Held() int64 { return s.held.Load() }

// detectWrites compares the state of the data, open as f, with its state after the last write of this process, and
// marks the segment as suspect if they differ. It does nothing while this process writes: change has just called it.
func (g *Segment) detectWrites(f *os.File) {
	if !g.dataMu.TryRLock() {
		return
	}
	written, now := g.written, stateOf(f)
	if now == written {
		g.dataMu.RUnlock()
		return
	}
	g.suspect.Store(true)
	g.Revoke()
	g.dataMu.RUnlock()
	g.dataMu.Lock()
	defer g.dataMu.Unlock()
	if g.written == written {
		g.written = now
	}
}

// change calls write to change the data. Calls must not overlap.
func (g *Segment) change(write func() error) error {
	g.detectWrites(g.data)
	g.dataMu.Lock()
	defer g.dataMu.Unlock()
	defer func() { g.written = stateOf(g.data) }()
	return write()
}

// closeViews closes shown, or leaves that to the last View. The segment was removed or is being closed.
func (g *Segment) closeViews(removed bool) error {
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
