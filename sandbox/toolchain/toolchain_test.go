// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// host makes a small toolchain and returns its inputs.
func host(t *testing.T) (dir string, inputs []sandbox.Input) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"usr/bin/cc": "a compiler", "usr/lib/deep/er/crt1.o": "object", "etc/ld.so.cache": "cache"} {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o755))
		must.Succeed(t, os.Chtimes(path, time.Time{}, time.Unix(1_000_000_000, 0)))
	}
	must.Succeed(t, os.Symlink("cc", filepath.Join(dir, "usr/bin/gcc")))
	return dir, []sandbox.Input{
		{Target: "/usr", Source: filepath.Join(dir, "usr")},
		{Target: "/bin", Source: filepath.Join(dir, "usr/bin")},
		{Target: "/etc/ld.so.cache", Source: filepath.Join(dir, "etc/ld.so.cache")},
	}
}

func fingerprint(t *testing.T, inputs []sandbox.Input) string {
	t.Helper()
	s := must.Get(Read(t.Context(), inputs))(t)
	return s.Fingerprint
}

// TestFingerprintCoversEveryEntry: every change in a toolchain changes its fingerprint. Its location on the host and
// the order of reading do not.
func TestFingerprintCoversEveryEntry(t *testing.T) {
	dir, inputs := host(t)
	first := fingerprint(t, inputs)
	for range 20 {
		if again := fingerprint(t, inputs); again != first {
			t.Fatalf("got %s and %s for the same toolchain", first, again)
		}
	}
	if _, elsewhere := host(t); fingerprint(t, elsewhere) == "" || fingerprint(t, elsewhere[:1]) != fingerprint(t, inputs[:1]) {
		t.Error("equal toolchains in two directories have different fingerprints")
	}
	seen := map[string]string{first: "nothing"}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, c := range []struct {
		what   string
		change func() error
	}{
		{"a new file", func() error { return os.WriteFile(at("usr/lib/new"), nil, 0o644) }},
		{"a size", func() error { return os.WriteFile(at("usr/lib/deep/er/crt1.o"), []byte("another object"), 0o755) }},
		{"a time", func() error { return os.Chtimes(at("usr/bin/cc"), time.Time{}, time.Unix(1_000_000_001, 0)) }},
		{"a mode", func() error { return os.Chmod(at("usr/bin/cc"), 0o700) }},
		{"the target of a symlink", func() error { _ = os.Remove(at("usr/bin/gcc")); return os.Symlink("clang", at("usr/bin/gcc")) }},
		{"an empty directory", func() error { return os.Mkdir(at("usr/share"), 0o755) }},
		{"a name", func() error { return os.Rename(at("usr/lib/new"), at("usr/lib/newer")) }},
		{"a single file", func() error { return os.WriteFile(at("etc/ld.so.cache"), nil, 0o755) }},
		{"a removed file", func() error { return os.Remove(at("usr/bin/cc")) }},
	} {
		must.Succeed(t, c.change())
		now := fingerprint(t, inputs)
		expect.Equal(t, seen[now], "", "%s: an earlier change with the same fingerprint", c.what)
		seen[now] = c.what
	}
}

// TestWatchNoticesChanges: a change in a directory is noticed within seconds, a file modified in place within a minute,
// and nothing is read between requests.
func TestWatchNoticesChanges(t *testing.T) {
	dir, inputs := host(t)
	var text bytes.Buffer
	w := NewWatch(inputs, slog.New(slog.NewTextHandler(&text, nil)))
	defer w.Close()
	w.running.Wait()
	now := w.checked
	w.now = func() time.Time { return now }
	// after returns the fingerprint after this time, and after the check that the first call may have begun.
	after := func(d time.Duration) string {
		now = now.Add(d)
		w.Fingerprint()
		w.running.Wait()
		return w.Fingerprint()
	}
	first := w.Fingerprint()
	if want := fingerprint(t, inputs); first != want {
		t.Fatalf("got %q, want %s", first, want)
	}
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "usr/lib/deep/new"), nil, 0o644))
	expect.Equal(t, after(time.Second), first, "after a second")
	second := after(backgroundAge)
	expect.That(t, second != first && second == fingerprint(t, inputs),
		"after a new file: got %s, want another fingerprint than %s", second, first)
	if !strings.Contains(text.String(), "the toolchain of this host changed") {
		t.Errorf("log: got %q, want the change", text.String())
	}
	// Replace an input as ldconfig does. No directory among the inputs contains this file.
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "etc/ld.so.cache~"), []byte("another cache"), 0o755))
	must.Succeed(t, os.Rename(filepath.Join(dir, "etc/ld.so.cache~"), filepath.Join(dir, "etc/ld.so.cache")))
	previous := second
	second = after(backgroundAge)
	expect.That(t, second != previous && second == fingerprint(t, inputs),
		"after a replaced input: got %s, want another fingerprint than %s", second, previous)
	must.Succeed(t, os.Remove(filepath.Join(dir, "etc/ld.so.cache")))
	previous = second
	second = after(backgroundAge)
	expect.That(t, second != previous && second == fingerprint(t, inputs),
		"after a removed input: got %s, want another fingerprint than %s", second, previous)
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "usr/lib/__pycache__"), 0o755))
	expect.Equal(t, after(backgroundAge), second, "after a new __pycache__")
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "usr/bin/cc"), []byte("patched in place"), 0o755))
	expect.Equal(t, after(backgroundAge), second, "directories are unchanged")
	third := after(rescanInterval)
	expect.That(t, third != second, "after a minute: got %s, want another fingerprint", third)
	// After a pause, the first call waits for the check.
	must.Succeed(t, os.Remove(filepath.Join(dir, "usr/bin/cc")))
	now = now.Add(time.Hour)
	if got := w.Fingerprint(); got == third {
		t.Errorf("after an hour: got %s, want another fingerprint at once", got)
	}
}

