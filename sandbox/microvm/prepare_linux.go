// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
	"golang.org/x/sys/unix"
)

// modules are those that a guest loads, in this order; some kernels contain some of them.
var modules = []string{
	"drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_legacy_dev",
	"drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/char/virtio_console",
	"fs/fuse/fuse", "fs/overlayfs/overlay", "net/ipv4/inet_diag", "net/ipv4/tcp_diag", "net/ipv4/udp_diag", "net/unix/unix_diag",
}

// prepare reads the kernel and builds the initramfs; all machines share both.
func (b *backend) prepare(k kernel) error {
	im := initramfs.Image{}
	for _, m := range mounts {
		im.Add(m.target, unix.S_IFDIR|0o755, "")
	}
	im.Add(hostDir, unix.S_IFDIR|0o755, "")
	if err := errors.Join(im.Copy(nameInit, "/proc/self/exe"), im.AddModules(k.modules, modules)); err != nil {
		return fmt.Errorf("initial root of virtual machines: %w", err)
	}
	text, err := os.ReadFile(k.image) // QEMU's user may have no right to it
	if err != nil {
		return fmt.Errorf("kernel of virtual machines: %w", err)
	}
	image, err := sealed("kernel", text)
	if err != nil {
		return fmt.Errorf("kernel of virtual machines: %w", err)
	}
	initrd, err := sealed("initrd", im.Bytes())
	if err != nil {
		image.Close()
		return fmt.Errorf("initial root of virtual machines: %w", err)
	}
	b.kernel, b.initrd = image, initrd
	return nil
}

// sealed returns a file in memory that cannot be changed any more, since each QEMU inherits it. The caller closes it.
func sealed(name string, text []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
