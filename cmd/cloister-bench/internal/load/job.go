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

// readCommand reads all files of a tree in the order of their names, and prints their checksum and size. It uses only
// POSIX tools and does little besides reading.
const readCommand = "cat */* | cksum"

// writeCommand writes $1 files, and $2 files into a directory, with shell builtins only.
const writeCommand = `i=0
while [ $i -lt $1 ]; do printf '%-1023s\n' "$SALT f$i" >f$i; i=$((i+1)); done
[ $2 = 0 ] && exit
mkdir d
i=0
while [ $i -lt $2 ]; do printf '%-1023s\n' "$SALT d/f$i" >d/f$i; i=$((i+1)); done`

// Programs of a compile action, and what Python does: it wraps the compiler, as the rules of Buck2 do.
const (
	python, compiler = "/usr/bin/python3", "g++"
	wrapper          = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
)

// source returns a C++ file that takes about as long to compile as Python takes to start.
func source(salt string) []byte {
	return fmt.Appendf(nil, "#include <cstdio>\n#include <cstdlib>\n#include <vector>\n"+
		"int f_%s(std::vector<int> &v) { v.push_back(std::rand()); return std::printf(\"%%zu\", v.size()); }\n", salt)
}

// written returns the content of a file of writeCommand.
func written(salt, name string) []byte { return fmt.Appendf(nil, "%-1023s\n", salt+" "+name) }

// A command is what an action runs, and its expected results.
type command struct {
	args, env []string // env is NAME=VALUE
	inputs    []*file  // other than those of a tree
	stdout    string
	files     map[string]string // digests of output files, by path; those of a compiler are anyContent
	dir       map[string]string // digests of the files in the output directory "d", by path; nil without it
}

// anyContent is the digest of a file whose content depends on the machine.
const anyContent = ""

// An action is a command with its inputs, encoded.
type action struct {
	command
	digest blob    // the Action message
	local  command // to run without a server; it reads the unchanged tree
}

// A job is the content of one round of a Workload.
type job struct {
	actions []action
	blobs   map[string]blob // everything that the actions need, by hash
	base    []*file         // the unchanged tree by directory; nil if no action reads it
}

