// SPDX-License-Identifier: Apache-2.0

//go:build windows

package jobobject

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/cloister-build/cloister/sandbox"
	"golang.org/x/sys/windows"
)

var (
	createRestrictedToken = windows.NewLazySystemDLL("advapi32.dll").NewProc("CreateRestrictedToken")
	// The message's third value is a process ID in the place of a pointer, which must not become one.
	getQueuedCompletionStatus = windows.NewLazySystemDLL("kernel32.dll").NewProc("GetQueuedCompletionStatus")
)

// Messages of a job to its completion port (JOB_OBJECT_MSG_... in winnt.h).
const (
	messageProcessLimit = 3
	messageMemoryLimit  = 10
)

// A job is a job object. Its processes die with the last handle to it, and so with the worker.
type job struct{ handle, port windows.Handle }

// newJob makes a job with the limits that job objects enforce.
func newJob(l *sandbox.Limits) (*job, error) {
	handle, err := windows.CreateJobObject(nil, nil)
	if err != nil {
		return nil, fmt.Errorf("create a job: %w", err)
	}
	j := &job{handle: handle}
	if j.port, err = windows.CreateIoCompletionPort(windows.InvalidHandle, 0, 0, 1); err != nil {
		return nil, errors.Join(fmt.Errorf("completion port: %w", err), j.close())
	}
	if err := j.limit(l); err != nil {
		return nil, errors.Join(fmt.Errorf("limits of the job: %w", err), j.close())
	}
	return j, nil
}

func (j *job) limit(l *sandbox.Limits) error {
	var info windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	basic := &info.BasicLimitInformation
	basic.LimitFlags = windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | windows.JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION
	if l.Memory != sandbox.Unlimited {
		basic.LimitFlags |= windows.JOB_OBJECT_LIMIT_JOB_MEMORY | windows.JOB_OBJECT_LIMIT_PROCESS_MEMORY
		info.JobMemoryLimit, info.ProcessMemoryLimit = uintptr(l.Memory), uintptr(l.Memory)
	}
	if l.Processes != sandbox.Unlimited {
		basic.LimitFlags |= windows.JOB_OBJECT_LIMIT_ACTIVE_PROCESS
		basic.ActiveProcessLimit = uint32(min(l.Processes, 1<<31))
	}
	if l.CPU != sandbox.Unlimited { // of user mode only; the worker counts both
		basic.LimitFlags |= windows.JOB_OBJECT_LIMIT_JOB_TIME
		basic.PerJobUserTimeLimit = int64(l.CPU / tick)
	}
	screen := windows.JOBOBJECT_BASIC_UI_RESTRICTIONS{UIRestrictionsClass: windows.JOB_OBJECT_UILIMIT_DESKTOP |
		windows.JOB_OBJECT_UILIMIT_DISPLAYSETTINGS | windows.JOB_OBJECT_UILIMIT_EXITWINDOWS | windows.JOB_OBJECT_UILIMIT_GLOBALATOMS |
		windows.JOB_OBJECT_UILIMIT_HANDLES | windows.JOB_OBJECT_UILIMIT_READCLIPBOARD |
		windows.JOB_OBJECT_UILIMIT_SYSTEMPARAMETERS | windows.JOB_OBJECT_UILIMIT_WRITECLIPBOARD}
	port := struct {
		key  uintptr
		port windows.Handle
	}{0, j.port}
	return errors.Join(
		set(j, windows.JobObjectExtendedLimitInformation, &info),
		set(j, windows.JobObjectBasicUIRestrictions, &screen),
		set(j, windows.JobObjectAssociateCompletionPortInformation, &port),
	)
}

// set sets information of a class, which has the type T.
func set[T any](j *job, class uint32, info *T) error {
	_, err := windows.SetInformationJobObject(j.handle, class, uintptr(unsafe.Pointer(info)), uint32(unsafe.Sizeof(*info)))
	return err
}

// query reads information of a class, which has the type T.
func query[T any](j *job, class int32) (info T, err error) {
	err = windows.QueryInformationJobObject(j.handle, class, uintptr(unsafe.Pointer(&info)), uint32(unsafe.Sizeof(info)), nil)
	return info, err
}

// tick is the unit of times of a job.
const tick = 100 * time.Nanosecond

// accounting is JOBOBJECT_BASIC_ACCOUNTING_INFORMATION.
type accounting struct {
	TotalUserTime, TotalKernelTime, PeriodUserTime, PeriodKernelTime     int64
	PageFaultCount, TotalProcesses, ActiveProcesses, TerminatedProcesses uint32
}

