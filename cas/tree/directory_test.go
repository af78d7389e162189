// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func seedDirectory() *repb.Directory {
	d := cas.SHA256.Sum(nil).Proto()
	return &repb.Directory{
		Files:       []*repb.FileNode{{Name: "a", Digest: d}, {Name: "c", Digest: d, IsExecutable: true}},
		Directories: []*repb.DirectoryNode{{Name: "b", Digest: d}},
		Symlinks:    []*repb.SymlinkNode{{Name: "d", Target: "../x"}},
	}
}

// Clients state sizes; their sum must not overflow.
func TestMeasureSaturatesBytes(t *testing.T) {
	d := must.Get(cas.NewDigest(cas.SHA256, strings.Repeat("a", 64), math.MaxInt64))(t)
	dir := &directory{entries: []entry{{name: "a", kind: File, digest: d}, {name: "b", kind: File, digest: d}}}
	if err := dir.measure(0); err != nil || dir.bytes != math.MaxInt64 {
		t.Errorf("got %d bytes, %v, want %d", dir.bytes, err, int64(math.MaxInt64))
	}
}

// Neither a Tree nor a Directory that CheckMessage rejects is stored.
func TestScannerRejectsOversizedMessages(t *testing.T) {
	large := &directory{}
	for i := range 1 + cas.MaxTree/4000 {
		e := entry{name: fmt.Sprintf("%08d", i), kind: Symlink, target: strings.Repeat("x", 4000)}
		large.entries = append(large.entries, e)
	}
	for _, format := range []repb.Command_OutputDirectoryFormat{
		repb.Command_TREE_ONLY, repb.Command_DIRECTORY_ONLY, repb.Command_TREE_AND_DIRECTORY,
	} {
		store := castest.NewMemory()
		s := &scanner{ofRun: true, limit: noLimit}
		b := cas.NewBatch(store)
		_, err := s.putTree(t.Context(), b, cas.SHA256, []*directory{large}, format)
		expect.That(t, errors.Is(err, ErrOutput) && len(b.Blobs()) == 0 && store.Len() == 0,
			"%v: got %v and %d blobs, want ErrOutput and none", format, err, len(b.Blobs()))
	}
}

func TestScannerLimitsEntries(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	root := must.Get(os.OpenRoot(dir))(t)
	defer root.Close()
	for ofRun, want := range map[bool]error{true: ErrOutput, false: cas.ErrInvalid} {
		s := &scanner{root: root, ofRun: ofRun, limit: noLimit, entries: maxEntries - 2}
		expect.Error(t, expect.Err(s.scan(t.Context(), ".", &directory{})), nil, "at the limit")
		s.entries = maxEntries - 1
		_, err := s.scan(t.Context(), ".", &directory{})
		expect.That(t, errors.Is(err, want) && strings.Contains(err.Error(), "1000000 entries"),
			"above the limit: got %v, want %v that names the limit", err, want)
	}
}

