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

// The supported node properties, by their field names in NodeProperties. Of its list of free-form properties
// only propertyTool has a meaning.
const (
	propertyTime = "mtime"
	propertyMode = "unix_mode"
)

// propertyTool marks a file as a part of the tool (Bazel's --experimental_remote_mark_tool_inputs).
const propertyTool = "bazel_tool_input"

// isTool reports whether m marks a file as a part of the tool.
func isTool(m *repb.NodeProperties) bool {
	return slices.ContainsFunc(m.GetProperties(), func(p *repb.NodeProperty) bool { return p.Name == propertyTool })
}

// NodeProperties returns the names of the supported node properties, sorted.
func NodeProperties() []string { return []string{propertyTime, propertyMode} }

// The range of an mtime in seconds since 1970, from 1901 to 2242: file systems, images and 64-bit nanoseconds can all
// express it.
const (
	minTime = -1 << 31
	maxTime = 1 << 33
)

// maxMode is the largest st_mode, including the file type bits.
const maxMode = 0o177777

// epoch is the modification time of every input that states none, so that no run can tell when it was staged.
var epoch = time.Unix(1_000_000_000, 0)

// properties are the node properties of one node; nil states none.
type properties struct {
	hasMode bool
	mode    fs.FileMode // permission bits, if hasMode
	mtime   time.Time   // zero if not stated
}

// readProperties returns the properties that m states, or nil.
//
// It keeps only the permission bits of a mode. Inputs are never set-user-ID, since a client that may upload files must
// not choose the user they run as. Neither the sticky bit nor the file type bits are of use.
func readProperties(m *repb.NodeProperties) (*properties, error) {
	if m.GetMtime() == nil && m.GetUnixMode() == nil {
		return nil, nil
	}
	p := &properties{}
	if ts := m.Mtime; ts != nil {
		if ts.Seconds < minTime || ts.Seconds >= maxTime || ts.CheckValid() != nil {
			return nil, fmt.Errorf("mtime of %d s and %d ns: want %d s to %d s since 1970 and 0 to 999999999 ns",
				ts.Seconds, ts.Nanos, minTime, maxTime-1)
		}
		p.mtime = ts.AsTime()
	}
	if mode := m.UnixMode; mode != nil {
		if mode.Value > maxMode {
			return nil, fmt.Errorf("unix_mode %#o is not the mode of a file", mode.Value)
		}
		p.hasMode, p.mode = true, fs.FileMode(mode.Value)&fs.ModePerm
	}
	return p, nil
}

// proto returns p as a message, nil if p is nil.
func (p *properties) proto() *repb.NodeProperties {
	if p == nil {
		return nil
	}
	m := &repb.NodeProperties{}
	if !p.mtime.IsZero() {
		m.Mtime = timestamppb.New(p.mtime)
	}
	if p.hasMode {
		m.UnixMode = wrapperspb.UInt32(uint32(p.mode))
	}
	return m
}

// modTime returns the modification time of a node with p.
func (p *properties) modTime() time.Time {
	if p == nil || p.mtime.IsZero() {
		return epoch
	}
	return p.mtime
}

// modeOr returns the mode of p, or mode if p states none.
func (p *properties) modeOr(mode fs.FileMode) fs.FileMode {
	if p == nil || !p.hasMode {
		return mode
	}
	return p.mode
}

// mode returns the mode of the file e as an input, or as a private copy. If unix_mode and is_executable disagree, the
// file has that mode and is executable. Only a private copy is writable for others, since a run may have
// another user than the worker.
func (e *entry) mode(private bool) fs.FileMode {
	mode := e.props.modeOr(defaultMode(e.exec, private))
	if e.exec {
		mode |= 0o111
	}
	if !private {
		mode &^= 0o022
	}
	return mode
}

// needsCopy reports whether the mode or modification time of the input e differs from those of a store's file.
func (e *entry) needsCopy() bool {
	return e.props != nil && (e.mode(false) != defaultMode(e.exec, false) || !e.props.modTime().Equal(epoch))
}

// mode returns the mode of an input directory that is not a planned one. By default it accepts new entries. A private
// one is open to all: its contents may be removed and replaced, whatever mode it states.
func (d *directory) mode(private bool) fs.FileMode {
	if private {
		return modePrivate
	}
	mode := d.props.modeOr(modeWritable)
	if mode&0o022 != 0 {
		mode |= fs.ModeSticky // a run must not remove its inputs
	}
	return mode
}

// readOnlyMode returns the mode of a directory in which nothing can be created.
func (d *directory) readOnlyMode() fs.FileMode {
	return d.props.modeOr(0o755) &^ (fs.ModeSticky | 0o022)
}

// A propertySet is the set of node properties that a client wants for outputs.
type propertySet struct{ time, mode bool }

func newPropertySet(names []string) propertySet {
	return propertySet{slices.Contains(names, propertyTime), slices.Contains(names, propertyMode)}
}

// of returns the wanted properties of the file that info describes, nil if none are wanted. mode is its mode before
// Capture made it readable. A time outside the range for inputs is clamped, so that every output can be an input.
func (w propertySet) of(info fs.FileInfo, mode fs.FileMode) *properties {
	if !w.time && !w.mode {
		return nil
	}
	p := &properties{}
	if w.mode {
		p.hasMode, p.mode = true, mode.Perm()
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
