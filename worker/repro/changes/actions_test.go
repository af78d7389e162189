// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// A fixture is a store in memory.
type fixture struct {
	*testing.T
	*castest.Memory
}

func newFixture(t *testing.T) *fixture { return &fixture{t, castest.NewMemory()} }

func (s *fixture) reader() *Reader { return &Reader{Store: s.Memory} }

func (s *fixture) put(m proto.Message) cas.Digest {
	s.Helper()
	d := must.Get(cas.PutProto(s.Context(), s.Memory, cas.SHA256, m))(s)
	return d
}

func (s *fixture) blob(text string) *repb.Digest {
	s.Helper()
	d := must.Get(cas.PutBytes(s.Context(), s.Memory, cas.SHA256, []byte(text)))(s)
	return d.Proto()
}

// files stores a Directory of files.
func (s *fixture) files(files map[string]string) cas.Digest {
	s.Helper()
	dir := &repb.Directory{}
	for name, text := range files {
		dir.Files = append(dir.Files, &repb.FileNode{Name: name, Digest: s.blob(text)})
	}
	slices.SortFunc(dir.Files, func(a, b *repb.FileNode) int { return strings.Compare(a.Name, b.Name) })
	return s.put(dir)
}

func (s *fixture) action(command *repb.Command, root cas.Digest, change func(*repb.Action)) cas.Digest {
	s.Helper()
	a := &repb.Action{CommandDigest: s.put(command).Proto(), InputRootDigest: root.Proto()}
	if change != nil {
		change(a)
	}
	return s.put(a)
}

// lines formats changes.
func lines(all []Change) string {
	var b strings.Builder
	for _, c := range all {
		fmt.Fprintf(&b, "%s | %s | %s | %s\n", c.What, c.Name, c.A, c.B)
	}
	return b.String()
}

