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
)

// A distant store counts what it is to fetch.
type distant struct {
	*castest.Memory
	fetched []cas.Digest
	fetch   func() error
}

func (d *distant) Fetch(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	d.fetched = append(d.fetched, ds...)
	return nil, d.fetch()
}

// TestFetchInputs: all files of an action in one call, each once, if there is room for them.
func TestFetchInputs(t *testing.T) {
	b := newBench(t, nil)
	far := &distant{Memory: b.store, fetch: func() error { return nil }}
	var store cas.Store = far
	b.Instances = func(string) (*cas.Instance, error) { return &cas.Instance{Store: store, Actions: b.store}, nil }
	var log strings.Builder
	b.Log = slog.New(slog.NewTextHandler(&log, nil))
	task := &Task{Action: b.action(nil)}
	file := cas.SHA256.Sum([]byte("12345"))

	fetch := func(fits bool) (asked int64, files int) {
		far.fetched, asked = nil, -1
		b.PrefetchInputs(t.Context(), task, func(bytes int64) bool { asked = bytes; return fits })
		for _, d := range far.fetched {
			if d == file {
				files++
			}
		}
		return asked, files
	}
	fetch(false) // so that it knows the tree
	if asked, files := fetch(false); asked != 10 || len(far.fetched) > 0 {
		t.Errorf("without room: it asked for %d bytes and fetched %d files", asked, files)
	}
	if asked, files := fetch(true); asked != 10 || files != 1 || !slices.Equal(far.fetched, []cas.Digest{file}) {
		t.Errorf("it asked for %d bytes and fetched %v", asked, far.fetched)
	}
	far.fetch = func() error { return cas.ErrUnavailable }
	fetch(true)
	if log.Len() > 0 {
		t.Errorf("what stage will come upon was told: %s", &log)
	}
	far.fetch = func() error { panic("broken") }
	fetch(true)
	if !strings.Contains(log.String(), "broken") {
		t.Errorf("the log is %q", &log)
	}
	store = b.store
	if asked, _ := fetch(true); asked != -1 {
		t.Error("of a store that is near, something is to be fetched")
	}
	b.store.Delete(task.Action)
	store = far
	b.inputs.Invalidate("")
	if asked, _ := fetch(true); asked != -1 {
		t.Error("what is absent was to be fetched")
	}
}
