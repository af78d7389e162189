// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"path/filepath"

	"github.com/cloister-build/cloister/tests/guestkernel"
)

// modules are those that the guest loads, in this order; some kernels contain some of them.
var modules = []string{
	"drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_legacy_dev",
	"drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
	"fs/overlayfs/overlay",
}

// addModules adds the modules to an image, in the order of their names.
func addModules(im image, k guestkernel.Kernel) error {
	for i, m := range modules {
		found, err := k.File("lib/modules/*/kernel/" + m + ".ko*")
		if err != nil {
			continue
		}
		if err := im.copy(fmt.Sprintf("%s/%d-%s", modulesDir, i, filepath.Base(found)), found); err != nil {
			return err
		}
	}
	return nil
}
