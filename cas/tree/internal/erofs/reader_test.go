// SPDX-License-Identifier: Apache-2.0

package erofs_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
	"github.com/cloister-build/cloister/tests/must"
)

// A node is an expected file, symlink or directory.
type node struct {
	kids   map[string]*node // of a directory, not nil
	target string           // of a symlink, not empty
	mode   uint16           // permission bits, of a directory or a file
	size   int64            // of a file, as what follows
	device int
	offset int64
	after  time.Duration // modification time relative to erofs.Time
}

// flat returns n as a Tree, in depth-first or breadth-first order.
func (n *node) flat(devices []int64, depthFirst bool) *erofs.Tree {
	t := &erofs.Tree{Devices: devices, Dirs: []erofs.Dir{{Mode: n.mode, After: n.after}}}
	todo := []*node{n}
	of := []int{0}
	for len(todo) > 0 {
		at := 0
		if depthFirst {
			at = len(todo) - 1
		}
		d, i := todo[at], of[at]
		todo, of = slices.Delete(todo, at, at+1), slices.Delete(of, at, at+1)
		t.Dirs[i].First, t.Dirs[i].Count = int32(len(t.Entries)), int32(len(d.kids))
		for _, name := range slices.Sorted(maps.Keys(d.kids)) {
			k := d.kids[name]
			e := erofs.Entry{
				Name: name, Kind: erofs.File, Mode: k.mode, Size: k.size, Device: int32(k.device),
				Offset: k.offset, After: k.after,
			}
			switch {
			case k.kids != nil:
				e = erofs.Entry{Name: name, Kind: erofs.Directory, Dir: int32(len(t.Dirs))}
				todo, of = append(todo, k), append(of, len(t.Dirs))
				t.Dirs = append(t.Dirs, erofs.Dir{Mode: k.mode, After: k.after})
			case k.target != "":
				e = erofs.Entry{Name: name, Kind: erofs.Symlink, Target: k.target, After: k.after}
			}
			t.Entries = append(t.Entries, e)
		}
	}
	return t
}

// lines writes a line for each node below n.
func (n *node) lines(b *strings.Builder, p string) {
	if n.after != 0 {
		fmt.Fprintf(b, "%v ", n.after)
	}
	switch {
	case n.kids != nil:
		fmt.Fprintf(b, "%s/ %o\n", p, n.mode)
		for _, name := range slices.Sorted(maps.Keys(n.kids)) {
			n.kids[name].lines(b, p+"/"+name)
		}
	case n.target != "":
		fmt.Fprintf(b, "%s -> %s\n", p, n.target)
	case n.size == 0:
		fmt.Fprintf(b, "%s %o empty\n", p, n.mode)
	default:
		fmt.Fprintf(b, "%s %o %d bytes at %d of %d\n", p, n.mode, n.size, n.offset, n.device)
	}
}

func (n *node) String() string {
	var b strings.Builder
	n.lines(&b, "")
	return b.String()
}

// A reader reads the images that Encode writes. It is written from the kernel's description of the format.
type reader struct {
	b      []byte
	inodes map[uint64]bool
}

// decode returns the content of an image and the block counts of its devices.
func decode(b []byte) (n *node, devices []uint32, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("image of %d bytes: %v", len(b), r)
		}
	}()
	le := binary.LittleEndian
	sb := b[1024:1152]
	if le.Uint32(sb) != 0xe0f5e1e2 || sb[12] != 9 || int(le.Uint32(sb[36:]))*512 != len(b) || le.Uint32(sb[40:]) != 0 {
		return nil, nil, fmt.Errorf("superblock %x", sb)
	}
	for i := range int(le.Uint16(sb[86:])) {
		devices = append(devices, le.Uint32(b[int(le.Uint16(sb[88:]))*128+i*128+64:]))
	}
	r := &reader{b, map[uint64]bool{}}
	root := uint64(le.Uint16(sb[14:]))
	n = r.inode(root, root, 2)
	if got := le.Uint64(sb[16:]); got != uint64(len(r.inodes)) {
		return nil, nil, fmt.Errorf("%d inodes, the superblock says %d", len(r.inodes), got)
	}
	return n, devices, nil
}

