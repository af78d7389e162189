// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFailedWritesMarkTheStoreAsFull: every kind of write does, for a minute.
func TestFailedWritesMarkTheStoreAsFull(t *testing.T) {
	c := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 10}))(t)
	defer c.Close()
	// A blob that never fits says nothing.
	var never fullStore
	if in, err := never.instances(c.Instance, c.Stats().MaxBytes/2)(""); err != nil {
		t.Fatal(err)
	} else if err := in.Store.Put(t.Context(), cas.SHA256.Sum(make([]byte, 1<<20)), bytes.NewReader(make([]byte, 1<<20))); !errors.Is(err, cas.ErrFull) || never.full(time.Now()) != "" {
		t.Errorf("a blob above the budget: %v, noted as %q", err, never.full(time.Now()))
	}
	var filling fullStore
	in := must.Get(filling.instances(c.Instance, c.Stats().MaxBytes/2)(""))(t)
	if _, ok := cas.As[cas.Locator](in.Store); !ok {
		t.Error("what is on a disk is no cas.Locator")
	}
	if _, ok := cas.As[cas.Splicer](in.Store); !ok {
		t.Error("what is on a disk is no cas.Splicer: no blob is split or spliced")
	}
	var held cas.Digest
	var content []byte // of held
	var err error
	for i := 0; err == nil; i++ {
		must.Be(t, filling.full(time.Now()) == "", "full before a write was refused")
		data := bytes.Repeat([]byte{byte(i), byte(i >> 8)}, 200)
		d := cas.SHA256.Sum(data)
		if err = in.Store.Put(t.Context(), d, bytes.NewReader(data)); err == nil {
			held, content = d, data
		}
	}
	if text := filling.full(time.Now()); !errors.Is(err, cas.ErrFull) || !strings.Contains(text, "full since") || !strings.Contains(text, "within the lease") {
		t.Errorf("Put: %v, noted as %q", err, text)
	}
	expect.Equal(t, filling.full(time.Now().Add(2*time.Minute)), "", "two minutes later")
	data := []byte("one more")
	for name, write := range map[string]func(in *cas.Instance) error{
		"PutAll": func(in *cas.Instance) error {
			return in.Store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: cas.SHA256.Sum(data), Data: data}})[0]
		},
		"Record": func(in *cas.Instance) error {
			return in.Actions.Record(t.Context(), held, &repb.ActionResult{StdoutRaw: data})
		},
		"Map": func(in *cas.Instance) error {
			twice := bytes.Repeat(content, 2)
			return in.Store.(cas.Splicer).Splice(t.Context(), cas.SHA256.Sum(twice), cas.ChunkList{Chunks: []cas.Digest{held, held}})
		},
	} {
		var f fullStore
		in, err := f.instances(c.Instance, c.Stats().MaxBytes/2)("")
		if err == nil {
			err = write(in)
		}
		expect.That(t, errors.Is(err, cas.ErrFull) && f.full(time.Now()) != "",
			"%s: %v, noted as %q", name, err, f.full(time.Now()))
	}
}

// TestReadsDoNotMarkTheStoreAsFull: fetching from an upstream may fail without the server being full.
func TestReadsDoNotMarkTheStoreAsFull(t *testing.T) {
	near := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 10}))(t)
	defer near.Close()
	far := castest.Instances()
	front := must.Get(overlay.New(overlay.Config{
		Local: near.Instance, Upstream: far, Journal: filepath.Join(t.TempDir(), "journal"),
	}))(t)
	defer front.Close(t.Context())
	var f fullStore
	in := must.Get(f.instances(front.Instance, near.Stats().MaxBytes/2)(""))(t)
	if _, ok := cas.As[cas.Fetcher](in.Store); !ok {
		t.Error("what is read from an upstream is no cas.Fetcher")
	}
	if _, ok := cas.As[cas.Locator](in.Store); !ok {
		t.Error("what is on a disk is no cas.Locator in front of an upstream")
	}
	if _, ok := cas.As[cas.Splicer](in.Store); !ok {
		t.Error("what is on a disk is no cas.Splicer in front of an upstream")
	}
	behind := must.Get(far(""))(t)
	var ds []cas.Digest
	for i := range 500 {
		data := bytes.Repeat([]byte{byte(i), byte(i >> 8)}, 1000)
		d := cas.SHA256.Sum(data)
		must.Succeed(t, behind.Store.Put(t.Context(), d, bytes.NewReader(data)))
		ds = append(ds, d)
	}
	must.Succeed(t, cas.Fetch(t.Context(), in.Store, ds))
	for _, d := range ds {
		must.Get(cas.ReadAll(t.Context(), in.Store, d, d.Size()))(t)
	}
	if missing, err := near.Instance(""); err != nil {
		t.Fatal(err)
	} else if absent, err := missing.Store.Missing(t.Context(), ds); err != nil || len(absent) == 0 || f.full(time.Now()) != "" {
		t.Errorf("%d of %d found no room, %v, noted as %q", len(absent), len(ds), err, f.full(time.Now()))
	}
}

