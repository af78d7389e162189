// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"strconv"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// TestNamesOfInstancesRunOut: with as many as there are numbers no other instance begins, which is told as a full store, and
// those that have a name go on.
func TestNamesOfInstancesRunOut(t *testing.T) {
	c, old := openStore(t, Config{Dir: t.TempDir()})
	if _, err := cas.PutBytes(t.Context(), old, cas.SHA256, []byte("first")); err != nil {
		t.Fatal(err)
	}
	for n := len(c.instances.names); n < 65_536; n++ { // as if each had been written to
		c.instances.add(strconv.Itoa(n))
	}
	in, err := c.Instance("another")
	if err != nil {
		t.Fatal(err)
	}
	d, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("another"))
	if !errors.Is(err, cas.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if missing, err := in.Store.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
		t.Errorf("a question for it: got %v, %v, want that it is absent", missing, err)
	}
	if _, err := cas.PutBytes(t.Context(), old, cas.SHA256, []byte("second")); err != nil {
		t.Errorf("the instance of before: %v", err)
	}
}