// TestFailedScansAreNotRepeatedAtOnce: after a failed scan, the next one follows soon. While scans keep failing, they
// become less frequent, unless no fingerprint is known. An error is logged once.
func TestFailedScansAreNotRepeatedAtOnce(t *testing.T) {
	dir, inputs := host(t)
	var text bytes.Buffer
	// start returns a Watch whose first check has ended, and a function that returns the fingerprint after a while.
	start := func(inputs []sandbox.Input) (w *Watch, after func(time.Duration) string) {
		w = NewWatch(inputs, slog.New(slog.NewTextHandler(&text, nil)))
		t.Cleanup(w.Close)
		w.running.Wait()
		now := w.checked
		w.now = func() time.Time { return now }
		return w, func(d time.Duration) string {
			now = now.Add(d)
			w.Fingerprint()
			w.running.Wait()
			return w.Fingerprint()
		}
	}
	warnings := func(w *Watch, want int) {
		t.Helper()
		w.running.Wait()
		expect.Equal(t, strings.Count(text.String(), "cannot scan"), want, "warnings")
	}
	cache := filepath.Join(dir, "etc/ld.so.cache")
	broken := slices.Clone(inputs)
	broken[2].Source += "/entry" // below a file, which is not a directory

	w, after := start(inputs)
	first, began := w.Scanned()
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "usr/new"), 0o755)) // the next check scans everything
	w.inputs = broken
	expect.Equal(t, after(backgroundAge), first, "after a failed scan")
	for n, seconds := range []time.Duration{5, 10, 20, 40, 60, 60} {
		interval, failed := seconds*time.Second, w.tried
		expect.Equal(t, after(interval-time.Nanosecond), first, "before scan %d is repeated", n)
		expect.Equal(t, w.tried, failed, "time of scan %d", n)
		expect.Equal(t, after(time.Nanosecond+backgroundAge), first, "after scan %d was repeated", n)
		expect.That(t, w.tried.After(failed), "scan %d was not repeated after %v", n, interval)
		warnings(w, 1)
	}
	fingerprint, scanned := w.Scanned()
	expect.That(t, fingerprint == first && scanned.Equal(began), "got a scan that began at %v, want %v", scanned, began)
	w.inputs = inputs
	expect.Equal(t, after(blockingAge), first, "before the interval ends")
	second := after(rescanInterval)
	expect.That(t, second != first && second != "", "after an interval: got %q, want another fingerprint than %s", second, first)
	if _, scanned := w.Scanned(); !scanned.After(began) {
		t.Errorf("after an interval: got a scan that began at %v, want a later one", scanned)
	}
	expect.That(t, strings.Contains(text.String(), "the toolchain of this host changed"), "log: got %s, want the change", &text)
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "usr/newer"), 0o755))
	w.inputs = broken
	expect.Equal(t, after(backgroundAge), second, "after another failed scan")
	w.inputs = inputs
	third := after(retryInterval)
	expect.That(t, third != second && third != "", "after a single failure: got %q, want another fingerprint than %s", third, second)

	text.Reset()
	w, after = start(broken)
	expect.Equal(t, after(backgroundAge), "", "without a fingerprint")
	warnings(w, 1)
	expect.Equal(t, after(retryInterval), "", "still broken")
	warnings(w, 1)
	must.Succeed(t, os.Remove(cache))
	must.Succeed(t, os.Symlink("ld.so.cache", cache)) // to itself
	expect.Equal(t, after(retryInterval), "", "another error")
	warnings(w, 2)
	must.Succeed(t, os.Remove(cache))
	expect.Equal(t, after(backgroundAge), "", "too early for another scan")
	expect.That(t, after(retryInterval) != "", "got no fingerprint")
	expect.That(t, strings.Contains(text.String(), "after errors"), "log: got %s, want the success", &text)
}

// TestAbsentInputs: an input that does not exist is part of the fingerprint and not an error.
func TestAbsentInputs(t *testing.T) {
	_, inputs := host(t)
	inputs = append(inputs, sandbox.Input{Target: "/opt", Source: filepath.Join(t.TempDir(), "absent")})
	if got := fingerprint(t, inputs); got == fingerprint(t, inputs[:3]) {
		t.Error("an absent directory is not part of the fingerprint")
	}
}

// TestSlowScan: Last does not wait for a first scan that takes long, and Fingerprint waits only for a while.
func TestSlowScan(t *testing.T) {
	defer func(old time.Duration) { maxWait = old }(maxWait)
	maxWait = time.Millisecond
	w := &Watch{now: time.Now, scan: &Scan{}, checking: make(chan struct{})} // the scan never ends
	expect.Equal(t, w.Last(), "", "Last")
	expect.Equal(t, w.Fingerprint(), "", "Fingerprint")
}

// BenchmarkRead scans 150,000 files, about as many as a server with several compilers scans at startup.
func BenchmarkRead(b *testing.B) {
	const directories, files = 5000, 30
	dir := b.TempDir()
	for d := range directories {
		sub := filepath.Join(dir, strconv.Itoa(d%50), strconv.Itoa(d))
		must.Succeed(b, os.MkdirAll(sub, 0o755))
		for f := range files {
			must.Succeed(b, os.WriteFile(filepath.Join(sub, "header"+strconv.Itoa(f)+".h"), nil, 0o644))
		}
	}
	inputs := []sandbox.Input{{Target: "/usr", Source: dir}}
	for b.Loop() {
		s := must.Get(Read(b.Context(), inputs))(b)
		must.Be(b, s.Entries == directories*files+directories+50, "got %d entries", s.Entries)
	}
	b.ReportMetric(directories*files, "files/op")
}
