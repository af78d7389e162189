// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
)

// An image is the root directory of a guest.
type image struct{ initramfs.Image }

const (
	directory = 0o040755
	regular   = 0o100644
	link      = 0o120777
)

// modules are those that the guest loads, in this order; some kernels contain some of them.
var modules = []string{
	"drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_legacy_dev",
	"drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
	"fs/overlayfs/overlay",
}

// programs adds programs of this host and the libraries that they load.
func (im image) programs(names ...string) error {
	for _, name := range names {
		name, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		out, err := exec.Command("ldd", name).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ldd %s: %w: %s", name, err, out)
		}
		for word := range strings.FieldsSeq(name + " " + string(out)) {
			if !strings.HasPrefix(word, "/") {
				continue
			}
			// The other directories are links to those of /usr in the guest.
			if err := im.Copy("/usr"+strings.TrimPrefix(word, "/usr"), word); err != nil {
				return err
			}
		}
	}
	return nil
}
