// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"strconv"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestInstanceNumbersRunOut: a put into one instance too many is ErrFull, and the other instances stay usable.
func TestInstanceNumbersRunOut(t *testing.T) {
	c, old := openStore(t, Config{Dir: t.TempDir()})
	must.Get(cas.PutBytes(t.Context(), old, cas.SHA256, []byte("first")))(t)
	for n := len(c.instances.names); n < 65_536; n++ {
		c.instances.add(strconv.Itoa(n))
	}
	in := must.Get(c.Instance("another"))(t)
	d, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("another"))
	expect.Error(t, err, cas.ErrFull)
	if missing, err := in.Store.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
		t.Errorf("Missing: got %v, %v, want the blob", missing, err)
	}
	expect.Error(t, expect.Err(cas.PutBytes(t.Context(), old, cas.SHA256, []byte("second"))), nil,
		"put into the first instance")
}

// TestInstanceWithAWordReservedSince: a store opens although a later version reserves a word in the name of an
// instance, and numbers the others as before.
func TestInstanceWithAWordReservedSince(t *testing.T) {
	dir := t.TempDir()
	c, _ := openStore(t, Config{Dir: dir})
	for _, name := range []string{"logstreams", "main"} {
		must.Get(c.instances.number(name))(t)
	}
	in, err := c.Instance("main")
	must.Succeed(t, err)
	d, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("data"))
	must.Succeed(t, err)
	must.Succeed(t, c.Close())
	again, err := Open(Config{Dir: dir, MaxBytes: 1 << 20})
	must.Succeed(t, err)
	defer again.Close()
	if in, err = again.Instance("main"); err != nil {
		t.Fatal(err)
	}
	expect.Slices(t, must.Get(in.Store.Missing(t.Context(), []cas.Digest{d}))(t), nil, "Missing")
	expect.Error(t, expect.Err(again.Instance("logstreams")), cas.ErrInvalid)
}
