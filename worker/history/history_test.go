// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

// open opens a log and closes it at the end of the test.
func open(t *testing.T, c Config) *Log {
	t.Helper()
	l := must.Get(Open(c))(t)
	t.Cleanup(func() { l.Close() })
	return l
}

// found returns the numbers of the entries that f selects.
func found(t *testing.T, l *Log, f Filter) []uint64 {
	t.Helper()
	var all []uint64
	for _, e := range entries(t, l, f) {
		all = append(all, e.Number)
	}
	return all
}

func entries(t *testing.T, l *Log, f Filter) []Entry {
	t.Helper()
	var all []Entry
	must.Succeed(t, l.Search(t.Context(), f, 1_000_000, func(e *Entry) error { all = append(all, *e); return nil }))
	return all
}

// TestDistinctIgnoresChecks since no client requested them.
func TestDistinctIgnoresChecks(t *testing.T) {
	l := open(t, Config{Dir: filepath.Join(t.TempDir(), "history")})
	l.Add(Entry{Action: digest(1), How: Executed})
	l.Add(Entry{Action: digest(2), How: Executed})
	l.Add(Entry{Action: digest(1), How: Checked, Verdict: "differs"})
	expect.Slices(t, found(t, l, Filter{Distinct: true}), []uint64{2, 1}, "distinct entries (2 and 1)")
	expect.Equal(t, len(found(t, l, Filter{})), 3, "entries")
}

// TestInstancesAreSeparate even if their names look the same.
func TestInstancesAreSeparate(t *testing.T) {
	l := open(t, Config{Dir: filepath.Join(t.TempDir(), "history")})
	long := strings.Repeat("\x01", 200)
	names := []string{"a\x01", `a\x01`, long + "a", long + "b", "a\ufffd"}
	for i, name := range names {
		l.Add(Entry{Action: digest(i), How: Executed, Instance: name})
	}
	for _, name := range []string{"a\xff", strings.Repeat("x", 1<<20), "a//b"} { // invalid names
		l.Add(Entry{Action: digest(9), How: Executed, Instance: name})
	}
	for i, name := range names {
		expect.Slices(t, found(t, l, Filter{Instance: name}), []uint64{uint64(i) + 1}, "instance %q", name)
	}
}

func TestFilesAreReadableByTheOwnerOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "history")
	l := open(t, Config{Dir: dir})
	l.Add(Entry{Action: digest(1), How: Executed})
	found(t, l, Filter{}) // writes the entry
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	must.Be(t, err == nil && len(files) == 1, "files are %q, %v, want one", files, err)
	for _, path := range append(files, dir) {
		if fi, err := os.Stat(path); err != nil || runtime.GOOS != "windows" && fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("mode of %s is %v, %v, want access for the owner only", path, fi.Mode(), err)
		}
	}
}

// TestClockSetBackHidesNoEntries before the one with an old time.
func TestClockSetBackHidesNoEntries(t *testing.T) {
	l := open(t, Config{Dir: filepath.Join(t.TempDir(), "history")})
	l.Add(Entry{Action: digest(1), How: Executed})
	l.Add(Entry{Action: digest(2), How: Executed, Time: time.Unix(1, 0)})
	l.Add(Entry{Action: digest(3), How: Executed})
	expect.Slices(t, found(t, l, Filter{}), []uint64{3, 1}, "found (3 and 1)")
}

func digest(i int) string { return fmt.Sprintf("%064x/%d", i, i) }

