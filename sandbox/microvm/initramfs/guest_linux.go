// SPDX-License-Identifier: Apache-2.0

package initramfs

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Prepare performs the first steps of a guest's first process: it loads the modules of the image, and mounts the root
// over itself, because pivot_root(2) cannot replace the root that the kernel unpacked.
func Prepare() error {
	names, err := filepath.Glob(modulesDir + "/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := load(name); err != nil {
			return fmt.Errorf("load %s: %w", filepath.Base(name), err)
		}
	}
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
	return nil
}

func load(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if filepath.Ext(name) != ".ko" {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	return unix.FinitModule(int(f.Fd()), "", flags)
}
