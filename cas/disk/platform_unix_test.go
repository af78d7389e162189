// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package disk_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestOpenMakesDirectoryPrivate: Open refuses a directory that other users could have written to.
func TestOpenMakesDirectoryPrivate(t *testing.T) {
	for _, c := range []struct {
		name string
		mode os.FileMode
		file bool // the directory is a store
		want string
	}{
		{"readable", 0o755, false, ""},
		{"a readable store", 0o755, true, ""},
		{"empty, of a group", 0o775, false, ""},
		{"a store, of a group", 0o775, true, "chmod 700"},
		{"of everybody", 0o777, false, "chmod 700"},
		{"like /tmp", 0o777 | os.ModeSticky, false, "chmod 700"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			config := disk.Config{Dir: dir, MaxBytes: 1 << 20}
			must.Succeed(t, os.Mkdir(dir, 0o700))
			if c.file {
				closeStore(t, open(t, config))
			}
			must.Succeed(t, os.Chmod(dir, c.mode))
			before := list(t, dir)
			store, err := disk.Open(config)
			if c.want != "" {
				fi, _ := os.Stat(dir)
				if err == nil || !strings.Contains(err.Error(), c.want) || fi.Mode() != c.mode|os.ModeDir ||
					!slices.Equal(list(t, dir), before) {
					t.Errorf("got %v, and the directory has mode %v", err, fi.Mode())
				}
				return
			}
			must.Succeed(t, err)
			defer store.Close()
			if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
				t.Errorf("the directory has mode %v, %v", fi.Mode(), err)
			}
		})
	}
}

func TestOpenRefusesDirectoryOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "root", "only root can change the owner of a directory")
	}
	dir := t.TempDir()
	must.Succeed(t, os.Chown(dir, 63210, 63210))
	expect.Message(t, expect.Err(disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})), "belongs to user 63210")
	if got := list(t, dir); len(got) != 1 {
		t.Errorf("Open created %q", got)
	}
}
