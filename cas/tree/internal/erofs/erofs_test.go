// SPDX-License-Identifier: Apache-2.0

package erofs_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestReadsBack checks that an image decodes to its tree, also in a reused buffer.
func TestReadsBack(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	buf := bytes.Repeat([]byte{0xaa}, 1<<20)
	for i := range 200 {
		devices := make([]int64, i%5)
		for j := range devices {
			devices[j] = 1 << 20
		}
		n := random(r, i*3, len(devices), 1<<20)
		used := bytes.Clone(encode(t, n, devices, buf))
		if fresh := encode(t, n, devices, nil); !bytes.Equal(used, fresh) {
			t.Fatal("equal trees made different images")
		}
	}
}

// TestBoundaries checks names and targets of every length at block boundaries.
func TestBoundaries(t *testing.T) {
	t.Parallel()
	for length := 1; length <= 255; length += 2 {
		n := &node{mode: 0o555, kids: map[string]*node{}}
		for i := range 60 {
			name := fmt.Sprintf("%02d%s", i, strings.Repeat("n", length))[:max(2, length)]
			n.kids[name] = &node{target: strings.Repeat("t", length*16+i/4), after: time.Duration(i % 3)}
		}
		encode(t, n, nil, nil)
	}
	for length := range 4095 {
		if length < 430 || length > 520 && length%97 != 0 {
			continue
		}
		for _, after := range []time.Duration{0, 1} {
			l := &node{target: strings.Repeat("t", length+1), after: after}
			encode(t, &node{kids: map[string]*node{"l": l}, after: after}, nil, nil)
		}
	}
}

// TestManySubdirectories has more of them than a compact inode could count links.
func TestManySubdirectories(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("70,000 directories")
	}
	n := &node{mode: 0o555, kids: map[string]*node{}}
	for i := range 70_000 {
		n.kids[fmt.Sprint(i)] = &node{kids: map[string]*node{}}
	}
	n.kids["zz"] = &node{mode: 0o444, size: 5 << 30, device: 0, offset: 512}
	encode(t, n, []int64{8 << 30}, nil)
}

// TestEncodeRejectsInvalidTrees checks that a tree an image cannot express is an error.
func TestEncodeRejectsInvalidTrees(t *testing.T) {
	file := erofs.Entry{Name: "f", Kind: erofs.File, Size: 1}
	one := func(e erofs.Entry) *erofs.Tree {
		return &erofs.Tree{Devices: []int64{4096}, Dirs: []erofs.Dir{{Count: 1}}, Entries: []erofs.Entry{e}}
	}
	with := func(change func(*erofs.Entry)) *erofs.Tree {
		e := file
		change(&e)
		return one(e)
	}
	for name, tree := range map[string]*erofs.Tree{
		"no root":            {},
		"name empty":         with(func(e *erofs.Entry) { e.Name = "" }),
		"name long":          with(func(e *erofs.Entry) { e.Name = strings.Repeat("n", 256) }),
		"name .":             with(func(e *erofs.Entry) { e.Name = "." }),
		"name ..":            with(func(e *erofs.Entry) { e.Name = ".." }),
		"name with slash":    with(func(e *erofs.Entry) { e.Name = "a/b" }),
		"name with NUL":      with(func(e *erofs.Entry) { e.Name = "a\x00" }),
		"no kind":            with(func(e *erofs.Entry) { e.Kind = 0 }),
		"size negative":      with(func(e *erofs.Entry) { e.Size = -1 }),
		"size huge":          with(func(e *erofs.Entry) { e.Size = 1<<40 + 1 }),
		"offset negative":    with(func(e *erofs.Entry) { e.Offset = -512 }),
		"offset not aligned": with(func(e *erofs.Entry) { e.Offset = 8 }),
		"offset huge":        with(func(e *erofs.Entry) { e.Offset = 1 << 41 }),
		"device negative":    with(func(e *erofs.Entry) { e.Device = -1 }),
		"device absent":      with(func(e *erofs.Entry) { e.Device = 1 }),
		"target empty":       with(func(e *erofs.Entry) { e.Kind = erofs.Symlink }),
		"target long": with(func(e *erofs.Entry) {
			e.Kind, e.Target = erofs.Symlink,
				strings.Repeat("t", 4096)
		}),
		"target with NUL":      with(func(e *erofs.Entry) { e.Kind, e.Target = erofs.Symlink, "\x00" }),
		"directory in itself":  with(func(e *erofs.Entry) { e.Kind = erofs.Directory }),
		"directory absent":     with(func(e *erofs.Entry) { e.Kind, e.Dir = erofs.Directory, 1 }),
		"device negative size": {Devices: []int64{-1}, Dirs: []erofs.Dir{{}}},
		"device huge":          {Devices: []int64{1 << 41}, Dirs: []erofs.Dir{{}}},
		"devices many":         {Devices: make([]int64, erofs.MaxDevices+1), Dirs: []erofs.Dir{{}}},
		"entries absent":       {Dirs: []erofs.Dir{{Count: 1}}},
		"directory unnamed":    {Dirs: []erofs.Dir{{}, {}}},
		"directory twice": {Dirs: []erofs.Dir{{Count: 2}, {}}, Entries: []erofs.Entry{
			{Name: "a", Kind: erofs.Directory, Dir: 1}, {Name: "b", Kind: erofs.Directory, Dir: 1},
		}},
		"names descend": {Dirs: []erofs.Dir{{Count: 2}}, Entries: []erofs.Entry{
			{Name: "b", Kind: erofs.File},
			{Name: "a", Kind: erofs.File},
		}},
		"names the same": {Dirs: []erofs.Dir{{Count: 2}}, Entries: []erofs.Entry{
			{Name: "a", Kind: erofs.File},
			{Name: "a", Kind: erofs.File},
		}},
	} {
		expect.Error(t, expect.Err(erofs.Encode(nil, tree)), erofs.ErrTree, "%s", name)
	}
	expect.Error(t, expect.Err(erofs.Encode(nil, one(file))), nil, "the valid tree")
}

// FuzzEncode checks that any tree decodes to itself.
func FuzzEncode(f *testing.F) {
	f.Add(uint64(1), uint16(50), uint8(3))
	f.Add(uint64(2), uint16(2000), uint8(0))
	f.Fuzz(func(t *testing.T, seed uint64, entries uint16, devices uint8) {
		sizes := make([]int64, devices)
		for i := range sizes {
			sizes[i] = 1 << 30
		}
		encode(t, random(rand.New(rand.NewPCG(seed, 0)), int(entries%4096), int(devices), 1<<30), sizes, nil)
	})
}

func manyFiles() *erofs.Tree {
	n := &node{mode: 0o555, kids: map[string]*node{}}
	for i := range 100 {
		d := &node{mode: 0o555, kids: map[string]*node{}}
		for j := range 20 {
			d.kids[fmt.Sprintf("file%d.go", j)] = &node{mode: 0o444, size: 4000, offset: int64(i*20+j) * 4096}
		}
		n.kids[fmt.Sprintf("dir%d", i)] = d
	}
	return n.flat([]int64{1 << 30}, true)
}

func BenchmarkEncode(b *testing.B) {
	t := manyFiles()
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if buf, err = erofs.Encode(buf, t); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(t.Entries)), "ns/entry")
	b.ReportMetric(float64(len(buf)), "image-bytes")
}