func TestSearchAppliesTheFilter(t *testing.T) {
	l := open(t, Config{Dir: filepath.Join(t.TempDir(), "history")})
	a, b := digest(0xa), "blake3:"+digest(0xb)
	for _, e := range []Entry{
		{Action: a, How: Executed, Invocation: "one", Target: "//x:y", Mnemonic: "CppCompile", Exit: 1},
		{Action: b, How: Absent, Invocation: "one", Target: "//x:z", Mnemonic: "CppLink"},
		{Action: b, How: Executed, Invocation: "one", Target: "//x:z", Mnemonic: "CppLink", Correlated: "c"},
		{Action: a, How: Executed, Invocation: "two", Target: "//x:y", Mnemonic: "CppCompile", Code: 4},
		{Action: a, How: Cached, Invocation: "two", Instance: "other"},
		{Action: a, How: Found, Invocation: `say "hi"`, Target: "//p<&>"},
	} {
		l.Add(e)
	}
	for _, c := range []struct {
		name string
		Filter
		want []uint64
	}{
		{"all", Filter{}, []uint64{6, 4, 3, 2, 1}},
		{"an instance", Filter{Instance: "other"}, []uint64{5}},
		{"an invocation", Filter{Invocation: "one"}, []uint64{3, 2, 1}},
		{"correlated", Filter{Correlated: "c"}, []uint64{3}},
		{"a target", Filter{Target: "//x:z"}, []uint64{3, 2}},
		{"target prefix", Filter{Target: "//x:*"}, []uint64{4, 3, 2, 1}},
		{"part of a target", Filter{Target: "//x"}, nil},
		{"a mnemonic", Filter{Mnemonic: "CppLink"}, []uint64{3, 2}},
		{"failed", Filter{Failed: true}, []uint64{4, 1}},
		{"distinct", Filter{Distinct: true}, []uint64{6, 3}},
		{"before", Filter{Before: 4}, []uint64{3, 2, 1}},
		{"hash prefix", Filter{Action: a[:64]}, []uint64{6, 4, 1}},
		{"a digest", Filter{Action: a}, []uint64{6, 4, 1}},
		{"hash prefix with a function", Filter{Action: b[7:71]}, []uint64{3, 2}},
		{"a function", Filter{Action: "blake3:"}, []uint64{3, 2}},
		{"the middle of a digest", Filter{Action: "b/11"}, nil},
		{"two conditions", Filter{Invocation: "one", Failed: true}, []uint64{1}},
		{"JSON escapes", Filter{Invocation: `say "hi"`}, []uint64{6}},
		{"HTML escapes", Filter{Target: "//p<&>"}, []uint64{6}},
	} {
		expect.Slices(t, found(t, l, c.Filter), c.want, "%s: found", c.name)
	}
	n := 0
	if err := l.Search(t.Context(), Filter{}, 2, func(*Entry) error { n++; return nil }); err != nil || n != 2 {
		t.Errorf("limit 2: %d entries, %v, want 2", n, err)
	}
	own := errors.New("visitor")
	if err := l.Search(t.Context(), Filter{}, 2, func(*Entry) error { return own }); err != own {
		t.Errorf("error is %v, want the visitor's", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Error(t, l.Search(ctx, Filter{}, 2, func(*Entry) error { return nil }), context.Canceled, "cancelled search")
}

// TestEntriesSurviveARestart with and without the remains of a killed writer.
func TestEntriesSurviveARestart(t *testing.T) {
	for name, torn := range map[string]string{
		"whole": "", "torn": `{"n":3,"time":"2026`, "a long tail": strings.Repeat("x", 2*block), "damage": "{}}\nrubbish\n", "a long line": strings.Repeat("x", 2*block) + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l := open(t, Config{Dir: dir})
			want := Entry{
				Number: 1, Time: time.Unix(1_800_000_000, 5).UTC(), Instance: "main", How: Executed, Action: digest(1), Invocation: "i", Correlated: "c",
				Target: "//t", Mnemonic: "m", Code: 4, Exit: -1, Result: "r", Manifest: digest(2), StableHash: "s", Worker: "w", Waited: time.Second, Prepared: 5, Ran: 7, Stored: 6, Verdict: "same",
			}
			l.Add(want)
			l.Add(Entry{Action: digest(2)})
			l.Close()
			l.Close()
			f, err := os.OpenFile((durable.Segments{Dir: dir, Suffix: suffix}).Path(1), os.O_WRONLY|os.O_APPEND, 0)
			must.Succeed(t, err)
			must.Get(f.WriteString(torn))(t)
			f.Close()

			l = open(t, Config{Dir: dir})
			l.Add(Entry{Action: digest(3)})
			expect.Slices(t, found(t, l, Filter{}), []uint64{3, 2}, "after a restart found (3 and 2)")
			expect.Equal(t, cmp.Diff([]Entry{want}, entries(t, l, Filter{Instance: "main"})), "", "(-want +got)")
			text, err := os.ReadFile((durable.Segments{Dir: dir, Suffix: suffix}).Path(1))
			if err != nil || name != "damage" && name != "a long line" && bytes.Count(text, []byte("\n")) != 3 {
				t.Errorf("segment has %d lines, %v, want 3", bytes.Count(text, []byte("\n")), err)
			}
		})
	}
}