// TestDownAtStartIsLoggedOnce checks the log of an upstream that is down from the start.
func TestDownAtStartIsLoggedOnce(t *testing.T) {
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	u := upstream{address: "grpc://far", reason: errNotProbed}
	for range 3 {
		u.note(errors.New("refused"), log)
	}
	u.note(nil, log)
	u.note(nil, log)
	if strings.Count(text.String(), "upstream is down") != 1 || strings.Count(text.String(), "upstream answers") != 1 {
		t.Errorf("the log is\n%s", &text)
	}
}

// TestFullUpstreamIsNoted checks that notes report a full upstream and the writes that wait for it, and that the hint
// of a full store names both.
func TestFullUpstreamIsNoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := castest.NewMemory()
		far := faulty.New(memory, memory)
		far.Fail(cas.ErrUpstreamFull, faulty.PutAll)
		n := &Node{Config: &Config{writePolicy: overlay.WriteBack}, Upstream: &upstream{address: "s3://b"}}
		n.Upstream.full.window = upstreamFullWindow
		n.overlay = must.Get(overlay.New(overlay.Config{
			Local: castest.Instances(), Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "journal"),
			Upstream: n.Upstream.full.instances(func(name string) (*cas.Instance, error) {
				return &cas.Instance{Name: name, Store: far, Actions: far}, nil
			}, math.MaxInt64),
		}))(t)
		defer n.overlay.Close(t.Context())
		in := must.Get(n.overlay.Instance(""))(t)
		must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, make([]byte, 1<<10)))(t)
		time.Sleep(2 * time.Minute)
		since := time.Now().Add(-2 * time.Minute).UTC().Format(time.RFC3339)
		for range 3 {
			notes := n.Notes()
			must.Be(t, len(notes) == 2, "got %q, want two notes", notes)
			expect.Text(t, notes[0], "upstream s3://b is full since "+since+": ")
			expect.Text(t, notes[1], "1 blobs and results of 1.0 KiB wait to be sent to upstream s3://b")
			expect.Text(t, n.FullHint(cas.LimitBytes),
				"free space in upstream s3://b, to which 1.0 KiB wait to be sent; otherwise "+FullHint(cas.LimitBytes))
			time.Sleep(time.Hour)
		}
		far.Heal()
		time.Sleep(11 * time.Minute)
		expect.Equal(t, len(n.Notes()), 0, "notes afterwards")
		expect.Equal(t, n.FullHint(cas.LimitBytes), FullHint(cas.LimitBytes))

		far.Fail(cas.ErrUnavailable, faulty.PutAll)
		must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, make([]byte, 2<<10)))(t)
		expect.Equal(t, n.FullHint(cas.LimitBytes), FullHint(cas.LimitBytes)+"; 2.0 KiB wait to be sent to upstream s3://b")
		far.Heal()
		time.Sleep(11 * time.Minute)
	})
}

// TestLargeBlobDoesNotMarkTheUpstreamAsFull: a blob above the upstream's size limit says nothing about its free space.
func TestLargeBlobDoesNotMarkTheUpstreamAsFull(t *testing.T) {
	var f fullStore
	_ = f.note(fmt.Errorf("put: %w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported))
	expect.Equal(t, f.full(time.Now()), "")
	_ = f.note(cas.ErrUpstreamFull)
	expect.That(t, f.full(time.Now()) != "", "a full upstream is not noted")
}

// TestPendingWritesAreNoted checks that /ready says what waits for an upstream, and stays 200.
func TestPendingWritesAreNoted(t *testing.T) {
	memory := castest.NewMemory()
	far := faulty.New(memory, memory)
	far.Fail(cas.ErrUnavailable, faulty.PutAll)
	front := must.Get(overlay.New(overlay.Config{
		Local: castest.Instances(), Policy: overlay.WriteBack, Journal: filepath.Join(t.TempDir(), "journal"),
		Upstream: func(name string) (*cas.Instance, error) {
			return &cas.Instance{Name: name, Store: far, Actions: far}, nil
		},
	}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	defer front.Close(ctx)
	n := &Node{
		Config: &Config{writePolicy: overlay.WriteBack}, Ready: &readiness{}, overlay: front,
		Upstream: &upstream{address: "s3://b"},
	}
	n.Ready.notes = n.Notes
	in := must.Get(front.Instance(""))(t)
	must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, make([]byte, 1<<10)))(t)
	ready := func(want ...string) {
		t.Helper()
		w := httptest.NewRecorder()
		n.Ready.ServeHTTP(w, nil)
		lines := strings.Split(strings.TrimSpace(w.Body.String()), "\n")
		must.Be(t, w.Code == 200 && len(lines) == len(want), "got %d with %q, want 200 with %q", w.Code, lines, want)
		for i := range want {
			expect.Text(t, lines[i], want[i], "line %d", i)
		}
	}
	ready("ready")
	n.Upstream.note(errors.New("connection refused"), slog.New(slog.DiscardHandler))
	ready("ready", "upstream s3://b is down since ", "1 blobs and results of 1.0 KiB wait to be sent to upstream s3://b, the oldest since ")
}
