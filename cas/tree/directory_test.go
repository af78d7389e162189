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

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// seeds adds encoded messages to a fuzz corpus.
func seeds(f *testing.F, ms ...proto.Message) {
	for _, m := range ms {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
}

func seedDirectory() *repb.Directory {
	d := cas.SHA256.Sum(nil).Proto()
	return &repb.Directory{
		Files:       []*repb.FileNode{{Name: "a", Digest: d}, {Name: "c", Digest: d, IsExecutable: true}},
		Directories: []*repb.DirectoryNode{{Name: "b", Digest: d}},
		Symlinks:    []*repb.SymlinkNode{{Name: "d", Target: "../x"}},
	}
}

// Sizes are what a client states, and their sum must not turn negative.
func TestMeasureSaturatesBytes(t *testing.T) {
	d, err := cas.NewDigest(cas.SHA256, strings.Repeat("a", 64), math.MaxInt64)
	if err != nil {
		t.Fatal(err)
	}
	dir := &directory{entries: []entry{{name: "a", kind: File, digest: d}, {name: "b", kind: File, digest: d}}}
	if err := dir.measure(0); err != nil || dir.bytes != math.MaxInt64 {
		t.Errorf("got %d bytes, %v, want %d", dir.bytes, err, int64(math.MaxInt64))
	}
}

// What is stored can be read again: neither Tree nor Directory is stored that CheckMessage refuses.
func TestScannerRefusesWhatCannotBeReadAgain(t *testing.T) {
	large := &directory{}
	for i := range 1 + cas.MaxTree/4000 {
		e := entry{name: fmt.Sprintf("%08d", i), kind: Symlink, target: strings.Repeat("x", 4000)}
		large.entries = append(large.entries, e)
	}
	for _, format := range []repb.Command_OutputDirectoryFormat{
		repb.Command_TREE_ONLY, repb.Command_DIRECTORY_ONLY, repb.Command_TREE_AND_DIRECTORY,
	} {
		store := castest.NewMemory()
		s := &scanner{own: true, limit: noLimit}
		b := cas.NewBatch(store)
		_, err := s.putTree(t.Context(), b, cas.SHA256, []*directory{large}, format)
		if !errors.Is(err, ErrOutput) || len(b.Blobs()) != 0 || store.Len() != 0 {
			t.Errorf("%v: got %v and %d blobs, want ErrOutput and none", format, err, len(b.Blobs()))
		}
	}
}

func TestScannerLimitsEntries(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for own, want := range map[bool]error{true: ErrOutput, false: cas.ErrInvalid} {
		s := &scanner{root: root, own: own, limit: noLimit, entries: maxEntries - 2}
		if _, err := s.scan(t.Context(), ".", &directory{}); err != nil {
			t.Errorf("as many as permitted: %v", err)
		}
		s.entries = maxEntries - 1
		_, err := s.scan(t.Context(), ".", &directory{})
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "1000000 entries") {
			t.Errorf("one more: got %v, want %v that names the limit", err, want)
		}
	}
}

// What decode accepts is what it says it is, and encode writes it again.
func FuzzDirectory(f *testing.F) {
	unsorted := seedDirectory()
	slices.Reverse(unsorted.Files)
	seeds(f, &repb.Directory{}, seedDirectory(), unsorted, &repb.Directory{Files: []*repb.FileNode{{Name: ".."}}})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m repb.Directory
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		d := &directory{digest: cas.SHA256.Sum(b)}
		if err := d.decode(&m); err != nil {
			if !errors.Is(err, cas.ErrInvalid) {
				t.Fatalf("decode failed with %v, which is not ErrInvalid", err)
			}
			return
		}
		for i := range d.entries {
			e := &d.entries[i]
			if e.name == "" || e.name == "." || e.name == ".." || strings.ContainsAny(e.name, "/\x00") {
				t.Fatalf("decode accepted the name %q", e.name)
			}
			if i > 0 && d.entries[i-1].name >= e.name {
				t.Fatalf("%q follows %q", e.name, d.entries[i-1].name)
			}
			if d.find(e.name) != e {
				t.Fatalf("find does not find %q", e.name)
			}
		}
		again := &directory{entries: slices.Clone(d.entries)}
		for i := range again.entries {
			if e := &again.entries[i]; e.kind == Directory {
				e.dir = &directory{digest: e.digest}
			}
		}
		encoded, err := again.encode(cas.SHA256)
		if err != nil {
			t.Fatal(err)
		}
		var back repb.Directory
		if err := proto.Unmarshal(encoded.Data, &back); err != nil {
			t.Fatal(err)
		}
		third := &directory{digest: encoded.Digest}
		if err := third.decode(&back); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(third.entries, d.entries) {
			t.Fatalf("encode turned %+v into %+v", d.entries, third.entries)
		}
	})
}

// fromTree accepts only what can be walked to its end.
func FuzzTree(f *testing.F) {
	child := seedDirectory()
	child.Directories = nil
	_, d, err := cas.MarshalProto(cas.SHA256, child)
	if err != nil {
		f.Fatal(err)
	}
	x, y := &repb.DirectoryNode{Name: "x", Digest: d.Proto()}, &repb.DirectoryNode{Name: "y", Digest: d.Proto()}
	root := &repb.Directory{Directories: []*repb.DirectoryNode{x, y}}
	seeds(f, &repb.Tree{}, &repb.Tree{Root: child}, &repb.Tree{Root: root},
		&repb.Tree{Root: root, Children: []*repb.Directory{child}})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m repb.Tree
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		root, err := fromTree(cas.SHA256, &m)
		if err != nil {
			if !errors.Is(err, cas.ErrInvalid) {
				t.Fatalf("fromTree failed with %v, which is not ErrInvalid", err)
			}
			return
		}
		n := int64(0)
		for range root.all(".") {
			n++
		}
		if n > root.count+1 {
			t.Fatalf("%d directories in a tree of %d entries", n, root.count)
		}
	})
}
