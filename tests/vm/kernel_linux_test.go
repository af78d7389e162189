// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// A kernel is the unpacked package of a Debian kernel.
type kernel struct{ dir string }

// fetch returns the kernel that a package of Debian depends on. It is downloaded once, into the user's cache directory.
func fetch(ctx context.Context, name string) (kernel, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return kernel{}, err
	}
	k := kernel{filepath.Join(cache, "cloister-vm", name)}
	if _, err := os.Stat(k.dir); !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	if err := os.MkdirAll(filepath.Dir(k.dir), 0o755); err != nil {
		return k, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(k.dir), "download-")
	if err != nil {
		return k, err
	}
	defer os.RemoveAll(dir)
	run := func(name string, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s %q: %w: %s", name, args, err, out)
		}
		return string(out), err
	}
	out, err := run("apt-cache", "depends", name)
	if err != nil {
		return k, err
	}
	image := regexp.MustCompile(`Depends: (linux-image-\S+)`).FindStringSubmatch(out)
	if image == nil {
		return k, fmt.Errorf("apt-cache: %s depends on no kernel: %s", name, out)
	}
	if _, err := run("apt-get", "download", image[1]); err != nil {
		return k, err
	}
	packages, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(packages) != 1 {
		return k, fmt.Errorf("apt-get download %s: got packages %q, %w", image[1], packages, err)
	}
	if _, err := run("dpkg-deb", "--extract", packages[0], "root"); err != nil {
		return k, err
	}
	return k, os.Rename(filepath.Join(dir, "root"), k.dir)
}

// file returns the only file of the kernel that matches a pattern.
func (k kernel) file(pattern string) (string, error) {
	found, err := filepath.Glob(filepath.Join(k.dir, pattern))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("got %q for %s in %s", found, pattern, k.dir)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// modules are those that the guest loads, in this order; some kernels contain some of them.
var modules = []string{
	"drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_legacy_dev",
	"drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
	"fs/overlayfs/overlay",
}

// addModules adds the modules to an image, in the order of their names.
func (k kernel) addModules(im image) error {
	for i, m := range modules {
		found, err := k.file("lib/modules/*/kernel/" + m + ".ko*")
		if err != nil {
			continue
		}
		if err := im.copy(fmt.Sprintf("%s/%d-%s", modulesDir, i, filepath.Base(found)), found); err != nil {
			return err
		}
	}
	return nil
}
