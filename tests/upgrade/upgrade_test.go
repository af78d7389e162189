// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/repro"
)

// recordings are the stores in testdata, oldest first, and the layout version of each. docs/store.md lists the
// versions.
var recordings = []struct {
	name, version string
	readable      bool
}{
	{"v1", "cloister-store v1", false},
	{"v2-segments", "cloister-store v2", true},   // the first with segments: SHA-256 only
	{"v2-chunks", "cloister-store v2", true},     // the first with chunk lists: eight digest functions
	{"v2-verdicts", "cloister-store v2", true},   // with an audit log, a history and verdicts
	{"v2", "cloister-store v2", true},            // with copies of executables
	{"v2-checkpoint", "cloister-store v2", true}, // with a checkpoint and a directory of builds
	{"v2-upstream", "cloister-store v2", true},   // with unsent writes, builds, images, drains: all files of today
}

func archiveOf(name string) string { return filepath.Join("testdata", name+".tar.gz") }

// TestRecordedStoresAreComplete opens each readable store and finds everything, twice, since opening may change it.
func TestRecordedStoresAreComplete(t *testing.T) {
	for _, r := range recordings {
		if !r.readable {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			dir, want := unpack(t, archiveOf(r.name))
			expect.Equal(t, want.Version, r.version, "version")
			wantLeases(t, dir, want)
			for range 2 {
				wantBlobs(t, dir, want)
				wantHistory(t, dir, want)
				wantViolation(t, dir, want)
				wantUnsent(t, dir, want)
				wantImage(t, dir, want)
			}
			wantSent(t, dir, want)
		})
	}
}

// open opens a store with a lease.
func open(t *testing.T, dir string, lease time.Duration) *disk.Cache {
	t.Helper()
	c := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30, Lease: lease}))(t)
	if s := c.Stats(); s.LogDamage > 0 || s.LogLost > 0 {
		t.Errorf("got %d bytes of damage and %d lost records, want none", s.LogDamage, s.LogLost)
	}
	return c
}

// wantLeases checks that the store knows that everything was last used during the recording. If it has a checkpoint,
// the time since then does not count, because the machine has restarted and its clock may have been set.
func wantLeases(t *testing.T, dir string, want *Contents) {
	t.Helper()
	const grain = 5 * time.Minute // leases are kept in seconds and last a little longer
	_, err := os.Stat(filepath.Join(dir, "checkpoint"))
	for _, k := range []struct {
		lease  time.Duration
		leased bool
	}{
		{time.Since(want.From) + grain, true},
		{(time.Since(want.Until) - grain) * 3 / 4, err == nil},
	} {
		if k.lease <= 0 {
			continue // it was recorded just now
		}
		c := open(t, dir, k.lease)
		r := must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Second, DryRun: true}))(t)
		if got := r.Blobs + r.Files; k.leased && got > 0 || !k.leased && r.Leased > 0 {
			t.Errorf("lease %v: got %d files to be removed and %d leased bytes, want leased: %v", k.lease, got, r.Leased, k.leased)
		}
		must.Succeed(t, c.Close())
	}
}

// wantBlobs checks all blobs and results, and the verdicts, which withhold results.
func wantBlobs(t *testing.T, dir string, want *Contents) {
	t.Helper()
	ctx := t.Context()
	c := open(t, dir, -1)
	defer c.Close()
	for _, b := range want.Blobs {
		d := must.Get(cas.ParseDigest(b.Digest))(t)
		in := must.Get(c.Instance(b.Instance))(t)
		content, err := cas.ReadAll(ctx, in.Store, d, d.Size())
		expect.That(t, err == nil && d.Function().Sum(content) == d,
			"blob %s of instance %q: got %d other bytes, %v", b.Digest, b.Instance, len(content), err)
		expect.Equal(t, len(must.Get(in.Store.Missing(ctx, []cas.Digest{d}))(t)), 0, "blob %s of instance %q: missing",
			b.Digest, b.Instance)
	}
	for _, r := range want.Results {
		in := must.Get(c.Instance(r.Instance))(t)
		got, err := in.Actions.Lookup(ctx, digest(t, r.Action))
		if err != nil || got.ExecutionMetadata.GetWorker() != "upgrade" {
			t.Errorf("result of %s in instance %q: got %v, %v, want that of the recording", r.Action, r.Instance, got, err)
			continue
		}
		stdout := got.StdoutRaw
		if got.StdoutDigest != nil { // the server made a blob of it
			d := must.Get(cas.FromProto(digest(t, r.Action).Function(), got.StdoutDigest))(t)
			stdout = must.Get(cas.ReadAll(ctx, in.Store, d, d.Size()))(t)
		}
		expect.Equal(t, string(stdout), r.Stdout, "result of %s in instance %q: stdout", r.Action, r.Instance)
	}
	if want.Verdict == "" {
		return
	}
	known := must.Get(repro.OpenVerdicts(repro.VerdictsConfig{Dir: dir}))(t)
	defer known.Close()
	in := must.Get(known.Withhold(c.Instance)("main"))(t)
	expect.Message(t, expect.Err(in.Actions.Lookup(ctx, digest(t, want.Verdict))), "differs",
		"action %s (its result withheld since it differs)", want.Verdict)
}

