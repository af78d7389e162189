// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// validationRules are the rules about requests that must not reach a worker.
var validationRules = []rule{
	{70, "exec", "absent actions are listed, malformed ones rejected", execution, badActions},
	{71, "exec", "absent commands are listed, malformed ones rejected", execution, badCommand},
	{72, "exec", "all missing inputs are listed at once", execution, missingInputsAtOnce},
	{73, "exec", "absolute symlinks in inputs behave as advertised", execution, inputSymlinks},
	{74, "exec", "non-canonical directories are rejected", execution, malformedDirectories},
	{75, "exec", "malformed and deep directories", execution, deepDirectories},
	{76, "exec", "environment variables of the command", execution, badEnvironment},
	{77, "exec", "output paths", execution, badOutputPaths},
	{78, "exec", "output_paths replaces the fields of api 2.0", execution, outputFields},
	{79, "exec", "outputs must not be nested in output files", execution, outputConflicts},
	{80, "exec", "the working directory is in the input root", execution, badWorkingDirectory},
	{81, "exec", "timeouts above the maximum and below zero", execution, timeoutBounds},
	{82, "exec", "output node properties and directory format", execution, outputForms},
	{83, "exec", "the platform of the action precedes that of the command", execution, platformPrecedence},
	{84, "exec", "unknown platform properties", execution, unknownProperty},
	{85, "exec", "platforms that no worker can match", execution, unmatchedPlatform},
	{86, "exec", "digest function of another length, and a full queue", execution, fullQueue},
	{87, "exec", "instance and priority of an execution", execution, instanceAndPriority},
}

// segments are the digest functions that resource names must state.
var segments = map[repb.DigestFunction_Value]string{
	repb.DigestFunction_BLAKE3: "blake3/", repb.DigestFunction_SHA256TREE: "sha256tree/", repb.DigestFunction_GITSHA1: "gitsha1/",
}

func badActions(c *client) {
	d := absentDigest(100)
	a := c.request(d, nil)
	c.lists("Execute of an unknown action", a.err, d)
	if c.ours {
		c.lists("WaitExecution after that", c.waitExecution(a.name()).err, d)
	}
	for f, segment := range segments {
		if !slices.Contains(c.caps.GetExecutionCapabilities().GetDigestFunctions(), f) {
			continue
		}
		d := absentDigest(100)
		if f == repb.DigestFunction_GITSHA1 {
			d.Hash = d.Hash[:40]
		}
		got, err := missingOf(c.request(d, func(r *repb.ExecuteRequest) { r.DigestFunction = f }).err)
		if want := fmt.Sprintf("blobs/%s%s/%d", segment, d.Hash, d.SizeBytes); err != nil || !slices.Equal(got, []string{want}) {
			c.Errorf("Execute of an unknown action by %v: got %q, %v, want %q", f, got, err, want)
		}
	}
	none := c.put(garbage())
	c.wantText("Execute of a malformed action", c.request(none, nil).err, []string{none.Hash}, codes.InvalidArgument)
}

func badCommand(c *client) {
	root := c.tree(nil)
	with := func(d *repb.Digest) job {
		return job{root: root, change: func(a *repb.Action) { a.CommandDigest = d }}
	}
	absent := absentDigest(100)
	c.lists("Execute of an action with an unknown command", c.try(with(absent)).err, absent)
	none := c.put(garbage())
	c.refused("a malformed command", with(none), []string{none.Hash}, codes.InvalidArgument)
	c.refused("a command without arguments", with(c.putProto(&repb.Command{Platform: c.platform()})), []string{"arguments"}, codes.InvalidArgument)
}

