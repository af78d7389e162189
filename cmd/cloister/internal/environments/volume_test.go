// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestVolumes: a volume is an input under the real path of the host. Paths that lead to secrets of the user or to files of
// the host's system are refused, and so are places that the sandbox has itself.
func TestVolumes(t *testing.T) {
	home := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	t.Setenv("HOME", home)
	t.Setenv("XDG_STATE_HOME", filepath.Join(home, "state"))
	for _, dir := range []string{".ssh", "data/more", "state/cloister/sandboxes"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(home, dir), 0o700))
	}
	must.Succeed(t, os.Symlink("data", filepath.Join(home, "link")))
	must.Succeed(t, os.Symlink(".ssh", filepath.Join(home, "keys")))
	must.Succeed(t, os.Symlink("/", filepath.Join(home, "root")))
	data := filepath.Join(home, "data")
	for value, want := range map[string]string{
		data + ":/mnt/data":                        data,
		data + ":/mnt/data:ro":                     data,
		filepath.Join(home, "link/more") + ":/mnt": filepath.Join(data, "more"),
	} {
		got := must.Get(volumes([]string{value}))(t)
		guest := strings.Split(value, ":")[1]
		expect.That(t, len(got) == 1 && got[0] == sandbox.Input{Target: guest, Source: want, Content: "volume"}, "%s: got %+v", value, got)
	}
	for value, want := range map[string]string{
		data:                                    "write HOST:GUEST",
		data + ":/mnt:rw":                       "write HOST:GUEST",
		data + ":mnt":                           "write HOST:GUEST",
		data + ":/mnt/../x":                     "write HOST:GUEST",
		":/mnt":                                 "write HOST:GUEST",
		filepath.Join(home, "absent") + ":/mnt": "no such file",
		home + ":/mnt":                          "is protected",
		filepath.Join(home, "keys") + ":/mnt":   "is protected",
		filepath.Join(home, "root") + ":/mnt":   "is protected",
		filepath.Join(home, "state/cloister/sandboxes") + ":/mnt": "is protected",
		"/:/mnt":         "is protected",
		"/etc:/mnt":      "is protected",
		"/dev/null:/mnt": "is protected",
		"/proc/1:/mnt":   "is protected",
		data + ":/":      "has its own /",
		data + ":/usr/x": "has its own /usr",
		data + ":/tmp/x": "has its own /tmp",
		data + ":/build": "has its own /build",
	} {
		_, err := volumes([]string{value})
		expect.That(t, err != nil && strings.Contains(err.Error(), want), "%s: got %v, want %q", value, err, want)
	}
}