func TestSizeAndAgeAreBounded(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	const most = 64 << 10
	l := open(t, Config{Dir: dir, MaxBytes: most, MaxAge: time.Hour, now: func() time.Time { return now }})
	for i := range 3000 {
		l.Add(Entry{Action: digest(i), Time: now})
		if i%100 == 0 {
			must.Succeed(t, l.flush(t.Context()))
		}
	}
	got := found(t, l, Filter{})
	if len(got) < 100 || got[0] != 3000 || got[len(got)-1] != 3001-uint64(len(got)) {
		t.Errorf("%d entries are kept, from %d to %d; want the newest", len(got), got[len(got)-1], got[0])
	}
	var total int64
	files := must.Get(os.ReadDir(dir))(t)
	for _, f := range files {
		total += must.Get(f.Info())(t).Size()
	}
	expect.That(t, total <= most && len(files) >= 2,
		"%d files with %d bytes, want several with at most %d", len(files), total, most)

	l.Close()
	now = now.Add(2 * time.Hour)
	l = open(t, Config{Dir: dir, MaxBytes: most, MaxAge: time.Hour, now: func() time.Time { return now }})
	expect.Equal(t, len(found(t, l, Filter{})), 0, "expired entries are listed")
	l.Add(Entry{Action: digest(1)})
	expect.Slices(t, found(t, l, Filter{}), []uint64{3001}, "after all expired found")
	if left, err := l.segs.List(); err != nil || len(left) > 2 {
		t.Errorf("segments are %v, %v, want at most 2", left, err)
	}
}

// TestSegmentThatCannotBeDeleted is logged, and the other segments stay bounded.
func TestSegmentThatCannotBeDeleted(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	l := open(t, Config{Dir: dir, MaxBytes: 64 << 10, Log: slog.New(slog.NewTextHandler(&log, nil))})
	first := ""
	for i := range 3000 {
		l.Add(Entry{Action: digest(i)})
		must.Succeed(t, l.flush(t.Context()))
		firsts := must.Get(l.segs.List())(t)
		if first == "" && len(firsts) > 1 {
			first = l.segs.Path(firsts[0])
			must.Succeed(t, errors.Join(os.Remove(first), os.MkdirAll(filepath.Join(first, "stuck"), 0o700)))
		}
	}
	if text := log.String(); !strings.Contains(text, "cannot be reduced or deleted") || !strings.Contains(text, first) ||
		!strings.Contains(text, "failures among them are lost") {
		t.Errorf("got the log %q, want warnings that name %s", text, first)
	}
	if firsts, err := l.segs.List(); err != nil || len(firsts) < 2 || len(firsts) > 20 {
		t.Errorf("got segments %v, %v, want several, but bounded", firsts, err)
	}
}

