// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestForget: a forgotten result does not reappear, although older ones are in the log. Another one may follow.
func TestForget(t *testing.T) {
	dir := t.TempDir()
	c := open(t, disk.Config{Dir: dir})
	s := store(t, c, "a")
	_, action := castest.Blob(1, 100)
	_, other := castest.Blob(2, 100)
	forget := func(want bool) {
		t.Helper()
		if was, err := s.Forget(t.Context(), action); was != want || err != nil {
			t.Errorf("Forget: got %v, %v, want %v", was, err, want)
		}
	}
	forget(false)
	for exit := range int32(3) {
		for _, d := range []cas.Digest{action, other} {
			must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: exit}))
		}
	}
	forget(true)
	forget(false)
	for range 2 {
		expect.Error(t, expect.Err(s.Lookup(t.Context(), action)), cas.ErrNotFound, "Lookup of a forgotten result")
		if r, err := s.Lookup(t.Context(), other); err != nil || r.ExitCode != 2 {
			t.Errorf("Lookup of another result: got %v, %v", r, err)
		}
		if report, err := c.Verify(t.Context(), disk.VerifyOptions{Restart: true}); err != nil ||
			len(report.Damaged) > 0 {
			t.Errorf("Verify: got %+v, %v", report, err)
		}
		closeStore(t, c)
		c = open(t, disk.Config{Dir: dir})
		s = store(t, c, "a")
	}
	// The empty result is valid.
	must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{}))
	expect.Error(t, expect.Err(s.Lookup(t.Context(), action)), nil, "Lookup of an empty result")
	forget(true)
}
