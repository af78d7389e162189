// SPDX-License-Identifier: Apache-2.0

// Package proctree finds the descendants and the control groups of a process.
package proctree

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// A Process is a living process.
type Process struct {
	PID      int
	Name     string // comm
	Resident int64  // memory in bytes
}

// Indexes of the fields that follow the name in /proc/PID/stat (proc_pid_stat(5)).
const (
	state   = 0
	parent  = 1
	threads = 17
	rss     = 21 // in pages
)

// Of returns a process and its living descendants, parents before children. It returns only the process itself, without
// name and memory, if the process has ended or the system has no /proc. It leaves out processes that the caller may not
// read.
func Of(root int) ([]Process, error) { return read("/proc", root) }

func read(proc string, root int) ([]Process, error) {
	entries, err := os.ReadDir(proc)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	children := map[int][]Process{}
	tree := []Process{{PID: root}}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(proc, e.Name(), "stat"))
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ESRCH):
			continue // it has ended
		case errors.Is(err, fs.ErrPermission):
			continue // /proc has the mount option hidepid, and the process belongs to another user
		case err != nil:
			return nil, err
		}
		name, rest := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')') // the name may contain anything
		if name < 0 || rest < name {
			continue
		}
		f := strings.Fields(string(b[rest+1:]))
		// A process whose first thread has ended has its state, but lives while another one does.
		if len(f) <= rss || f[state] == "X" || f[state] == "Z" && (f[threads] == "0" || f[threads] == "1") {
			continue
		}
		pages, _ := strconv.ParseInt(f[rss], 10, 64)
		p := Process{PID: pid, Name: string(b[name+1 : rest]), Resident: pages * int64(os.Getpagesize())}
		if pid == root {
			tree[0] = p
		}
		if of, err := strconv.Atoi(f[parent]); err == nil {
			children[of] = append(children[of], p)
		}
	}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i].PID]...)
	}
	return tree, nil
}

// ControlGroups returns the directories of the control groups that the cloister process pid named after itself.
func ControlGroups(pid int) (all []string) {
	mark := fmt.Sprintf("cloister.%d.", pid)
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(path, mark) {
			all = append(all, path)
		}
		return nil // groups come and go meanwhile
	})
	return all
}