func TestHostileTextsAreBoundedAndPrintable(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Config{Dir: dir})
	evil := "\x1b[2J\n{\"n\":7}\n\u202e\xff"
	l.Add(Entry{Action: digest(1), Target: evil, Invocation: strings.Repeat("\x00", 1<<20), Mnemonic: strings.Repeat("ä", 400), How: How(evil), Worker: evil})
	l.Close()
	got := entries(t, l, Filter{Target: evil})
	must.Be(t, len(got) == 1, "%d entries, want 1", len(got))
	e := got[0]
	if want := `\x1b[2J\n{"n":7}\n\u202e\xff`; e.Target != want || string(e.How) != want || e.Worker != want {
		t.Errorf("texts are %q, %q, %q, want %q", e.Target, e.How, e.Worker, want)
	}
	if len(e.Invocation) > maxText || len(e.Mnemonic) > maxText || !strings.HasPrefix(e.Mnemonic, `\u00e4\u00e4`) {
		t.Errorf("texts of %d and %d bytes, want at most %d", len(e.Invocation), len(e.Mnemonic), maxText)
	}
	text, err := os.ReadFile((durable.Segments{Dir: dir, Suffix: suffix}).Path(1))
	if err != nil || bytes.Count(text, []byte("\n")) != 1 || strings.ContainsFunc(strings.TrimSpace(string(text)), func(r rune) bool { return !strconv.IsPrint(r) }) {
		t.Errorf("file is %q, %v, want one printable line", text, err)
	}
}

// TestAddNeverBlocks checks that entries are lost while the directory is missing, and that the next entry reports it.
func TestAddNeverBlocks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "history")
	l := open(t, Config{Dir: dir})
	must.Succeed(t, os.Remove(dir))
	for i := range 10 {
		l.Add(Entry{Action: digest(i)})
	}
	if err := l.flush(t.Context()); err != nil || l.Lost() != 10 {
		t.Fatalf("Lost is %d, want 10: %v", l.Lost(), err)
	}
	l.Add(Entry{Action: digest(10)}) // reports ten lost entries, and is lost itself
	must.Succeed(t, l.flush(t.Context()))
	must.Succeed(t, os.Mkdir(dir, 0o700))
	l.Add(Entry{Action: digest(11)})
	l.Add(Entry{Action: digest(12)})
	got := entries(t, l, Filter{})
	expect.That(t, len(got) == 2 && got[1].Lost == 11 && got[0].Lost == 0,
		"found %+v, want two, the older with Lost 11", got)
	l.Close()
	l.Add(Entry{Action: digest(13)}) // from a call that ends late
	expect.That(t, len(entries(t, l, Filter{})) == 2, "Add after Close wrote an entry")

	// A writer that blocks.
	stuck := &Log{cfg: Config{now: time.Now}, entries: make(chan Entry, 2)}
	for range 5 {
		stuck.Add(Entry{})
	}
	expect.Equal(t, stuck.Lost(), 3, "Lost")
}

func TestIdentityDependsOnOutputsOnly(t *testing.T) {
	d := func(s string) *repb.Digest { return &repb.Digest{Hash: s, SizeBytes: 3} }
	base := func() *repb.ActionResult {
		return &repb.ActionResult{
			OutputFiles:       []*repb.OutputFile{{Path: "a", Digest: d("1")}, {Path: "b", Digest: d("2")}},
			OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: d("3")}},
			OutputSymlinks:    []*repb.OutputSymlink{{Path: "l", Target: "t"}},
			StdoutDigest:      d("4"), StderrDigest: d("5"),
		}
	}
	want := Identity(base())
	expect.That(t, len(want) == 32 && Identity(nil) == "" && Identity(&repb.ActionResult{}) != "",
		"Identity is %q, and %q of nil; want 32 digits and none", want, Identity(nil))
	for name, change := range map[string]func(*repb.ActionResult){
		"order":    func(r *repb.ActionResult) { slices.Reverse(r.OutputFiles) },
		"metadata": func(r *repb.ActionResult) { r.ExecutionMetadata = &repb.ExecutedActionMetadata{Worker: "w"} },
		"contents": func(r *repb.ActionResult) { r.OutputFiles[0].Contents, r.StdoutRaw = []byte("abc"), []byte("abc") },
		"links twice": func(r *repb.ActionResult) {
			r.OutputFileSymlinks = []*repb.OutputSymlink{{Path: "l", Target: "t"}}
		},
	} {
		r := base()
		if change(r); Identity(r) != want {
			t.Errorf("%s changes the identity", name)
		}
	}
	for name, change := range map[string]func(*repb.ActionResult){
		"a file":        func(r *repb.ActionResult) { r.OutputFiles[0].Digest = d("9") },
		"a path":        func(r *repb.ActionResult) { r.OutputFiles[0].Path = "c" },
		"executable":    func(r *repb.ActionResult) { r.OutputFiles[0].IsExecutable = true },
		"a directory":   func(r *repb.ActionResult) { r.OutputDirectories[0].TreeDigest = d("9") },
		"a link":        func(r *repb.ActionResult) { r.OutputSymlinks[0].Target = "u" },
		"stdout":        func(r *repb.ActionResult) { r.StdoutDigest = d("9") },
		"stderr, raw":   func(r *repb.ActionResult) { r.StderrDigest, r.StderrRaw = nil, []byte("x") },
		"exit":          func(r *repb.ActionResult) { r.ExitCode = 1 },
		"fewer":         func(r *repb.ActionResult) { r.OutputFiles = r.OutputFiles[:1] },
		"out for err":   func(r *repb.ActionResult) { r.StdoutDigest, r.StderrDigest = r.StderrDigest, r.StdoutDigest },
		"lines by name": func(r *repb.ActionResult) { r.OutputSymlinks[0].Path = "l\" \"t" },
	} {
		r := base()
		if change(r); Identity(r) == want {
			t.Errorf("%s does not change the identity", name)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir(), MaxBytes: 64 << 10})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 2000 {
			l.Add(Entry{Action: digest(i)})
		}
	}()
	for range 20 {
		found(t, l, Filter{Action: "00"})
	}
	<-done
	l.Close()
}

