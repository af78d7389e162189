// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// forks creates a number of idle processes.
func forks(r *report, args []string) {
	want, err := strconv.Atoi(args[0])
	if !r.must("number", err) {
		return
	}
	// The runtime must not need a new thread after the limit is reached.
	debug.SetGCPercent(-1)
	var children []int
	for range want {
		pid, no := fork()
		if no != nil {
			err = no
			break
		}
		children = append(children, pid)
	}
	for _, pid := range children {
		kill(pid)
	}
	if err == nil {
		r.escape("created %d processes", want)
		return
	}
	r.refused("process "+strconv.Itoa(len(children)+1), err, unix.EAGAIN)
}

// memory takes a number of MiB of one kind: "anonymous", "memfd", or a directory for a file.
func memory(r *report, args []string) {
	mib, err := strconv.Atoi(args[1])
	if !r.must("size", err) {
		return
	}
	size, piece := mib<<20, bytes.Repeat([]byte("x"), 1<<20)
	switch kind := args[0]; kind {
	case "anonymous":
		b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if !r.must("map", err) {
			return
		}
		for i := 0; i < size; i += 4096 {
			b[i] = 1
		}
	default:
		var fd int
		if kind == "memfd" {
			fd, err = unix.MemfdCreate("hostile", unix.MFD_CLOEXEC)
		} else {
			fd, err = unix.Open(kind+"/big", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		}
		if !r.must("make a file", err) {
			return
		}
		for range mib {
			if _, err := unix.Write(fd, piece); err != nil {
				r.refused("write to "+kind, err, unix.ENOSPC, unix.ENOMEM)
				return
			}
		}
	}
	r.escape("took %d MiB of memory", mib)
}

// sockets fills the buffers of connections to itself, up to a number of MiB.
func sockets(r *report, args []string) {
	mib, err := strconv.Atoi(args[0])
	listener, socketErr := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if !r.must("size", err) || !r.must("socket", socketErr) {
		return
	}
	if !r.must("bind", unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})) || !r.must("listen", unix.Listen(listener, 1)) {
		return
	}
	to, err := unix.Getsockname(listener)
	if !r.must("getsockname", err) {
		return
	}
	held, piece, connections := 0, bytes.Repeat([]byte("x"), 1<<20), 0
	for ; connections < 100; connections++ {
		from, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if errors.Is(err, unix.EMFILE) {
			break
		}
		if !r.must("socket", err) || !r.must("connect", unix.Connect(from, to)) {
			return
		}
		other, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EMFILE) {
			break
		}
		if !r.must("accept", err) || !r.must("set non-blocking", unix.SetNonblock(from, true)) {
			return
		}
		for _, fd := range []int{from, other} {
			for n := 0; err == nil; held += n {
				if n, err = unix.Write(fd, piece); err != nil {
					n = 0
				}
			}
			err = nil
		}
		if held >= mib<<20 {
			r.escape("the buffers of sockets hold %d MiB", held>>20)
			return
		}
	}
	r.hold("the buffers of %d sockets hold %d MiB", 2*connections, held>>20)
}

// descriptors opens a number of files.
func descriptors(r *report, args []string) {
	want, err := strconv.Atoi(args[0])
	if !r.must("number", err) {
		return
	}
	for i := range want {
		if _, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			r.refused("descriptor "+strconv.Itoa(i), err, unix.EMFILE)
			return
		}
	}
	r.escape("opened %d files", want)
}

// cpu uses three seconds of CPU time, at most one per process.
func cpu(r *report, _ []string) {
	for range 4 {
		pid, err := start(self, syscall.SysProcAttr{}, "child-spin")
		if !r.must("start", err) {
			return
		}
		if _, err := unix.Wait4(pid, nil, 0, nil); !r.must("wait", err) {
			return
		}
	}
	r.escape("used three seconds of CPU time")
}

// spin uses 750 ms of CPU time.
func spin() {
	for {
		var used unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &used); err != nil || used.Nano() > int64(750*time.Millisecond) {
			os.Exit(0)
		}
	}
}

// flood writes a number of MiB to stdout, without a verdict.
func flood(r *report, args []string) {
	mib, err := strconv.Atoi(args[0])
	if !r.must("size", err) {
		return
	}
	piece := bytes.Repeat([]byte("x"), 1<<20)
	for range mib {
		if _, err := os.Stdout.Write(piece); err != nil {
			os.Exit(exitBroken)
		}
	}
	os.Exit(0)
}
