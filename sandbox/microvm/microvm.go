// SPDX-License-Identifier: Apache-2.0

// Package microvm runs commands in virtual machines of QEMU or msb (microsandbox). Each machine has its own Linux
// kernel, on which package namespace runs the command. The guarantees of a run are therefore those of that package,
// with these differences:
//   - an action that exploits a bug in its kernel controls the virtual machine, which can read the host directories of
//     its run and has no network;
//   - directories of the host are read through this process (FUSE), everything else of the workspace is copied into the
//     machine, and outputs are copied back and checked;
//   - a run cannot be audited in full, reaches no endpoint outside the sandbox, and has no terminal, no root file
//     system of its own and no superuser;
//   - the clock is the machine's.
//
// Each run has a machine of its own, which ends with it.
//
// QEMU can emulate the processor (TCG), for tests on hosts without KVM. QEMU does not consider its emulator a security
// boundary, and neither does this package: the emulated backend has its own name, which does not satisfy actions that
// require QEMU. It keeps machines for later runs, because they take long to boot.
//
// The backends need root. That of QEMU needs QEMU ($QEMU_PATH or in PATH) and a kernel: the newest in /boot, or that in
// the directory $CLOISTER_GUEST_KERNEL, which contains boot and lib/modules. That of msb needs msb ($MSB_PATH or in
// PATH), whose package contains a kernel.
//
// The program must call namespace.Init at the start of main. It must be statically linked, because it is also the first
// process of each machine.
package microvm

// A kind says what runs the machines of a backend.
type kind struct {
	msb      bool // msb instead of QEMU
	emulated bool // the processor; only tests emulate it for msb
}

// name returns the name of the backend in Features.
func (k kind) name() string {
	switch {
	case k.msb:
		return "microvm"
	case k.emulated:
		return "qemu-tcg"
	}
	return "qemu"
}

// engine returns what users call the program that runs the machines.
func (k kind) engine() string {
	if k.msb {
		return "msb"
	}
	return "QEMU"
}

// kernel returns the name of the kernel in Features.
func (k kind) kernel() string {
	if k.emulated {
		return "Linux in " + k.engine() + ", emulated"
	}
	return "Linux in " + k.engine()
}
