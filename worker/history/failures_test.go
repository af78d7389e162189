// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
)

// A fixture is a store on disk with a history, for use in a synctest bubble.
type fixture struct {
	*testing.T
	config   disk.Config
	cache    *disk.Cache
	log      *Log
	failures *Failures
}

const lease = 3 * time.Hour

// open opens the store and its history with a limit for the blobs of failures.
func (s *fixture) open(dir string, protected int64) {
	s.Helper()
	s.config = disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 4 << 20, Lease: lease}
	s.cache = must.Get(disk.Open(s.config))(s)
	s.log = must.Get(Open(Config{Dir: filepath.Join(dir, "history")}))(s)
	s.failures = KeepFailures(FailuresConfig{
		Log: s.log, Instances: s.cache.Instance, MaxBytes: protected, RenewInterval: lease / 3,
	})
}

func (s *fixture) close() {
	s.failures.Close()
	s.log.Close()
	s.cache.Close()
}

func (s *fixture) store() cas.Store {
	return must.Get(s.cache.Instance("main"))(s).Store
}

// blob stores n bytes that begin with name.
func (s *fixture) blob(name string, n int) *repb.Digest {
	s.Helper()
	d := must.Get(cas.PutBytes(s.Context(), s.store(), cas.SHA256, append([]byte(name), make([]byte, n)...)))(s)
	return d.Proto()
}

// A failed is a failed action and its blobs.
type failed struct {
	kept, outputs []cas.Digest
}

// fail records a failure with an output of some bytes.
func (s *fixture) fail(name string, output int) *failed {
	s.Helper()
	command := s.blob(name+" command", 10)
	action := must.Get(cas.PutProto(s.Context(), s.store(), cas.SHA256, &repb.Action{CommandDigest: command}))(s)
	tree := must.Get(cas.PutProto(s.Context(), s.store(), cas.SHA256, &repb.Tree{Root: &repb.Directory{
		Files: []*repb.FileNode{{Name: "f", Digest: s.blob(name+" in a tree", 10)}},
	}}))(s)
	manifest := s.blob(name+" manifest", 10)
	r := &repb.ExecuteResponse{
		Result: &repb.ActionResult{
			ExitCode: 1, StdoutDigest: s.blob(name+" stdout", 10), StderrDigest: s.blob(name+" stderr", 10),
			OutputFiles:       []*repb.OutputFile{{Path: "o", Digest: s.blob(name+" output", output)}},
			OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: tree.Proto()}},
		},
		ServerLogs: map[string]*repb.LogFile{"audit": {Digest: s.blob(name+" audit", 10)}},
	}
	response := s.failures.Put("main", action, r)
	s.log.Add(Entry{
		Instance: "main", Action: action.String(), How: Executed, Exit: 1, Response: response.String(),
		Manifest: cas.SHA256.Sum(append([]byte(name+" manifest"), make([]byte, 10)...)).String(),
	})
	f := &failed{kept: []cas.Digest{action, response}}
	for _, p := range []*repb.Digest{command, manifest, r.Result.StdoutDigest, r.Result.StderrDigest, r.ServerLogs["audit"].Digest} {
		f.kept = append(f.kept, must.Get(cas.FromProto(cas.SHA256, p))(s))
	}
	f.outputs = must.Get(cas.Closure(s.Context(), s.store(), cas.SHA256, &repb.ActionResult{
		OutputFiles: r.Result.OutputFiles, OutputDirectories: r.Result.OutputDirectories,
	}))(s)
	return f
}

// day lets a day pass, with new blobs that fill the store. It reads nothing, since that would renew leases.
func (s *fixture) day() {
	s.Helper()
	for i := range 24 {
		time.Sleep(time.Hour)
		synctest.Wait()
		for j := range 16 {
			s.blob(fmt.Sprint(time.Now(), i, j), 50<<10)
		}
	}
}

// wantPresent checks which blobs the store still has: all of some, or none.
func (s *fixture) wantPresent(what string, blobs []cas.Digest, want bool) {
	s.Helper()
	missing, err := s.store().Missing(s.Context(), blobs)
	if err != nil || want && len(missing) > 0 || !want && len(missing) < len(blobs) {
		s.Errorf("%s: %d of %d blobs are missing, %v; want them present: %v", what, len(missing), len(blobs), err, want)
	}
}

