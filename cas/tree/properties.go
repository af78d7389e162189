// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"fmt"
	"io/fs"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The node properties that inputs may have and outputs may be asked for: fields of NodeProperties. What its list of
// strings says (bazel_tool_input, say) is somebody else's business, and ignored.
const (
	propertyTime = "mtime"
	propertyMode = "unix_mode"
)

// NodeProperties returns the names of these, sorted.
func NodeProperties() []string { return []string{propertyTime, propertyMode} }

// The range of an mtime, in seconds since 1970, from 1901 to 2242: what file systems, images and nanoseconds in 64
// bits can all express.
const (
	minTime = -1 << 31
	maxTime = 1 << 33
)

// maxMode is the largest file mode, with the bits that say what kind of file it is.
const maxMode = 0o177777

// epoch is the time of last change of every input that states none, so that no run can tell when it was staged.
var epoch = time.Unix(1_000_000_000, 0)

// properties are the node properties of one node; nil states none.
type properties struct {
	moded bool
	mode  fs.FileMode // permission bits, if moded
	mtime time.Time   // zero if none is stated
}

// readProperties returns what m states, nil if that is nothing.
//
// Of a mode the permission bits count alone. No input is set-user-ID: whoever may upload files does not decide as whom
// they run; nor is a sticky bit or the kind of file, which st_mode has too, of any use.
func readProperties(m *repb.NodeProperties) (*properties, error) {
	if m.GetMtime() == nil && m.GetUnixMode() == nil {
		return nil, nil
	}
	p := &properties{}
	if ts := m.Mtime; ts != nil {
		if ts.Seconds < minTime || ts.Seconds >= maxTime || ts.CheckValid() != nil {
			return nil, fmt.Errorf("mtime of %d s and %d ns: must be from %d s to %d s since 1970, with 0 to 999999999 ns",
				ts.Seconds, ts.Nanos, minTime, maxTime-1)
		}
		p.mtime = ts.AsTime()
	}
	if mode := m.UnixMode; mode != nil {
		if mode.Value > maxMode {
			return nil, fmt.Errorf("unix_mode %#o is not the mode of a file", mode.Value)
		}
		p.moded, p.mode = true, fs.FileMode(mode.Value)&fs.ModePerm
	}
	return p, nil
}

// proto returns p as a message, nil if it states nothing.
func (p *properties) proto() *repb.NodeProperties {
	if p == nil {
		return nil
	}
	m := &repb.NodeProperties{}
	if !p.mtime.IsZero() {
		m.Mtime = timestamppb.New(p.mtime)
	}
	if p.moded {
		m.UnixMode = wrapperspb.UInt32(uint32(p.mode))
	}
	return m
}

// date returns when a node with p was changed last.
func (p *properties) date() time.Time {
	if p == nil || p.mtime.IsZero() {
		return epoch
	}
	return p.mtime
}

// or returns the mode of p, or mode if it states none.
func (p *properties) or(mode fs.FileMode) fs.FileMode {
	if p == nil || !p.moded {
		return mode
	}
	return p.mode
}

// mode returns the mode of the file e: as an input, or as a private copy. Where unix_mode and is_executable disagree
// both hold: the file has that mode, and is executable besides.
func (e *entry) mode(private bool) fs.FileMode {
	mode := e.own.or(modeOf(e.exec, private))
	if e.exec {
		mode |= 0o111
	}
	return mode
}

// special reports whether the input e has another mode or date than the file that a store shows of its content.
func (e *entry) special() bool {
	return e.own != nil && (e.mode(false) != modeOf(e.exec, false) || !e.own.date().Equal(epoch))
}

// mode returns the mode of an input directory that is not spine. A private one stays open to all: what lies in it
// may be removed and replaced, whatever its own mode.
func (d *directory) mode(private bool) fs.FileMode {
	if private {
		return modePrivate
	}
	return d.own.or(modeBoundDir)
}

// A want says which node properties outputs are to have.
type want struct{ time, mode bool }

func wanted(names []string) want {
	return want{slices.Contains(names, propertyTime), slices.Contains(names, propertyMode)}
}

// of returns the properties of what info describes, nil if none are wanted. It had mode before Capture made it
// readable. A date beyond those that inputs may have becomes the nearest that they may have, so that every output can be an
// input.
func (w want) of(info fs.FileInfo, mode fs.FileMode) *properties {
	if !w.time && !w.mode {
		return nil
	}
	p := &properties{}
	if w.mode {
		p.moded, p.mode = true, mode.Perm()
	}
	if w.time {
		p.mtime = info.ModTime().UTC()
		switch s := p.mtime.Unix(); {
		case s < minTime:
			p.mtime = time.Unix(minTime, 0).UTC()
		case s >= maxTime:
			p.mtime = time.Unix(maxTime-1, 0).UTC()
		}
	}
	return p
}