// A usage is what a job has counted.
type usage struct {
	user, kernel            time.Duration
	active                  uint32 // processes that are alive
	peakMemory, peakProcess int64  // in bytes of committed memory: of the job, of its largest process
}

func (j *job) usage() (usage, error) {
	a, err := query[accounting](j, windows.JobObjectBasicAccountingInformation)
	if err != nil {
		return usage{}, fmt.Errorf("accounting of the job: %w", err)
	}
	l, err := query[windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION](j, windows.JobObjectExtendedLimitInformation)
	if err != nil {
		return usage{}, fmt.Errorf("memory use of the job: %w", err)
	}
	return usage{
		user: time.Duration(a.TotalUserTime) * tick, kernel: time.Duration(a.TotalKernelTime) * tick, active: a.ActiveProcesses,
		peakMemory: int64(l.PeakJobMemoryUsed), peakProcess: int64(l.PeakProcessMemoryUsed),
	}, nil
}

// messages reads what the job has reported since the last call: whether a memory limit was hit, and how often that of
// processes.
func (j *job) messages() (memory bool, processes int) {
	for {
		var message uint32
		var key, pid uintptr
		ok, _, _ := getQueuedCompletionStatus.Call(uintptr(j.port), uintptr(unsafe.Pointer(&message)),
			uintptr(unsafe.Pointer(&key)), uintptr(unsafe.Pointer(&pid)), 0)
		switch {
		case ok == 0:
			return memory, processes
		case message == messageMemoryLimit || message == messageMemoryLimit-1: // of the job, of a process
			memory = true
		case message == messageProcessLimit:
			processes++
		}
	}
}

// kill kills the processes of the job and waits for their end.
func (j *job) kill() error {
	if err := windows.TerminateJobObject(j.handle, uint32(exitKilled)); err != nil {
		return fmt.Errorf("kill the job: %w", err)
	}
	for deadline := time.Now().Add(endTime); ; time.Sleep(time.Millisecond) {
		used, err := j.usage()
		if err != nil || used.active == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of the run did not end within %v of their kill", used.active, endTime)
		}
	}
}

// close kills what is left in the job.
func (j *job) close() error {
	var err error
	if j.port != 0 {
		err = windows.CloseHandle(j.port)
	}
	return errors.Join(windows.CloseHandle(j.handle), err)
}

// Flags of CreateRestrictedToken.
const disableMaxPrivilege = 1

// restrictedToken returns the token of this process without its privileges, except that of passing through directories,
// and with the group of administrators only to deny access. The caller closes it.
func restrictedToken() (windows.Token, error) {
	var own, restricted windows.Token
	err := windows.OpenProcessToken(windows.CurrentProcess(),
		windows.TOKEN_DUPLICATE|windows.TOKEN_ASSIGN_PRIMARY|windows.TOKEN_QUERY|windows.TOKEN_ADJUST_DEFAULT, &own)
	if err != nil {
		return 0, err
	}
	defer own.Close()
	sid, err := windows.CreateWellKnownSid(windows.WinBuiltinAdministratorsSid)
	if err != nil {
		return 0, err
	}
	administrators := windows.SIDAndAttributes{Sid: sid}
	ok, _, err := createRestrictedToken.Call(uintptr(own), disableMaxPrivilege, 1, uintptr(unsafe.Pointer(&administrators)),
		0, 0, 0, 0, uintptr(unsafe.Pointer(&restricted)))
	if ok == 0 {
		return 0, err
	}
	return restricted, nil
}

// resumeProcess resumes the threads of a suspended process.
func resumeProcess(pid uint32) error {
	snapshot, err := windows.CreateToolhelp32Snapshot(windows.TH32CS_SNAPTHREAD, 0)
	if err != nil {
		return err
	}
	defer func() { _ = windows.CloseHandle(snapshot) }()
	entry := windows.ThreadEntry32{Size: uint32(unsafe.Sizeof(windows.ThreadEntry32{}))}
	resumed := false
	for err = windows.Thread32First(snapshot, &entry); err == nil; err = windows.Thread32Next(snapshot, &entry) {
		if entry.OwnerProcessID != pid {
			continue
		}
		thread, err := windows.OpenThread(windows.THREAD_SUSPEND_RESUME, false, entry.ThreadID)
		if err != nil {
			return err
		}
		_, err = windows.ResumeThread(thread)
		if err = errors.Join(err, windows.CloseHandle(thread)); err != nil {
			return err
		}
		resumed = true
	}
	if !errors.Is(err, windows.ERROR_NO_MORE_FILES) {
		return err
	}
	if !resumed {
		return errors.New("the process has no thread")
	}
	return nil
}