func digest(t *testing.T, text string) cas.Digest {
	t.Helper()
	return must.Get(cas.ParseDigest(text))(t)
}

// wantHistory checks the history.
func wantHistory(t *testing.T, dir string, want *Contents) {
	t.Helper()
	if !want.History {
		return
	}
	l, err := history.Open(history.Config{Dir: filepath.Join(dir, "history"), MaxAge: time.Since(want.From) + time.Hour})
	must.Succeed(t, err)
	defer l.Close()
	var found []history.Entry
	must.Succeed(t, l.Search(t.Context(), history.Filter{Instance: "main", Action: want.Executed}, 100, func(e *history.Entry) error {
		found = append(found, *e)
		return nil
	}))
	if !slices.ContainsFunc(found, func(e history.Entry) bool {
		return e.How == history.Executed && e.Target == "//upgrade:target" && e.Manifest != "" && e.StableHash != ""
	}) {
		t.Errorf("action %s: got %+v, want its execution", want.Executed, found)
	}
}

// wantViolation checks the audit log.
func wantViolation(t *testing.T, dir string, want *Contents) {
	t.Helper()
	if want.Violation == "" {
		return
	}
	found := false
	must.Succeed(t, audit.Read(filepath.Join(dir, "audit"), func(r audit.Record) error {
		found = found || r.Action == want.Violation && r.Target == "//upgrade:target" && len(r.Events) > 0
		return nil
	}))
	if r, err := audit.Verify(filepath.Join(dir, "audit"), ""); err != nil || !found {
		t.Errorf("action %s: found %v, want its violation; verify: %+v, %v", want.Violation, found, r, err)
	}
}

// TestUnreadableStoresAreRefused checks that a store of an earlier or later version stays as it is, and that the error
// names both versions and what to do.
func TestUnreadableStoresAreRefused(t *testing.T) {
	refuse := func(name, dir, version string) {
		before := listing(t, dir)
		c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30})
		if err == nil {
			c.Close()
			t.Fatalf("%s: opened, want an error", name)
		}
		for _, want := range []string{version, recordings[len(recordings)-1].version, "choose another directory", "delete"} {
			expect.Text(t, err.Error(), want, "%s", name)
		}
		if after := listing(t, dir); !slices.Equal(before, after) {
			t.Errorf("%s: got files %q, want them unchanged: %q", name, after, before)
		}
	}
	for _, r := range recordings {
		if !r.readable {
			dir, _ := unpack(t, archiveOf(r.name))
			refuse(r.name, dir, r.version)
		}
	}
	dir, _ := unpack(t, archiveOf(recordings[len(recordings)-1].name))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "version"), []byte("cloister-store v3\n"), 0o600))
	refuse("newer", dir, "cloister-store v3")
}

// listing returns the names and contents of all files below dir.
func listing(t *testing.T, dir string) (all []string) {
	t.Helper()
	must.Succeed(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		all = append(all, path+" "+string(content))
		return err
	}))
	return all
}

// TestLastRecordingIsComplete checks that the last recording has content of every kind.
func TestLastRecordingIsComplete(t *testing.T) {
	_, want := unpack(t, archiveOf(recordings[len(recordings)-1].name))
	if !slices.ContainsFunc(want.Blobs, func(b Blob) bool { return b.Chunked }) || len(want.Results) == 0 || !want.History ||
		slices.Contains([]string{
			want.Violation, want.Verdict, want.Unsent, want.Pending, want.PendingResult.Action, want.Image, want.Build, want.Drain,
		}, "") {
		t.Errorf("got %+v, want content of every kind", want)
	}
	for _, f := range cas.Functions() {
		if !slices.ContainsFunc(want.Blobs, func(b Blob) bool { return digest(t, b.Digest).Function() == f }) {
			t.Errorf("the last recorded store has no blob of %s", f)
		}
	}
}

// TestRecordingsAreSmall, since they stay in the repository for ever.
func TestRecordingsAreSmall(t *testing.T) {
	for _, r := range recordings {
		info := must.Get(os.Stat(archiveOf(r.name)))(t)
		expect.That(t, info.Size() <= 200<<10, "%s has %d bytes, want at most 200 KiB", archiveOf(r.name), info.Size())
	}
}
