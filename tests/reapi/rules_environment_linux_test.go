// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// environmentRules are the rules about the environment of actions, which the probe examines.
var environmentRules = []rule{
	{98, "exec", "the input tree is exact", execution, exactTree},
	{99, "exec", "inputs are read-only, and nothing else is visible", execution, inputsStay},
	{100, "exec", "parents of outputs exist, outputs do not", execution, parentsOfOutputs},
	{101, "exec", "inputs at the paths of outputs", execution, inputAtOutput},
	{102, "exec", "how programs are found", execution, programFound},
	{103, "exec", "environment variables are those of the command", execution, commandsEnvironment},
	{104, "exec", "descriptors, umask, signals, terminal", execution, processState},
	{105, "exec", "temporary directories are empty for each action", execution, newTemporaries},
	{106, "exec", "no network except loopback", execution, noNetwork},
	{107, "exec", "all processes end with the action", execution, daemonsEnd},
	{108, "exec", "a timeout has a result", execution, timeoutResult},
	{109, "exec", "a signal is an exit code", execution, signalCodes},
	{110, "exec", "a server failure is not an exit code", ownServer, serverFaults},
}

func exactTree(c *client) {
	long := strings.Repeat("l", 255)
	files := map[string]file{
		"a": {text: "A\n"}, "empty": {}, "dir/b": {text: "B\n"}, "dir/tool": {text: "#!\n", x: true}, "dir/big": {text: string(fresh(300_000))},
		"dir/bigtool": {text: string(fresh(300_001)), x: true}, "no files/": {}, "dir/up": {link: "../a"}, "dangling": {link: "no/where"},
		"dir/sub/deep/file": {text: "x"}, "spaces and\nlines": {text: "1"}, "-dash": {text: "2"}, "\u00fcml\u00e4ut": {text: "3"}, long: {text: "4"},
	}
	stdout, _ := c.succeed(job{steps: []string{"tree ."}, files: files})
	got := c.entries(stdout)
	want := map[string]file{"probe": c.probeFile()}
	dirs := map[string]bool{}
	for p, f := range files {
		if p = strings.TrimSuffix(p, "/"); p == "no files" {
			dirs[p] = true
			continue
		}
		want[p] = f
		for d := path.Dir(p); d != "."; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	for p, f := range want {
		e := got[p]
		switch {
		case f.link != "" && (e.Type != "l" || e.Target != f.link):
			c.Errorf("%q: got %+v, want a symlink to %q", p, e, f.link)
		case f.link == "" && (e.Type != "f" || e.SHA256 != cas.SHA256.Sum([]byte(f.text)).Hash()):
			c.Errorf("%q: got %+v, want a file of %d bytes", p, e, len(f.text))
		case f.link == "" && e.Mode&0o100 != 0 != f.x:
			c.Errorf("%q: got mode %o, want is_executable=%v", p, e.Mode, f.x)
		case c.ours && f.link == "" && (e.Mode != map[bool]uint32{false: 0o644, true: 0o755}[f.x] || e.MTime != 1_000_000_000 || e.MTimeNanos != 0):
			c.Errorf("%q: got %+v, want the fixed mode and time of inputs", p, e)
		}
	}
	for d := range dirs {
		if e := got[d]; e.Type != "d" {
			c.Errorf("%q: got %+v, want a directory", d, e)
		}
	}
	for p, e := range got {
		if _, ok := want[p]; !ok && !dirs[p] && p != "." {
			c.Errorf("%q: got %+v, want nothing", p, e)
		}
	}
	supported := c.caps.GetExecutionCapabilities().GetSupportedNodeProperties()
	for _, property := range []string{"mtime", "unix_mode"} {
		if slices.Contains(supported, property) {
			c.inputProperties(property)
		} else if c.ours {
			c.Errorf("supported_node_properties %q: want %q among them", supported, property)
		}
	}
	if c.ours {
		nodeProperties(c)
	}
}

// inputProperties checks that the action sees a node property of its inputs.
func (c *client) inputProperties(property string) {
	c.Helper()
	when := timestamppb.New(time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC))
	properties := &repb.NodeProperties{}
	if property == "mtime" {
		properties.Mtime = when
	} else {
		properties.UnixMode = wrapperspb.UInt32(0o640)
	}
	root := c.putProto(&repb.Directory{Files: []*repb.FileNode{
		{Name: "big", Digest: c.put(fresh(300_000)), NodeProperties: properties},
		{Name: "plain", Digest: c.put(fresh(10))},
		{Name: "probe", Digest: c.put([]byte(c.probeFile().text)), IsExecutable: true},
		{Name: "small", Digest: c.put(fresh(10)), NodeProperties: properties},
	}})
	stdout, _ := c.succeed(job{steps: []string{"tree ."}, root: root})
	all := c.entries(stdout)
	for _, name := range []string{"big", "small"} {
		if e := all[name]; property == "mtime" && e.MTime != when.Seconds || property == "unix_mode" && e.Mode != 0o640 {
			c.Errorf("%s with %v: got %+v", name, properties, e)
		}
	}
}

