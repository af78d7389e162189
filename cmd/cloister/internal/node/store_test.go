// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/audit"
)

// TestLargeBudgetIsReported: a budget larger than the file system is a warning at start.
func TestLargeBudgetIsReported(t *testing.T) {
	for size, want := range map[flags.Size]int{{Bytes: 1 << 62}: 1, {Bytes: 1 << 20}: 0, {Percent: 50}: 0} {
		var text bytes.Buffer
		c := &Config{Dir: t.TempDir(), maxSize: size}
		must.Get(openStore(c, slog.New(slog.NewTextHandler(&text, nil))))(t).Close()
		expect.That(t, strings.Count(text.String(), "--max-size is larger than the file system") == want,
			"%v: got the log %q, want %d warnings", size, &text, want)
	}
}

// TestDamagedLogsAreReported: a start logs and counts what a segment has lost, of its log or of its data, and nothing
// otherwise.
func TestDamagedLogsAreReported(t *testing.T) {
	for suffix, want := range map[string]string{
		".log":  "unreadable_or_missing_bytes=64 records_without_bytes=0",
		".data": "unreadable_or_missing_bytes=0 records_without_bytes=1",
		"":      "",
	} {
		c := &Config{Dir: t.TempDir(), maxSize: flags.Size{Bytes: 1 << 20}}
		start := func() (*disk.Cache, string) {
			var text bytes.Buffer
			return must.Get(openStore(c, slog.New(slog.NewTextHandler(&text, nil))))(t), text.String()
		}
		store, _ := start()
		in := must.Get(store.Instance(""))(t)
		for i := range byte(2) {
			must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, bytes.Repeat([]byte{i}, 500)))(t)
		}
		must.Succeed(t, store.Close())
		if suffix != "" {
			files := must.Get(filepath.Glob(filepath.Join(c.Dir, "segments", "*"+suffix)))(t)
			must.Be(t, len(files) == 1, "got files %q, want one", files)
			half := map[string]int64{".log": 64, ".data": 512}[suffix]
			must.Succeed(t, os.Truncate(files[0], half))
		}
		store, log := start()
		damage := ""
		for _, m := range (&Node{Store: store, Ready: &readiness{}}).storeMetrics() {
			if strings.HasPrefix(m.name, "cloister_cas_start_") && m.value() > 0 {
				damage += fmt.Sprint(m.name, " ", m.value())
			}
		}
		expect.Equal(t, damage, map[string]string{
			".log": "cloister_cas_start_damaged_bytes 64", ".data": "cloister_cas_start_lost 1",
		}[suffix], "metrics after losing half of %q", suffix)
		must.Succeed(t, store.Close())
		expect.That(t, strings.Contains(log, "damaged segment logs") == (want != "") && strings.Contains(log, want),
			"lost half of %q: got the log %q, want %q", suffix, log, want)
	}
}

// TestFullHintNamesTheFlags of each limit.
func TestFullHintNamesTheFlags(t *testing.T) {
	for limit, want := range map[cas.Limit][]string{
		cas.LimitBytes: {"--max-size", "--lease"},
		cas.LimitFiles: {"--max-files", "cloister gc"},
		cas.LimitDisk:  {"free space", "inodes"},
	} {
		expect.Texts(t, FullHint(limit), want, "limit %d", limit)
		var f fullStore
		err := &cas.FullError{Limit: limit, Err: fmt.Errorf("no room: %w", cas.ErrFull)}
		if got := f.note(err); !errors.Is(got, cas.ErrFull) || !strings.HasSuffix(f.full(f.last), FullHint(limit)) {
			t.Errorf("limit %d: not ready because %q", limit, f.full(f.last))
		}
	}
}

// TestUnwritableStoreIsNotReady while it cannot be written.
func TestUnwritableStoreIsNotReady(t *testing.T) {
	reason := fmt.Errorf("store %s: %w", filepath.Join("a", "b"), cas.ErrUnwritable)
	for _, err := range []error{nil, reason, nil} {
		r := readiness{writable: func() error { return err }}
		w := httptest.NewRecorder()
		r.ServeHTTP(w, nil)
		want, code := "ready\n", 200
		if err != nil {
			want, code = reason.Error()+"\n", 503
		}
		expect.That(t, w.Code == code && w.Body.String() == want,
			"%v: got %d %q, want %d %q", err, w.Code, w.Body, code, want)
	}
}

// TestLostAuditEntriesAreCounted: an entry that cannot be written is in the metrics, not only in the log.
func TestLostAuditEntriesAreCounted(t *testing.T) {
	t.Parallel()
	record := must.Get(audit.Open(audit.Config{Dir: t.TempDir()}))(t)
	must.Succeed(t, record.Close()) // every Append fails
	n := &Node{record: record, Ready: &readiness{}}
	lost := func() float64 {
		metrics := n.storeMetrics()
		i := slices.IndexFunc(metrics, func(m metric) bool { return m.name == "cloister_audit_lost_total" })
		must.Be(t, i >= 0, "the metric is missing")
		return metrics[i].value()
	}
	expect.Equal(t, lost(), 0, "before")
	recordViolations(slog.New(slog.DiscardHandler), record, "w", &worker.Task{}, &worker.Violations{Unrecorded: 1})
	expect.Equal(t, lost(), 1, "after a failure")
}
