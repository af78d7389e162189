// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestStoreID: a directory keeps its name, no other has it, and one that cannot be read is made anew.
func TestStoreID(t *testing.T) {
	id := func(dir string) string {
		t.Helper()
		id, err := storeID(dir)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	dir := t.TempDir()
	first := id(dir)
	if again := id(dir); again != first || len(first) < 26 {
		t.Errorf("%q, and then %q", first, again)
	}
	if other := id(t.TempDir()); other == first {
		t.Errorf("two directories are called %q", other)
	}
	for _, damage := range []string{"", "\x00\x00\x00", "a b"} {
		if err := os.WriteFile(filepath.Join(dir, "worker.id"), []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		if anew := id(dir); anew == first || id(dir) != anew {
			t.Errorf("of %q came %q, and then %q", damage, anew, id(dir))
		}
	}
	if _, err := storeID(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("there is one of a directory that there is not")
	}
}
