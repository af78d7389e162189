// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/must"
)

// TestUnreadableHistorySaysWhatToDo checks that serve names the file and the flag that disables the history.
func TestUnreadableHistorySaysWhatToDo(t *testing.T) {
	var c Config
	c.Dir, c.History = t.TempDir(), 1<<20
	file := filepath.Join(c.Dir, "history", "00000000000000000001.v1.jsonl")
	must.Succeed(t, os.MkdirAll(file, 0o700))
	_, err := c.openHistory(nil)
	if err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "--history-size 0") {
		t.Errorf("got %v, want the file and advice", err)
	}
	c.History = 0
	if l, err := c.openHistory(nil); l != nil || err != nil {
		t.Errorf("--history-size 0: got %v, %v, want no history", l, err)
	}
}

// TestJobsAreLimitedWithRemoteAPIs: more are refused if the operator states them, and not the default of a machine with
// more processors.
func TestJobsAreLimitedWithRemoteAPIs(t *testing.T) {
	permits := must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n")))(t)
	for _, row := range []struct {
		jobs   int
		stated bool
		policy *policy.Policy
		want   int // 0: an error
	}{
		{201, true, permits, 0}, {201, false, permits, 200}, {200, true, permits, 200}, {201, true, policy.Default(), 201},
	} {
		var c Config
		c.Jobs, c.jobsStated = row.jobs, row.stated
		err := c.limitJobs(row.policy)
		switch {
		case row.want == 0 && (err == nil || !strings.Contains(err.Error(), "--jobs 201: ")):
			t.Errorf("%+v: got %v, want an error that names --jobs", row, err)
		case row.want != 0 && (err != nil || c.Jobs != row.want):
			t.Errorf("%+v: got %d, %v", row, c.Jobs, err)
		}
	}
}
