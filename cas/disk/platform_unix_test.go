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
)

// A directory is this user's alone once it is a store. What others could have written is refused as it is.
func TestOpenLetsNobodyElseIn(t *testing.T) {
	for _, c := range []struct {
		name string
		mode os.FileMode
		file bool // there is a store of before in it
		says string
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
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if c.file {
				closeStore(t, open(t, config))
			}
			if err := os.Chmod(dir, c.mode); err != nil {
				t.Fatal(err)
			}
			before := list(t, dir)
			store, err := disk.Open(config)
			if c.says != "" {
				fi, _ := os.Stat(dir)
				if err == nil || !strings.Contains(err.Error(), c.says) || fi.Mode() != c.mode|os.ModeDir || !slices.Equal(list(t, dir), before) {
					t.Errorf("%v; the directory is %v", err, fi.Mode())
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer store.Close()
			if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
				t.Errorf("the directory is %v, %v", fi.Mode(), err)
			}
		})
	}
}

func TestOpenRefusesWhatAnotherUserOwns(t *testing.T) {
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "root", "nobody else may give a directory away")
	}
	dir := t.TempDir()
	if err := os.Chown(dir, 63210, 63210); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20}); err == nil || !strings.Contains(err.Error(), "belongs to user 63210") {
		t.Errorf("%v", err)
	}
	if got := list(t, dir); len(got) != 1 {
		t.Errorf("Open left %q", got)
	}
}