func wantLines(t *testing.T, got []Change, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, strings.Split(strings.TrimSuffix(lines(got), "\n"), "\n")); diff != "" && !(len(want) == 0 && len(got) == 0) {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestActionsNamesEachChangedPart(t *testing.T) {
	s := newFixture(t)
	command := func() *repb.Command {
		return &repb.Command{
			Arguments:            []string{"cc", "-O1", "-c", "x.c", "-o", "x.o"},
			EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "LANG", Value: "C"}, {Name: "PATH", Value: "/bin"}},
			OutputPaths:          []string{"x.o"},
			Platform:             &repb.Platform{Properties: []*repb.Platform_Property{{Name: "OSFamily", Value: "linux"}}},
		}
	}
	root := s.files(map[string]string{"x.c": "1", "x.h": "2", "z.h": "3"})
	// of returns the same root with properties.
	of := func(all, file *repb.NodeProperties) cas.Digest {
		var d repb.Directory
		must.Succeed(t, cas.ReadProto(t.Context(), s.Memory, root, &d))
		d.NodeProperties, d.Files[0].NodeProperties = all, file
		return s.put(&d)
	}
	rooted := func(all *repb.NodeProperties) cas.Digest { return of(all, nil) }
	dated := func(sec int64) cas.Digest {
		return of(nil, &repb.NodeProperties{Mtime: &timestamppb.Timestamp{Seconds: sec}, UnixMode: wrapperspb.UInt32(0o640)})
	}
	sticky := &repb.NodeProperties{UnixMode: wrapperspb.UInt32(0o1777)}
	base := s.action(command(), root, nil)
	reversed := func() cas.Digest {
		c := command()
		slices.Reverse(c.EnvironmentVariables)
		return s.action(c, root, nil)
	}
	long := strings.Repeat("x", 300)
	for name, c := range map[string]struct {
		change func(*repb.Command)
		root   cas.Digest
		action func(*repb.Action)
		want   []string
	}{
		"equal":              {},
		"an argument":        {change: func(c *repb.Command) { c.Arguments[1] = "-O2" }, want: []string{"argument | 2 | -O1 | -O2"}},
		"one more":           {change: func(c *repb.Command) { c.Arguments = slices.Insert(c.Arguments, 2, "-g", "") }, want: []string{"argument | 3 |  | -g", `argument | 4 |  | ""`}},
		"one less":           {change: func(c *repb.Command) { c.Arguments = slices.Delete(c.Arguments, 1, 2) }, want: []string{"argument | 2 | -O1 | "}},
		"two places":         {change: func(c *repb.Command) { c.Arguments[1], c.Arguments[5] = "-O2", "y.o" }, want: []string{"argument | 2 | -O1 | -O2", "argument | 6 | x.o | y.o"}},
		"hostile":            {change: func(c *repb.Command) { c.Arguments[1] = "\x1b[2J\n" }, want: []string{`argument | 2 | -O1 | "\x1b[2J\n"`}},
		"long":               {change: func(c *repb.Command) { c.Arguments[1] = long }, want: []string{"argument | 2 | -O1 | " + long[:maxText-3] + "..."}},
		"a variable":         {change: func(c *repb.Command) { c.EnvironmentVariables[0].Value = "de" }, want: []string{"environment | LANG | C | de"}},
		"another variable":   {change: func(c *repb.Command) { c.EnvironmentVariables[0].Name = "LC" }, want: []string{"environment | LANG | C | ", "environment | LC |  | C"}},
		"a directory":        {change: func(c *repb.Command) { c.WorkingDirectory = "d" }, want: []string{`working directory |  | "" | d`}},
		"an output":          {change: func(c *repb.Command) { c.OutputPaths[0] = "y.o" }, want: []string{"declared output | x.o | declared | ", "declared output | y.o |  | declared"}},
		"a platform":         {change: func(c *repb.Command) { c.Platform.Properties[0].Value = "macos" }, want: []string{"platform | OSFamily | linux | macos"}},
		"the action's":       {action: func(a *repb.Action) { a.Platform = &repb.Platform{} }, want: []string{"platform | OSFamily | linux | "}},
		"a timeout":          {action: func(a *repb.Action) { a.Timeout = durationpb.New(time.Minute) }, want: []string{"timeout |  |  | 1m0s"}},
		"do_not_cache":       {action: func(a *repb.Action) { a.DoNotCache = true }, want: []string{"do_not_cache |  | false | true"}},
		"a salt":             {action: func(a *repb.Action) { a.Salt = []byte("s") }, want: []string{"salt |  |  | s"}},
		"an input":           {root: s.files(map[string]string{"x.c": "9", "x.h": "2", "z.h": "3"}), want: []string{"input | x.c | " + digestText("1") + " | " + digestText("9")}},
		"an input less":      {root: s.files(map[string]string{"x.c": "1", "z.h": "3"}), want: []string{"input | x.h | " + digestText("2") + " | "}},
		"an input more":      {root: s.files(map[string]string{"x.c": "1", "x.h": "2", "y": "y", "z.h": "3"}), want: []string{"input | y |  | " + digestText("y")}},
		"an input's date":    {root: dated(1), want: []string{"input | x.c | " + digestText("1") + " | " + digestText("1") + " mode 0640 mtime 1970-01-01T00:00:01Z"}},
		"a directory's mode": {root: rooted(sticky), want: []string{"input | / | directory " + root.String() + " | directory " + rooted(sticky).String()}},
		"order": {
			change: func(c *repb.Command) { slices.Reverse(c.EnvironmentVariables) },
			want:   []string{"action, of equal parts in another order or encoding |  | " + base.String() + " | " + reversed().String()},
		},
		"missing input root": {root: cas.SHA256.Sum([]byte("absent")), want: []string{"input root |  | " + root.String() + " | " + digestText("absent") + " absent"}},
	} {
		t.Run(name, func(t *testing.T) {
			command := command()
			if c.change != nil {
				c.change(command)
			}
			if c.root.IsZero() {
				c.root = root
			}
			got := must.Get(Actions(t.Context(), s.reader(), base, s.action(command, c.root, c.action)))(t)
			wantLines(t, got, c.want...)
		})
	}
	expect.That(t, expect.Err(Actions(t.Context(), s.reader(), base, cas.SHA256.Sum([]byte("none")))) != nil,
		"missing action: got no error")
}

func digestText(content string) string { return cas.SHA256.Sum([]byte(content)).String() }