// badDirectories returns a Directory for each way of not being canonical (rule 74).
func badDirectories() []proto.Message {
	d := cas.SHA256.Sum(nil).Proto()
	file := func(name string) *repb.FileNode { return &repb.FileNode{Name: name, Digest: d} }
	sub := func(name string) *repb.DirectoryNode { return &repb.DirectoryNode{Name: name, Digest: d} }
	link := func(name, target string) *repb.SymlinkNode { return &repb.SymlinkNode{Name: name, Target: target} }
	var all []proto.Message
	for _, name := range []string{"", ".", "..", "a/b", "/a", "a\x00", strings.Repeat("n", 256), "\u00e9"} {
		all = append(all, &repb.Directory{Files: []*repb.FileNode{file(name)}},
			&repb.Directory{Directories: []*repb.DirectoryNode{sub(name)}},
			&repb.Directory{Symlinks: []*repb.SymlinkNode{link(name, "x")}})
	}
	return append(all,
		&repb.Directory{Files: []*repb.FileNode{file("b"), file("a")}},
		&repb.Directory{Files: []*repb.FileNode{file("a"), file("a")}},
		&repb.Directory{Files: []*repb.FileNode{file("a")}, Directories: []*repb.DirectoryNode{sub("a")}},
		&repb.Directory{Files: []*repb.FileNode{{Name: "a"}}, Directories: []*repb.DirectoryNode{{Name: "b"}}},
		&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: &repb.Digest{Hash: d.Hash, SizeBytes: -1}}}},
		&repb.Directory{Symlinks: []*repb.SymlinkNode{link("a", "")}},
		&repb.Directory{Symlinks: []*repb.SymlinkNode{link("a", "../../../etc/passwd"), link("b", "/etc/passwd")}},
		&repb.Directory{NodeProperties: &repb.NodeProperties{
			Mtime: &timestamppb.Timestamp{Seconds: 1 << 40, Nanos: -1}, UnixMode: wrapperspb.UInt32(1 << 31),
		}},
		&repb.Directory{NodeProperties: &repb.NodeProperties{
			Mtime: &timestamppb.Timestamp{Seconds: 1}, UnixMode: wrapperspb.UInt32(0o4755),
		}},
	)
}

// canonical reports whether m is sorted and has no duplicate names.
func canonical(m *repb.Directory) bool {
	var all []string
	ascend := func(names []string) bool {
		all = append(all, names...)
		return slices.IsSorted(names)
	}
	var files, dirs, links []string
	for _, n := range m.Files {
		files = append(files, n.Name)
	}
	for _, n := range m.Directories {
		dirs = append(dirs, n.Name)
	}
	for _, n := range m.Symlinks {
		links = append(links, n.Name)
	}
	if !ascend(files) || !ascend(dirs) || !ascend(links) {
		return false
	}
	slices.Sort(all)
	return len(slices.Compact(all)) == len(files)+len(dirs)+len(links)
}

// FuzzDirectory checks that decode accepts only canonical messages, that encode inverts it, and that Plan does not
// panic on the result.
func FuzzDirectory(f *testing.F) {
	for _, m := range append(badDirectories(), &repb.Directory{}, seedDirectory()) {
		b := must.Get(proto.Marshal(m))(f)
		f.Add(b, "", "b/out")
		f.Add(b, "b", "a/../../x")
		f.Add(b, ".", "")
	}
	f.Fuzz(func(t *testing.T, b []byte, workdir, output string) {
		var m repb.Directory
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		d := &directory{digest: cas.SHA256.Sum(b)}
		if err := d.decode(&m); err != nil {
			must.Be(t, errors.Is(err, cas.ErrInvalid) && strings.Contains(err.Error(), d.digest.String()),
				"decode: got error %v, want ErrInvalid that names the Directory", err)
			if i := strings.IndexFunc(err.Error(), func(r rune) bool { return r < ' ' || r > '~' }); i >= 0 {
				t.Fatalf("%q is not printable ASCII", err)
			}
			return
		}
		must.Be(t, canonical(&m), "decode accepted %v", &m)
		for i := range d.entries {
			e := &d.entries[i]
			must.Be(t, e.name != "" && e.name != "." && e.name != ".." && !strings.ContainsAny(e.name, "/\x00"),
				"decode accepted the name %q", e.name)
			must.Be(t, d.find(e.name) == e, "find does not find %q", e.name)
			must.Be(t, e.mode(false)&^0o777 == 0 && e.mode(true)&^0o777 == 0,
				"%q has the mode %v", e.name, e.mode(false))
		}
		again := &directory{entries: slices.Clone(d.entries), props: d.props}
		for i := range again.entries {
			if e := &again.entries[i]; e.kind == Directory {
				e.dir = &directory{digest: e.digest}
				d.entries[i].dir = e.dir
			}
		}
		encoded := must.Get(again.encode(cas.SHA256))(t)
		var back repb.Directory
		must.Succeed(t, proto.Unmarshal(encoded.Data, &back))
		third := &directory{digest: encoded.Digest}
		must.Succeed(t, third.decode(&back))
		for i := range third.entries {
			third.entries[i].dir = d.entries[i].dir
		}
		must.Be(t, reflect.DeepEqual(third.entries, d.entries) && reflect.DeepEqual(third.props, d.props),
			"encode turned %+v into %+v", d.entries, third.entries)
		must.Succeed(t, d.measure(0))
		l, err := (&Input{root: d}).Plan(workdir, []string{output, "out"}, []string{output})
		if err != nil {
			must.Be(t, errors.Is(err, cas.ErrInvalid), "Plan: got error %v, want ErrInvalid", err)
			return
		}
		_, _, _ = l.String(), l.contents(false), l.contents(true)
		if bytes, files := l.SizeEstimate(castest.NewMemory()); bytes < 0 || files < int64(len(l.dirs)) {
			t.Fatalf("SizeEstimate: got %d bytes in %d files", bytes, files)
		}
	})
}

