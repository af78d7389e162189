// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestListIsThatOfPackageOS: on Linux, entries are those of package os, so that all systems compute the same
// fingerprint.
func TestListIsThatOfPackageOS(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, mode := range map[string]fs.FileMode{
		"b": 0o644, "a": 0o755 | fs.ModeSetuid, "c": 0o755 | fs.ModeSetgid, "é \"quoted\"": 0o400,
	} {
		must.Succeed(t, os.WriteFile(at(name), []byte(name), 0o600))
		must.Succeed(t, os.Chmod(at(name), mode))
	}
	must.Succeed(t, errors.Join(os.Mkdir(at("dir"), 0o700), os.Chmod(at("dir"), 0o777|fs.ModeSticky)))
	must.Succeed(t, os.Symlink("nowhere", at("link")))
	must.Succeed(t, unix.Mkfifo(at("pipe"), 0o600))
	fd := must.Get(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0))(t)
	defer unix.Close(fd)
	must.Succeed(t, unix.Bind(fd, &unix.SockaddrUnix{Name: at("socket")}))
	for _, dir := range []string{dir, "/dev"} { // which has devices
		got := must.Get(list(dir))(t)
		var want []entry
		for _, f := range must.Get(os.ReadDir(dir))(t) {
			want = append(want, must.Get(entryAt(filepath.Join(dir, f.Name())))(t))
		}
		for _, entries := range [][]entry{got, want} {
			for i := range entries {
				if entries[i].mode&fs.ModeDevice != 0 {
					entries[i].modified = 0 // other processes write to terminals
				}
			}
		}
		expect.Slices(t, got, want, dir)
	}
}

// TestAbsentEntries: list omits entries that have just changed or are private, and fails for other reasons.
func TestAbsentEntries(t *testing.T) {
	for err, want := range map[error]bool{
		unix.ENOENT: true, unix.EINVAL: true, unix.EACCES: true, unix.EPERM: true, unix.EIO: false, unix.ENOMEM: false,
	} {
		expect.Equal(t, absent(err), want, err)
	}
}

// TestUnreadableSymlinkIsAnError: entryAt does not omit the target of a symlink, here /proc/PID/exe of a process that has
// ended.
func TestUnreadableSymlinkIsAnError(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
	must.Succeed(t, cmd.Start())
	must.Succeed(t, uninterrupted(func() error {
		return unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}))
	path := fmt.Sprintf("/proc/%d/exe", cmd.Process.Pid)
	must.Get(os.Lstat(path))(t)
	expect.Error(t, expect.Err(entryAt(path)), fs.ErrNotExist)
	must.Succeed(t, cmd.Wait())
}
