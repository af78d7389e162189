// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/auditlog"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/audit"
)

// TestVerifyReportsDeletedEntries: it reports where the log begins, and whether the log itself deleted the older
// entries.
func TestVerifyReportsDeletedEntries(t *testing.T) {
	store := t.TempDir()
	l := must.Get(audit.Open(audit.Config{Dir: storedir.Audit(store), MaxBytes: 24_000}))(t)
	for i := range 200 {
		must.Succeed(t, l.Append(audit.Entry{Time: time.Date(2026, 11, 22, 9, i, 0, 0, time.UTC), Action: "9f2c"}))
	}
	must.Succeed(t, l.Close())
	const when = `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`
	check := func(want string) {
		t.Helper()
		var out strings.Builder
		err := auditVerify(t.Context(), &auditConfig{dir: store}, &out)
		_, text, _ := strings.Cut(out.String(), "\n")
		if err != nil || !regexp.MustCompile(`^begins at entry \d+, of `+when+`: older entries were deleted`+want+` as entry \d+ of `+when+` says\n$`).MatchString(text) {
			t.Errorf("got %q, %v, want %q", text, err, want)
		}
	}
	check(` for --audit-size, the last of them \(\d+ to \d+, since ` + when + `\)`)
	segments, err := filepath.Glob(filepath.Join(storedir.Audit(store), "*.jsonl"))
	must.Be(t, err == nil && len(segments) >= 3, "segments %q, %v", segments, err)
	must.Succeed(t, os.Remove(segments[0]))
	check(`, and not by the log itself, which deleted those up to \d+,`)
}

// The --kind flag knows the kind of every line.
func TestAuditKindsAreComplete(t *testing.T) {
	r := audit.Record{Entry: audit.Entry{Action: "9f2c", Unrecorded: 2, Events: []sandbox.Event{{Kind: sandbox.EventConnect}}}, Note: "a note"}
	for _, line := range append(r.Lines(""), r.Lines("note")...) {
		if kind := strings.Fields(line)[2]; !slices.Contains(auditlog.Kinds, kind) {
			t.Errorf("%q is not in %q", kind, auditlog.Kinds)
		}
	}
}

func TestAuditSizeFlag(t *testing.T) {
	for text, want := range map[string]flags.Limit{"unlimited": 0, "1GiB": 1 << 30, "20MiB": 20 << 20} {
		var b flags.Limit
		if err := b.Set(text); err != nil || b != want {
			t.Errorf("%q: got %d, %v, want %d", text, b, err, want)
		}
	}
	for _, text := range []string{"0", "", "-1", "10%", "none"} {
		var b flags.Limit
		expect.Message(t, b.Set(text), flags.Unlimited, "%q: %v", text, &b)
	}
	c := node.NewConfig()
	expect.Equal(t, c.Audit, 1<<30, "the default")
	c.Jobs, c.Audit = 1, 1<<20
	expect.Message(t, c.Check(serveCommand()), "at least 16", "for --audit-size 1MiB")
}
