// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cloister-build/cloister/cmd/internal/proctree"
)

// measure returns the values of all Measures. No request may be in flight.
func (p *Process) measure(ctx context.Context) (map[string]float64, error) {
	tree, err := proctree.Of(p.PID)
	if err != nil {
		return nil, err
	}
	v := map[string]float64{processes: float64(len(tree)), groups: float64(len(proctree.ControlGroups(p.PID)))}
	held := map[file]float64{}
	spaces := map[string]bool{}
	for _, member := range tree {
		name := memory
		if member.PID != p.PID {
			name = helpers
		}
		v[name] += float64(member.Resident)
		v[descriptors] += p.descriptors(member.PID, held)
		v[mounts] += mountsOf(member.PID, spaces)
	}
	for _, bytes := range held {
		v[stored] += bytes
	}
	if err := p.disk(v); err != nil {
		return nil, err
	}
	v[goroutines], err = Metric(ctx, p.Metrics, "go_goroutines")
	return v, err
}

// A file identifies a file without a name.
type file struct{ device, inode uint64 }

// descriptors returns the number of open descriptors of a process, and adds to held the bytes of the removed files of
// the store that they keep on the disk.
func (p *Process) descriptors(pid int, held map[file]float64) (n float64) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		to, err := os.Readlink(path)
		if err != nil {
			continue // it was closed meanwhile
		}
		n++
		if !strings.HasPrefix(to, p.Dir) || !strings.HasSuffix(to, " (deleted)") {
			continue
		}
		if info, err := os.Stat(path); err == nil {
			s := info.Sys().(*syscall.Stat_t)
			held[file{uint64(s.Dev), s.Ino}] = float64(s.Blocks) * 512
		}
	}
	return n
}

// mountsOf returns the number of mounts in the mount namespace of a process, unless it is in spaces, and adds it.
func mountsOf(pid int, spaces map[string]bool) float64 {
	space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil || spaces[space] {
		return 0
	}
	spaces[space] = true
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	return float64(bytes.Count(b, []byte("\n")))
}

// disk adds the sizes on disk of the store and of the logs.
func (p *Process) disk(v map[string]float64) error {
	if info, err := os.Stat(p.Log); err == nil {
		v[logs] += float64(info.Size())
	}
	return filepath.WalkDir(p.Dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		} else if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return nil //nolint:nilerr // it was removed meanwhile
		}
		rel, _ := filepath.Rel(p.Dir, path)
		top, _, _ := strings.Cut(rel, string(filepath.Separator))
		name := stored
		if top == "audit" || top == "history" {
			name = logs
		}
		v[name] += float64(info.Sys().(*syscall.Stat_t).Blocks) * 512
		return nil
	})
}

// Leftovers returns what a server that has ended left behind: processes that have its directory open, mounts of it, and
// control groups.
func (p *Process) Leftovers() (left []string) {
	for _, g := range proctree.ControlGroups(p.PID) {
		left = append(left, "control group "+g)
	}
	paths, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
	for _, path := range paths {
		b, _ := os.ReadFile(path)
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, p.Dir) {
				left = append(left, fmt.Sprintf("mount in %s: %s", filepath.Dir(path), strings.TrimSpace(line)))
			}
		}
	}
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && strings.HasPrefix(to, p.Dir+"/") {
			left = append(left, fmt.Sprintf("descriptor %s of %s", l, to))
		}
	}
	return left
}
