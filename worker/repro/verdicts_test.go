// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// opened opens the verdicts of a file, which the test closes, and returns what the log is told.
func opened(t *testing.T, path string) (*Verdicts, *bytes.Buffer) {
	t.Helper()
	var said bytes.Buffer
	v, err := OpenVerdicts(VerdictsConfig{Path: path, Log: slog.New(slog.NewTextHandler(&said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.Close() })
	return v, &said
}

// about returns the subject of a number.
func about(i int) subject { return subject{"an instance", cas.SHA256.Sum([]byte(fmt.Sprint(i)))} }

// lines returns how many lines a file has.
func lines(t *testing.T, path string) int {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(data, []byte("\n"))
}

// TestVerdictsAreThereBeforeTheyAreTold: whoever opens the file next has them, though nobody has closed it.
func TestVerdictsAreThereBeforeTheyAreTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), VerdictsFile)
	v, _ := opened(t, path)
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("there is a file before there is a verdict: %v", err)
	}
	v.keep(about(1), "a differs")
	v.keep(about(2), "b differs")
	v.keep(about(1), "a and c differ")
	v.keep(about(1), "a and c differ")
	v.keep(subject{`"an` + "\n" + `instance"`, about(3).action}, "another")
	v.forget(about(2))
	v.forget(about(4))
	v.suspect(about(1), "it cannot be run")
	v.suspect(about(5), "it cannot be run")
	if why, verdict := v.of(about(5)); why != "it cannot be run" || verdict {
		t.Errorf("of what could not be run again is known %q", why)
	}
	next, said := opened(t, path)
	for i, want := range []string{"", "a and c differ", "", "", "", ""} {
		if why, _ := next.of(about(i)); why != want {
			t.Errorf("%d: %q, want %q", i, why, want)
		}
	}
	if why, verdict := next.of(subject{"\"an\ninstance\"", about(3).action}); why != "another" || !verdict {
		t.Errorf("of an instance with such a name: %q", why)
	}
	if n := lines(t, path); n != 5 || said.Len() > 0 {
		t.Errorf("the file has %d lines, and it is said %q", n, said)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
}

// TestDamageCostsWhatItHits, is told once, and nothing is lost that comes later.
func TestDamageCostsWhatItHits(t *testing.T) {
	intact := string(encode(about(1), "one differs")) + string(encode(about(2), "two differs")) + string(encode(about(3), "three differs"))
	second := strings.Index(intact, "two")
	for name, c := range map[string]struct {
		text  string
		known []int
	}{
		"a torn line":      {intact[:len(intact)-9], []int{1, 2}},
		"no end":           {intact[:len(intact)-1], []int{1, 2}},
		"a flipped bit":    {intact[:second] + "uwo" + intact[second+3:], []int{1, 3}},
		"zeros at the end": {intact + strings.Repeat("\x00", 5000), []int{1, 2, 3}},
		"zeros between":    {intact[:second] + strings.Repeat("\x00", 5000) + intact[second+3:], []int{1, 3}},
		"rubbish":          {"\n\n{}\n" + intact + strings.Repeat("x", 1<<20) + "\n", []int{1, 2, 3}},
		"no digest":        {intact + fmt.Sprintf("%08x %s\n", crc32.Checksum([]byte(`{"action":"x"}`), castagnoli), `{"action":"x"}`), []int{1, 2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), VerdictsFile)
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			v, said := opened(t, path)
			if strings.Count(said.String(), "damaged verdicts") != 1 || strings.Count(said.String(), "\n") != 1 {
				t.Errorf("it is said %q", said)
			}
			v.keep(about(9), "nine differs")
			for range 2 {
				var known []int
				for i := range 10 {
					if why, _ := v.of(about(i)); why != "" {
						known = append(known, i)
					}
				}
				if want := append(c.known[:len(c.known):len(c.known)], 9); fmt.Sprint(known) != fmt.Sprint(want) {
					t.Errorf("known are %d, want %d", known, want)
				}
				if v, said = opened(t, path); said.Len() > 0 {
					t.Errorf("once more it is said %q", said)
				}
			}
		})
	}
}