func inputsStay(c *client) {
	names := []string{"top", "dir/sub", "dir/big", "tool"}
	files := map[string]file{
		"top": {text: string(fresh(100))}, "dir/sub": {text: string(fresh(100))}, "dir/big": {text: string(fresh(300_000))},
		"tool": {text: string(fresh(300_001)), x: true},
	}
	var steps []string
	for _, n := range names {
		steps = append(steps, "spoil "+n)
	}
	root := c.tree(withProbe(c, files))
	stdout, _ := c.succeed(job{steps: steps, root: root, outputs: []string{"out", "dir/out"}})
	if c.ours && stdout != strings.Repeat("kept\n", len(names)) {
		c.Errorf("%q: got %q, want every input unchanged", steps, stdout)
	}
	// A later action and the store must have the unchanged inputs.
	stdout, _ = c.succeed(job{steps: []string{"tree ."}, root: root})
	all := c.entries(stdout)
	for n, f := range files {
		d := cas.SHA256.Sum([]byte(f.text))
		if e := all[n]; e.SHA256 != d.Hash() {
			c.Errorf("%s after another action tried to change it: got %+v, want digest %s", n, e, d.Hash())
		}
		c.get(d.Proto()) // checks the digest
	}
	// The input root contains nothing but the tree.
	stdout, _ = c.succeed(job{
		steps: []string{"tree .."}, files: map[string]file{"w/in": {text: "x"}, "beside": {text: "y"}},
		command: &repb.Command{WorkingDirectory: "w"},
	})
	var got []string
	for p := range c.entries(stdout) {
		got = append(got, p)
	}
	slices.Sort(got)
	expect.Slices(c, got, []string{"..", "../beside", "../probe", "../w", "../w/in"}, "input root")
	// The working directory and the parents of outputs are writable.
	stdout, _ = c.succeed(job{
		steps: []string{"write? undeclared", "write? ../o/p/undeclared"}, files: map[string]file{"w/in": {text: "x"}},
		outputs: []string{"../o/p/out"}, command: &repb.Command{WorkingDirectory: "w"},
	})
	expect.That(c, stdout == "made\nmade\n",
		"undeclared files in the working directory and beside an output: got %q, want both created", stdout)
	// So is every directory of inputs, and other actions do not see what is made there.
	root = c.tree(withProbe(c, map[string]file{"in/a/b": {text: "x"}, "in/e/f": {text: "y"}}))
	made := job{
		steps: []string{"write? in/new", "write? in/a/new", "mkdirs in/a/c/d", "write? in/a/c/d/new"},
		root:  root, outputs: []string{"out"},
	}
	stdout, result := c.succeed(made)
	oneOf(c, "new files in directories of inputs", stdout, "made\nmade\nmade\n")
	c.wantOutputs("undeclared files", result)
	stdout, _ = c.succeed(job{steps: []string{"absent in/new", "absent in/a/new", "absent in/a/c"}, root: root})
	expect.Equal(c, stdout, "", "files that another action left in directories of inputs")
}

