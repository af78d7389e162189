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
		t.Errorf("measured %+v", r)
	}
	store, err := disk.Open(disk.Config{Dir: c.Dir, MaxBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if n := store.Stats().Blobs; n != c.Blobs {
		t.Errorf("the store has %d blobs", n)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = load.RunStore(t.Context(), c); err != nil || r.Filled {
		t.Errorf("the second run: %+v, %v; want that nothing is put", r, err)
	}
	// As many blobs, but others.
	c.Salt = "other"
	if _, err := load.RunStore(t.Context(), c); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("got %v of a store that lacks the blobs", err)
	}
}
