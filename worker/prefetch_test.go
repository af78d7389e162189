// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
)

// A fetcher records the blobs that it fetches.
type fetcher struct {
	*castest.Memory
	fetched []cas.Digest
	fetch   func() error
}

func (d *fetcher) Fetch(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	d.fetched = append(d.fetched, ds...)
	return nil, d.fetch()
}

func TestPrefetchInputs(t *testing.T) {
	b := newBench(t, nil)
	upstream := &fetcher{Memory: b.store, fetch: func() error { return nil }}
	var store cas.Store = upstream
	b.cfg.Instances = func(string) (*cas.Instance, error) { return &cas.Instance{Store: store, Actions: b.store}, nil }
	var log strings.Builder
	b.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	task := &Task{Action: b.action(nil)}
	file := cas.SHA256.Sum([]byte("12345"))

	fetch := func(fits bool) (asked int64, files int) {
		upstream.fetched, asked = nil, -1
		b.PrefetchInputs(t.Context(), task, func(bytes int64) bool { asked = bytes; return fits })
		for _, d := range upstream.fetched {
			if d == file {
				files++
			}
		}
		return asked, files
	}
	fetch(false) // caches the tree
	if asked, files := fetch(false); asked != 10 || len(upstream.fetched) > 0 {
		t.Errorf("refused: got %d bytes reserved, %d files fetched", asked, files)
	}
	if asked, files := fetch(true); asked != 10 || files != 1 || !slices.Equal(upstream.fetched, []cas.Digest{file}) {
		t.Errorf("got %d bytes reserved, fetched %v", asked, upstream.fetched)
	}
	upstream.fetch = func() error { return cas.ErrUnavailable }
	fetch(true)
	expect.That(t, log.Len() <= 0, "got log %s, want none: stage reports the error", &log)
	upstream.fetch = func() error { panic("broken") }
	fetch(true)
	expect.Text(t, log.String(), "broken", "log (the panic)")
	store = b.store
	if asked, _ := fetch(true); asked != -1 {
		t.Error("got a reservation for a local store")
	}
	b.store.Delete(task.Action)
	store = upstream
	b.inputs.Invalidate("")
	if asked, _ := fetch(true); asked != -1 {
		t.Error("got a reservation for a missing action")
	}
}
