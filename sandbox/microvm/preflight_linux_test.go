// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPreflightHasCodes: each reason why KVM cannot be used has its code.
func TestPreflightHasCodes(t *testing.T) {
	cpuinfo := filepath.Join(t.TempDir(), "cpuinfo")
	must.Succeed(t, os.WriteFile(cpuinfo, []byte("flags\t\t: fpu svme\n"), 0o644))
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"no device":     {checkKVM(filepath.Join(t.TempDir(), "kvm"), cpuinfo), preflight.KVMMissing},
		"no permission": {explainOpen("/dev/kvm", syscall.EACCES), preflight.KVMPermission},
		"not permitted": {explainOpen("/dev/kvm", syscall.EPERM), preflight.KVMPermission},
		"no driver":     {explainOpen("/dev/kvm", syscall.ENODEV), preflight.KVMMissing},
		"another":       {checkKVM("/dev/null", cpuinfo), preflight.KVMAPI},
		"busy":          {explainCreate("/dev/kvm", syscall.EBUSY), preflight.KVMBusy},
		"forbidden":     {explainCreate("/dev/kvm", syscall.EPERM), preflight.KVMPermission},
		"denied":        {explainCreate("/dev/kvm", syscall.EACCES), preflight.KVMPermission},
		"no memory":     {explainCreate("/dev/kvm", syscall.ENOMEM), preflight.VMProbe},
	} {
		if got := preflight.Code(c.err); got != c.want {
			t.Errorf("%s: got code %q of %v, want %q", name, got, c.err, c.want)
		}
	}
	if _, err := os.Stat(device); err == nil && os.Geteuid() == 0 { // any kind of KVM
		if err := checkKVM(device, cpuinfo); preflight.Code(err) != preflight.NoVirt && preflight.Code(err) != preflight.KVMBusy {
			t.Errorf("a processor without virtualization: got %v, want %s", err, preflight.NoVirt)
		}
	}
}

func TestVirtualizes(t *testing.T) {
	for text, want := range map[string]bool{
		"processor\t: 0\nflags\t\t: fpu vmx sse\n":            true,
		"flags\t\t: fpu svm\n":                                true,
		"flags\t\t: fpu sse\nvmx flags\t: vnmi\nbugs: svm\n":  false,
		"flags\t\t: svm_lock avmx\nflags\t\t: fpu\n":          false,
		"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp\n": true, // not x86
	} {
		if got := virtualizes([]byte(text)); got != want {
			t.Errorf("%q: got %t, want %t", text, got, want)
		}
	}
}

// TestNewestKernelIsFound: the newest kernel with modules is used, ordered by the numbers of its version.
func TestNewestKernelIsFound(t *testing.T) {
	root := t.TempDir()
	t.Setenv("CLOISTER_GUEST_KERNEL", root)
	if _, err := findKernel(); preflight.Code(err) != preflight.KernelNotFound {
		t.Errorf("without a kernel: got %v, want %s", err, preflight.KernelNotFound)
	}
	must.Succeed(t, os.Mkdir(filepath.Join(root, "boot"), 0o755))
	for release, modules := range map[string]bool{"6.2.0-1": true, "6.12.117-1": true, "6.12.99-1": true, "7.0": false} {
		must.Succeed(t, os.WriteFile(filepath.Join(root, "boot/vmlinuz-"+release), nil, 0o644))
		if modules {
			must.Succeed(t, os.MkdirAll(filepath.Join(root, "lib/modules", release, "kernel"), 0o755))
		}
	}
	k, err := findKernel()
	if want := (kernel{filepath.Join(root, "boot/vmlinuz-6.12.117-1"), filepath.Join(root, "lib/modules/6.12.117-1/kernel")}); err != nil || k != want {
		t.Errorf("got %+v, %v, want %+v", k, err, want)
	}
	versions := []string{"10", "9", "9.10", "9.2", "", "a"}
	slices.SortFunc(versions, compareVersions)
	if want := []string{"", "9", "9.2", "9.10", "10", "a"}; !slices.Equal(versions, want) {
		t.Errorf("got %q, want %q", versions, want)
	}
}

// TestQEMUIsNotInGroupRoot: QEMU has the group of its device only if it needs it, and never root's.
func TestQEMUIsNotInGroupRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "only root gives files away")
	}
	file := filepath.Join(t.TempDir(), "kvm")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	for name, c := range map[string]struct {
		group int
		mode  os.FileMode
		want  []uint32
		code  string
	}{
		"for all":       {0, 0o666, nil, ""},
		"its own":       {123, 0o660, []uint32{123}, ""},
		"root's":        {0, 0o660, nil, preflight.KVMPermission},
		"for its owner": {123, 0o600, nil, preflight.KVMPermission},
	} {
		must.Succeed(t, errors.Join(os.Chown(file, 0, c.group), os.Chmod(file, c.mode)))
		if got, err := groups(file); !slices.Equal(got, c.want) || (err != nil) != (c.code != "") || preflight.Code(err) != c.code {
			t.Errorf("%s: got %v, %v, want %v and code %q", name, got, err, c.want, c.code)
		}
	}
}
