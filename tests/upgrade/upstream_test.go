// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// withUpstream opens a store with an upstream for instance main. The returned function ends that.
func withUpstream(t *testing.T, dir string, upstream *faulty.Store) (*overlay.Overlay, *cas.Instance, *disk.Cache, func()) {
	t.Helper()
	c := open(t, dir, 0)
	o := must.Get(overlay.New(overlay.Config{
		Local: c.Instance, Journal: filepath.Join(dir, "upstream.journal"),
		Upstream: func(name string) (*cas.Instance, error) {
			return &cas.Instance{Name: name, Store: upstream, Actions: upstream}, nil
		},
	}))(t)
	return o, must.Get(o.Instance("main"))(t), c, func() {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = o.Close(ctx) // what is not sent stays in the journal
		must.Succeed(t, c.Close())
	}
}

// wantUnsent checks that a store with a full upstream does not treat unsent writes as sent.
func wantUnsent(t *testing.T, dir string, want *Contents) {
	t.Helper()
	if want.Unsent == "" {
		return
	}
	memory := castest.NewMemory()
	upstream := faulty.New(memory, memory)
	upstream.Fail(cas.ErrFull, faulty.Put, faulty.PutAll, faulty.Record)
	o, in, c, end := withUpstream(t, dir, upstream)
	defer end()
	ds := []cas.Digest{digest(t, want.Unsent), digest(t, want.Pending)}
	expect.Slices(t, must.Get(in.Store.Missing(t.Context(), ds))(t), ds, "missing")
	local := must.Get(c.Instance("main"))(t)
	expect.Slices(t, must.Get(local.Store.Missing(t.Context(), ds))(t), nil, "missing in the local store")
	if s := o.Stats(); s.Pending < 2 || s.Lost > 0 || s.Oldest.Before(want.From.Add(-1e9)) || s.Oldest.After(want.Until) {
		t.Errorf("got %+v, want a pending blob and result of the recording", s)
	}
}

// wantSent checks that an upstream gets everything that was unsent.
func wantSent(t *testing.T, dir string, want *Contents) {
	t.Helper()
	if want.Unsent == "" {
		return
	}
	memory := castest.NewMemory()
	o, in, c, end := withUpstream(t, dir, faulty.New(memory, memory))
	defer end()
	must.Hold(t, "everything pending is sent", func() bool { return o.Stats().Pending == 0 })
	local := must.Get(c.Instance("main"))(t)
	unsent := digest(t, want.Unsent)
	content := must.Get(cas.ReadAll(t.Context(), local.Store, unsent, unsent.Size()))(t)
	must.Succeed(t, in.Store.Put(t.Context(), unsent, bytes.NewReader(content)))
	for _, d := range []cas.Digest{unsent, digest(t, want.Pending)} {
		expect.Slices(t, must.Get(memory.Missing(t.Context(), []cas.Digest{d}))(t), nil, "missing in the upstream")
		expect.Slices(t, must.Get(in.Store.Missing(t.Context(), []cas.Digest{d}))(t), nil, "missing")
	}
	got, err := memory.Lookup(t.Context(), digest(t, want.PendingResult.Action))
	expect.That(t, err == nil && got.ExecutionMetadata.GetWorker() == "upgrade", "pending result: the upstream has %v, %v", got, err)
}

// wantImage checks that the image is known and stored.
func wantImage(t *testing.T, dir string, want *Contents) {
	t.Helper()
	if want.Image == "" {
		return
	}
	c := open(t, dir, 0)
	defer c.Close()
	l := must.Get(image.OpenLibrary(image.LibraryConfig{
		Config: image.Config{Function: cas.SHA256}, Path: filepath.Join(dir, image.LibraryFile), Instances: c.Instance,
	}))(t)
	defer l.Close()
	found := l.Find("main", want.Image)
	if len(found) != 1 || !found[0].Loaded || found[0].Files != 1 {
		t.Fatalf("image %s: got %+v, want one with one file", want.Image, found)
	}
	in := must.Get(c.Instance("main"))(t)
	expect.Slices(t, must.Get(in.Store.Missing(t.Context(), []cas.Digest{found[0].Root}))(t), nil, "missing root of image %s", want.Image)
}
