// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
)

// An openings store counts the calls of Open per blob.
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
	return must.Get(cas.PutProto(t.Context(), o, cas.SHA256, m))(t)
}

// A marking store counts how often each digest was passed to Missing.
type marking struct {
	*openings
	marks map[cas.Digest]int
}

func newMarking() *marking { return &marking{newOpenings(), map[cas.Digest]int{}} }

func (m *marking) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	for _, d := range ds {
		m.marks[d]++
	}
	return m.openings.Missing(ctx, ds)
}

// text stores a blob that is not a message.
func (m *marking) text(t *testing.T, content string) cas.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(content)))(t)
}

// wantMarked checks that since the last call exactly the blobs in want were marked, each once.
func (m *marking) wantMarked(t *testing.T, want ...cas.Digest) {
	t.Helper()
	once := map[cas.Digest]int{}
	for _, d := range want {
		once[d] = 1
	}
	expect.Equal(t, cmp.Diff(once, m.marks, cmp.Comparer(func(a, b cas.Digest) bool { return a == b })), "",
		"blobs marked as used (-want +got)")
	clear(m.marks)
}

// fileOf returns a Directory with one file.
func fileOf(name string, d cas.Digest) *repb.Directory {
	return &repb.Directory{Files: []*repb.FileNode{{Name: name, Digest: d.Proto()}}}
}

// TestClosureReadsAndListsEachBlobOnce: outputs may share a Tree, root Directories and subdirectories.
func TestClosureReadsAndListsEachBlobOnce(t *testing.T) {
	s := newOpenings()
	var r repb.ActionResult
	inTree, inShared, inRoot := cas.SHA256.Sum([]byte("1")), cas.SHA256.Sum([]byte("2")), cas.SHA256.Sum([]byte("3"))
	tree := s.put(t, &repb.Tree{Root: fileOf("f", inTree), Children: []*repb.Directory{fileOf("g", inTree)}})
	shared := s.put(t, fileOf("f", inShared))
	want := []cas.Digest{tree}
	for i := range 3 {
		// Different roots with the same content; each holds the shared Directory twice.
		dir := fileOf(fmt.Sprint("f", i), inRoot)
		dir.Directories = []*repb.DirectoryNode{
			{Name: "a", Digest: shared.Proto()}, {Name: "b", Digest: shared.Proto()},
		}
		root := s.put(t, dir)
		want = append(want, root)
		for range 2 {
			r.OutputDirectories = append(r.OutputDirectories,
				&repb.OutputDirectory{TreeDigest: tree.Proto(), RootDirectoryDigest: root.Proto()})
		}
	}
	want = append(want, inTree, inRoot, shared, inShared)
	got := must.Get(cas.Closure(t.Context(), s, cas.SHA256, &r))(t)
	expect.Equal(t, cmp.Diff(fmt.Sprint(want), fmt.Sprint(got)), "", "closure (-want +got)")
	for d, n := range s.n {
		expect.Equal(t, n, 1, "blob %s was read N times", d)
	}
	if len(s.n) != 5 { // the Tree, three roots, the shared Directory
		t.Errorf("%d blobs were read, want 5", len(s.n))
	}
}

// A remoteStore fails the test if a blob is opened that was not fetched.
type remoteStore struct {
	*openings
	t       *testing.T
	fetched map[cas.Digest]bool
	calls   int
}

func (f *remoteStore) Fetch(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	f.calls++
	for _, d := range ds {
		f.fetched[d] = true
	}
	return nil, nil
}

func (f *remoteStore) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	expect.That(f.t, f.fetched[d], "%s was opened before it was fetched", d)
	return f.openings.Open(ctx, d, off)
}

// TestRule062_ClosureOfManyOutputsIsFetchedInFewCalls has 20,000 outputs and a tree of three levels.
func TestRule062_ClosureOfManyOutputsIsFetchedInFewCalls(t *testing.T) {
	s := &remoteStore{openings: newOpenings(), t: t, fetched: map[cas.Digest]bool{}}
	r := &repb.ActionResult{}
	for i := range 10_000 {
		d := cas.SHA256.Sum(fmt.Append(nil, i))
		tree := s.put(t, &repb.Tree{Root: fileOf("f", d)})
		r.OutputFiles = append(r.OutputFiles, &repb.OutputFile{Path: fmt.Sprint("f", i), Digest: d.Proto()})
		r.OutputDirectories = append(r.OutputDirectories, &repb.OutputDirectory{Path: fmt.Sprint("d", i), TreeDigest: tree.Proto()})
	}
	top := &repb.Directory{}
	for i := range 30 {
		mid := &repb.Directory{}
		for j := range 30 {
			leaf := s.put(t, fileOf(fmt.Sprint(i, j), cas.SHA256.Sum([]byte("leaf"))))
			mid.Directories = append(mid.Directories, &repb.DirectoryNode{Name: fmt.Sprint(100 + j), Digest: leaf.Proto()})
		}
		top.Directories = append(top.Directories, &repb.DirectoryNode{Name: fmt.Sprint(100 + i), Digest: s.put(t, mid).Proto()})
	}
	r.OutputDirectories[0].RootDirectoryDigest = s.put(t, top).Proto()
	ds := must.Get(cas.Closure(t.Context(), s, cas.SHA256, r))(t)
	expect.Equal(t, len(ds), 20_000+1+30+900+1, "blobs of the closure")
	if s.calls != 4 { // Trees, and three levels of Directories
		t.Errorf("blobs were fetched in %d calls, want 4", s.calls)
	}
}

