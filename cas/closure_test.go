// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
)

// An openings counts how often each blob is opened.
type openings struct {
	*castest.Memory
	mu sync.Mutex
	n  map[cas.Digest]int // guarded by mu
}

func newOpenings() *openings {
	return &openings{Memory: castest.NewMemory(), n: map[cas.Digest]int{}}
}

func (o *openings) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	o.mu.Lock()
	o.n[d]++
	o.mu.Unlock()
	return o.Memory.Open(ctx, d, off)
}

func (o *openings) put(t *testing.T, m proto.Message) cas.Digest {
	t.Helper()
	d, err := cas.PutProto(t.Context(), o, cas.SHA256, m)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// fileOf returns a Directory that holds one file.
func fileOf(name string, d cas.Digest) *repb.Directory {
	return &repb.Directory{Files: []*repb.FileNode{{Name: name, Digest: d.Proto()}}}
}

// Many outputs that share a Tree, root Directories or what is below them cost as much as one.
func TestClosureReadsAndListsEachBlobOnce(t *testing.T) {
	s := newOpenings()
	var r repb.ActionResult
	inTree, inShared, inRoot := cas.SHA256.Sum([]byte("1")), cas.SHA256.Sum([]byte("2")), cas.SHA256.Sum([]byte("3"))
	tree := s.put(t, &repb.Tree{Root: fileOf("f", inTree), Children: []*repb.Directory{fileOf("g", inTree)}})
	shared := s.put(t, fileOf("f", inShared))
	want := []cas.Digest{tree, inTree}
	for i := range 3 {
		// The roots differ, but not in what they hold; each holds the shared Directory twice.
		dir := fileOf(fmt.Sprint("f", i), inRoot)
		dir.Directories = []*repb.DirectoryNode{
			{Name: "a", Digest: shared.Proto()}, {Name: "b", Digest: shared.Proto()},
		}
		root := s.put(t, dir)
		want = append(want, root)
		if i == 0 {
			want = append(want, inRoot, shared, inShared)
		}
		for range 2 {
			r.OutputDirectories = append(r.OutputDirectories,
				&repb.OutputDirectory{TreeDigest: tree.Proto(), RootDirectoryDigest: root.Proto()})
		}
	}
	got, err := cas.Closure(t.Context(), s, cas.SHA256, &r)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(got)); diff != "" {
		t.Errorf("closure (-want +got):\n%s", diff)
	}
	for d, n := range s.n {
		if n != 1 {
			t.Errorf("blob %s was read %d times", d, n)
		}
	}
	if len(s.n) != 5 { // the Tree, three roots, the shared Directory
		t.Errorf("%d blobs were read, want 5", len(s.n))
	}
}

// A blob can be a file, a Tree and a Directory: having met it as one is not to have read it as another.
func TestClosureReadsBlobAsAllThatItIs(t *testing.T) {
	s := newOpenings()
	inTree := cas.SHA256.Sum([]byte("1"))
	tree := s.put(t, &repb.Tree{Root: fileOf("f", inTree)})
	got, err := cas.Closure(t.Context(), s, cas.SHA256, &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "f", Digest: tree.Proto()}},
		OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: tree.Proto()}},
	})
	if want := fmt.Sprint([]cas.Digest{tree, inTree}); err != nil || fmt.Sprint(got) != want {
		t.Errorf("file and Tree: got %v, %v, want %v", got, err, want)
	}
	empty := cas.SHA256.Sum(nil)
	asTree := &repb.OutputDirectory{TreeDigest: empty.Proto()}
	asRoot := &repb.OutputDirectory{RootDirectoryDigest: empty.Proto()}
	for _, dirs := range [][]*repb.OutputDirectory{{asTree, asRoot, asTree}, {asRoot, asTree, asRoot}} {
		s.n = map[cas.Digest]int{}
		_, err := cas.Closure(t.Context(), s, cas.SHA256, &repb.ActionResult{OutputDirectories: dirs})
		if err != nil || s.n[empty] != 2 {
			t.Errorf("Tree and Directory: read %d times, %v, want 2", s.n[empty], err)
		}
	}
}

// Rule 62.
func TestLookupCompleteSaysWhatIsWrong(t *testing.T) {
	s := newOpenings()
	in := &cas.Instance{Store: s, Actions: s}
	text := s.put(t, &repb.Digest{Hash: "no Tree at all"})
	first, second := cas.SHA256.Sum([]byte("1")), cas.SHA256.Sum([]byte("2"))
	for _, c := range []struct {
		name   string
		result *repb.ActionResult
		want   string
	}{
		{"TwoAbsent", &repb.ActionResult{
			OutputFiles:  []*repb.OutputFile{{Digest: text.Proto()}, {Digest: first.Proto()}, {Digest: first.Proto()}},
			StdoutDigest: second.Proto(),
		}, "2 of the 3 blobs it refers to are absent, first " + first.String()},
		{"AbsentTree", &repb.ActionResult{
			OutputDirectories: []*repb.OutputDirectory{{TreeDigest: first.Proto()}},
		}, first.String()},
		{"NoTree", &repb.ActionResult{
			OutputDirectories: []*repb.OutputDirectory{{TreeDigest: text.Proto()}},
		}, text.String() + " is not a valid Tree"},
		{"MalformedDigest", &repb.ActionResult{StdoutDigest: &repb.Digest{Hash: "x"}}, "digest"},
	} {
		t.Run(c.name, func(t *testing.T) {
			action := cas.SHA256.Sum([]byte(c.name))
			if err := s.Record(t.Context(), action, c.result); err != nil {
				t.Fatal(err)
			}
			_, err := cas.LookupComplete(t.Context(), in, action)
			if !errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) {
				t.Fatalf("got %v, want ErrNotFound alone", err)
			}
			for _, want := range []string{action.String(), c.want} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %q, want %q in it", err, want)
				}
			}
		})
	}
}