func missingInputsAtOnce(c *client) {
	cmd, a, b, sub := absentDigest(10), absentDigest(11), absentDigest(12), absentDigest(13)
	// Many files in several directories, some of them twice.
	var many []*repb.FileNode
	absent := []*repb.Digest{cmd, a, b, sub}
	for i := range 300 {
		d := absentDigest(20 + i)
		many, absent = append(many, &repb.FileNode{Name: fmt.Sprintf("%03d", i), Digest: d}), append(absent, d)
	}
	root := c.putProto(&repb.Directory{
		Files: []*repb.FileNode{{Name: "a", Digest: a}, {Name: "b", Digest: b}, {Name: "c", Digest: c.put(fresh(30))}},
		Directories: []*repb.DirectoryNode{
			{Name: "known", Digest: c.putProto(&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: a}}})},
			{Name: "many", Digest: c.putProto(&repb.Directory{Files: many})},
			{Name: "sub", Digest: sub},
		},
	})
	j := job{root: root, change: func(x *repb.Action) { x.CommandDigest = cmd }}
	c.lists(fmt.Sprintf("Execute with %d absent blobs", len(absent)), c.try(j).err, absent...)
	gone := absentDigest(14)
	c.lists("Execute with an absent input root", c.try(job{root: gone}).err, gone)
}

func inputSymlinks(c *client) {
	links := map[string]file{"absolute": {link: "/no/where"}, "dir/out": {link: "../../../../no/where"}}
	j := job{steps: []string{"tree ."}, files: links}
	strategy := c.caps.GetCacheCapabilities().GetSymlinkAbsolutePathStrategy()
	if strategy == repb.SymlinkAbsolutePathStrategy_DISALLOWED {
		for name, link := range links {
			c.refused("a symlink to "+link.link, job{steps: j.steps, files: map[string]file{name: link}}, nil, codes.InvalidArgument)
		}
		return
	}
	if !oneOf(c, "symlink_absolute_path_strategy", strategy, repb.SymlinkAbsolutePathStrategy_ALLOWED) {
		return
	}
	stdout, _ := c.succeed(j)
	all := c.entries(stdout)
	for name, link := range links {
		if got := all[name]; got.Type != "l" || got.Target != link.link {
			c.Errorf("%s: got %+v, want a symlink to %s", name, got, link.link)
		}
	}
}

func malformedDirectories(c *client) {
	f, d := c.put(fresh(9)), c.putProto(&repb.Directory{})
	files := func(names ...string) *repb.Directory {
		dir := &repb.Directory{}
		for _, n := range names {
			dir.Files = append(dir.Files, &repb.FileNode{Name: n, Digest: f})
		}
		return dir
	}
	directories := func(names ...string) *repb.Directory {
		dir := &repb.Directory{}
		for _, n := range names {
			dir.Directories = append(dir.Directories, &repb.DirectoryNode{Name: n, Digest: d})
		}
		return dir
	}
	symlinks := func(names ...string) *repb.Directory {
		dir := &repb.Directory{}
		for _, n := range names {
			dir.Symlinks = append(dir.Symlinks, &repb.SymlinkNode{Name: n, Target: "x"})
		}
		return dir
	}
	both := func(a, b *repb.Directory) *repb.Directory {
		proto.Merge(a, b)
		return a
	}
	cases := map[string]*repb.Directory{
		"files out of order":         files("b", "a"),
		"directories out of order":   directories("b", "a"),
		"symlinks out of order":      symlinks("b", "a"),
		"a file twice":               files("a", "a"),
		"a directory twice":          directories("a", "a"),
		"a symlink twice":            symlinks("a", "a"),
		"a file and a directory":     both(files("a"), directories("a")),
		"a file and a symlink":       both(files("a"), symlinks("a")),
		"a directory and a symlink":  both(directories("a"), symlinks("a")),
		"a file without a digest":    {Files: []*repb.FileNode{{Name: "a"}}},
		"a directory without one":    {Directories: []*repb.DirectoryNode{{Name: "a"}}},
		"a symlink without a target": {Symlinks: []*repb.SymlinkNode{{Name: "a"}}},
	}
	for _, name := range []string{"", ".", "..", "a/b", "/a", "a\x00b"} {
		cases[fmt.Sprintf("a file named %q", name)] = files(name)
		cases[fmt.Sprintf("a directory named %q", name)] = directories(name)
		cases[fmt.Sprintf("a symlink named %q", name)] = symlinks(name)
	}
	for what, dir := range cases {
		bad := c.putProto(dir)
		// At the root and below it.
		below := c.putProto(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: "sub", Digest: bad}}})
		for where, root := range map[string]*repb.Digest{"the root": bad, "a directory": below} {
			c.refused(fmt.Sprintf("%s in %s", what, where), job{root: root}, []string{bad.Hash}, codes.InvalidArgument)
		}
	}
}

