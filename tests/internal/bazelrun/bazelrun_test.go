// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestProcessesAreCountedByTheirWay(t *testing.T) {
	for _, c := range []struct {
		name, output string
		want         map[string]int
	}{
		{"hits", "a\nINFO: 7 processes: 4 remote cache hit, 3 internal.\nb",
			map[string]int{"remote cache hit": 4, "internal": 3}},
		{"one", "INFO: 1 process: 1 internal.", map[string]int{"internal": 1}},
		{"none", "INFO: 0 processes.", map[string]int{}},
		{"no summary", "ERROR: no such target", map[string]int{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, (&Build{Output: c.output}).Processes()); diff != "" {
				t.Errorf("want -, got +:\n%s", diff)
			}
		})
	}
}

func TestBlobsFindsOneThatIsNotWhatItsNameSays(t *testing.T) {
	const name = "instances/@/blobs/sha256/ba/ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad-3"
	for _, c := range []struct {
		name, content string
		ok            bool
	}{
		{"sound", "abc", true},
		{"changed", "abd", false},
		{"cut short", "ab", false},
		{"longer", "abc\n", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(c.content), 0o444); err != nil {
				t.Fatal(err)
			}
			names, err := Blobs(dir)
			if c.ok != (err == nil) || c.ok != (len(names) == 1) {
				t.Errorf("got %v, %v, want them sound: %v", names, err, c.ok)
			}
			if err != nil && !strings.Contains(err.Error(), "ba7816bf") {
				t.Errorf("error does not name the blob: %v", err)
			}
		})
	}
}
