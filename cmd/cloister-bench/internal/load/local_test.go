// SPDX-License-Identifier: Apache-2.0

package load

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestLocalResultsAreChecked(t *testing.T) {
	tree := Workload{Kind: Trees, Actions: 1, Parallel: 1, Tree: Tree{Files: 2, Dirs: 1, Changed: 1, Read: true}}
	outputs := Workload{Kind: Outputs, Actions: 1, Parallel: 1, Files: 1, InDirectory: 1}
	for _, c := range []struct {
		name  string
		work  Workload
		spoil func(*command)
		want  string
	}{
		{"Read", tree, func(*command) {}, ""},
		{"ReadOther", tree, func(c *command) { c.stdout = "1 2\n" }, `want "1 2\n"`},
		{"Written", outputs, func(*command) {}, ""},
		{"WrittenOther", outputs, func(c *command) { c.files["f0"] = "00" }, "/f0 has digest"},
		{"WrittenInDirectory", outputs, func(c *command) { c.dir["d/f0"] = "00" }, "/d/f0 has digest"},
		{"Fails", outputs, func(c *command) { c.args = []string{"/bin/false"} }, "exit status 1"},
		{"NotWritten", outputs, func(c *command) { c.files["f1"] = "00" }, "f1: no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := must.Get(newJob(&c.work, nil, "salt"))(t)
			c.spoil(&j.actions[0].local)
			t.Setenv("TMPDIR", t.TempDir())
			_, err := must.Get(newScratch(j, &ExecConfig{}))(t).commands(t.Context(), &c.work, 1)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// TestRepeat checks that repeat runs at least once, and stops at the time limit and at the maximum.
func TestRepeat(t *testing.T) {
	s := scratch{time: time.Nanosecond}
	all, err := s.repeat(t.Context(), 2, 1000, func(int) error { time.Sleep(time.Microsecond); return nil })
	expect.That(t, err == nil && len(all.took) != 0 && len(all.took) <= 2,
		"time limit: got %d runs, %v, want 1 or 2", len(all.took), err)
	s.time = time.Hour
	all, err = s.repeat(t.Context(), 2, 5, func(int) error { return nil })
	expect.That(t, err == nil && len(all.took) == 5 && all.rate() > 0 && all.p50() > 0,
		"maximum: got %+v, %v, want 5 runs", all, err)
	expect.Error(t, expect.Err(s.repeat(t.Context(), 2, 5, func(int) error { return os.ErrClosed })), os.ErrClosed,
		"error")
}

// TestChecksum compares with the output of cksum.
func TestChecksum(t *testing.T) {
	for data, want := range map[string]string{"": "4294967295 0\n", "a": "1220704766 1\n", "123456789": "930766865 9\n"} {
		half := len(data) / 2
		got := checksum([]*file{{blob: blob{data: []byte(data[:half])}}, {blob: blob{data: []byte(data[half:])}}})
		expect.Equal(t, got, want, "checksum of %q", data)
	}
}
