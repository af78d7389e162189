// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// opened opens the verdicts of a file until the test ends. It also returns the log.
func opened(t *testing.T, path string) (*Verdicts, *bytes.Buffer) {
	t.Helper()
	var logged bytes.Buffer
	v, err := OpenVerdicts(VerdictsConfig{Dir: filepath.Dir(path), Log: slog.New(slog.NewTextHandler(&logged, nil))})
	must.Succeed(t, err)
	t.Cleanup(func() { v.Close() })
	return v, &logged
}

// fileLine returns the line of a record in the file.
func fileLine(record []byte) string {
	return fmt.Sprintf("%08x %s\n", crc32.Checksum(record, crc32.MakeTable(crc32.Castagnoli)), record)
}

// nth returns the key of a numbered action.
func nth(i int) actionKey { return actionKey{"an instance", cas.SHA256.Sum([]byte(fmt.Sprint(i)))} }

// lines returns the number of lines in a file.
func lines(t *testing.T, path string) int {
	t.Helper()
	data := must.Get(os.ReadFile(path))(t)
	return bytes.Count(data, []byte("\n"))
}

func TestVerdictsAreWrittenAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), verdictsFile)
	v, _ := opened(t, path)
	expect.Error(t, expect.Err(os.Stat(path)), os.ErrNotExist, "the file exists before the first verdict")
	v.keep(nth(1), "a differs", found{})
	v.keep(nth(2), "b differs", found{})
	v.keep(nth(1), "a and c differ", found{})
	v.keep(nth(1), "a and c differ", found{})
	v.keep(actionKey{`"an` + "\n" + `instance"`, nth(3).action}, "another", found{})
	v.forget(nth(2))
	v.forget(nth(4))
	v.suspect(nth(1), "it cannot be run")
	v.suspect(nth(5), "it cannot be run")
	if why, verdict := v.of(nth(5)); why != "it cannot be run" || verdict {
		t.Errorf("action that could not be checked: got %q, verdict %v", why, verdict)
	}
	next, logged := opened(t, path)
	for i, want := range []string{"", "a and c differ", "", "", "", ""} {
		if why, _ := next.of(nth(i)); why != want {
			t.Errorf("%d: got %q, want %q", i, why, want)
		}
	}
	if why, verdict := next.of(actionKey{"\"an\ninstance\"", nth(3).action}); why != "another" || !verdict {
		t.Errorf("unusual instance name: got %q", why)
	}
	if n := lines(t, path); n != 5 || logged.Len() > 0 {
		t.Errorf("got %d lines and the log %q, want 5 lines", n, logged)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
}

func TestDamagedVerdictsAreDroppedWithOneWarning(t *testing.T) {
	var intact string
	for i, name := range []string{"one", "two", "three"} {
		intact += fileLine(encode(nth(i+1), reason{why: name + " differs", at: 1}))
	}
	before, after, _ := strings.Cut(intact, "two")
	for name, c := range map[string]struct {
		text  string
		known []int
	}{
		"torn line":        {intact[:len(intact)-9], []int{1, 2}},
		"no newline":       {intact[:len(intact)-1], []int{1, 2}},
		"flipped bit":      {before + "uwo" + after, []int{1, 3}},
		"zeros at the end": {intact + strings.Repeat("\x00", 5000), []int{1, 2, 3}},
		"zeros between":    {before + strings.Repeat("\x00", 5000) + after, []int{1, 3}},
		"garbage":          {"\n\n{}\n" + intact + strings.Repeat("x", 1<<20) + "\n", []int{1, 2, 3}},
		"invalid digest":   {intact + fileLine([]byte(`{"action":"x"}`)), []int{1, 2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), verdictsFile)
			must.Succeed(t, os.WriteFile(path, []byte(c.text), 0o600))
			v, logged := opened(t, path)
			if strings.Count(logged.String(), "dropped damaged verdicts") != 1 || strings.Count(logged.String(), "\n") != 1 {
				t.Errorf("got log %q", logged)
			}
			v.keep(nth(9), "nine differs", found{})
			for range 2 {
				var known []int
				for i := range 10 {
					if why, _ := v.of(nth(i)); why != "" {
						known = append(known, i)
					}
				}
				if want := append(slices.Clip(c.known), 9); fmt.Sprint(known) != fmt.Sprint(want) {
					t.Errorf("got verdicts %d, want %d", known, want)
				}
				if v, logged = opened(t, path); logged.Len() > 0 {
					t.Errorf("opened again: got log %q", logged)
				}
			}
		})
	}
}

