// SPDX-License-Identifier: Apache-2.0

package load

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// A Kind is what the actions of a Work do.
type Kind string

// The kinds.
const (
	Noop    Kind = "noop"    // nothing, without inputs
	Trees   Kind = "tree"    // nothing, or read all of their inputs
	Outputs Kind = "outputs" // write files
	Mixed   Kind = "mixed"   // of five: three do nothing, one reads a small tree, one writes files
)

// A Work is a load of actions, no two of which are equal.
type Work struct {
	Kind     Kind   `json:"kind"`
	Actions  int    `json:"actions"` // in a round, besides the two before the clock starts
	Parallel int    `json:"parallel"`
	Program  string `json:"program"` // what does nothing, an absolute path
	Tree     Tree   `json:"tree"`    // of Trees and Mixed
	Files    int    `json:"output_files"`
	Inner    int    `json:"output_files_in_directory"` // in one more output, a directory
}

// A Tree is an input root of directories that lie beside each other and have files in them.
type Tree struct {
	Files    int   `json:"files"`
	Dirs     int   `json:"directories"` // at most Files
	Changed  int   `json:"changed"`     // files that differ from action to action, at most Files
	Smallest int64 `json:"smallest_bytes"`
	Largest  int64 `json:"largest_bytes"` // sizes are spread evenly
	Read     bool  `json:"read"`          // whether actions read all files
}

// Check returns what is wrong with w.
func (w *Work) Check() error {
	t := &w.Tree
	switch {
	case w.Actions < 1 || w.Parallel < 1:
		return fmt.Errorf("%s: there must be at least one action, and one in flight", w.Kind)
	case w.Program == "" || w.Program[0] != '/':
		return fmt.Errorf("%s: program %q: write its absolute path", w.Kind, w.Program)
	case w.Files < 0 || w.Inner < 0 || w.Kind == Outputs && w.Files+w.Inner == 0:
		return fmt.Errorf("%s: there must be at least one file that is written", w.Kind)
	case w.Kind != Trees && w.Kind != Mixed:
		return nil
	case t.Dirs < 1 || t.Files < t.Dirs:
		return fmt.Errorf("%s: there must be at least one directory, and as many files as directories", w.Kind)
	case t.Changed < 1 || t.Changed > t.Files:
		return fmt.Errorf("%s: from one file to all of them change with each action", w.Kind)
	case t.Smallest < 1 || t.Largest < t.Smallest || t.Largest > 1<<20:
		return fmt.Errorf("%s: a file has from 1 byte to 1MiB", w.Kind)
	case t.Read && t.Files > maxRead:
		return fmt.Errorf("%s: at most %d files can be read, since their names are the arguments of one command", w.Kind, maxRead)
	}
	return nil
}

// idle reports whether the commands do nothing.
func (w *Work) idle() bool { return w.Kind == Noop || w.Kind == Trees && !w.Tree.Read }

// maxRead keeps the arguments of readCommand below a megabyte.
const maxRead = 50_000

// readCommand reads all files of a tree, in the order of their names, and prints a checksum and how many bytes
// it has read: with what every system of POSIX has, and little work besides reading.
const readCommand = "cat */* | cksum"

// writeCommand writes $1 files, and $2 into a directory, with nothing but the shell's own means.
const writeCommand = `i=0
while [ $i -lt $1 ]; do printf '%-1023s\n' "$SALT f$i" >f$i; i=$((i+1)); done
[ $2 = 0 ] && exit
mkdir d
i=0
while [ $i -lt $2 ]; do printf '%-1023s\n' "$SALT d/f$i" >d/f$i; i=$((i+1)); done`

// written is the content of a file that writeCommand writes.
func written(salt, name string) []byte { return fmt.Appendf(nil, "%-1023s\n", salt+" "+name) }