// withProbe adds the probe to an input tree.
func withProbe(c *client, files map[string]file) map[string]file {
	c.Helper()
	files["probe"] = c.probeFile()
	return files
}

func parentsOfOutputs(c *client) {
	_, r := c.succeed(job{
		steps: []string{"absent a/b/out", "absent w/d", "write a/b/out 1", "write top 2", "mkdir new", "rename new w/d"},
		files: map[string]file{"w/in": {text: "x"}}, outputs: []string{"a/b/out", "top", "w/d"},
	})
	c.wantOutputs("output_paths", r, "directory w/d", "file a/b/out", "file top")
	stdout, r := c.succeed(job{
		steps:   []string{"exists p/q/d", "write p/q/beside 1", "mkdirs p/q/d", "write p/q/d/f 1", "write p/q/f 1"},
		command: &repb.Command{OutputDirectories: []string{"p/q/d"}, OutputFiles: []string{"p/q/f"}},
	})
	oneOf(c, "whether a directory of output_directories is there at the start", stdout, "no\n", "yes\n")
	c.wantOutputs("output_files and output_directories", r, "directory p/q/d", "file p/q/f")
	// Files can be renamed between writable directories.
	c.succeed(job{steps: []string{"write x 1", "rename x a/b/out"}, outputs: []string{"a/b/out"}})
}

func inputAtOutput(c *client) {
	files := map[string]file{"f": {text: "old"}, "d/x": {text: "old"}, "d/keep": {text: "kept"}, "g": {text: "old"}}
	_, r := c.succeed(job{
		steps: []string{"write tmp new", "rename tmp f", "remove d/x", "write d/y made", "remove g", "write g again"},
		files: files, outputs: []string{"d", "f", "g"},
	})
	c.wantOutputs("outputs over inputs", r, "directory d", "file f", "file g")
	if f, g := c.file(r, "f"), c.file(r, "g"); f != "new" || g != "again" {
		c.Errorf("outputs over inputs: got %q and %q, want new and again", f, g)
	}
	expect.Slices(c, c.treeOf(r, "d"), []string{"keep", "y"}, "an output directory over an input (keep and y)")
	// Modify the input in place, if the action has its own copy.
	a := c.try(job{steps: []string{"append f more"}, files: map[string]file{"f": {text: "old"}}, outputs: []string{"f"}})
	if r := c.wantResult("append", a).Result; r.GetExitCode() == 0 {
		expect.Equal(c, c.file(r, "f"), "oldmore", "an input that was appended to")
	} else if c.ours {
		c.Errorf("an input at the path of an output could not be appended to: exit code %d", r.GetExitCode())
	}
}

// treeOf returns the sorted paths in an output directory.
func (c *client) treeOf(r *repb.ActionResult, dir string) []string {
	c.Helper()
	for _, d := range r.GetOutputDirectories() {
		if d.GetPath() != dir {
			continue
		}
		paths, err := walk(c.decodeTree(d.GetTreeDigest()))
		if err != nil {
			c.Fatalf("tree of %q: %v", dir, err)
		}
		return paths
	}
	c.Fatalf("the result has no output directory %q: %v", dir, r)
	return nil
}

