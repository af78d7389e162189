// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A statement takes no file's place but its own: neither one beside it, nor what a link there leads to, nor a device.
func TestStatementReplacesOneFile(t *testing.T) {
	dir := t.TempDir()
	beside, link, target := filepath.Join(dir, "s.new"), filepath.Join(dir, "link"), filepath.Join(dir, "target")
	must.Succeed(t, errors.Join(os.WriteFile(beside, []byte("mine"), 0o600), os.WriteFile(target, []byte("old"), 0o600), os.Symlink("target", link)))
	for _, path := range []string{filepath.Join(dir, "s"), link, os.DevNull} {
		must.Succeed(t, replaceFile(path, []byte("new")))
	}
	for path, want := range map[string]string{beside: "mine", filepath.Join(dir, "s"): "new", target: "new", link: "new", os.DevNull: ""} {
		expect.Equal(t, string(must.Get(os.ReadFile(path))(t)), want, "%s", path)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", fi.Mode(), err)
	}
	expect.That(t, replaceFile(filepath.Join(dir, "absent", "s"), nil) != nil, "written below what is not there")
	expect.Equal(t, len(must.Get(os.ReadDir(dir))(t)), 4, "left")
}
