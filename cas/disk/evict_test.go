// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// Between the choice of a victim and the removal of its file, somebody may put it again.
func TestEvictionSparesWhatIsPutAgain(t *testing.T) {
	c, err := Open(Config{Dir: t.TempDir(), MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in, err := c.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	d, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	victim := c.index.doomOldest()
	if missing, err := in.Store.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
		t.Errorf("a victim is still present: %v, %v", missing, err)
	}
	if _, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := c.bury(victim); err != nil {
		t.Fatal(err)
	}
	if got, err := cas.ReadAll(t.Context(), in.Store, d, 1); err != nil || string(got) != "x" {
		t.Errorf("after the removal: got %q, %v", got, err)
	}
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// What is listed in tmp may be gone when it is to be removed.
func TestSweepToleratesVanishedFiles(t *testing.T) {
	c, err := Open(Config{Dir: t.TempDir(), MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range 500 {
		if err := os.WriteFile(filepath.Join(c.dir, "tmp", strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Each of these removes files that the others have listed.
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if err := c.sweep(); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
