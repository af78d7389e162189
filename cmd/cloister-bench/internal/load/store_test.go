// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
)

func TestRunStore(t *testing.T) {
	c := load.StoreConfig{Dir: t.TempDir(), Salt: "salt", Blobs: 5000, Size: 100, Reads: 200}
	r, err := load.RunStore(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if !r.Filled || r.Put <= 0 || r.Open <= 0 || r.Missing <= 0 || r.Read <= 0 {
		t.Errorf("first run: got %+v, want positive rates of a new store", r)
	}
	store, err := disk.Open(disk.Config{Dir: c.Dir, MaxBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if n := store.Stats().Blobs; n != c.Blobs {
		t.Errorf("the store contains %d blobs, want %d", n, c.Blobs)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = load.RunStore(t.Context(), c); err != nil || r.Filled {
		t.Errorf("second run: got %+v, %v, want a store that is not filled again", r, err)
	}
	// The same number of other blobs.
	c.Salt = "other"
	if _, err := load.RunStore(t.Context(), c); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("other blobs: got %v, want missing blobs", err)
	}
}
