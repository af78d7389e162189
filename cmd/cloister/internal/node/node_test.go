// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
)

// TestOpenStoreDecidesReadiness: a node asks its own store whether writes are possible.
func TestOpenStoreDecidesReadiness(t *testing.T) {
	c := NewConfig()
	cmd := &cobra.Command{Use: "serve"}
	c.Register(cmd)
	c.Upstream.Register(cmd)
	must.Succeed(t, cmd.ParseFlags([]string{"--dir", filepath.Join(t.TempDir(), "store"), "--max-size", "1MiB"}))
	n := must.Get(Open(t.Context(), &c, slog.New(slog.DiscardHandler)))(t)
	defer n.Close()
	must.Be(t, n.Ready.writable != nil, "nothing asks the store")
	w := httptest.NewRecorder()
	n.Ready.ServeHTTP(w, nil)
	expect.That(t, w.Code == 200, "got %d %s, want 200", w.Code, w.Body)
}

// A holdingMachine keeps a removed file of the store open until it is asked to release it.
type holdingMachine struct {
	Machine
	held cas.Location
}

func (m *holdingMachine) ReleaseRemoved() bool {
	removed := m.held.Removed()
	m.held.Release()
	return removed
}

// TestStoreAsksTheMachineToRelease: cloister gc frees what mounted input trees keep on the disk.
func TestStoreAsksTheMachineToRelease(t *testing.T) {
	store := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Lease: -1}))(t)
	defer store.Close()
	in := must.Get(store.Instance(""))(t)
	d := must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, bytes.Repeat([]byte("input "), 100)))(t)
	locator, _ := cas.As[cas.Locator](in.Store)
	m := &holdingMachine{held: must.Get(locator.Locate(t.Context(), []cas.Digest{d}))(t)}
	file := m.held.Files()[0]
	n := &Node{Store: store}
	n.Attach(m)
	must.Get(store.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}))(t)
	_, err := file.Stat()
	expect.Error(t, err, os.ErrClosed, "the removed segment")
	expect.Equal(t, store.Stats().HeldBytes, 0, "bytes held")
}
