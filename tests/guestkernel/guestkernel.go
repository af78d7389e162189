// SPDX-License-Identifier: Apache-2.0

// Package guestkernel provides kernels of Debian for virtual machines. Only tests import it.
package guestkernel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Usual is the package whose kernel most tests use.
const Usual = "linux-image-6.12-cloud-amd64"

// A Kernel is the unpacked package of a Debian kernel.
type Kernel struct{ Dir string }

// Fetch returns the kernel that a package of Debian depends on. It is downloaded once, into the user's cache directory.
func Fetch(ctx context.Context, name string) (Kernel, error) {
	k, err := cached(name)
	if err != nil {
		return k, err
	}
	if _, err := os.Stat(k.Dir); !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	if err := os.MkdirAll(filepath.Dir(k.Dir), 0o755); err != nil {
		return k, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(k.Dir), "download-")
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
	return k, os.Rename(filepath.Join(dir, "root"), k.Dir)
}

// File returns the only file of the kernel that matches a pattern.
func (k Kernel) File(pattern string) (string, error) {
	found, err := filepath.Glob(filepath.Join(k.Dir, pattern))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("got %q for %s in %s", found, pattern, k.Dir)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

func cached(name string) (Kernel, error) {
	cache, err := os.UserCacheDir()
	return Kernel{filepath.Join(cache, "cloister-vm", name)}, err
}

// Use makes the QEMU backends of this process and its children use the usual kernel if it was fetched and
// CLOISTER_REQUIRE names qemu, unless CLOISTER_GUEST_KERNEL selects another.
func Use() {
	if os.Getenv(variable) != "" || !slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "qemu") {
		return
	}
	if k, err := cached(Usual); err == nil {
		if _, err := os.Stat(k.Dir); err == nil {
			if err := os.Setenv(variable, k.Dir); err != nil {
				panic(err)
			}
		}
	}
}

// Missing returns why tests boot no virtual machines, or "". They take minutes, so a kernel has to be chosen for them.
func Missing() string {
	if os.Getenv(variable) == "" {
		return "booting virtual machines takes minutes: run make qemu, or set " + variable
	}
	return ""
}

const variable = "CLOISTER_GUEST_KERNEL"