// chain uploads depth nested directories with the same name inside a root with the probe, and returns the root.
func (c *client) chain(name string, depth int) *repb.Digest {
	c.Helper()
	b, d := encoded(c, &repb.Directory{})
	blobs := [][]byte{b}
	for range depth - 1 {
		b, d = encoded(c, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: name, Digest: d}}})
		blobs = append(blobs, b)
	}
	probe := c.probeFile()
	b, d = encoded(c, &repb.Directory{
		Files:       []*repb.FileNode{{Name: "probe", Digest: c.put([]byte(probe.text)), IsExecutable: true}},
		Directories: []*repb.DirectoryNode{{Name: name, Digest: d}},
	})
	c.putAll(append(blobs, b))
	return d
}

func deepDirectories(c *client) {
	none := c.put(garbage())
	c.refused("a malformed directory", job{root: c.putProto(&repb.Directory{
		Directories: []*repb.DirectoryNode{{Name: "a", Digest: none}},
	})}, []string{none.Hash}, codes.InvalidArgument)
	c.refused("a malformed input root", job{root: none}, []string{none.Hash}, codes.InvalidArgument)
	for what, root := range map[string]*repb.Digest{
		"900 directories within one another":        c.chain("d", 900),
		"1,500 directories within one another":      c.chain("d", 1500),
		"20,000 directories within one another":     c.chain("d", 20_000),
		"a path of 8,000 bytes, longer than any os": c.chain(strings.Repeat("n", 200), 40),
		"a name of 255 bytes":                       c.chain(strings.Repeat("n", 255), 1),
		"a name of 256 bytes, longer than any file": c.chain(strings.Repeat("n", 256), 1),
	} {
		// The tree is either laid out completely or rejected.
		if a := c.try(job{steps: []string{"say ran"}, root: root}); a.err != nil {
			c.wantCode("Execute of an action with "+what, a.err, codes.InvalidArgument)
		} else if stdout, _ := c.wantSuccess(what, a); stdout != "ran\n" {
			c.Errorf("%s: got stdout %q", what, stdout)
		}
	}
	c.still("deep directories")
}

// variables returns environment variables from pairs of name and value.
func variables(words ...string) (all []*repb.Command_EnvironmentVariable) {
	for v := range slices.Chunk(words, 2) {
		all = append(all, &repb.Command_EnvironmentVariable{Name: v[0], Value: v[1]})
	}
	return all
}

func badEnvironment(c *client) {
	with := func(words ...string) job {
		return job{steps: []string{"report"}, command: &repb.Command{EnvironmentVariables: variables(words...)}}
	}
	for _, name := range []string{"", "A=B", "=", "A\x00B"} {
		c.refused(fmt.Sprintf("a variable named %q", name), with(name, "x"), []string{"variable"}, codes.InvalidArgument)
	}
	for range 2 { // the answer must be the same
		c.refused("a variable twice", with("TWICE", "1", "TWICE", "2"), []string{"TWICE"}, codes.InvalidArgument)
		a := c.try(with("Z", "1", "A", "2"))
		if !c.wantCode("Execute of an action with unsorted variables", a.err, codes.OK, codes.InvalidArgument) || a.err != nil {
			continue
		}
		stdout, _ := c.wantSuccess("unsorted variables", a)
		if env := c.report(stdout).Env; !slices.Contains(env, "Z=1") || !slices.Contains(env, "A=2") {
			c.Errorf("unsorted variables: got %q, want A=2 and Z=1", env)
		}
	}
}

