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
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFullJournal checks that an entry that does not fit into the journal is not acknowledged, and harms no later one.
func TestFullJournal(t *testing.T) {
	p := newPair(t, overlay.WriteBack)
	disconnect(p.faultyUpstream)
	_, before := put(t, p.store, 1, 100)

	var old syscall.Rlimit
	must.Succeed(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old))
	info := must.Get(os.Stat(p.journal))(t)
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	// Enough for one and a half lines.
	limit := syscall.Rlimit{Cur: uint64(info.Size() + info.Size()/2), Max: old.Max}
	must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit))
	defer syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old)
	b, refused := castest.Blob(2, 100)
	err := p.store.Put(t.Context(), refused, bytes.NewReader(b))
	errs := p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{
		{Digest: refused, Data: b},
		{Digest: refused, Data: b[1:]},
	})
	for _, err := range []error{err, errs[0]} {
		expect.Message(t, err, "journal", "write to a full journal")
		wantError(t, "write to a full journal", err, cas.ErrUnwritable)
	}
	wantError(t, "wrong bytes", errs[1], cas.ErrMismatch)
	expect.Equal(t, p.Stats().Pending, 1, "pending")
	wantMissing(t, "what is in no journal", p.store, []cas.Digest{before, refused}, []cas.Digest{refused})
	text, err := os.ReadFile(p.journal)
	if err != nil || !strings.HasPrefix(string(text), "add blob \"\" "+before.String()+" ") ||
		strings.Count(string(text), "\n") != 1 {
		t.Errorf("got journal %q, %v", text, err)
	}
	must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old))
	_, after := put(t, p.store, 3, 100)
	put(t, p.store, 2, 100)
	p.faultyUpstream.Heal()
	wantMissing(t, "put again", p.store, []cas.Digest{refused}, nil)
	p.drain(t)
	expect.That(t, has(t, p.upstream, before) && has(t, p.upstream, after) && has(t, p.upstream, refused),
		"acknowledged writes are not in the upstream")
}
