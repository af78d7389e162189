// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

// TestLocalResultsAreChecked: a machine that does something else is no measure.
func TestLocalResultsAreChecked(t *testing.T) {
	tree := Work{Kind: Trees, Program: "/bin/true", Actions: 1, Parallel: 1, Tree: Tree{Files: 2, Dirs: 1, Changed: 1, Smallest: 1, Largest: 1, Read: true}}
	outputs := Work{Kind: Outputs, Program: "/bin/true", Actions: 1, Parallel: 1, Files: 1, Inner: 1}
	for _, c := range []struct {
		name  string
		work  Work
		spoil func(*command)
		want  string
	}{
		{"Read", tree, func(*command) {}, ""},
		{"ReadOther", tree, func(c *command) { c.stdout = "1 2\n" }, `want "1 2\n"`},
		{"Written", outputs, func(*command) {}, ""},
		{"WrittenOther", outputs, func(c *command) { c.files["f0"] = "00" }, "/f0 has digest"},
		{"WrittenInDirectory", outputs, func(c *command) { c.dir["d/f0"] = "00" }, "/d/f0 has digest"},
		{"NotWritten", outputs, func(c *command) { c.files["f1"] = "00" }, "f1: no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j, err := newJob(&c.work, nil, "salt")
			if err != nil {
				t.Fatal(err)
			}
			c.spoil(&j.actions[0].local)
			s, err := newScratch(j, &ExecConfig{Dir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			_, err = s.commands(t.Context(), &c.work, 1)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// TestRepeat: at least once, until the time is over, and no more than is wanted.
func TestRepeat(t *testing.T) {
	s := scratch{time: time.Nanosecond}
	all, err := s.repeat(t.Context(), 2, 1000, func(int) error { time.Sleep(time.Microsecond); return nil })
	if err != nil || len(all.took) == 0 || len(all.took) > 2 {
		t.Errorf("%d times in no time, %v", len(all.took), err)
	}
	s.time = time.Hour
	if all, err = s.repeat(t.Context(), 2, 5, func(int) error { return nil }); err != nil || len(all.took) != 5 || all.rate() <= 0 || all.p50() <= 0 {
		t.Errorf("%d times, want 5, %v", len(all.took), err)
	}
	if _, err := s.repeat(t.Context(), 2, 5, func(int) error { return os.ErrClosed }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v of what fails", err)
	}
}

// TestChecksum compares with what cksum prints, which POSIX says.
func TestChecksum(t *testing.T) {
	for data, want := range map[string]string{"": "4294967295 0\n", "a": "1220704766 1\n", "123456789": "930766865 9\n"} {
		half := len(data) / 2
		got := checksum([]*file{{blob: blob{data: []byte(data[:half])}}, {blob: blob{data: []byte(data[half:])}}})
		if got != want {
			t.Errorf("the checksum of %q is %q, want %q", data, got, want)
		}
	}
}