// Everything that users look for in a failure is protected from eviction, also after a restart.
func TestFailuresAreProtectedFromEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dir := &fixture{T: t}, t.TempDir()
		s.open(dir, 1<<20)
		f := s.fail("f", 1000)
		plain := s.blob("plain", 1000)
		s.day()
		s.close()
		s.open(dir, 1<<20)
		defer s.close()
		s.day()
		s.wantPresent("failure", slices.Concat(f.kept, f.outputs), true)
		s.wantPresent("another blob", []cas.Digest{must.Get(cas.FromProto(cas.SHA256, plain))(t)}, false)
	})
}

// Beyond the limit older failures are evicted, and outputs that do not fit; these do not cost the failure its logs.
func TestProtectionOfFailuresIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dir := &fixture{T: t}, t.TempDir()
		s.open(dir, 100<<10)
		defer s.close()
		oldest := s.fail("oldest", 90<<10)
		large := s.fail("large", 120<<10)
		newest := s.fail("newest", 50<<10)
		s.day()
		s.wantPresent("newest", slices.Concat(newest.kept, newest.outputs), true)
		s.wantPresent("large", large.kept, true)
		s.wantPresent("the output of large", large.outputs[:1], false)
		s.wantPresent("oldest", oldest.kept, true)
		s.wantPresent("the output of oldest", oldest.outputs[:1], false)
	})
	synctest.Test(t, func(t *testing.T) {
		s, dir := &fixture{T: t}, t.TempDir()
		s.open(dir, 5000) // the newest without its outputs
		defer s.close()
		oldest, newest := s.fail("oldest", 10), s.fail("newest", 10)
		s.day()
		s.wantPresent("newest", newest.kept, true)
		s.wantPresent("oldest", oldest.kept, false)
	})
}

// An action that fails again and again takes the space of one failure.
func TestOnlyTheNewestFailureOfAnActionIsProtected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dir := &fixture{T: t}, t.TempDir()
		s.open(dir, 20<<10)
		defer s.close()
		other := s.fail("other", 10)
		for range 100 {
			s.fail("again", 10)
		}
		s.day()
		s.wantPresent("the other action", other.kept, true)
	})
}

// The oldest answers are dropped before the oldest failures, and both are bounded.
func TestFailuresOutliveSuccesses(t *testing.T) {
	dir := t.TempDir()
	const most = 64 << 10
	l := open(t, Config{Dir: dir, MaxBytes: most})
	add := func(l *Log, n int, e Entry) {
		for i := range n {
			e.Action, e.How = digest(i), Executed
			l.Add(e)
			if i%50 == 0 {
				must.Succeed(t, l.flush(t.Context()))
			}
		}
	}
	add(l, 5, Entry{Exit: 1, Target: "//a:fails"})
	add(l, 5000, Entry{})
	add(l, 1, Entry{Code: 4, Target: "//a:fails"})
	add(l, 5000, Entry{})
	want := []uint64{5006, 5, 4, 3, 2, 1}
	expect.Slices(t, found(t, l, Filter{Failed: true}), want, "found the failures")
	all := found(t, l, Filter{})
	if !slices.IsSortedFunc(all, func(a, b uint64) int { return int(b) - int(a) }) || len(all) < 200 || len(all) > 1000 {
		t.Errorf("found %d entries, want the newest hundreds and the failures, newest first", len(all))
	}
	expect.Slices(t, found(t, l, Filter{Before: 5006, Failed: true}), want[1:], "before 5006 found")
	l.Close()

	// A writer that is killed while it reduces a segment leaves the complete one, too.
	reduced := durable.Segments{Dir: dir, Suffix: reducedSuffix}
	firsts, err := reduced.List()
	must.Be(t, err == nil && len(firsts) != 0, "reduced segments are %v, %v, want some", firsts, err)
	text := must.Get(os.ReadFile(reduced.Path(firsts[0])))(t)
	both := (durable.Segments{Dir: dir, Suffix: suffix}).Path(firsts[0])
	must.Succeed(t, os.WriteFile(both, text, 0o600))
	l = open(t, Config{Dir: dir, MaxBytes: most})
	expect.Slices(t, found(t, l, Filter{Failed: true}), want, "after a restart found the failures")

	add(l, 5000, Entry{Exit: 1})
	if got := found(t, l, Filter{Failed: true}); slices.Contains(got, 5006) || len(got) < 100 {
		t.Errorf("found %d failures, want the newest hundreds", len(got))
	}
	add(l, 5000, Entry{})
	failed := found(t, l, Filter{Failed: true})
	var size int64
	files := must.Get(filepath.Glob(filepath.Join(dir, "*")))(t)
	for _, f := range files {
		info := must.Get(os.Stat(f))(t)
		if size += info.Size(); strings.HasSuffix(f, ".new") {
			t.Errorf("%s is left", f)
		}
	}
	if size > most || len(failed) < 100 || len(found(t, l, Filter{})) < len(failed)+100 {
		t.Errorf("%d bytes, %d failures, %d entries; want at most %d bytes, and a part for each kind",
			size, len(failed), len(found(t, l, Filter{})), most)
	}
}