func TestVerdictsAreLimitedInNumberAndSize(t *testing.T) {
	path := filepath.Join(t.TempDir(), verdictsFile)
	v, _ := opened(t, path)
	for i := range maxKnown + 5 {
		v.keep(nth(i), fmt.Sprint(i, " differs", 1), found{})
	}
	v.keep(nth(7), "seven differs otherwise", found{}) // keeps its position
	wantOldest := func(v *Verdicts, oldest int) {
		t.Helper()
		if gone, _ := v.of(nth(oldest - 1)); gone != "" {
			t.Errorf("%d: got %q, want it dropped", oldest-1, gone)
		}
		if why, _ := v.of(nth(oldest)); why == "" || len(v.known) > maxKnown || v.order.Len() != len(v.known) {
			t.Errorf("%d: got %q of %d verdicts", oldest, why, len(v.known))
		}
	}
	wantOldest(v, 5)
	next, _ := opened(t, path)
	wantOldest(next, 5)
	next.keep(nth(maxKnown+5), "x", found{})
	next.keep(nth(maxKnown+6), "x", found{})
	next.keep(nth(maxKnown+7), "x", found{})
	wantOldest(next, 8)

	for i := range 30_000 {
		next.keep(nth(8), fmt.Sprint("differs for the ", i), found{})
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Size() > 2*next.bytes+2*slack {
		t.Errorf("file of %d bytes for %d bytes of verdicts: %v", fi.Size(), next.bytes, err)
	}
	for i := range maxKnown {
		next.forget(nth(i + 8))
	}
	if next.bytes != 0 || len(next.known) != 0 || next.order.Len() != 0 {
		t.Errorf("all forgotten: %d bytes, %d verdicts, %d keys left", next.bytes, len(next.known), next.order.Len())
	}
	const long = 1 << 20
	for i := range 20 {
		next.keep(nth(i), strings.Repeat("x", long), found{})
	}
	expect.That(t, next.bytes <= maxKnownBytes && len(next.known) == maxKnownBytes/long-1,
		"got %d verdicts of %d bytes", len(next.known), next.bytes)
}

func TestFailedWritesAreRetried(t *testing.T) {
	for _, how := range []string{"the next verdict", "the same verdict", "the end"} {
		t.Run(how, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			path := filepath.Join(dir, verdictsFile)
			v, logged := opened(t, path)
			v.keep(nth(1), "one differs", found{})
			v.keep(nth(2), "two differs", found{})
			if why, verdict := v.of(nth(1)); why == "" || !verdict {
				t.Errorf("unwritten verdict: got %q, verdict %v", why, verdict)
			}
			expect.That(t, strings.Count(logged.String(), "cannot write verdicts") == 1, "got log %q", logged)
			must.Succeed(t, os.Mkdir(dir, 0o700))
			switch how {
			case "the next verdict":
				v.forget(nth(2))
			case "the same verdict":
				v.keep(nth(1), "one differs", found{})
			case "the end":
				v.Close()
				v.keep(nth(3), "three differs", found{}) // by a check that ends late
			}
			next, _ := opened(t, path)
			if why, _ := next.of(nth(1)); why != "one differs" || !strings.Contains(logged.String(), "verdicts are written again") {
				t.Errorf("got %q and the log %q", why, logged)
			}
			if why, _ := next.of(nth(2)); (why == "") != (how == "the next verdict") {
				t.Errorf("second verdict: got %q", why)
			}
		})
	}
}

// The directory may belong to another server by then.
func TestCloseEndsWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), verdictsFile)
	v, _ := opened(t, path)
	v.keep(nth(1), strings.Repeat("x", 2*slack), found{})
	must.Succeed(t, v.Close())
	const others = "by another server\n"
	must.Succeed(t, os.WriteFile(path, []byte(others), 0o600))
	v.forget(nth(1)) // would compact the file
	if data, err := os.ReadFile(path); err != nil || string(data) != others {
		t.Errorf("the file was overwritten with %d bytes: %v", len(data), err)
	}
}

func TestFailedWritesLeaveNoFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, verdictsFile)
	v, _ := opened(t, path)
	must.Succeed(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
	v.keep(nth(1), "one differs", found{})
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("got files %v, %v", files, err)
	}
	if _, err := OpenVerdicts(VerdictsConfig{Dir: filepath.Dir(path)}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("unreadable file: got error %v", err)
	}
}

func TestVerdictsAreSafeForConcurrentUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), verdictsFile)
	v, _ := opened(t, path)
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for i := range 200 {
				v.keep(nth(i%20), fmt.Sprint(w, " of ", i), found{})
				v.of(nth(i))
				if i%3 == w%3 {
					v.forget(nth(i % 20))
				}
				v.suspect(nth(100+i), "x")
			}
		})
	}
	all.Wait()
	next, logged := opened(t, path)
	for i := range 300 {
		was, verdict := v.of(nth(i))
		if is, _ := next.of(nth(i)); verdict && is != was || !verdict && is != "" {
			t.Errorf("%d: got %q in memory and %q in the file", i, was, is)
		}
	}
	if logged.Len() > 0 {
		t.Error(logged)
	}
}

func BenchmarkOpenVerdicts(b *testing.B) {
	path := filepath.Join(b.TempDir(), verdictsFile)
	var all bytes.Buffer
	for i := range maxKnown {
		why := "not reproducible: bazel-out/k8-fastbuild/bin/some/package/of/a/program/library.a differs (timestamp)"
		all.WriteString(fileLine(encode(nth(i), reason{why: why, at: 1})))
	}
	must.Succeed(b, os.WriteFile(path, all.Bytes(), 0o600))
	b.SetBytes(int64(all.Len()))
	for b.Loop() {
		v, err := OpenVerdicts(VerdictsConfig{Dir: filepath.Dir(path)})
		if err != nil || len(v.known) != maxKnown {
			b.Fatal(len(v.known), err)
		}
		v.Close()
	}
}

// Verdicts expire, also if another server found them; another check renews them.
func TestVerdictsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := VerdictsConfig{Dir: t.TempDir(), MaxAge: 30 * 24 * time.Hour}
		open := func() *Verdicts {
			v := must.Get(OpenVerdicts(c))(t)
			return v
		}
		v := open()
		v.keep(nth(1), "a differs", found{})
		v.keep(nth(2), "b differs", found{})
		v.keep(nth(3), "c differs", found{})
		time.Sleep(20 * 24 * time.Hour)
		v.keep(nth(2), "b differs", found{})
		must.Succeed(t, v.Close())
		time.Sleep(20 * 24 * time.Hour)
		v = open()
		if why, verdict := v.of(nth(1)); why != "" || verdict {
			t.Errorf("got %q, %v after 40 days, want none", why, verdict)
		}
		if why, verdict := v.of(nth(2)); why != "b differs" || !verdict {
			t.Errorf("got %q, %v 20 days after the last check", why, verdict)
		}
		v.forget(nth(3)) // the same after 40 days
		must.Succeed(t, v.Close())
		c.MaxAge = 0
		v = open()
		if why, verdict := v.of(nth(3)); why != "" || verdict {
			t.Errorf("got %q, %v, want no verdict on an action that is the same", why, verdict)
		}
		if why, verdict := v.of(nth(1)); why != "a differs" || !verdict {
			t.Errorf("got %q, %v without a limit", why, verdict)
		}
		must.Succeed(t, v.Close())
	})
}

// A listing neither changes the file nor waits for the server that writes it.
func TestReadVerdicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), verdictsFile)
		dir := filepath.Dir(path)
		if all, err := ReadVerdicts(dir); len(all) != 0 || err != nil {
			t.Errorf("without a file: got %v, %v", all, err)
		}
		v, _ := opened(t, path)
		began := time.Now()
		for i := range 3 {
			v.keep(nth(i), "x differs", found{"//a:b", "Make", Differs, []string{"timestamp", "owner"}})
			time.Sleep(time.Hour)
		}
		v.suspect(nth(9), "it cannot be run")
		v.forget(nth(1))
		before := must.Get(os.ReadFile(path))(t)
		all := must.Get(ReadVerdicts(dir))(t)
		must.Be(t, len(all) == 2, "got %d verdicts, want 2", len(all))
		want := &Summary{
			Time: began.Add(2 * time.Hour), Instance: "an instance", Action: nth(2).action, Target: "//a:b", Mnemonic: "Make",
			Result: Differs, Causes: []string{"timestamp", "owner"}, Line: "x differs",
		}
		if got := all[0]; fmt.Sprint(*got) != fmt.Sprint(*want) || all[1].Action != nth(0).action {
			t.Errorf("got %v and %v, want %v first", *got, *all[1], *want)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
			t.Errorf("the file changed: %v", err)
		}
	})
}