// FuzzTree checks that Closure and Extract of any bytes claimed to be a Tree do not panic, and that Extract never
// writes outside its directory.
func FuzzTree(f *testing.F) {
	child := seedDirectory()
	child.Directories = nil
	_, d, err := cas.MarshalProto(cas.SHA256, child)
	must.Succeed(f, err)
	x, y := &repb.DirectoryNode{Name: "x", Digest: d.Proto()}, &repb.DirectoryNode{Name: "y", Digest: d.Proto()}
	root := &repb.Directory{Directories: []*repb.DirectoryNode{x, y}}
	trees := []proto.Message{
		&repb.Tree{}, &repb.Tree{Root: child}, &repb.Tree{Root: root},
		&repb.Tree{Root: root, Children: []*repb.Directory{child}},
		&repb.Tree{Root: root, Children: []*repb.Directory{child, child, {}}},
	}
	for _, m := range badDirectories() {
		trees = append(trees, &repb.Tree{Root: m.(*repb.Directory), Children: []*repb.Directory{{}}})
	}
	for _, m := range trees {
		b := must.Get(proto.Marshal(m))(f)
		f.Add(b, "out", "link")
		f.Add(b, "a/b", "a")
		f.Add(b, "", "../x")
		f.Add(b, "../out", "x/../../y")
	}
	f.Fuzz(func(t *testing.T, b []byte, p, linkAt string) {
		store := castest.NewMemory()
		d := must.Get(cas.PutBytes(t.Context(), store, cas.SHA256, b))(t)
		r := &repb.ActionResult{
			OutputDirectories: []*repb.OutputDirectory{{Path: p, TreeDigest: d.Proto()}},
			OutputSymlinks:    []*repb.OutputSymlink{{Path: linkAt, Target: ".."}},
			// An attempt to write through the link.
			OutputFileSymlinks: []*repb.OutputSymlink{{Path: linkAt + "/through", Target: "x"}},
		}
		if _, err := cas.Closure(t.Context(), store, cas.SHA256, r); err != nil && !errors.Is(err, cas.ErrInvalid) {
			t.Fatalf("Closure: got error %v, want ErrInvalid", err)
		}
		above := t.TempDir()
		must.Succeed(t, os.Mkdir(filepath.Join(above, "in"), 0o755))
		in := must.Get(os.OpenRoot(filepath.Join(above, "in")))(t)
		defer in.Close()
		for range 2 { // also over existing files
			_ = Extract(t.Context(), store, cas.SHA256, r, in) // may fail
		}
		if names, err := os.ReadDir(above); err != nil || len(names) != 1 {
			t.Fatalf("Extract wrote outside its directory: %v, %v", names, err)
		}
		var m repb.Tree
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		root, err := fromTree(cas.SHA256, &m)
		if err != nil {
			must.Be(t, errors.Is(err, cas.ErrInvalid), "fromTree: got error %v, want ErrInvalid", err)
			return
		}
		n := int64(0)
		for range root.all(".") {
			n++
		}
		must.Be(t, n <= root.count+1, "%d directories in a tree of %d entries", n, root.count)
	})
}
