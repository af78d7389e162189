// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
	"golang.org/x/sys/unix"
)

const (
	guestInit = "/init"
	systemd   = "/lib/systemd/systemd"
)

// boot is the guest's first process. It loads the kernel modules and becomes systemd.
func boot() error {
	if err := initramfs.Prepare(); err != nil {
		return err
	}
	return unix.Exec(systemd, []string{systemd}, []string{"PATH=/usr/sbin:/usr/bin"})
}