// A command is what an action runs, and what must come of it.
type command struct {
	args, env []string          // env is NAME=VALUE
	stdout    string            // all that is printed
	files     map[string]string // digests of output files, by path
	dir       map[string]string // those of the files in the output directory "d", by path; nil if there is none
}

// An action is a command with its inputs, encoded.
type action struct {
	command
	digest blob // of the Action; its data are the message
	// local is what to run without a server: of an action that reads, with what it prints of the unchanged tree.
	local command
}

// A job is the content of one round of a Work.
type job struct {
	actions []action
	blobs   map[string]blob // all that the actions need, by hash
	base    []*file         // the unchanged tree, directory by directory; nil if nothing reads it
}

// newJob makes the content of a round: two actions more than are measured.
func newJob(w *Work, platform *repb.Platform, salt string) (*job, error) {
	j := &job{blobs: map[string]blob{}}
	var f *forest
	if w.Kind == Trees || w.Kind == Mixed {
		f = j.plant(&w.Tree, salt)
	}
	empty := j.put(nil)
	for i := range w.Actions + 2 {
		kind := w.Kind
		if kind == Mixed {
			kind = [...]Kind{Noop, Trees, Noop, Outputs, Noop}[i%5]
		}
		own := hash(fmt.Appendf(nil, "%s\naction\n%d", salt, i))
		c := command{args: []string{w.Program}, env: []string{"PATH=/usr/bin:/bin", "SALT=" + own}}
		local, root := c, empty
		switch kind {
		case Trees:
			var files []*file
			root, files = j.change(f, own, i)
			if w.Tree.Read {
				c.args = []string{"/bin/sh", "-c", readCommand}
				local.args, local.stdout = c.args, f.stdout
				c.stdout = checksum(files)
			}
		case Outputs:
			c.args = []string{"/bin/sh", "-c", writeCommand, "sh", strconv.Itoa(w.Files), strconv.Itoa(w.Inner)}
			c.files = outputs(own, "f", w.Files)
			if w.Inner > 0 {
				c.dir = outputs(own, "d/f", w.Inner)
			}
			local = c
		}
		digest, err := j.action(&c, platform, root)
		if err != nil {
			return nil, err
		}
		j.actions = append(j.actions, action{c, digest, local})
	}
	if w.Tree.Read && f != nil {
		j.base = f.files()
	}
	return j, nil
}

// outputs returns the digests of n files that writeCommand writes, by name.
func outputs(salt, prefix string, n int) map[string]string {
	digests := make(map[string]string, n)
	for i := range n {
		name := prefix + strconv.Itoa(i)
		digests[name] = hash(written(salt, name))
	}
	return digests
}

// put adds a blob.
func (j *job) put(data []byte) blob {
	b := blob{data: data, hash: hash(data)}
	j.blobs[b.hash] = b
	return b
}

// message adds m.
func (j *job) message(m proto.Message) (blob, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	return j.put(data), err
}

// action adds the messages of an action.
func (j *job) action(c *command, platform *repb.Platform, root blob) (blob, error) {
	m := &repb.Command{Arguments: c.args, Platform: platform}
	for _, v := range c.env { // the API wants them in order, and they are
		name, value, _ := strings.Cut(v, "=")
		m.EnvironmentVariables = append(m.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: name, Value: value})
	}
	m.OutputPaths = slices.Sorted(maps.Keys(c.files))
	if c.dir != nil {
		m.OutputPaths = slices.Insert(m.OutputPaths, 0, "d") // before "f..."
	}
	encoded, err := j.message(m)
	if err != nil {
		return blob{}, err
	}
	return j.message(&repb.Action{CommandDigest: encoded.digest(), InputRootDigest: root.digest(), Platform: platform})
}

// A file is one of an input tree.
type file struct {
	dir, name string
	blob      blob
}

// firstFile is the name of the first file of each directory.
const firstFile = "f000000"

// A forest is the tree from which those of all actions differ in a few files.
type forest struct {
	tree   *Tree
	dirs   [][]*file
	root   *repb.Directory
	stdout string // what readCommand prints of it
}