func TestDirectoriesComparesKindsModesAndLinks(t *testing.T) {
	s := newFixture(t)
	sub := func(text string) *repb.DirectoryNode {
		return &repb.DirectoryNode{Name: "sub", Digest: s.files(map[string]string{"deep": text}).Proto()}
	}
	a := &repb.Directory{
		Files:       []*repb.FileNode{{Name: "mode", Digest: s.blob("m")}, {Name: "same", Digest: s.blob("s")}, {Name: "was", Digest: s.blob("w")}},
		Directories: []*repb.DirectoryNode{sub("1")},
		Symlinks:    []*repb.SymlinkNode{{Name: "link", Target: "there"}},
	}
	b := &repb.Directory{
		Files:       []*repb.FileNode{{Name: "mode", Digest: s.blob("m"), IsExecutable: true}, {Name: "same", Digest: s.blob("s")}},
		Directories: []*repb.DirectoryNode{sub("2"), {Name: "was", Digest: s.files(nil).Proto()}},
		Symlinks:    []*repb.SymlinkNode{{Name: "link", Target: "else where"}},
	}
	got, err := Directories(t.Context(), "input", s.reader().Directory(s.put(a)), s.reader().Directory(s.put(b)))
	must.Succeed(t, err)
	wantLines(t, got,
		`input | link | link to there | link to "else where"`,
		"input | mode | "+digestText("m")+" | "+digestText("m")+" executable",
		"input | sub/deep | "+digestText("1")+" | "+digestText("2"),
		"input | was | "+digestText("w")+" | directory "+s.files(nil).String(),
	)
	tree := s.put(&repb.Tree{Root: a, Children: []*repb.Directory{{Files: []*repb.FileNode{{Name: "deep", Digest: s.blob("1")}}}}})
	if got, err := Directories(t.Context(), "input", s.reader().Tree(tree), s.reader().Directory(s.put(a))); err != nil || len(got) != 0 {
		t.Errorf("a Tree and its Directory: %s, %v", lines(got), err)
	}
	// A missing directory is one change; the others are still compared.
	s.Delete(s.files(map[string]string{"deep": "2"}))
	if got, err = Directories(t.Context(), "input", s.reader().Directory(s.put(a)), s.reader().Directory(s.put(b))); err != nil || len(got) != 4 || got[2].Name != "sub/" || strings.Contains(got[2].A, "absent") || !strings.HasSuffix(got[2].B, ", which is absent") {
		t.Errorf("with an absent directory: %s, %v", lines(got), err)
	}
}

func TestHostileDirectoriesAreCheap(t *testing.T) {
	s := newFixture(t)
	nest := func(d cas.Digest) cas.Digest {
		for range 60 { // 2^60 paths
			d = s.put(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: "a", Digest: d.Proto()}, {Name: "b", Digest: d.Proto()}}})
		}
		return d
	}
	a, b := nest(s.files(map[string]string{"f": "1"})), nest(s.files(map[string]string{"f": "2"}))
	got, err := Directories(t.Context(), "input", s.reader().Directory(a), s.reader().Directory(b))
	expect.That(t, err == nil && len(got) == 61 && strings.HasPrefix(got[1].A, "as in a/a"),
		"got %d changes, %v", len(got), err)
	many := map[string]string{}
	for i := range 2 * maxChanges {
		many[fmt.Sprint(i)] = "x"
	}
	got, err = Directories(t.Context(), "input", s.reader().Directory(s.files(nil)), s.reader().Directory(s.files(many)))
	expect.That(t, err == nil && len(got) == maxChanges+1 && got[maxChanges].B == "more",
		"got %d changes, %v", len(got), err)
	args := slices.Repeat([]string{"x", "y"}, 100_000)
	if got := sequences("argument", args, append([]string{"z"}, args...)); len(got) != 1 {
		t.Errorf("one added argument: got %s", lines(got))
	}
	if got := sequences("argument", args, append(append([]string{"z"}, args...), "z")); len(got) != 1 {
		t.Errorf("two added arguments: got %s", lines(got))
	}
}

