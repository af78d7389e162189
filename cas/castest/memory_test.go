// SPDX-License-Identifier: Apache-2.0

package castest_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestMemory(t *testing.T) {
	castest.TestStore(t, func(*testing.T) cas.Store { return castest.NewMemory() })
	castest.TestActionCache(t, func(*testing.T) cas.ActionCache { return castest.NewMemory() })
}

func TestMemoryReportsCorruptBlob(t *testing.T) {
	m := castest.NewMemory()
	b, d := castest.Blob(1, 100)
	expect.That(t, !m.Corrupt(d), "Corrupt of an absent blob: got true")
	must.Succeed(t, m.Put(t.Context(), d, bytes.NewReader(b)))
	expect.That(t, m.Corrupt(d), "Corrupt: got false")
	expect.Error(t, expect.Err(cas.ReadAll(t.Context(), m, d, 100)), cas.ErrCorrupt, "ReadAll")
	must.Succeed(t, m.Put(t.Context(), d, bytes.NewReader(b)))
	expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), m, d, 100))(t)), string(b), "after Put")
}

func TestMemoryDigestsAndDelete(t *testing.T) {
	m := castest.NewMemory()
	var want []cas.Digest
	for i := range 10 {
		d := must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte{byte(i)}))(t)
		want = append(want, d)
	}
	slices.SortFunc(want, func(a, b cas.Digest) int { return bytes.Compare([]byte(a.Hash()), []byte(b.Hash())) })
	m.Delete(want[3])
	want = slices.Delete(want, 3, 4)
	if got := m.Digests(); !slices.Equal(got, want) || m.Len() != len(want) {
		t.Errorf("got %d digests %v\nwant %d %v", m.Len(), got, len(want), want)
	}
}

// Rule 22.
func TestInstancesAreIsolated(t *testing.T) {
	instances := castest.Instances()
	expect.Error(t, expect.Err(instances("a/blobs")), cas.ErrInvalid, "reserved word")
	a := must.Get(instances("a"))(t)
	d := must.Get(cas.PutBytes(t.Context(), a.Store, cas.SHA256, []byte("x")))(t)
	for name, want := range map[string]int{"a": 0, "": 1, "b": 1, "a/b": 1} {
		in := must.Get(instances(name))(t)
		expect.Equal(t, len(must.Get(in.Store.Missing(t.Context(), []cas.Digest{d}))(t)), want, "instance %q", name)
	}
}
