// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A decoder fills the entries of one directory from its message.
type decoder struct {
	dir  *directory
	prev string // the last name of the list that is being read
}

// decode fills d.entries from m, the message whose digest is d.digest. A message that is not canonical is
// cas.ErrInvalid. Subdirectories get only their digests.
func (d *directory) decode(m *repb.Directory) (err error) {
	c := &decoder{dir: d}
	d.entries = make([]entry, 0, len(m.GetFiles())+len(m.GetDirectories())+len(m.GetSymlinks()))
	if d.props, err = c.properties(Directory, ".", m.GetNodeProperties()); err != nil {
		return err
	}
	for _, n := range m.GetFiles() {
		e := entry{name: n.Name, kind: File, exec: n.IsExecutable, tool: isTool(n.NodeProperties)}
		if err := c.add(&e, n.Digest, n.NodeProperties); err != nil {
			return err
		}
	}
	c.prev = ""
	for _, n := range m.GetDirectories() {
		if err := c.add(&entry{name: n.Name, kind: Directory}, n.Digest, nil); err != nil {
			return err
		}
	}
	c.prev = ""
	for _, n := range m.GetSymlinks() {
		e := entry{name: n.Name, kind: Symlink, target: n.Target}
		if err := c.add(&e, nil, n.NodeProperties); err != nil {
			return err
		}
	}
	slices.SortFunc(d.entries, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for i := 1; i < len(d.entries); i++ {
		if a, b := &d.entries[i-1], &d.entries[i]; a.name == b.name {
			return c.errorf("%+q is both a %s and a %s", a.name, a.kind, b.kind)
		}
	}
	return nil
}

func (c *decoder) errorf(format string, args ...any) error {
	return errorf(cas.ErrInvalid, "Directory %s: %s", c.dir.digest, fmt.Sprintf(format, args...))
}

// add checks e, with the digest and the properties of its node, and adds it.
func (c *decoder) add(e *entry, digest *repb.Digest, props *repb.NodeProperties) (err error) {
	if e.kind == Symlink {
		t := e.target
		if t == "" || len(t) > maxTarget || strings.ContainsRune(t, 0) || !utf8.ValidString(t) {
			return c.errorf("symlink %+.256q has the target %+.64q, which must be 1 to %d bytes of UTF-8 without NUL",
				e.name, t, maxTarget)
		}
	} else if e.digest, err = cas.FromProto(c.dir.digest.Function(), digest); err != nil {
		return c.errorf("%s %+.256q: %v", e.kind, e.name, err)
	}
	if e.props, err = c.properties(e.kind, e.name, props); err != nil {
		return err
	}
	if why := badName(e.name); why != "" {
		return c.errorf("the name %+.256q of a %s %s", e.name, e.kind, why)
	}
	if e.name <= c.prev {
		return c.errorf("%s %+q follows %+q: names must ascend and differ", e.kind, e.name, c.prev)
	}
	c.prev = e.name
	c.dir.entries = append(c.dir.entries, *e)
	return nil
}

func (c *decoder) properties(k Kind, name string, m *repb.NodeProperties) (*properties, error) {
	p, err := readProperties(m)
	if err != nil {
		return nil, c.errorf("%s %+.256q: %v", k, name, err)
	}
	return p, nil
}

// encode returns d as a blob and records its digest. Files and subdirectories must have their digests.
func (d *directory) encode(f cas.Function) (cas.Blob, error) {
	m := &repb.Directory{NodeProperties: d.props.proto()}
	for i := range d.entries {
		switch e := &d.entries[i]; e.kind {
		case File:
			m.Files = append(m.Files, &repb.FileNode{
				Name: e.name, Digest: e.digest.Proto(), IsExecutable: e.exec, NodeProperties: e.props.proto(),
			})
		case Directory:
			e.digest = e.dir.digest
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: e.digest.Proto()})
		case Symlink:
			m.Symlinks = append(m.Symlinks,
				&repb.SymlinkNode{Name: e.name, Target: e.target, NodeProperties: e.props.proto()})
		}
	}
	data, digest, err := cas.MarshalProto(f, m)
	d.digest = digest
	return cas.Blob{Digest: digest, Data: data}, err
}

// encodeAll encodes dirs, which are in parents-first order and whose files have digests. It returns the blobs in that
// order too, without duplicates: each after its last parent.
func encodeAll(f cas.Function, dirs []*directory) ([]cas.Blob, error) {
	var blobs []cas.Blob
	seen := map[cas.Digest]bool{}
	for _, d := range slices.Backward(dirs) {
		b, err := d.encode(f)
		if err != nil {
			return nil, err
		}
		if !seen[b.Digest] {
			seen[b.Digest] = true
			blobs = append(blobs, b)
		}
	}
	slices.Reverse(blobs)
	return blobs, nil
}