// TestUnreadableSegmentLosesNoOtherFailures when later segments are reduced.
func TestUnreadableSegmentLosesNoOtherFailures(t *testing.T) {
	var log bytes.Buffer
	l := open(t, Config{Dir: t.TempDir(), MaxBytes: 64 << 10, Log: slog.New(slog.NewTextHandler(&log, nil))})
	reduced := func(n int) []uint64 { // adds a failure, and others until n segments are reduced
		l.Add(Entry{Action: digest(n), How: Executed, Exit: 1})
		for i := range 3000 {
			l.Add(Entry{Action: digest(100 + i), How: Executed})
			if i%50 == 0 {
				must.Succeed(t, l.flush(t.Context()))
				if firsts := must.Get(l.reduced.List())(t); len(firsts) >= n {
					return firsts
				}
			}
		}
		t.Fatalf("got fewer than %d reduced segments; log: %s", n, log.String())
		return nil
	}
	unreadable := l.reduced.Path(reduced(1)[0])
	must.Succeed(t, errors.Join(os.Remove(unreadable), os.Mkdir(unreadable, 0o700)))
	text := must.Get(os.ReadFile(l.reduced.Path(reduced(2)[1])))(t)
	expect.That(t, strings.Contains(string(text), digest(2)), "the reduced segment has %q, want the failure", text)
	expect.Equal(t, log.String(), "")
}

// The history of an action ends with the same answer after it was reduced: a failure that was repaired since is not the
// latest, and a run that was cancelled or lost is not worth its space.
func TestReducingKeepsTheLatestAnswer(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir(), MaxBytes: 64 << 10})
	add := func(i int, e Entry) {
		e.Action = digest(i)
		l.Add(e)
	}
	others := 100
	reduce := func() { // what was added before
		for range 2000 {
			add(others, Entry{How: Executed})
			if others++; others%50 == 0 {
				must.Succeed(t, l.flush(t.Context()))
			}
		}
	}
	add(1, Entry{How: Executed, Exit: 1})                        // 1, repaired at once
	add(1, Entry{How: Executed, Instance: "other"})              // 2, of another instance
	add(1, Entry{How: Executed})                                 // 3
	add(1, Entry{How: Cached})                                   // 4
	add(1, Entry{How: Checked})                                  // 5, no answer
	add(2, Entry{How: Executed, Exit: 1})                        // 6, repaired in a later segment
	add(3, Entry{How: Executed})                                 // 7, broken since
	add(3, Entry{How: Executed, Exit: 1})                        // 8
	add(4, Entry{How: Executed, Code: int32(codes.Canceled)})    // 9
	add(5, Entry{How: Executed, Code: int32(codes.Unavailable)}) // 10
	reduce()
	add(2, Entry{How: Executed}) // 2011
	reduce()
	for i, want := range [][]uint64{1: {4, 1}, 2: {2011, 6}, 3: {8}, 4: nil, 5: nil} {
		if got := found(t, l, Filter{Action: digest(i)}); i > 0 && !slices.Equal(got, want) {
			t.Errorf("action %d has the entries %d, want %d", i, got, want)
		}
	}
	if got := found(t, l, Filter{Instance: "other"}); got != nil {
		t.Errorf("the other instance, where nothing failed, has the entries %d, want none", got)
	}
}

// A hostile message can neither forge an entry nor make a line too long to be read.
func TestMessagesAreBounded(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir()})
	l.Add(Entry{Action: digest(1), Code: 9, Message: "refused\n" + string(bytes.Repeat([]byte("\x1b"), 1<<20))})
	got := entries(t, l, Filter{Failed: true})
	if len(got) != 1 || len(got[0].Message) > maxMessage || !strings.HasPrefix(got[0].Message, "refused") || strings.ContainsAny(got[0].Message, "\n\x1b") {
		t.Errorf("found %.200v", got)
	}
}