// BenchmarkSearch finds the oldest build among a million entries.
func BenchmarkSearch(b *testing.B) {
	l := must.Get(Open(Config{Dir: b.TempDir(), MaxBytes: 8 << 30}))(b)
	defer l.Close()
	for i := range 1_000_000 {
		l.Add(Entry{
			Action: digest(i), How: Executed, Invocation: fmt.Sprintf("5f1d6c0e-3b0a-4f7c-9d1e-%012d", i/5000), Worker: "worker-17",
			Target: fmt.Sprintf("//some/package/of/a/program:target_%d", i), Mnemonic: "CppCompile", Result: digest(i)[:32], Ran: 1234567890, Waited: 12345678,
		})
		if i%1000 == 0 {
			must.Succeed(b, l.flush(b.Context()))
		}
	}
	for b.Loop() {
		n := 0
		if err := l.Search(b.Context(), Filter{Invocation: "5f1d6c0e-3b0a-4f7c-9d1e-000000000000"}, 10_000, func(*Entry) error { n++; return nil }); err != nil || n != 5000 {
			b.Fatalf("%d entries: %v", n, err)
		}
	}
}

// TestFilesOfEarlierVersionsAreRead with texts that are printable but not ASCII.
func TestFilesOfEarlierVersionsAreRead(t *testing.T) {
	dir := t.TempDir()
	line := `{"n":7,"time":"` + time.Now().UTC().Format(time.RFC3339) + `","how":"executed","action":"` + digest(1) + `","target":"//ä"}` + "\n"
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "00000000000000000007.v1.jsonl"), []byte(line), 0o600))
	l := open(t, Config{Dir: dir})
	l.Add(Entry{Action: digest(2), Target: "//ä"})
	expect.Slices(t, found(t, l, Filter{Target: "//ä"}), []uint64{8, 7}, "found (8 and 7)")
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		pattern, match, other string
	}{
		{"", "//a:b ", ""},
		{"//a:b", "//a:b", "//a:bc //a"},
		{"//a:*", "//a:b //a:", "//a/b:c"},
		{"//a/...", "//a:b //a/c:d //a/c/e:f", "//ab:c //a @r//a:b"},
		{"//...", "//a:b //:a", "@r//a:b"},
		{"@r//a/...", "@r//a:b", "//a:b"},
	} {
		for want, texts := range map[bool]string{true: c.match, false: c.other} {
			for text := range strings.SplitSeq(texts, " ") {
				if got := Match(c.pattern, text); texts != "" && got != want {
					t.Errorf("%q and %q: got %v, want %v", c.pattern, text, got, want)
				}
			}
		}
	}
}