func badOutputPaths(c *client) {
	for _, p := range []string{"/x", "x/", "../x", "a/../../x", "..", "x\x00y"} {
		c.refused(fmt.Sprintf("output_paths %q", p), job{outputs: []string{p}}, []string{"output_paths"}, codes.InvalidArgument)
		c.refused(fmt.Sprintf("output_files %q", p), job{command: &repb.Command{OutputFiles: []string{p}}}, []string{"output_files"}, codes.InvalidArgument)
		c.refused(fmt.Sprintf("output_directories %q", p), job{command: &repb.Command{OutputDirectories: []string{p}}}, []string{"output_directories"}, codes.InvalidArgument)
	}
	c.refused("an output twice", job{steps: []string{"write x 1"}, outputs: []string{"x", "x"}}, []string{"x"}, codes.InvalidArgument, codes.OK)
	a := c.try(job{steps: []string{"write x 1", "write a 1"}, outputs: []string{"x", "a"}})
	if c.wantCode("Execute of an action with unsorted outputs", a.err, codes.OK, codes.InvalidArgument) && a.err == nil {
		c.wantOutputs("unsorted outputs", a.response.GetResult(), "file a", "file x")
	}
	// Outside the working directory but inside the input root.
	_, r := c.succeed(job{
		steps: []string{"write ../out 1"}, files: map[string]file{"w/": {}}, outputs: []string{"../out"},
		command: &repb.Command{WorkingDirectory: "w"},
	})
	c.wantOutputs("output_paths ../out from w", r, "file ../out")
	// The working directory itself.
	for what, cmd := range map[string]*repb.Command{
		"output_paths": {OutputPaths: []string{""}}, "output_directories": {OutputDirectories: []string{""}},
	} {
		cmd.WorkingDirectory = "w"
		_, r := c.succeed(job{steps: []string{"write made 1"}, files: map[string]file{"w/": {}}, command: cmd})
		c.wantOutputs(what+" with the working directory", r, "directory ")
	}
}

// wantOutputs checks the outputs of a result in the form of outputsOf.
func (c *client) wantOutputs(what string, r *repb.ActionResult, want ...string) {
	c.Helper()
	expect.Slices(c, outputsOf(r), want, "%s: outputs", what)
}

func outputFields(c *client) {
	steps := []string{"write a 1", "write b 2", "mkdirs c", "write c/x 3"}
	_, r := c.succeed(job{steps: steps, command: &repb.Command{
		OutputPaths: []string{"a"}, OutputFiles: []string{"b"}, OutputDirectories: []string{"c"},
	}})
	c.wantOutputs("output_paths beside output_files and output_directories", r, "file a")
	_, r = c.succeed(job{steps: steps, command: &repb.Command{OutputFiles: []string{"b"}, OutputDirectories: []string{"c"}}})
	c.wantOutputs("output_files and output_directories", r, "directory c", "file b")
}

func outputConflicts(c *client) {
	for what, cmd := range map[string]*repb.Command{
		"a file below a file":               {OutputFiles: []string{"x", "x/y"}},
		"one path as a file and directory":  {OutputFiles: []string{"x"}, OutputDirectories: []string{"x"}},
		"a directory below a file":          {OutputFiles: []string{"x"}, OutputDirectories: []string{"x/y"}},
		"a directory far below a file":      {OutputFiles: []string{"x"}, OutputDirectories: []string{"x/y/z"}},
		"a file below, with others between": {OutputFiles: []string{"x", "x-y", "x.z", "x/y"}},
	} {
		c.refused(what, job{command: cmd}, []string{"x"}, codes.InvalidArgument)
	}
}

func badWorkingDirectory(c *client) {
	files := map[string]file{"a/b": {text: "a file"}}
	for _, dir := range []string{"/x", "..", "../x", "a/../../x"} {
		c.refused(fmt.Sprintf("working_directory %q", dir), job{files: files, command: &repb.Command{WorkingDirectory: dir}},
			[]string{"working_directory"}, codes.InvalidArgument)
	}
	for _, dir := range []string{"nowhere", "a/nowhere", "a/b"} {
		c.refused(fmt.Sprintf("working_directory %q", dir), job{files: files, command: &repb.Command{WorkingDirectory: dir}},
			[]string{dir}, codes.InvalidArgument, codes.FailedPrecondition)
	}
}