func (r *reader) inode(nid, parent uint64, kind byte) *node {
	if r.inodes[nid] {
		panic(fmt.Sprintf("inode %d has two names", nid))
	}
	r.inodes[nid] = true
	le := binary.LittleEndian
	b := r.b[nid*32:]
	format, mode := le.Uint16(b), le.Uint16(b[4:])
	size, links, next := uint64(le.Uint32(b[8:])), uint32(le.Uint16(b[6:])), 32
	after := time.Duration(0)
	if format&1 != 0 {
		size, links, next = le.Uint64(b[8:]), le.Uint32(b[44:]), 64
		after = time.Duration(int64(le.Uint64(b[32:]))-erofs.Time)*time.Second + time.Duration(le.Uint32(b[40:]))
	}
	if want := map[uint16]byte{0o100000: 1, 0o040000: 2, 0o120000: 7}[mode&^0o7777]; want != kind {
		panic(fmt.Sprintf("mode %o under an entry of kind %d", mode, kind))
	}
	var data []byte
	end := true // whether data is followed by a NUL or the end of a block
	switch format >> 1 & 7 {
	case 0:
		at := r.b[uint64(le.Uint32(b[16:]))*512:]
		data, end = at[:size], size%512 == 0 || at[size] == 0
	case 2:
		data, end = b[next:][:size], kind == 2 && b[next+int(size)] == 0
		if (int(nid)*32)/512 != (int(nid)*32+next+int(size)-1)/512 {
			panic("inline data lies in another block")
		}
	case 4:
		chunk := le.Uint16(b[16:])
		if chunk&0x20 == 0 || size > 1<<(9+chunk&0x1f) {
			panic(fmt.Sprintf("a chunk of format %x for %d bytes", chunk, size))
		}
		index := b[next:]
		return &node{
			mode: mode & 0o7777, size: int64(size), device: int(le.Uint16(index[2:])) - 1,
			offset: int64(le.Uint32(index[4:])) * 512, after: after,
		}
	}
	switch kind {
	case 1:
		return &node{mode: mode & 0o7777, after: after}
	case 7:
		return &node{target: string(data), after: after}
	}
	if !end {
		panic("the last name of a directory is not terminated")
	}
	n := &node{mode: mode & 0o7777, kids: map[string]*node{}, after: after}
	prev, dots := "", 0
	subdirectories := uint32(0)
	for len(data) > 0 {
		block := data[:min(512, len(data))]
		data = data[len(block):]
		count := int(le.Uint16(block[8:])) / 12
		for i := range count {
			e := block[12*i:]
			end := len(block)
			if i+1 < count {
				end = int(le.Uint16(e[12+8:]))
			}
			name := strings.TrimRight(string(block[le.Uint16(e[8:]):end]), "\x00")
			if name <= prev {
				panic(fmt.Sprintf("%q follows %q", name, prev))
			}
			prev = name
			to := le.Uint64(e)
			switch {
			case name == "." && to == nid && e[10] == 2, name == ".." && to == parent && e[10] == 2:
				dots++
			case name == "." || name == "..":
				panic("wrong " + name)
			default:
				n.kids[name] = r.inode(to, nid, e[10])
				if e[10] == 2 {
					subdirectories++
				}
			}
		}
	}
	if dots != 2 || links != 1 {
		panic(fmt.Sprintf("a directory with %d of . and .., %d links and %d subdirectories", dots, links,
			subdirectories))
	}
	return n
}

// encode returns the image of n and checks that the reader decodes it.
func encode(t testing.TB, n *node, devices []int64, buf []byte) []byte {
	t.Helper()
	b := must.Get(erofs.Encode(buf, n.flat(devices, len(devices)%2 == 0)))(t)
	got, blocks, err := decode(b)
	must.Succeed(t, err)
	if g, w := got.String(), n.String(); g != w {
		t.Fatalf("got\n%.4000s\nwant\n%.4000s", g, w)
	}
	for i, size := range devices {
		must.Be(t, i < len(blocks) && int64(blocks[i]) == size/512,
			"got device blocks %d, want those of %d bytes", blocks, devices)
	}
	return b
}

// random returns a tree of up to n entries with files in devices of size bytes each.
func random(r *rand.Rand, n int, devices int, size int64) *node {
	root := &node{mode: 0o755, kids: map[string]*node{}}
	dirs := []*node{root}
	const alphabet = "!+-.0aZ\xc3\xff"
	for range n {
		name := make([]byte, 1+r.IntN(1+r.IntN(255)))
		for i := range name {
			name[i] = alphabet[r.IntN(len(alphabet))]
		}
		if s := string(name); s == "." || s == ".." {
			continue
		}
		k := &node{}
		if r.IntN(4) == 0 { // from 1901 to 2242
			k.after = time.Duration(r.Int64N(10_737_418_240)-3_147_483_648)*time.Second + time.Duration(r.IntN(1e9))
		}
		switch r.IntN(6) {
		case 0:
			k.kids, k.mode = map[string]*node{}, []uint16{0o555, 0o755, 0o1777}[r.IntN(3)]
			dirs = append(dirs, k)
		case 1:
			k.target = strings.Repeat("t", 1+r.IntN([]int{20, 600, 4095}[r.IntN(3)]))
		case 2:
			k.mode = 0o444
		default:
			k.mode = []uint16{0o444, 0o555}[r.IntN(2)]
			if devices > 0 {
				k.device = r.IntN(devices)
				k.offset = r.Int64N(size/512) * 512
				k.size = 1 + r.Int64N(min(size-k.offset, 70_000))
			}
		}
		d := dirs[r.IntN(len(dirs))]
		if _, taken := d.kids[string(name)]; !taken {
			d.kids[string(name)] = k
		}
	}
	return root
}
