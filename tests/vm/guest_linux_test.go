// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	guestInit  = "/init"
	modulesDir = "/modules"
	systemd    = "/lib/systemd/systemd"
)

// boot is the guest's first process. It loads the kernel modules and becomes systemd.
func boot() error {
	names, err := filepath.Glob(modulesDir + "/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		flags := 0
		if filepath.Ext(name) != ".ko" {
			flags = unix.MODULE_INIT_COMPRESSED_FILE
		}
		err = unix.FinitModule(int(f.Fd()), "", flags)
		f.Close()
		if err != nil {
			return fmt.Errorf("load %s: %w", filepath.Base(name), err)
		}
	}
	// A sandbox cannot replace the root that the kernel unpacked, so mount its files over it.
	for _, step := range []func() error{
		func() error { return os.Mkdir("/new", 0o755) },
		func() error { return unix.Mount("/", "/new", "", unix.MS_BIND, "") },
		func() error { return unix.Chdir("/new") },
		func() error { return unix.Mount(".", "/", "", unix.MS_MOVE, "") },
		func() error { return unix.Chroot(".") },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("move the root: %w", err)
		}
	}
	return unix.Exec(systemd, []string{systemd}, []string{"PATH=/usr/sbin:/usr/bin"})
}
