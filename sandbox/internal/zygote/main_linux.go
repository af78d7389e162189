// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Callable reports whether this program calls Main, and so can start itself as a zygote.
func Callable() bool { return callable.Load() }

var callable atomic.Bool

// Main runs the zygote, a slot, the holder of a user namespace or a probe if the process was started as one, and does
// not return then.
func Main() {
	callable.Store(true)
	// Namespaces and credentials belong to threads.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	switch os.Args[0] {
	case Name:
		zygoteMain()
	case nameSlot:
		slotMain()
	case nameOuterHolder:
		outerHolderMain()
	case nameHolder:
		holderMain()
	case NameProbe:
		probeMain()
	case NameLauncher:
		launcherMain()
	case nameRunsc:
		runscMain()
	case NameGuest:
		guestMain()
	default:
		return
	}
	syscall.Exit(0) // os.Exit would sleep for a second under the race detector
}

// probeMain prints the Facts of the sandbox that this process runs in.
func probeMain() {
	var f Facts
	f.UID, f.GID, f.PID = os.Getuid(), os.Getgid(), os.Getpid()
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		f.Hostname, f.Domain = unix.ByteSliceToString(name.Nodename[:]), unix.ByteSliceToString(name.Domainname[:])
	}
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			f.Capabilities = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, "Seccomp:"); ok {
			f.Filtered = strings.TrimSpace(v) == "2"
		}
	}
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	f.NoNewPrivs = err == nil && nnp == 1
	// Two header lines, then one for each interface: NAME: COUNTERS.
	dev, _ := os.ReadFile("/proc/self/net/dev")
	for line := range strings.Lines(string(dev)) {
		if name, _, ok := strings.Cut(line, ":"); ok {
			f.Interfaces = append(f.Interfaces, strings.TrimSpace(name))
		}
	}
	if file, err := os.OpenFile("/probe-write", os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
		f.RootWritable = true
		file.Close()
	}
	if file, err := os.OpenFile(NameProbeInput, os.O_WRONLY, 0); err == nil {
		f.InputWritable = true
		file.Close()
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	f.Mounts = string(mounts)
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			f.Processes++
		}
	}
	f.Loopback = loopbackWorks()
	for ; f.Inotify <= MaxInotify; f.Inotify++ {
		if _, err := unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
			break
		}
	}
	f.Umask, f.CPUs = unix.Umask(0), runtime.NumCPU()
	f.FixedLayout = layoutIsFixed()
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		f.Monotonic = now.Nano()
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// loopbackWorks reports whether a datagram over loopback arrives.
func loopbackWorks() bool {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(s)
	if err := unix.Bind(s, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return false
	}
	self, err := unix.Getsockname(s)
	if err != nil {
		return false
	}
	if err := unix.Sendto(s, []byte("x"), 0, self); err != nil {
		return false
	}
	n, _, err := unix.Recvfrom(s, make([]byte, 2), unix.MSG_DONTWAIT)
	return err == nil && n == 1
}
