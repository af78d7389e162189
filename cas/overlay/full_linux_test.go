// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
)

// TestFullJournal: a line that does not fit is an entry that is not acknowledged, and spoils none that follows.
func TestFullJournal(t *testing.T) {
	p := newPair(t, overlay.WriteBack)
	p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
	_, before := put(t, p.store, 1, 100)

	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(p.journal)
	if err != nil {
		t.Fatal(err)
	}
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	// Room for one line and a half.
	limit := syscall.Rlimit{Cur: uint64(info.Size() + info.Size()/2), Max: old.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old)
	b, refused := castest.Blob(2, 100)
	err = p.store.Put(t.Context(), refused, bytes.NewReader(b))
	errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: refused, Data: b}, {Digest: refused, Data: b[1:]}})
	for _, err := range []error{err, errs[0]} {
		if err == nil || !strings.Contains(err.Error(), "journal") {
			t.Errorf("a write that the journal has no room for: got %v", err)
		}
	}
	wantError(t, "other bytes", errs[1], cas.ErrMismatch)
	if n := p.Stats().Pending; n != 1 {
		t.Errorf("%d are pending, want 1", n)
	}
	text, err := os.ReadFile(p.journal)
	if err != nil || string(text) != "add blob \"\" "+before.String()+"\n" {
		t.Errorf("the journal holds %q, %v", text, err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	_, after := put(t, p.store, 3, 100)
	p.faulty.Heal()
	p.drain(t)
	if !has(t, p.far, before) || !has(t, p.far, after) {
		t.Error("not all that was acknowledged came far")
	}
}
