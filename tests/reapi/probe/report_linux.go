// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/tests/reapi/probe/seen"
	"golang.org/x/sys/unix"
)

// A state is the part of the initial state that the probe itself changes.
type state struct {
	fds    []int
	status string // of /proc/self/status
}

func initialState() state {
	var b state
	for fd := range 1024 {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		// Skip descriptors that Go itself has opened; they are close-on-exec.
		if err == nil && (fd < 3 || flags&unix.FD_CLOEXEC == 0) {
			b.fds = append(b.fds, fd)
		}
	}
	text, err := os.ReadFile("/proc/self/status")
	if err == nil { // no rule requires /proc
		b.status = string(text)
	}
	return b
}

func report(b state) error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	r := seen.Report{
		Args: os.Args, Dir: dir, Env: os.Environ(), FDs: b.fds, Hostname: host,
		UID: os.Getuid(), GID: os.Getgid(),
		Umask:   unix.Umask(0o022),
		Limits:  limits(),
		Ignored: signals(b.status, "SigIgn:"), Blocked: signals(b.status, "SigBlk:"),
		Tmp: names("/tmp"), TempDir: names(os.TempDir()), TempWorks: tempWorks(),
		Loopback: loopback(),
	}
	if tty, err := os.Open("/dev/tty"); err == nil {
		r.TTY = true
		tty.Close()
	}
	r.Stdin, _ = io.Copy(io.Discard, os.Stdin) // a closed stdin counts as empty
	if all, err := net.Interfaces(); err == nil {
		for _, i := range all {
			r.Interfaces = append(r.Interfaces, i.Name)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func limits() map[string]seen.Limit {
	all := map[string]seen.Limit{}
	for name, resource := range map[string]int{
		"CORE": unix.RLIMIT_CORE, "CPU": unix.RLIMIT_CPU, "DATA": unix.RLIMIT_DATA, "FSIZE": unix.RLIMIT_FSIZE,
		"NOFILE": unix.RLIMIT_NOFILE, "NPROC": unix.RLIMIT_NPROC, "STACK": unix.RLIMIT_STACK, "AS": unix.RLIMIT_AS,
	} {
		var l unix.Rlimit
		if unix.Getrlimit(resource, &l) == nil {
			all[name] = seen.Limit{Soft: l.Cur, Hard: l.Max}
		}
	}
	return all
}

// signals returns the numbers in a mask of /proc/self/status.
func signals(status, field string) []int {
	_, rest, ok := strings.Cut(status, field)
	if !ok {
		return nil
	}
	text, _, _ := strings.Cut(rest, "\n")
	mask, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
	if err != nil {
		return nil
	}
	var all []int
	for i := range 64 {
		if mask&(1<<i) != 0 {
			all = append(all, i+1)
		}
	}
	return all
}

func names(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func tempWorks() bool {
	f, err := os.CreateTemp("", "probe-")
	if err != nil {
		return false
	}
	f.Close()
	return os.Remove(f.Name()) == nil
}

func loopback() bool {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return false
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// tree prints a directory and everything below it, sorted by path.
func tree(o []string) error {
	var all []seen.Entry
	err := filepath.WalkDir(o[0], func(path string, d fs.DirEntry, err error) error {
		e := seen.Entry{Path: path, Type: "?"}
		if err != nil {
			e.Error = err.Error()
		} else if fi, err := os.Lstat(path); err != nil {
			e.Error = err.Error()
		} else {
			describe(&e, fi)
		}
		all = append(all, e)
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b seen.Entry) int { return strings.Compare(a.Path, b.Path) })
	to := json.NewEncoder(os.Stdout)
	for _, e := range all {
		if err := to.Encode(e); err != nil {
			return err
		}
	}
	return nil
}

func describe(e *seen.Entry, fi fs.FileInfo) {
	e.Mode, e.Size = uint32(fi.Mode().Perm()), fi.Size()
	e.MTime, e.MTimeNanos = fi.ModTime().Unix(), int32(fi.ModTime().Nanosecond())
	var err error
	switch fi.Mode().Type() {
	case 0:
		e.Type = "f"
		e.SHA256, err = digest(e.Path)
	case fs.ModeDir:
		e.Type = "d"
	case fs.ModeSymlink:
		e.Type = "l"
		e.Target, err = os.Readlink(e.Path)
	}
	if err != nil {
		e.Error = err.Error()
	}
}

func digest(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
