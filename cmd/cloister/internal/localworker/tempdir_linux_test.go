// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/tests/must"
)

// TestAbandonedDirectoriesAreRemoved: those of killed processes, and no others.
func TestAbandonedDirectoriesAreRemoved(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	living := must.Get(Open(&confinement.Flags{Tier: "full"}))(t)
	name := func(s string) string { return tempPrefix + s }
	for _, d := range []string{name("dead/store/sub"), name("other"), name("foreign"), "elsewhere", "mine"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(tmp, d), 0o700))
	}
	for _, f := range []string{name("dead/lock"), name("dead/store/sub/file"), name("foreign/lock"), "elsewhere/lock", "mine/kept"} {
		must.Succeed(t, os.WriteFile(filepath.Join(tmp, f), nil, 0o600))
	}
	must.Succeed(t, os.Symlink("elsewhere", filepath.Join(tmp, name("link"))))
	must.Succeed(t, os.Symlink("../../mine", filepath.Join(tmp, name("dead/store/out"))))
	want := []string{name("link"), name("other"), "elsewhere", "mine", filepath.Base(living.Dir)}
	if os.Geteuid() == 0 { // only root can give a file away
		must.Succeed(t, os.Chown(filepath.Join(tmp, name("foreign")), 12345, 12345))
		want = append(want, name("foreign"))
	}
	second := must.Get(Open(&confinement.Flags{Tier: "full"}))(t)
	listing := func() (names []string) {
		all := must.Get(os.ReadDir(tmp))(t)
		for _, e := range all {
			names = append(names, e.Name())
		}
		return names
	}
	slices.Sort(want)
	if got := listing(); !slices.Equal(got, sorted(append(want, filepath.Base(second.Dir)))) {
		t.Errorf("there are %q, want %q and %s", got, want, second.Dir)
	}
	must.Get(os.Stat(filepath.Join(tmp, "mine/kept")))(t)
	for _, w := range []*Worker{living, second} {
		must.Succeed(t, w.Close())
	}
	if got := listing(); slices.Contains(got, filepath.Base(living.Dir)) || slices.Contains(got, filepath.Base(second.Dir)) {
		t.Errorf("left are %q", got)
	}
}

func sorted(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return names
}
