// SPDX-License-Identifier: Apache-2.0

// Package initramfs builds the initramfs of a virtual machine: a cpio archive that the kernel unpacks, with modules of
// that kernel. On Linux it also has the first steps of the machine's first process.
package initramfs

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// An Image is the root directory of a guest: its files by absolute path.
type Image map[string]file

type file struct {
	mode uint32 // type and permissions, as in stat
	body string // contents, or a link's target
}

const (
	directory = 0o040755
	program   = 0o100755
)

// modulesDir has the modules in the order in which Prepare loads them.
const modulesDir = "/modules"

// Add adds a file and the directories above it. The mode is its type and permissions, as in stat, and the body of a
// symbolic link its target.
func (im Image) Add(name string, mode uint32, body string) {
	im[name] = file{mode, body}
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		if _, ok := im[dir]; !ok {
			im[dir] = file{mode: directory}
		}
	}
}

// Copy adds a file of this host as a program.
func (im Image) Copy(name, from string) error {
	body, err := os.ReadFile(from)
	if err == nil {
		im.Add(name, program, string(body))
	}
	return err
}

// AddModules adds kernel modules from dir (lib/modules/RELEASE/kernel). Modules are paths in dir without suffix, each
// after its dependencies. Modules that dir lacks are skipped, because they may be built into the kernel.
func (im Image) AddModules(dir string, modules []string) error {
	for i, m := range modules {
		found, err := filepath.Glob(filepath.Join(dir, m+".ko*"))
		if err != nil {
			return err
		}
		if len(found) != 1 {
			continue
		}
		if err := im.Copy(fmt.Sprintf("%s/%02d-%s", modulesDir, i, filepath.Base(found[0])), found[0]); err != nil {
			return err
		}
	}
	return nil
}

// Bytes returns the image as the kernel unpacks it: a cpio archive in the format newc.
func (im Image) Bytes() []byte {
	var b bytes.Buffer
	pad := func() { b.Write(make([]byte, -b.Len()&3)) }
	add := func(number int, name string, f file) {
		fmt.Fprintf(&b, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X", number, f.mode, 0, 0, 1, 0, len(f.body),
			0, 0, 0, 0, len(name)+1, 0)
		b.WriteString(name + "\x00")
		pad()
		b.WriteString(f.body)
		pad()
	}
	for i, name := range slices.Sorted(maps.Keys(im)) { // a directory comes before its files
		add(i+1, name[1:], im[name])
	}
	add(0, "TRAILER!!!", file{})
	return b.Bytes()
}
