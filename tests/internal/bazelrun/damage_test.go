// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestDamageIsWhatItSays: as many files and extents are changed, each by one bit, and as many files are gone, as
// is returned.
func TestDamageIsWhatItSays(t *testing.T) {
	dir := t.TempDir()
	content := map[string][]byte{}
	for i := range 100 {
		content[fmt.Sprintf("files/@/sha256/%02d/%d", i, i)] = bytes.Repeat([]byte{byte(i)}, 1000)
	}
	// The second half is room that is not used yet.
	content["segments/00000001.data"] = append(bytes.Repeat([]byte{7}, 50*extent), make([]byte, 50*extent)...)
	content["segments/00000001.log"] = []byte("a log")
	for name, b := range content {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	type damage struct{ Flipped, Removed, Extents int }
	var did, found damage
	rnd := rand.New(rand.NewPCG(1, 1))
	var err error
	if did.Flipped, did.Removed, err = DamageFiles(dir, rnd, 0.1); err != nil {
		t.Fatal(err)
	}
	if did.Extents, err = DamageSegments(dir, rnd, 0.1); err != nil {
		t.Fatal(err)
	}
	if err := LoseFiles(dir, rnd, 0.1); err != nil {
		t.Fatal(err)
	}
	did.Removed += 9 // of the 95 that there are
	for name, want := range content {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			found.Removed++
			continue
		}
		if err != nil || len(got) != len(want) {
			t.Fatalf("%s has %d bytes, want %d: %v", name, len(got), len(want), err)
		}
		for i := range got {
			if got[i] == want[i] {
				continue
			}
			if got[i]^want[i] != 1 {
				t.Errorf("%s: byte %d is %d, want %d but for one bit", name, i, got[i], want[i])
			}
			if filepath.Dir(name) == "segments" {
				found.Extents++
			} else {
				found.Flipped++
			}
		}
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: its mode is %v, want 0444: %v", name, info.Mode(), err)
		}
	}
	if diff := cmp.Diff(damage{5, 14, 5}, did); diff != "" {
		t.Errorf("want -, got +:\n%s", diff)
	}
	if diff := cmp.Diff(did, found); diff != "" {
		t.Errorf("said -, did +:\n%s", diff)
	}
}