// walk returns the paths of a Tree, with a slash after directories. It fails if a child is missing.
func walk(t *repb.Tree) ([]string, error) {
	children := map[string]*repb.Directory{}
	for _, d := range t.GetChildren() {
		_, digest, err := cas.MarshalProto(cas.SHA256, d)
		if err != nil {
			return nil, err
		}
		children[digest.Hash()] = d
	}
	type place struct {
		prefix string
		dir    *repb.Directory
	}
	var paths []string
	const most = 1_000_000
	for todo := []place{{"", t.GetRoot()}}; len(todo) > 0; {
		at := todo[0]
		todo = todo[1:]
		for _, f := range at.dir.GetFiles() {
			paths = append(paths, at.prefix+f.GetName())
		}
		for _, l := range at.dir.GetSymlinks() {
			paths = append(paths, at.prefix+l.GetName())
		}
		for _, d := range at.dir.GetDirectories() {
			child := children[d.GetDigest().GetHash()]
			if child == nil {
				return nil, fmt.Errorf("the child %s with digest %s is not in the Tree", at.prefix+d.GetName(), d.GetDigest().GetHash())
			}
			paths = append(paths, at.prefix+d.GetName()+"/")
			todo = append(todo, place{at.prefix + d.GetName() + "/", child})
		}
		if len(paths) > most {
			return nil, errors.New("the Tree has no end")
		}
	}
	slices.Sort(paths)
	return paths, nil
}

func programFound(c *client) {
	files := map[string]file{"dir/tool": c.probeFile(), "data": {text: "no program\n"}}
	for _, p := range []struct {
		what, dir string
		args      []string
	}{
		{"a path with ./", "", []string{"./dir/tool", "exit 3"}},
		{"a path without ./", "", []string{"dir/tool", "exit 3"}},
		{"a path from the working directory", "dir", []string{"./tool", "exit 3"}},
		{"a path up from the working directory", "dir", []string{"../dir/tool", "exit 3"}},
	} {
		a := c.try(job{files: files, command: &repb.Command{Arguments: p.args, WorkingDirectory: p.dir}})
		if r := c.wantResult(p.what, a); r.Result.GetExitCode() != 3 {
			c.Errorf("%s, %q in %q: got exit code %d, want 3", p.what, p.args, p.dir, r.Result.GetExitCode())
		}
	}
	// The input root is at a path chosen by the server, which may differ the next time.
	root := c.look(job{files: files}).Dir
	for what, cmd := range map[string]*repb.Command{
		"an absolute path":                     {Arguments: []string{path.Join(root, "dir/tool"), "exit 3"}},
		"a bare name in PATH":                  {Arguments: []string{"tool", "exit 3"}, EnvironmentVariables: variables("PATH", "/nowhere:"+path.Join(root, "dir"))},
		"a bare name in the working directory": {Arguments: []string{"tool", "exit 3"}, WorkingDirectory: "dir"},
		"an unknown name":                      {Arguments: []string{"no-such-program"}},
		"an unknown path":                      {Arguments: []string{"./no-such-file"}},
		"a file without execute permission":    {Arguments: []string{"./data"}},
		"a directory":                          {Arguments: []string{"./dir"}},
		"an executable of unknown format":      {Arguments: []string{"./odd"}},
		"a name in the default PATH":           {Arguments: []string{"false"}},
	} {
		want := map[string]int32{
			"a name in the default PATH": 1,
			"an absolute path":           3, "a bare name in PATH": 3, "a file without execute permission": 126, "a directory": 126, "an executable of unknown format": 126,
		}[what]
		if want == 0 {
			want = 127
		}
		files := map[string]file{"dir/tool": c.probeFile(), "data": {text: "no program\n"}, "odd": {text: "\x00no format", x: true}}
		j := job{files: files, command: cmd}
		d := c.prepare(j)
		a := c.request(d, nil)
		if a.err != nil {
			c.wantCode(what, a.err, codes.OK, codes.InvalidArgument, codes.FailedPrecondition)
			continue
		}
		got := a.response.GetResult().GetExitCode()
		if c.ours && got != want || got == 0 {
			c.Errorf("%s, %q: got exit code %d, want %d", what, cmd.Arguments, got, want)
		}
		if c.ours && want >= 126 {
			stderr := c.output(a.response.GetResult().GetStderrRaw(), a.response.GetResult().GetStderrDigest())
			expect.Text(c, stderr, cmd.Arguments[0], "%s", what)
			c.notRecorded(what, d)
		}
	}
}
