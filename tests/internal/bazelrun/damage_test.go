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

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

// TestDamageMatchesItsCounts checks that the reported numbers of files and extents are changed by one bit each or
// removed.
func TestDamageMatchesItsCounts(t *testing.T) {
	dir := t.TempDir()
	content := map[string][]byte{}
	for i := range 100 {
		content[fmt.Sprintf("files/@/sha256/%02d/%d", i, i)] = bytes.Repeat([]byte{byte(i)}, 1000)
	}
	// The second half is unused.
	content["segments/00000001.data"] = append(bytes.Repeat([]byte{7}, 50*extent), make([]byte, 50*extent)...)
	content["segments/00000001.log"] = []byte("a log")
	for name, b := range content {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, b, 0o444))
	}
	type damage struct{ Flipped, Removed, Extents int }
	var did, found damage
	rnd := rand.New(rand.NewPCG(1, 1))
	var err error
	if did.Flipped, did.Removed, err = DamageFiles(dir, rnd, 0.1); err != nil {
		t.Fatal(err)
	}
	did.Extents = must.Get(DamageSegments(dir, rnd, 0.1))(t)
	must.Succeed(t, LoseFiles(dir, rnd, 0.1))
	did.Removed += 9 // a tenth of the remaining 95
	for name, want := range content {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			found.Removed++
			continue
		}
		must.Be(t, err == nil && len(got) == len(want), "%s: got %d bytes, want %d: %v", name, len(got), len(want), err)
		for i := range got {
			if got[i] == want[i] {
				continue
			}
			expect.That(t, got[i]^want[i] == 1,
				"%s: byte %d: got %d, want %d with one bit flipped", name, i, got[i], want[i])
			if filepath.Dir(name) == "segments" {
				found.Extents++
			} else {
				found.Flipped++
			}
		}
		expect.Equal(t, must.Get(os.Stat(filepath.Join(dir, name)))(t).Mode().Perm(), 0o444, "%s", name)
	}
	expect.Equal(t, cmp.Diff(damage{5, 14, 5}, did), "")
	expect.Equal(t, cmp.Diff(did, found), "", "reported -, done +")
}
