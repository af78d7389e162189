// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// ignoreFileLimit makes writes beyond the file size limit fail until the test ends. Not for synctest bubbles.
func ignoreFileLimit(t *testing.T) {
	signal.Ignore(syscall.SIGXFSZ)
	t.Cleanup(func() { signal.Reset(syscall.SIGXFSZ) })
}

// fillJournal makes files so small that half a line fits into the journal of p, which has one, until heal is called or
// the test ends.
func fillJournal(t *testing.T, p *pair) (heal func()) {
	t.Helper()
	var old syscall.Rlimit
	must.Succeed(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old))
	info := must.Get(os.Stat(p.journal))(t)
	limit := syscall.Rlimit{Cur: uint64(info.Size() + info.Size()/2), Max: old.Max}
	must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit))
	heal = func() { must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old)) }
	t.Cleanup(heal)
	return heal
}

// TestResultsAreQueuedAgain checks that a result that did not fit into the journal is sent when there is room.
func TestResultsAreQueuedAgain(t *testing.T) {
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprint("closed=", closed), func(t *testing.T) {
			ignoreFileLimit(t)
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, overlay.WriteBack)
				disconnect(p.faultyUpstream)
				put(t, p.store, 1, 100)
				heal := fillJournal(t, p)
				action := cas.SHA256.Sum([]byte("a"))
				wantError(t, "full journal", p.actions.Record(t.Context(), action, &repb.ActionResult{}), cas.ErrUnwritable)
				time.Sleep(5 * time.Minute)
				expect.Equal(t, p.Stats().Pending, 1, "pending while the journal is full")
				heal()
				p.faultyUpstream.Heal()
				if closed {
					p.drain(t)
				} else {
					time.Sleep(time.Minute)
				}
				must.Get(p.upstream.Lookup(t.Context(), action))(t)
			})
		})
	}
}

// TestCloseReportsResults checks that Close reports results that are not in the journal, and queues them if the journal
// has room again.
func TestCloseReportsResults(t *testing.T) {
	for _, full := range []bool{true, false} {
		t.Run(fmt.Sprint("full=", full), func(t *testing.T) {
			ignoreFileLimit(t)
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, overlay.WriteBack)
				disconnect(p.faultyUpstream)
				put(t, p.store, 1, 100)
				heal := fillJournal(t, p)
				for _, action := range []string{"a", "b"} {
					err := p.actions.Record(t.Context(), cas.SHA256.Sum([]byte(action)), &repb.ActionResult{})
					wantError(t, "full journal", err, cas.ErrUnwritable)
				}
				ctx, cancel := context.WithCancel(t.Context())
				closed := make(chan error)
				go func() { closed <- p.Close(ctx) }()
				synctest.Wait() // it waits for the upstream
				if !full {
					heal()
				}
				cancel()
				err := <-closed
				if full {
					expect.Message(t, err, "2 results were not queued and will not be sent", "Close")
					expect.Message(t, err, "1 blobs and results are not sent", "Close")
				} else {
					expect.Message(t, err, "3 blobs and results are not sent", "Close")
					expect.That(t, !errors.Is(err, cas.ErrUnwritable), "Close: got %v", err)
				}
			})
		})
	}
}

// TestFullJournal checks that an entry that does not fit into the journal is not acknowledged, and harms no later one.
func TestFullJournal(t *testing.T) {
	p := newPair(t, overlay.WriteBack)
	disconnect(p.faultyUpstream)
	_, before := put(t, p.store, 1, 100)

	ignoreFileLimit(t)
	heal := fillJournal(t, p)
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
	heal()
	_, after := put(t, p.store, 3, 100)
	put(t, p.store, 2, 100)
	p.faultyUpstream.Heal()
	wantMissing(t, "put again", p.store, []cas.Digest{refused}, nil)
	p.drain(t)
	expect.That(t, has(t, p.upstream, before) && has(t, p.upstream, after) && has(t, p.upstream, refused),
		"acknowledged writes are not in the upstream")
}

// failSync replaces the open file at path by a device that accepts writes and cannot be synced.
func failSync(t *testing.T, path string) {
	t.Helper()
	null := must.Get(os.OpenFile(os.DevNull, os.O_RDWR, 0))(t)
	defer null.Close()
	for _, e := range must.Get(os.ReadDir("/proc/self/fd"))(t) {
		if link, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && link == path {
			fd := must.Get(strconv.Atoi(e.Name()))(t)
			must.Succeed(t, syscall.Dup3(int(null.Fd()), fd, syscall.O_CLOEXEC))
			return
		}
	}
	t.Fatalf("%s is not open", path)
}

// TestRecordsAreSynced checks that with Config.Sync, a large blob is not stored locally before its record is synced, and
// WriteBack acknowledges nothing before its entry is synced.
func TestRecordsAreSynced(t *testing.T) {
	for _, c := range []struct {
		policy overlay.Policy
		suffix string
		kept   bool // the blob is stored before its entry is written
	}{{overlay.WriteThrough, ".unsent", false}, {overlay.WriteBack, "", true}} {
		for _, sync := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d sync=%t", c.policy, sync), func(t *testing.T) {
				journal := filepath.Join(must.Get(filepath.EvalSymlinks(t.TempDir()))(t), "journal")
				local, upstream := castest.NewMemory(), faulty.New(castest.NewMemory(), nil)
				disconnect(upstream)
				o := open(t, overlay.Config{
					Local: one(local, local), Upstream: one(upstream, upstream), Policy: c.policy, Journal: journal, Sync: sync,
				})
				s := instance(t, o).Store
				write := func(seed byte) (cas.Digest, error) {
					b, d := castest.Blob(seed, 3<<20)
					return d, s.Put(t.Context(), d, bytes.NewReader(b))
				}
				write(1) // opens the file
				failSync(t, journal+c.suffix)
				d, err := write(2)
				expect.Equal(t, errors.Is(err, cas.ErrUnwritable), sync, "ErrUnwritable (got %v)", err)
				expect.Equal(t, has(t, local, d), c.kept || !sync, "the blob is local")
			})
		}
	}
}