func TestResultsNamesEachChange(t *testing.T) {
	s := newFixture(t)
	a := &repb.ActionResult{
		OutputFiles:  []*repb.OutputFile{{Path: "o", Digest: s.blob("1")}, {Path: "same", Digest: s.blob("s")}},
		StdoutRaw:    []byte("said"),
		StderrDigest: s.blob("err 1"),
	}
	b := &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "o", Digest: s.blob("2")}, {Path: "same", Digest: s.blob("s")}},
		OutputSymlinks:    []*repb.OutputSymlink{{Path: "l", Target: "t"}},
		StdoutDigest:      s.blob("said"),
		StderrDigest:      s.blob("err 2"),
		ExitCode:          1,
		ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: "another"},
	}
	got, err := Results(t.Context(), s.reader(), cas.SHA256, a, b)
	must.Succeed(t, err)
	wantLines(t, got, "exit code |  | 0 | 1", "output | l |  | link to t", "output | o | "+digestText("1")+" | "+digestText("2"),
		"stderr |  | "+digestText("err 1")+" | "+digestText("err 2"))
	in, done, err := got[2].EntryB.Open(t.Context())
	must.Be(t, err == nil && in.Size() == 1, "open the output of B: %v", err)
	done()
	if got, err := Results(t.Context(), s.reader(), cas.SHA256, a, a); err != nil || len(got) != 0 {
		t.Errorf("equal results: got %s, %v", lines(got), err)
	}
}

// A changed source changes the actions that depend on it, and one action has two results.
func TestBuildsNamesCausesBeforeConsequences(t *testing.T) {
	s := newFixture(t)
	file := func(path, text string) *repb.ActionResult {
		return &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: path, Digest: s.blob(text)}}}
	}
	record := func(a cas.Digest, r *repb.ActionResult) cas.Digest {
		must.Succeed(t, s.Record(t.Context(), a, r))
		return a
	}
	compile := func(source, object string) cas.Digest {
		return record(s.action(&repb.Command{Arguments: []string{"cc"}, OutputPaths: []string{"x.o"}}, s.files(map[string]string{"x.c": source}), nil), file("x.o", object))
	}
	link := func(object, other, program string) cas.Digest {
		return record(s.action(&repb.Command{Arguments: []string{"ld"}, OutputPaths: []string{"x"}}, s.files(map[string]string{"x.o": object, "y.o": other}), nil), file("x", program))
	}
	stamp := s.action(&repb.Command{Arguments: []string{"date"}}, s.files(nil), nil)
	made := func(text string) cas.Digest {
		m := &manifest.Manifest{
			Action: stamp, Command: stamp, InputRoot: stamp, Stdout: cas.SHA256.Sum(nil), Stderr: cas.SHA256.Sum(nil), Status: "OK",
			Outputs: []manifest.Output{{Kind: manifest.File, Path: "stamp", Digest: cas.SHA256.Sum([]byte(text))}},
		}
		s.blob(text)
		d := must.Get(cas.PutBytes(t.Context(), s.Memory, cas.SHA256, []byte(m.Text())))(t)
		return d
	}
	use := func(text string) cas.Digest {
		return s.action(&repb.Command{Arguments: []string{"use"}}, s.files(map[string]string{"stamp": text}), nil)
	}
	test := s.action(&repb.Command{Arguments: []string{"test"}}, s.files(nil), nil)
	// Declared outputs distinguish actions of one target and mnemonic.
	twin := func(out, arg string) cas.Digest {
		return s.action(&repb.Command{Arguments: []string{"gen", arg}, OutputPaths: []string{out}}, s.files(nil), nil)
	}
	a := []Step{
		{Action: test, Target: "//:test", Mnemonic: "Test", Result: "r"},
		{Action: link("o1", "y", "p1"), Target: "//:x", Mnemonic: "Link", Result: "p1"},
		{Action: compile("c1", "o1"), Target: "//:x", Mnemonic: "Compile", Result: "o1"},
		{Action: stamp, Target: "//:stamp", Mnemonic: "Stamp", Result: "s1", Manifest: made("monday")},
		{Action: use("monday"), Target: "//:use", Mnemonic: "Use"},
		{Action: twin("one", "1"), Target: "//:gen", Mnemonic: "Gen"},
		{Action: twin("two", "1"), Target: "//:gen", Mnemonic: "Gen"},
		{Action: twin("gone", "1"), Target: "//:gone", Mnemonic: "Gen"},
	}
	b := []Step{
		{Action: compile("c2", "o2"), Target: "//:x", Mnemonic: "Compile", Result: "o2"},
		{Action: link("o2", "y", "p2"), Target: "//:x", Mnemonic: "Link", Result: "p2"},
		{Action: test, Target: "//:test", Mnemonic: "Test", Result: "r"},
		{Action: stamp, Target: "//:stamp", Mnemonic: "Stamp", Result: "s2", Manifest: made("tuesday")},
		{Action: use("tuesday"), Target: "//:use", Mnemonic: "Use"},
		{Action: twin("two", "2"), Target: "//:gen", Mnemonic: "Gen"},
		{Action: twin("one", "2"), Target: "//:gen", Mnemonic: "Gen"},
		{Action: twin("new", "1"), Target: "//:new", Mnemonic: "Gen"},
	}
	pairs, err := Builds(t.Context(), s.reader(), s.Memory, a, b)
	must.Succeed(t, err)
	var got []string
	for _, p := range pairs {
		step := p.A
		if step == nil {
			step = p.B
		}
		line := fmt.Sprintf("%s %s", p.Relation, step.Target)
		for _, f := range p.Follows {
			line += " follows " + f.A.Mnemonic
		}
		for _, c := range p.Changes {
			line += " " + c.What + " " + c.Name
		}
		if p.Err != nil {
			line += " " + p.Err.Error()
		}
		got = append(got, line)
	}
	want := []string{
		"not reproducible //:stamp output stamp",
		"changed //:x input x.c",
		"changed //:gen argument 2",
		"changed //:gen argument 2",
		"changed //:x follows Compile input x.o",
		"changed //:use follows Stamp input stamp",
		"only in A //:gone",
		"only in B //:new",
		"same //:test",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	// A link with a change of its own, or with an object from elsewhere, does not follow from others.
	for _, own := range []cas.Digest{link("o2", "other", "p2"), link("o3", "y", "p3")} {
		b[1].Action = own
		if pairs, err = Builds(t.Context(), s.reader(), s.Memory, a, b); err != nil {
			t.Fatal(err)
		}
		for _, p := range pairs {
			if p.A != nil && p.A.Mnemonic == "Link" && p.Follows != nil {
				t.Errorf("%s: got follows %v, want none", p.A.Mnemonic, p.Follows)
			}
		}
	}
}

