// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRule100_OldBazelFindsItsOutputDirectories: the API says that only the parents of outputs exist before the action;
// Bazel before version 5 relies on the directories themselves.
func TestRule100_OldBazelFindsItsOutputDirectories(t *testing.T) {
	b := newBench(t, nil)
	action := b.action(func(_ *repb.Action, c *repb.Command) {
		c.OutputPaths, c.OutputFiles, c.OutputDirectories = nil, []string{"f"}, []string{"d/made"}
	})
	for _, c := range []struct {
		tool, version string
		want          bool
	}{
		{"bazel", "4.2.3", true},
		{"bazel", "4.2.3- (@non-git)", true},
		{"bazel", "2.1.0", true},
		{"bazel", "5.0.0", false},
		{"bazel", "10.0.1", false},
		{"bazel", "", false},
		{"bazel", "no_version", false},
		{"pants", "2.17.1", false},
		{"", "", false},
	} {
		task := &Task{Action: action}
		task.SetMetadata(&repb.RequestMetadata{ToolDetails: &repb.ToolDetails{ToolName: c.tool, ToolVersion: c.version}})
		req, err := b.Local.resolveFor(t.Context(), &cas.Instance{Store: b.store, Actions: b.store}, task, false)
		must.Succeed(t, err)
		layout := req.Layout.String()
		if got := strings.Contains(layout, "dir 00777 d/made\n"); got != c.want || !strings.Contains(layout, "dir 01777 d\n") {
			t.Errorf("%s %q: got directory %v, want %v and its parent:\n%s", c.tool, c.version, got, c.want, layout)
		}
	}
}