// files returns all files in the order in which a shell lists their names.
func (f *forest) files() []*file { return slices.Concat(f.dirs...) }

// plant makes the unchanged tree.
func (j *job) plant(t *Tree, salt string) *forest {
	f := &forest{tree: t, dirs: make([][]*file, t.Dirs), root: &repb.Directory{}}
	random := rand.New(rand.NewPCG(1, 2)) // sizes are the same in every round
	for i := range t.Files {
		// Names of equal length, so that they are in order.
		dir := i % t.Dirs
		b := newBlob(salt, "tree", i, t.Smallest+random.Int64N(t.Largest-t.Smallest+1))
		j.blobs[b.hash] = b
		f.dirs[dir] = append(f.dirs[dir], &file{fmt.Sprintf("d%06d", dir), fmt.Sprintf("f%06d", i/t.Dirs), b})
	}
	for _, files := range f.dirs {
		f.root.Directories = append(f.root.Directories, j.directory(files))
	}
	if t.Read {
		f.stdout = checksum(f.files())
	}
	return f
}

// directory adds the message of a directory.
func (j *job) directory(files []*file) *repb.DirectoryNode {
	m := &repb.Directory{}
	for _, f := range files {
		m.Files = append(m.Files, &repb.FileNode{Name: f.name, Digest: f.blob.digest()})
	}
	b, _ := j.message(m) // names are ASCII
	return &repb.DirectoryNode{Name: files[0].dir, Digest: b.digest()}
}

// change returns the tree of the action i, in which some files, spread over the directories, have another
// content of the same size.
func (j *job) change(f *forest, salt string, i int) (root blob, files []*file) {
	dirs := slices.Clone(f.dirs)
	touched := map[int]bool{}
	for k := range f.tree.Changed {
		n := (i*f.tree.Changed + k) % f.tree.Files
		d := n % f.tree.Dirs
		if !touched[d] {
			touched[d] = true
			dirs[d] = slices.Clone(dirs[d])
		}
		old := dirs[d][n/f.tree.Dirs]
		b := newBlob(salt, "changed", k, int64(len(old.blob.data)))
		j.blobs[b.hash] = b
		dirs[d][n/f.tree.Dirs] = &file{old.dir, old.name, b}
	}
	m := &repb.Directory{Directories: slices.Clone(f.root.Directories)}
	for d := range touched {
		m.Directories[d] = j.directory(dirs[d])
	}
	root, _ = j.message(m)
	return root, slices.Concat(dirs...)
}

// checksum returns what readCommand prints of files.
func checksum(files []*file) string {
	var sum uint32
	size := 0
	for _, f := range files {
		sum = cksum(sum, f.blob.data)
		size += len(f.blob.data)
	}
	for n := size; n > 0; n >>= 8 {
		sum = cksum(sum, []byte{byte(n)})
	}
	return fmt.Sprintf("%d %d\n", ^sum, size)
}

// polynomial is that of the cksum of POSIX, whose bits are in the other order than those of package hash/crc32.
const polynomial = 0x04c11db7

var crcTable = func() (table [256]uint32) {
	for i := range table {
		c := uint32(i) << 24
		for range 8 {
			c = c<<1 ^ c>>31*polynomial
		}
		table[i] = c
	}
	return table
}()

func cksum(sum uint32, data []byte) uint32 {
	for _, b := range data {
		sum = sum<<8 ^ crcTable[byte(sum>>24)^b]
	}
	return sum
}

// platformOf returns the message of properties, which the API wants in order.
func platformOf(properties []*repb.Platform_Property) *repb.Platform {
	if len(properties) == 0 {
		return nil
	}
	sorted := slices.SortedFunc(slices.Values(properties), func(a, b *repb.Platform_Property) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Value, b.Value))
	})
	return &repb.Platform{Properties: sorted}
}
