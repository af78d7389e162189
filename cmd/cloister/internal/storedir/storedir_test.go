// SPDX-License-Identifier: Apache-2.0

package storedir

import (
	"bytes"
	"context"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPendingReadsTheJournal that an overlay writes.
func TestPendingReadsTheJournal(t *testing.T) {
	dir := t.TempDir()
	if n, err := Pending(dir); n != 0 || err != nil {
		t.Errorf("without a journal: %d, %v", n, err)
	}
	memory := castest.NewMemory()
	flaky := faulty.New(memory, memory)
	c := overlay.Config{
		Local: castest.Instances(), Policy: overlay.WriteBack, Journal: Journal(dir),
		Upstream: func(name string) (*cas.Instance, error) {
			return &cas.Instance{Name: name, Store: flaky, Actions: flaky}, nil
		},
	}
	flaky.Fail(cas.ErrUnavailable, faulty.Put, faulty.PutAll)
	for _, want := range []int{3, 0} {
		front := must.Get(overlay.New(c))(t)
		ctx, cancel := context.WithCancel(t.Context())
		if want > 0 {
			cancel()
			in := must.Get(front.Instance("a name"))(t)
			for i := range want {
				data := []byte{byte(i)}
				must.Succeed(t, in.Store.Put(t.Context(), cas.SHA256.Sum(data), bytes.NewReader(data)))
			}
		} else {
			flaky.Heal()
		}
		if err := front.Close(ctx); (err != nil) != (want > 0) {
			t.Errorf("Close with %d to send: %v", want, err)
		}
		cancel()
		if n, err := Pending(dir); n != want || err != nil {
			t.Errorf("%d, %v, want %d", n, err, want)
		}
	}
}