// TestVerdictsAreBounded, in number, in bytes, and in what the file has of those that are over.
func TestVerdictsAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), VerdictsFile)
	v, _ := opened(t, path)
	for i := range maxKnown + 5 {
		v.keep(about(i), fmt.Sprint(i, " differs"))
	}
	v.keep(about(7), "seven differs otherwise") // which keeps its place
	wantOldest := func(v *Verdicts, oldest int) {
		t.Helper()
		if gone, _ := v.of(about(oldest - 1)); gone != "" {
			t.Errorf("%d is known: %q", oldest-1, gone)
		}
		if why, _ := v.of(about(oldest)); why == "" || len(v.known) > maxKnown || v.order.Len() != len(v.known) {
			t.Errorf("of %d is known %q; %d actions are", oldest, why, len(v.known))
		}
	}
	wantOldest(v, 5)
	next, _ := opened(t, path)
	wantOldest(next, 5)
	next.keep(about(maxKnown+5), "x")
	next.keep(about(maxKnown+6), "x")
	next.keep(about(maxKnown+7), "x")
	wantOldest(next, 8)

	for i := range 30_000 {
		next.keep(about(8), fmt.Sprint("differs for the ", i))
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Size() > 2*next.bytes+2*slack {
		t.Errorf("the file has %d bytes, of verdicts of %d: %v", fi.Size(), next.bytes, err)
	}
	for i := range maxKnown {
		next.forget(about(i + 8))
	}
	if next.bytes != 0 || len(next.known) != 0 || next.order.Len() != 0 {
		t.Errorf("%d bytes, %d actions and %d places are left", next.bytes, len(next.known), next.order.Len())
	}
	const long = 1 << 20
	for i := range 20 {
		next.keep(about(i), strings.Repeat("x", long))
	}
	if next.bytes > maxKnownBytes || len(next.known) != maxKnownBytes/long-1 {
		t.Errorf("%d actions of %d bytes", len(next.known), next.bytes)
	}
}

// TestWhatCannotBeWrittenIsWrittenLater, with the next verdict, or at the end.
func TestWhatCannotBeWrittenIsWrittenLater(t *testing.T) {
	for _, how := range []string{"the next verdict", "the same verdict", "the end"} {
		t.Run(how, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			path := filepath.Join(dir, VerdictsFile)
			v, said := opened(t, path)
			v.keep(about(1), "one differs")
			v.keep(about(2), "two differs")
			if why, verdict := v.of(about(1)); why == "" || !verdict {
				t.Error("what cannot be written is not known")
			}
			if strings.Count(said.String(), "verdicts cannot be written") != 1 {
				t.Errorf("it is said %q", said)
			}
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			switch how {
			case "the next verdict":
				v.forget(about(2))
			case "the same verdict":
				v.keep(about(1), "one differs")
			case "the end":
				v.Close()
				v.keep(about(3), "three differs") // of a check that ends late
			}
			next, _ := opened(t, path)
			if why, _ := next.of(about(1)); why != "one differs" || !strings.Contains(said.String(), "verdicts can be written again") {
				t.Errorf("known is %q, and it is said %q", why, said)
			}
			if why, _ := next.of(about(2)); (why == "") != (how == "the next verdict") {
				t.Errorf("of the second is known %q", why)
			}
		})
	}
}

// TestNothingIsWrittenOnceTheyAreClosed: the directory may be another server's by then, and its file that one's.
func TestNothingIsWrittenOnceTheyAreClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), VerdictsFile)
	v, _ := opened(t, path)
	v.keep(about(1), strings.Repeat("x", 2*slack))
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	const others = "what another server has written\n"
	if err := os.WriteFile(path, []byte(others), 0o600); err != nil {
		t.Fatal(err)
	}
	v.forget(about(1)) // by a check that ends late, after which most of the file is over
	if data, err := os.ReadFile(path); err != nil || string(data) != others {
		t.Errorf("the file has %d bytes: %v", len(data), err)
	}
}

// TestWhatCannotBeWrittenLeavesNothing beside the file.
func TestWhatCannotBeWrittenLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, VerdictsFile)
	v, _ := opened(t, path)
	if err := os.MkdirAll(filepath.Join(path, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	v.keep(about(1), "one differs")
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("there are %v, %v", files, err)
	}
	if _, err := OpenVerdicts(VerdictsConfig{Path: path}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a file that cannot be read is %v", err)
	}
}

// TestVerdictsOfManyAtOnce is for the race detector.
func TestVerdictsOfManyAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), VerdictsFile)
	v, _ := opened(t, path)
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for i := range 200 {
				v.keep(about(i%20), fmt.Sprint(w, " of ", i))
				v.of(about(i))
				if i%3 == w%3 {
					v.forget(about(i % 20))
				}
				v.suspect(about(100+i), "x")
			}
		})
	}
	all.Wait()
	next, said := opened(t, path)
	for i := range 300 {
		was, verdict := v.of(about(i))
		if is, _ := next.of(about(i)); verdict && is != was || !verdict && is != "" {
			t.Errorf("%d: %q, and in the file %q", i, was, is)
		}
	}
	if said.Len() > 0 {
		t.Error(said)
	}
}

// BenchmarkOpenVerdicts reads as many verdicts as there may be, of the usual length.
func BenchmarkOpenVerdicts(b *testing.B) {
	path := filepath.Join(b.TempDir(), VerdictsFile)
	var all bytes.Buffer
	for i := range maxKnown {
		all.Write(encode(about(i), "not reproducible: bazel-out/k8-fastbuild/bin/some/package/of/a/program/library.a differs (timestamp); see: cloister repro "+about(i).action.String()))
	}
	if err := os.WriteFile(path, all.Bytes(), 0o600); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(all.Len()))
	for b.Loop() {
		v, err := OpenVerdicts(VerdictsConfig{Path: path})
		if err != nil || len(v.known) != maxKnown {
			b.Fatal(len(v.known), err)
		}
		v.Close()
	}
}