// TestClosureReadsBlobInEachRole: a blob can be a file, a Tree and a Directory.
func TestClosureReadsBlobInEachRole(t *testing.T) {
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
		expect.That(t, err == nil && s.n[empty] == 2, "Tree and Directory: read %d times, %v, want 2", s.n[empty], err)
	}
}

// Rule 62.
func TestLookupCompleteGivesReason(t *testing.T) {
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
			must.Succeed(t, s.Record(t.Context(), action, c.result))
			_, err := cas.LookupComplete(t.Context(), in, action)
			must.Be(t, errors.Is(err, cas.ErrNotFound) && !errors.Is(err, cas.ErrInvalid),
				"got %v, want only ErrNotFound", err)
			expect.Texts(t, err.Error(), []string{action.String(), c.want})
		})
	}
}

// TestLookupOfUnansweredBlobsIsMiss: if an upstream does not answer or refuses a call, the action runs. Errors of the
// local store fail the lookup.
func TestLookupOfUnansweredBlobsIsMiss(t *testing.T) {
	for _, kind := range []error{cas.ErrUnavailable, cas.ErrDenied, cas.ErrUpstreamFull, cas.ErrUnwritable} {
		for _, op := range []faulty.Op{faulty.Open, faulty.Missing} {
			m := castest.NewMemory()
			s := faulty.New(m, m)
			tree := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, &repb.Tree{}))(t)
			action := cas.SHA256.Sum([]byte("action"))
			must.Succeed(t, m.Record(t.Context(), action, &repb.ActionResult{
				OutputDirectories: []*repb.OutputDirectory{{TreeDigest: tree.Proto()}},
			}))
			s.Fail(fmt.Errorf("since noon: %w", kind), op)
			_, err := cas.LookupComplete(t.Context(), &cas.Instance{Store: s, Actions: m}, action)
			if kind == cas.ErrUnwritable {
				expect.Error(t, err, kind, "%v", op)
				continue
			}
			expect.Error(t, err, cas.ErrNotFound, "%v of %v", kind, op)
			expect.That(t, !errors.Is(err, kind), "%v of %v: got %v, want only ErrNotFound", kind, op, err)
			expect.Texts(t, err.Error(), []string{action.String(), "since noon"})
		}
	}
}

func TestRule062And063_HitMarksItsWholeClosureOrIsNone(t *testing.T) {
	s := newMarking()
	in := &cas.Instance{Store: s, Actions: s}
	var blobs []cas.Digest
	text := func(content string) cas.Digest {
		blobs = append(blobs, s.text(t, content))
		return blobs[len(blobs)-1]
	}
	message := func(m proto.Message) *repb.Digest {
		blobs = append(blobs, s.put(t, m))
		return blobs[len(blobs)-1].Proto()
	}
	nested := message(fileOf("f", text("below the root Directory's directory")))
	root := fileOf("f", text("in the root Directory"))
	root.Directories = []*repb.DirectoryNode{{Name: "d", Digest: nested}}
	r := &repb.ActionResult{
		OutputFiles:  []*repb.OutputFile{{Path: "a", Digest: text("a").Proto()}, {Path: "b", Digest: text("b").Proto()}},
		StdoutDigest: text("stdout").Proto(),
		StderrDigest: text("stderr").Proto(),
		OutputDirectories: []*repb.OutputDirectory{
			{Path: "tree", TreeDigest: message(&repb.Tree{
				Root:     fileOf("f", text("in the Tree's root")),
				Children: []*repb.Directory{fileOf("f", text("in a child")), fileOf("f", text("in another child"))},
			})},
			{Path: "root", RootDirectoryDigest: message(root)},
		},
	}
	action := cas.SHA256.Sum([]byte("action"))
	must.Succeed(t, s.Record(t.Context(), action, r))
	must.Get(cas.LookupComplete(t.Context(), in, action))(t)
	s.wantMarked(t, blobs...)
	for _, d := range blobs {
		content := must.Get(cas.ReadAll(t.Context(), s, d, 1<<20))(t)
		s.Delete(d)
		expect.Error(t, expect.Err(cas.LookupComplete(t.Context(), in, action)), cas.ErrNotFound, "without %q", content)
		s.text(t, string(content))
	}
}

// A Directory needs no result around it: the closure has the root first, and equal subtrees once.
func TestDirectoryClosure(t *testing.T) {
	o := newOpenings()
	file := func(text string) *repb.FileNode {
		return &repb.FileNode{Name: text, Digest: cas.SHA256.Sum([]byte(text)).Proto()}
	}
	leaf := o.put(t, &repb.Directory{Files: []*repb.FileNode{file("a"), file("b")}})
	root := o.put(t, &repb.Directory{
		Files: []*repb.FileNode{file("a")},
		Directories: []*repb.DirectoryNode{
			{Name: "x", Digest: leaf.Proto()}, {Name: "y", Digest: leaf.Proto()},
		},
	})
	want := []cas.Digest{root, cas.SHA256.Sum([]byte("a")), leaf, cas.SHA256.Sum([]byte("b"))}
	got, err := cas.DirectoryClosure(t.Context(), o, root)
	if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(got)); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	expect.That(t, o.n[leaf] == 1 && o.n[root] == 1, "openings: got %v, want one of each Directory", o.n)
	expect.Error(t, expect.Err(cas.DirectoryClosure(t.Context(), o, cas.SHA256.Sum([]byte("absent")))), cas.ErrNotFound,
		"absent")
}