// newJob generates the content of a round, with two additional actions to run before the clock starts.
func newJob(w *Workload, platform *repb.Platform, salt string) (*job, error) {
	j := &job{blobs: map[string]blob{}}
	var f *inputTree
	if w.Kind == Trees || w.Kind == Mixed {
		f = j.newTree(&w.Tree, salt)
	}
	empty := j.put(nil)
	for i := range w.Actions + 2 {
		kind := w.Kind
		if kind == Mixed {
			kind = [...]Kind{Noop, Trees, Noop, Outputs, Noop}[i%5]
		}
		own := hash(fmt.Appendf(nil, "%s\naction\n%d", salt, i))
		c := command{args: []string{Program}, env: []string{"PATH=/usr/bin:/bin", "SALT=" + own}}
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
			c.args = []string{"/bin/sh", "-c", writeCommand, "sh", strconv.Itoa(w.Files), strconv.Itoa(w.InDirectory)}
			c.files = outputs(own, "f", w.Files)
			if w.InDirectory > 0 {
				c.dir = outputs(own, "d/f", w.InDirectory)
			}
			local = c
		case Compiles:
			c.args = []string{python, "-c", wrapper, compiler, "-c", "in.cc", "-o", "out.o"}
			c.inputs = []*file{{name: "in.cc", blob: j.put(source(own))}}
			c.files = map[string]string{"out.o": anyContent}
			root = j.directory(c.inputs)
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

// outputs returns the digests of n files of writeCommand by name.
func outputs(salt, prefix string, n int) map[string]string {
	digests := make(map[string]string, n)
	for i := range n {
		name := prefix + strconv.Itoa(i)
		digests[name] = hash(written(salt, name))
	}
	return digests
}

// put adds a blob to the job.
func (j *job) put(data []byte) blob {
	b := blob{data: data, hash: hash(data)}
	j.blobs[b.hash] = b
	return b
}

// message adds a message to the job.
func (j *job) message(m proto.Message) (blob, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	return j.put(data), err
}

// action adds the messages of an action to the job.
func (j *job) action(c *command, platform *repb.Platform, root blob) (blob, error) {
	m := &repb.Command{Arguments: c.args, Platform: platform}
	for _, v := range c.env { // sorted, as the API requires
		name, value, _ := strings.Cut(v, "=")
		m.EnvironmentVariables = append(m.EnvironmentVariables,
			&repb.Command_EnvironmentVariable{Name: name, Value: value})
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

// A file is a file of an input tree.
type file struct {
	dir, name string
	blob      blob
}

// firstFile is the name of the first file of each directory.
const firstFile = "f000000"

// An inputTree is the unchanged tree. Those of all actions differ from it in a few files.
type inputTree struct {
	shape  *Tree
	dirs   [][]*file
	root   *repb.Directory
	stdout string // of readCommand
}

// files returns all files in the order of a shell's globbing.
func (f *inputTree) files() []*file { return slices.Concat(f.dirs...) }

// newTree generates the unchanged tree.
func (j *job) newTree(t *Tree, salt string) *inputTree {
	f := &inputTree{shape: t, dirs: make([][]*file, t.Dirs), root: &repb.Directory{}}
	random := rand.New(rand.NewPCG(1, 2)) // every round has the same sizes
	for i := range t.Files {
		// Names of equal length sort by number.
		dir := i % t.Dirs
		b := newBlob(salt, "tree", i, 1<<10+random.Int64N(7<<10+1))
		j.blobs[b.hash] = b
		f.dirs[dir] = append(f.dirs[dir], &file{fmt.Sprintf("d%06d", dir), fmt.Sprintf("f%06d", i/t.Dirs), b})
	}
	for _, files := range f.dirs {
		f.root.Directories = append(f.root.Directories, j.node(files))
	}
	if t.Read {
		f.stdout = checksum(f.files())
	}
	return f
}

// directory adds the message of a directory to the job.
func (j *job) directory(files []*file) blob {
	m := &repb.Directory{}
	for _, f := range files {
		m.Files = append(m.Files, &repb.FileNode{Name: f.name, Digest: f.blob.digest()})
	}
	b, _ := j.message(m) // names are ASCII
	return b
}

// node adds the message of a directory to the job, and returns its entry in the root.
func (j *job) node(files []*file) *repb.DirectoryNode {
	b := j.directory(files)
	return &repb.DirectoryNode{Name: files[0].dir, Digest: b.digest()}
}

// change returns the tree of action i: some files in different directories have other contents of the same size.
func (j *job) change(f *inputTree, salt string, i int) (root blob, files []*file) {
	dirs := slices.Clone(f.dirs)
	touched := map[int]bool{}
	for k := range f.shape.Changed {
		n := (i*f.shape.Changed + k) % f.shape.Files
		d := n % f.shape.Dirs
		if !touched[d] {
			touched[d] = true
			dirs[d] = slices.Clone(dirs[d])
		}
		old := dirs[d][n/f.shape.Dirs]
		b := newBlob(salt, "changed", k, int64(len(old.blob.data)))
		j.blobs[b.hash] = b
		dirs[d][n/f.shape.Dirs] = &file{old.dir, old.name, b}
	}
	m := &repb.Directory{Directories: slices.Clone(f.root.Directories)}
	for d := range touched {
		m.Directories[d] = j.node(dirs[d])
	}
	root, _ = j.message(m)
	return root, slices.Concat(dirs...)
}

// checksum returns the output of readCommand for files.
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

// polynomial is that of POSIX cksum, which uses the reverse bit order of package hash/crc32.
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

// platformOf returns the message of properties, sorted as the API requires.
func platformOf(properties []*repb.Platform_Property) *repb.Platform {
	if len(properties) == 0 {
		return nil
	}
	sorted := slices.SortedFunc(slices.Values(properties), func(a, b *repb.Platform_Property) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Value, b.Value))
	})
	return &repb.Platform{Properties: sorted}
}
