// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/proctree"
	"golang.org/x/sys/unix"
)

// A census is the state of this host before a self-test, of everything that the test makes.
type census struct {
	mounts      []string // lines of /proc/self/mountinfo
	descriptors []string // targets of those of this process
	groups      []string // of the control groups of this process
	temp        string   // the temporary directory of the test
	was         string   // TMPDIR
}

// takeCensus makes a temporary directory for the test and adopts orphans, so that no process is missed. The caller
// calls compare.
func takeCensus() (*census, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("adopt orphans: %w", err)
	}
	if left, err := alive(); err != nil || len(left) > 0 {
		return nil, errors.Join(err, fmt.Errorf("this process already has children: %v", left))
	}
	c := &census{was: os.Getenv("TMPDIR")}
	var err error
	if c.temp, err = os.MkdirTemp("", "cloister-selftest-"); err != nil {
		return nil, err
	}
	if err := os.Setenv("TMPDIR", c.temp); err != nil {
		return nil, err
	}
	c.mounts, c.descriptors, c.groups = mounts(), namespaceDescriptors(), proctree.ControlGroups(os.Getpid())
	return c, nil
}

// compare reports everything left over, by kind, and removes the temporary directory.
func (c *census) compare() []line {
	_ = os.Setenv("TMPDIR", c.was)
	var lines []line
	add := func(what, nothing string, more []string, err error) {
		l := line{ok: len(more) == 0 && err == nil, what: what, detail: nothing}
		if err != nil {
			l.detail = err.Error()
		} else if !l.ok {
			l.detail = fmt.Sprintf("%d more than before, first %+.200q", len(more), more[0])
		}
		lines = append(lines, l)
	}
	living, err := alive()
	// A killed process takes a moment to disappear.
	for deadline := time.Now().Add(time.Second); len(living) > 0 && err == nil && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
		living, err = alive()
	}
	add("no process left", "no descendant is alive", living, err)
	more := without(mounts(), c.mounts)
	add("no mount left", fmt.Sprintf("%d as before", len(c.mounts)), more, nil)
	// A namespace lives while a process is in it, a descriptor refers to it, or it is mounted (namespaces(7)).
	held := append(slices.Clone(living), without(namespaceDescriptors(), c.descriptors)...)
	held = append(held, slices.DeleteFunc(more, func(m string) bool { return !strings.Contains(m, " - nsfs ") })...)
	add("no namespace left", "none held by a process, descriptor or mount", held, nil)
	add("no control group left", fmt.Sprintf("%d as before", len(c.groups)), without(proctree.ControlGroups(os.Getpid()), c.groups), nil)
	var files []string
	err = filepath.WalkDir(c.temp, func(path string, _ fs.DirEntry, err error) error {
		if path != c.temp {
			files = append(files, path)
		}
		return err
	})
	add("no file left", "the temporary directory is empty", files, err)
	if len(files) == 0 {
		_ = os.Remove(c.temp)
	}
	return lines
}

// without returns the elements of everything that are not in known.
func without(all, known []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(known, s) })
}

// alive returns the living descendants of this process.
func alive() ([]string, error) {
	tree, err := proctree.Of(os.Getpid())
	if err != nil {
		return nil, err
	}
	var left []string
	for _, p := range tree[1:] {
		left = append(left, fmt.Sprintf("process %d, (%.100s)", p.PID, p.Name))
	}
	return left, nil
}

// mounts returns the mounts that this process sees.
func mounts() []string {
	b, _ := os.ReadFile("/proc/self/mountinfo")
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// namespaceDescriptors returns the namespaces that descriptors of this process hold.
func namespaceDescriptors() []string {
	links, _ := filepath.Glob("/proc/self/fd/*")
	var all []string
	for _, l := range links {
		to, err := os.Readlink(l)
		if kind, _, ok := strings.Cut(to, ":["); err == nil && ok && kind != "pipe" && kind != "socket" && kind != "anon_inode" {
			all = append(all, to)
		}
	}
	return all
}
