// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A census counts what a server holds.
type census struct{ processes, descriptors, mounts, groups int }

// tree returns a process and its live descendants, parents first.
func tree(pid int) []int {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// The name is in parentheses and may hold anything. State and parent follow the last one.
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil || len(f) < 2 || f[0] == "Z" || f[0] == "X" {
			continue
		}
		if parent, err := strconv.Atoi(f[1]); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}

// groups returns the control groups that a process named after itself.
func groups(pid int) (all []string) {
	mark := fmt.Sprintf("cloister.%d.", pid)
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(path, mark) {
			all = append(all, path)
		}
		return nil // groups come and go meanwhile
	})
	return all
}

// take counts what the process and its descendants hold.
func take(pid int) census {
	c := census{groups: len(groups(pid))}
	spaces := map[string]bool{}
	for _, p := range tree(pid) {
		c.processes++
		fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p))
		c.descriptors += len(fds)
		space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", p))
		if err != nil || spaces[space] {
			continue
		}
		spaces[space] = true
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", p))
		c.mounts += bytes.Count(b, []byte("\n"))
	}
	return c
}

// within reports whether c has at most what limit has, with some slack for connections and for the next runs that idle
// slots prepare: each is a process with some 25 mounts. A round has tens of faults.
func (c census) within(limit census) bool {
	return c.processes <= limit.processes+2 && c.descriptors <= limit.descriptors+40 &&
		c.mounts <= limit.mounts+60 && c.groups <= limit.groups+2
}

// awaitWithin waits until the process holds no more than limit.
func awaitWithin(pid int, limit census) (c census, ok bool) {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if c = take(pid); c.within(limit) || time.Now().After(end) {
			return c, c.within(limit)
		}
	}
}
