// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"cmp"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"golang.org/x/sys/unix"
)

// instead is what to do on a machine without KVM.
const instead = "use --sandbox gvisor, or for tests --sandbox qemu-tcg, which is no security boundary"

// Requests of KVM (linux/kvm.h).
const (
	kvmGetAPIVersion = 0xae00
	kvmCreateVM      = 0xae01
	kvmAPIVersion    = 12
)

// checkKVM returns why KVM cannot be used, or nil. Only booting a machine shows that it works.
func checkKVM(device, cpuinfo string) error {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return explainOpen(device, err)
	}
	defer unix.Close(fd)
	version, err := unix.IoctlRetInt(fd, kvmGetAPIVersion)
	if err != nil || version != kvmAPIVersion {
		return preflight.Fail(preflight.KVMAPI, "%s: API version %d (%v), want %d", device, version, err, kvmAPIVersion)
	}
	machine, err := unix.IoctlRetInt(fd, kvmCreateVM)
	if err != nil {
		return explainCreate(device, err)
	}
	unix.Close(machine)
	text, err := os.ReadFile(cpuinfo)
	if err != nil {
		return err
	}
	if !virtualizes(text) {
		return preflight.Fail(preflight.NoVirt, "%s opens, but the processor has neither vmx nor svm: this is a software implementation "+
			"of KVM (such as kvm-pvm), on which standard kernels do not boot; %s", device, instead)
	}
	return nil
}

func explainOpen(device string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return preflight.Fail(preflight.KVMMissing, "%s does not exist: the module kvm is not loaded, or nested virtualization is off; load kvm_intel "+
			"or kvm_amd, or %s", device, instead)
	case errors.Is(err, fs.ErrPermission):
		return preflight.Fail(preflight.KVMPermission, "cannot open %s for reading and writing as user %d: %v; run as root, in a container with "+
			"that device", device, os.Geteuid(), err)
	}
	return preflight.Fail(preflight.KVMMissing, "open %s: %v; %s", device, err, instead)
}

func explainCreate(device string, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return preflight.Fail(preflight.KVMBusy, "%s: create a machine: %v; another hypervisor may hold VT-x or AMD-V", device, err)
	case errors.Is(err, fs.ErrPermission):
		return preflight.Fail(preflight.KVMPermission, "%s: create a machine as user %d: %v; a security module or a seccomp filter, such as a "+
			"container's, may forbid it", device, os.Geteuid(), err)
	}
	return preflight.Fail(preflight.VMProbe, "%s: create a machine: %v; %s", device, err, instead)
}

// virtualizes reports whether /proc/cpuinfo lists the flag of VT-x or AMD-V. Without any flags, as on processors other
// than x86, it returns true.
func virtualizes(cpuinfo []byte) bool {
	flags := false
	for line := range bytes.Lines(cpuinfo) {
		if name, value, _ := bytes.Cut(line, []byte(":")); string(bytes.TrimSpace(name)) == "flags" {
			flags = true
			for flag := range bytes.FieldsSeq(value) {
				if string(flag) == "vmx" || string(flag) == "svm" {
					return true
				}
			}
		}
	}
	return !flags
}

// findQEMU returns the path of QEMU.
func findQEMU() (string, error) {
	stated := os.Getenv("QEMU_PATH")
	file, err := exec.LookPath(cmp.Or(stated, program))
	if err == nil {
		file, err = filepath.Abs(file)
	}
	if err != nil {
		return "", preflight.Fail(preflight.QEMUNotFound, "%s not found: QEMU_PATH is %q: %v; install it (Debian: qemu-system-x86)", program, stated, err)
	}
	return file, nil
}

// A kernel is a kernel of this host, and the directory of its modules.
type kernel struct{ image, modules string }

// findKernel returns the newest kernel that has modules.
func findKernel() (kernel, error) {
	root := cmp.Or(os.Getenv("CLOISTER_GUEST_KERNEL"), "/")
	images, err := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if err != nil {
		return kernel{}, err
	}
	slices.SortFunc(images, compareVersions)
	for _, image := range slices.Backward(images) {
		release := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
		for _, lib := range []string{"lib", "usr/lib"} {
			modules := filepath.Join(root, lib, "modules", release, "kernel")
			if st, err := os.Stat(modules); err == nil && st.IsDir() {
				return kernel{image, modules}, nil
			}
		}
	}
	return kernel{}, preflight.Fail(preflight.KernelNotFound, "no boot/vmlinuz-RELEASE with lib/modules/RELEASE below %s; install a kernel (Debian: "+
		"linux-image-cloud-amd64), or set CLOISTER_GUEST_KERNEL to a directory that has an unpacked one", root)
}

// compareVersions compares names of kernels as versions: numbers in them by value, the rest as text.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		x, y := digits(a), digits(b)
		if x > 0 && y > 0 {
			if c := cmp.Or(cmp.Compare(x, y), strings.Compare(a[:x], b[:y])); c != 0 {
				return c
			}
			a, b = a[x:], b[y:]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits returns the number of digits at the beginning.
func digits(s string) int { return len(s) - len(strings.TrimLeft(s, "0123456789")) }

// groups returns the groups that a user without other rights needs to open a device for reading and writing.
func groups(device string) ([]uint32, error) {
	var st unix.Stat_t
	if err := unix.Stat(device, &st); err != nil {
		return nil, explainOpen(device, err)
	}
	switch {
	case st.Mode&0o006 == 0o006:
		return nil, nil
	case st.Gid == 0:
		return nil, preflight.Fail(preflight.KVMPermission, "%s belongs to the group root, in which QEMU must not run; give it a group of its own, such as kvm", device)
	case st.Mode&0o060 != 0o060:
		return nil, preflight.Fail(preflight.KVMPermission, "the group of %s may not read and write it; run chmod 660 on it", device)
	}
	return []uint32{st.Gid}, nil
}
