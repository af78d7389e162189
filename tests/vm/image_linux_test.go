// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// An image is the root directory of a guest: its files by absolute path.
type image map[string]file

type file struct {
	mode uint32 // type and permissions, as in stat
	body string // a link's target
}

const (
	directory = 0o040755
	regular   = 0o100644
	program   = 0o100755
	link      = 0o120777
)

// add adds a file and the directories above it.
func (im image) add(name string, mode uint32, body string) {
	im[name] = file{mode, body}
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		if _, ok := im[dir]; !ok {
			im[dir] = file{mode: directory}
		}
	}
}

// copy adds a file of this host.
func (im image) copy(name, from string) error {
	body, err := os.ReadFile(from)
	if err == nil {
		im.add(name, program, string(body))
	}
	return err
}

// programs adds programs of this host and the libraries that they load.
func (im image) programs(names ...string) error {
	for _, name := range names {
		name, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		out, err := exec.Command("ldd", name).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ldd %s: %w: %s", name, err, out)
		}
		for word := range strings.FieldsSeq(name + " " + string(out)) {
			if !strings.HasPrefix(word, "/") {
				continue
			}
			// The other directories are links to those of /usr in the guest.
			if err := im.copy("/usr"+strings.TrimPrefix(word, "/usr"), word); err != nil {
				return err
			}
		}
	}
	return nil
}

// bytes returns the image as the kernel unpacks it: a cpio archive in the format newc.
func (im image) bytes() []byte {
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