// onDisk is a store with its blobs in files, as far as a Reader can tell.
type onDisk struct {
	cas.Store
	dir string
}

// File implements cas.Filer.
func (s *onDisk) File(ctx context.Context, d cas.Digest, _ bool) (string, func(), error) {
	data, err := cas.ReadAll(ctx, s.Store, d, d.Size())
	if err != nil {
		return "", nil, err
	}
	path := filepath.Join(s.dir, d.Hash())
	return path, func() {}, os.WriteFile(path, data, 0o600)
}

func TestReaderCopiesLimitedBlobsOfOtherMachines(t *testing.T) {
	s := newFixture(t)
	large := strings.Repeat("0123456789abcdef", 9<<16) // more than is kept in memory
	d := must.Get(cas.FromProto(cas.SHA256, s.blob(large)))(t)
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	for name, r := range map[string]*Reader{
		"no limit": {Store: s.Memory}, "below the limit": {Store: s.Memory, MaxCopy: d.Size()},
		"on disk": {Store: &onDisk{s.Memory, t.TempDir()}, MaxCopy: 1},
	} {
		in, done, err := r.Open(t.Context(), d)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if text, err := io.ReadAll(in); err != nil || string(text) != large {
			t.Errorf("%s: got %d bytes, %v", name, len(text), err)
		}
		done()
	}
	if _, _, err := (&Reader{Store: s.Memory, MaxCopy: d.Size() - 1}).Open(t.Context(), d); !errors.Is(err, ErrTooLarge) {
		t.Errorf("above the limit: got %v", err)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("temporary files are left: %v, %v", left, err)
	}
}
