// SPDX-License-Identifier: Apache-2.0

// Package preflight defines the reasons why a backend runs nothing on a host, lacks a protection there or refuses an
// input.
package preflight

import (
	"debug/elf"
	"errors"
	"fmt"
	"slices"

	"github.com/cloister-build/cloister/sandbox"
)

// The codes of reasons, which cloister explain explains.
const (
	WrongSystem     = "wrong_system"
	NotRoot         = "root_needed"
	ProgramDynamic  = "program_dynamic"
	NamespaceProbe  = "namespace_probe_failed"
	RunscNotFound   = "runsc_not_found"
	RunscNotStarted = "runsc_not_executable"
	RunscDynamic    = "runsc_dynamic"
	GVisorProbe     = "gvisor_probe_failed"
	PtraceScope     = "ptrace_scope"
	QEMUNotFound    = "qemu_not_found"
	KernelNotFound  = "kernel_not_found"
	KVMMissing      = "kvm_missing"
	KVMPermission   = "kvm_permission"
	KVMBusy         = "kvm_busy"
	KVMAPI          = "kvm_api"
	NoVirt          = "cpu_no_virt"
	VMProbe         = "vm_probe_failed"
	MSBNotFound     = "msb_not_found"
	MSBNotStarted   = "msb_not_executable"
	MSBShim         = "msb_shim"
	MSBVersion      = "msb_version"
	MSBFlag         = "msb_flag"
	MSBKrunfw       = "msb_krunfw"
	SeatbeltProbe   = "seatbelt_probe_failed"
	JobProbe        = "job_probe_failed"
	NoCgroup        = "cgroup_unavailable"
	MountSource     = "mount_source"
)

// A failure is a reason, with a code that other programs recognise.
type failure struct {
	code string
	text error
}

func (f *failure) Error() string   { return Coded(f.text.Error(), f.code) }
func (f *failure) Code() string    { return f.code }
func (f *failure) Unwrap() []error { return []error{sandbox.ErrUnsupported, f.text} }

// Fail returns an ErrUnsupported with a code, which its method Code returns and its text includes. The format is that
// of fmt.Errorf.
func Fail(code, format string, args ...any) error {
	return &failure{code, fmt.Errorf(format, args...)}
}

// Code returns the code of an error that Fail returned, or "".
func Code(err error) string {
	if f, ok := errors.AsType[*failure](err); ok {
		return f.code
	}
	return ""
}

// Coded returns a reason with its code at the end, or "" for an empty reason.
func Coded(reason, code string) string {
	if reason == "" {
		return ""
	}
	return reason + " (" + code + ")"
}

// ErrDynamic is returned for a program that needs a dynamic linker.
var ErrDynamic = errors.New("is dynamically linked")

// Static returns nil if a file is an executable without a dynamic linker, ErrDynamic if it has one, and another error
// if it is no executable.
func Static(file string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("is no executable: %w", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return ErrDynamic
	}
	return nil
}
