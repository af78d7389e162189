// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/changes"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

func put(t *testing.T, s cas.Store, content string) *repb.Digest {
	t.Helper()
	d := must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, []byte(content)))(t)
	return d.Proto()
}

func putMessage(t *testing.T, s cas.Store, m proto.Message) cas.Digest {
	t.Helper()
	d := must.Get(cas.PutProto(t.Context(), s, cas.SHA256, m))(t)
	return d
}

func folder(s cas.Store, d cas.Digest) *changes.Entry {
	return &changes.Entry{Directory: (&changes.Reader{Store: s}).Directory(d)}
}

func TestEntriesNamesEntriesAndContents(t *testing.T) {
	s := castest.NewMemory()
	dir := func(time, link string, executable bool, more ...*repb.FileNode) cas.Digest {
		sub := putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{{Name: "log", Digest: put(t, s, "one\nbuilt at "+time+"\n")}}})
		return putMessage(t, s, &repb.Directory{
			Files:       append([]*repb.FileNode{{Name: "same", Digest: put(t, s, "same"), IsExecutable: executable}}, more...),
			Directories: []*repb.DirectoryNode{{Name: "sub", Digest: sub.Proto()}},
			Symlinks:    []*repb.SymlinkNode{{Name: "to", Target: link}},
		})
	}
	file := func(name string) *repb.FileNode { return &repb.FileNode{Name: name, Digest: put(t, s, "x")} }
	a := dir("12:00:00", "x", true, file("core.pid-12"), file("only"))
	b := dir("13:00:00", "y", false, file("core.pid-77"), file("sub2"))
	ds := must.Get(Entries(t.Context(), "out", folder(s, a), folder(s, b), Known{}))(t)
	checkDifferences(t, ds)
	want := []string{
		"out/same: executable: file mode", "out/sub/log: line 2: timestamp", "out/to: target of the link: ",
		"out/core.pid-12: name: process id", "out/only: entry: ", "out/sub2: entry: ",
	}
	if got := summaries(ds); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestEntriesOfTreesNeedNoStoredDirectories(t *testing.T) {
	s := castest.NewMemory()
	tree := func(content string) *changes.Entry {
		sub := &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: put(t, s, content)}}}
		_, digest, err := cas.MarshalProto(cas.SHA256, sub)
		must.Succeed(t, err)
		root := &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: digest.Proto()}}}
		d := putMessage(t, s, &repb.Tree{Root: root, Children: []*repb.Directory{sub}})
		return &changes.Entry{Directory: (&changes.Reader{Store: s}).Tree(d)}
	}
	ds := must.Get(Entries(t.Context(), "out", tree("at 12:00:00"), tree("at 13:00:00"), Known{}))(t)
	if got, want := summaries(ds), []string{"out/d/f: line 1: timestamp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestEntriesPairsRenamedEntries(t *testing.T) {
	s := castest.NewMemory()
	dir := func(names ...string) *changes.Entry {
		sub := putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{
			{Name: names[0], Digest: put(t, s, "x")}, {Name: names[1], Digest: put(t, s, "y")},
		}})
		return folder(s, putMessage(t, s, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "build", Digest: sub.Proto()}}}))
	}
	k := knownRuns()
	k.A.User = "build" // like the directory
	ds, err := Entries(t.Context(), "out", dir("core.pid-12", "on-cloister"), dir("core.pid-77", "on-host-b7"), k)
	must.Succeed(t, err)
	if got, want := summaries(ds), []string{"out/build/core.pid-12: name: process id", "out/build/on-cloister: name: hostname"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Each directory contains the next one twice: there are 2^90 paths.
func TestEntriesReportsADirectoryOnce(t *testing.T) {
	s := castest.NewMemory()
	nested := func(content string) cas.Digest {
		d := putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: put(t, s, content)}}})
		for range 90 {
			d = putMessage(t, s, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "l", Digest: d.Proto()}, {Name: "r", Digest: d.Proto()}}})
		}
		return d
	}
	ds, err := Entries(t.Context(), "out", folder(s, nested("x")), folder(s, nested("y")), Known{})
	if err != nil || len(ds) != 1 {
		t.Errorf("got %v, %v", ds, err)
	}
}

func TestEntriesFailsIfABlobIsMissing(t *testing.T) {
	s := castest.NewMemory()
	dir := func(content string) cas.Digest {
		return putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: cas.SHA256.Sum([]byte(content)).Proto()}}})
	}
	if _, err := Entries(t.Context(), "out", folder(s, dir("x")), folder(s, dir("y")), Known{}); err == nil || !strings.Contains(err.Error(), "out/f") {
		t.Errorf("got %v", err)
	}
}

func TestJSONNamesPaths(t *testing.T) {
	for _, row := range []struct {
		name, a, b string
		want       []string
	}{
		{
			"value", `{"a": {"time": "2026-11-22T00:44:31Z", "n": [1, 2]}}`, `{"a": {"time": "2026-11-22T00:44:32Z", "n": [1, 3]}}`,
			[]string{"x/$.a.time: value: timestamp", "x/$.a.n[1]: value: "},
		},
		{"order of keys", `{"b": 1, "a": 2}`, `{"a": 2, "b": 1}`, []string{"x/$: order of keys: hash seed"}},
		{"order of items", `["b.c", "a.c"]`, `["a.c", "b.c"]`, []string{"x/$: order of items, from item 0: member order"}},
		{"key", `{"a": 1}`, `{"a": 1, "b": {}}`, []string{"x/$.b: key: "}},
		{"number of a process", `{"pid": 12}`, `{"pid": 19}`, []string{"x/$.pid: value: process id"}},
		{"type", `{"a": 1}`, `{"a": [1]}`, []string{"x/$.a: value of another type: "}},
		{"white space", "{\"a\":\n1}\n", `{"a": 1}`, []string{"x: line 1: ", "x: line 2 of the first only: "}},
		{"no JSON", "{a\n1", "{a\n2", []string{"x: line 2: "}},
		{"items", `[1,2,3,4]`, `[1,3,4]`, []string{"x/$[1]: item: "}},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got := summaries(blobs(t, "x", row.a, row.b, Known{})); !slices.Equal(got, row.want) {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

func TestDeepJSONIsText(t *testing.T) {
	for _, depth := range []int{maxJSONDepth + 1, 100_000} {
		begin, end := strings.Repeat("[", depth), strings.Repeat("]", depth)
		if got := summaries(blobs(t, "x", begin+"1"+end, begin+"2"+end, Known{})); !slices.Equal(got, []string{"x: line 1: "}) {
			t.Errorf("depth %d: got %q", depth, got)
		}
	}
}
