// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// resultRules are the rules about results.
var resultRules = []rule{
	{111, "exec", "missing outputs are omitted", execution, missingOutputs},
	{112, "exec", "outputs of another type than api 2.0 declares", execution, wrongKind},
	{113, "exec", "output files", execution, outputFiles},
	{114, "exec", "output symlinks", execution, outputSymlinks},
	{115, "exec", "output directories", execution, outputDirectories},
	{116, "exec", "special and unreadable files in outputs", execution, specialFiles},
	{117, "exec", "output names that are not UTF-8", execution, nonUTF8Names},
	{118, "exec", "stdout and stderr are exact", execution, exactStreams},
	{119, "exec", "a reported result is complete", execution, completeResult},
	{120, "exec", "what the action cache records", execution, recordedResults},
	{121, "exec", "execution metadata", execution, executionMetadata},
	{122, "exec", "cached results keep their metadata", execution, keptMetadata},
	{123, "exec", "a result is never empty", execution, neverEmpty},
	{124, "exec", "inlined outputs and the size of a response", execution, inlinedOutputs},
	{125, "exec", "server logs", execution, serverLogs},
	{126, "exec", "messages for people", ownServer, messages},
	{127, "exec", "output while the action runs", execution, liveOutput},
	{128, "exec", "request metadata", execution, requestMetadata},
}

func missingOutputs(c *client) {
	d := c.prepare(job{
		steps: []string{"write file 1", "mkdir dir", "symlink x link"}, outputs: []string{"dir", "elsewhere/never", "file", "link", "never"},
	})
	_, r := c.wantSuccess("an action that makes three of five outputs", c.request(d, nil))
	c.wantOutputs("an action that makes three of five outputs", r, "directory dir", "file file", "symlink link")
	_, r = c.succeed(job{command: &repb.Command{OutputFiles: []string{"never"}, OutputDirectories: []string{"nowhere/never"}}, steps: []string{"say x"}})
	if n := len(r.GetOutputFiles()); n > 0 {
		c.Errorf("an action that makes no output: got %v", r)
	}
}

func wrongKind(c *client) {
	for what, j := range map[string]job{
		"a directory in output_files":   {steps: []string{"mkdir out"}, command: &repb.Command{OutputFiles: []string{"out"}}},
		"a file in output_directories":  {steps: []string{"remove out", "write out 1"}, command: &repb.Command{OutputDirectories: []string{"out"}}},
		"a file, if nothing is there":   {steps: []string{"write out 1"}, command: &repb.Command{OutputDirectories: []string{"out"}}},
		"a fifo in output_directories ": {steps: []string{"fifo out"}, command: &repb.Command{OutputDirectories: []string{"out"}}},
	} {
		d := c.prepare(j)
		a := c.request(d, nil)
		if a.err == nil && a.response.GetResult().GetExitCode() == 99 {
			continue // whether the directory exists at the start is up to the server: rule 100
		}
		c.wantText(what, a.err, []string{"out"}, codes.FailedPrecondition)
		c.notRecorded(what, d)
	}
}

func outputFiles(c *client) {
	_, r := c.succeed(job{
		steps: []string{
			"write one 1", "write ../empty ", "write tool x", "chmod 711 tool", "write group x", "chmod 654 group", "random 3000000 big", "mkdirs a/b", "write a/b/c deep",
		},
		files: map[string]file{"w/": {}}, outputs: []string{"../empty", "a/b/c", "big", "group", "never", "one", "tool"},
		command: &repb.Command{WorkingDirectory: "w"},
	})
	var got []string
	for _, f := range r.GetOutputFiles() {
		got = append(got, fmt.Sprintf("%s %d %v", f.GetPath(), f.GetDigest().GetSizeBytes(), f.GetIsExecutable()))
		c.get(f.GetDigest()) // checks the digest
	}
	slices.Sort(got)
	want := []string{"../empty 0 false", "a/b/c 4 false", "big 3000000 false", "group 1 true", "one 1 false", "tool 1 true"}
	expect.Slices(c, got, want)
	for _, f := range r.GetOutputFiles() {
		if f.GetPath() == "../empty" && f.GetDigest().GetHash() != cas.SHA256.Sum(nil).Hash() {
			c.Errorf("an empty output: got digest %v", f.GetDigest())
		}
	}
}

func outputSymlinks(c *client) {
	steps := []string{"symlink target file", "mkdir dir", "symlink dir link"}
	_, r := c.succeed(job{steps: steps, outputs: []string{"file", "link"}})
	var got []string
	for _, s := range r.GetOutputSymlinks() {
		got = append(got, s.GetPath()+" "+s.GetTarget())
	}
	slices.Sort(got)
	if want := []string{"file target", "link dir"}; !slices.Equal(got, want) || len(r.GetOutputFiles())+len(r.GetOutputDirectories()) > 0 {
		c.Errorf("output_paths: got symlinks %q in %v, want only %q", got, r, want)
	}
	// The fields for old clients, which new ones also find in output_symlinks.
	a := c.try(job{steps: steps, command: &repb.Command{OutputFiles: []string{"file"}, OutputDirectories: []string{"link"}}})
	if a.err == nil && a.response.GetResult().GetExitCode() != 0 {
		a = c.try(job{steps: append([]string{"remove link"}, steps...), command: &repb.Command{OutputFiles: []string{"file"}, OutputDirectories: []string{"link"}}})
	}
	_, r = c.wantSuccess("output_files and output_directories", a)
	files, dirs := r.GetOutputFileSymlinks(), r.GetOutputDirectorySymlinks()
	if len(files) != 1 || files[0].GetPath() != "file" || files[0].GetTarget() != "target" || len(dirs) != 1 || dirs[0].GetPath() != "link" || dirs[0].GetTarget() != "dir" {
		c.Errorf("output_files and output_directories: got %v and %v, want file -> target and link -> dir", files, dirs)
	}
	if c.ours && len(r.GetOutputSymlinks()) != 2 {
		c.Errorf("output_files and output_directories: got output_symlinks %v, want both", r.GetOutputSymlinks())
	}
	absolute := c.try(job{steps: []string{"symlink /no/where abs"}, outputs: []string{"abs"}})
	if c.caps.GetCacheCapabilities().GetSymlinkAbsolutePathStrategy() == repb.SymlinkAbsolutePathStrategy_DISALLOWED {
		c.wantCode("an absolute symlink as an output", absolute.err, codes.FailedPrecondition)
	} else if _, r := c.wantSuccess("an absolute symlink as an output", absolute); len(r.GetOutputSymlinks()) != 1 || r.OutputSymlinks[0].GetTarget() != "/no/where" {
		c.Errorf("an absolute symlink as an output: got %v, want /no/where", r)
	}
}

func outputDirectories(c *client) {
	steps := []string{
		"mkdirs d/x/same", "mkdirs d/y/same", "mkdirs d/empty", "write d/x/same/f s", "write d/y/same/f s", "symlink x d/link", "symlink ../../out d/y/up",
		"write d/t t", "chmod 755 d/t",
	}
	wantPaths := []string{"empty/", "link", "t", "x/", "x/same/", "x/same/f", "y/", "y/same/", "y/same/f", "y/up"}
	digests := map[string]bool{}
	for what, cmd := range map[string]*repb.Command{
		"output_paths":       {OutputPaths: []string{"d"}},
		"output_directories": {OutputDirectories: []string{"d"}},
		"TREE_AND_DIRECTORY": {OutputPaths: []string{"d"}, OutputDirectoryFormat: repb.Command_TREE_AND_DIRECTORY},
		"DIRECTORY_ONLY":     {OutputPaths: []string{"d"}, OutputDirectoryFormat: repb.Command_DIRECTORY_ONLY},
	} {
		_, r := c.succeed(job{steps: steps, command: cmd})
		if len(r.GetOutputDirectories()) != 1 || r.OutputDirectories[0].GetPath() != "d" {
			c.Errorf("%s: got %v, want a directory d", what, r.GetOutputDirectories())
			continue
		}
		o := r.OutputDirectories[0]
		if cmd.OutputDirectoryFormat != repb.Command_DIRECTORY_ONLY || o.GetTreeDigest() != nil {
			digests[o.GetTreeDigest().GetHash()] = true
			t := c.decodeTree(o.GetTreeDigest())
			paths, err := walk(t)
			expect.That(c, err == nil && slices.Equal(paths, wantPaths),
				"%s: got a Tree with %q, %v, want %q", what, paths, err, wantPaths)
			expect.Error(c, once(t), nil, "%s", what)
			if err := sorted(t); o.GetIsTopologicallySorted() && err != nil {
				c.Errorf("%s: is_topologically_sorted is set, but %v", what, err)
			} else if c.ours && !o.GetIsTopologicallySorted() {
				c.Errorf("%s: is_topologically_sorted is not set", what)
			}
			for _, f := range t.GetRoot().GetFiles() {
				expect.That(c, f.GetIsExecutable(), "%s: %s is not executable", what, f.GetName())
				c.get(f.GetDigest())
			}
		}
		asked := cmd.OutputDirectoryFormat == repb.Command_TREE_AND_DIRECTORY || cmd.OutputDirectoryFormat == repb.Command_DIRECTORY_ONLY
		switch root := o.GetRootDirectoryDigest(); {
		case asked && root != nil:
			c.directoriesOf(what, root, o.GetTreeDigest())
		case asked && (c.ours || o.GetTreeDigest() == nil):
			c.Errorf("%s: root_directory_digest is missing: %v", what, o)
		}
	}
	expect.That(c, len(digests) == 1, "got different Trees for the same directory: %v", digests)
}

// once returns an error if a child of a Tree occurs twice or belongs to no directory.
func once(t *repb.Tree) error {
	needed := map[string]bool{}
	for _, d := range append([]*repb.Directory{t.GetRoot()}, t.GetChildren()...) {
		for _, sub := range d.GetDirectories() {
			needed[sub.GetDigest().GetHash()] = true
		}
	}
	seen := map[string]bool{}
	for _, d := range t.GetChildren() {
		_, digest, err := cas.MarshalProto(cas.SHA256, d)
		if err != nil {
			return err
		}
		if h := digest.Hash(); seen[h] {
			return fmt.Errorf("child %s occurs twice in the Tree", h)
		} else if !needed[h] {
			return fmt.Errorf("child %s of the Tree belongs to no directory", h)
		}
		seen[digest.Hash()] = true
	}
	return nil
}

// sorted returns an error if a child of a Tree precedes one of its parents.
func sorted(t *repb.Tree) error {
	place := map[string]int{}
	for i, d := range t.GetChildren() {
		_, digest, err := cas.MarshalProto(cas.SHA256, d)
		if err != nil {
			return err
		}
		place[digest.Hash()] = i
	}
	for i, d := range t.GetChildren() {
		for _, sub := range d.GetDirectories() {
			if at, ok := place[sub.GetDigest().GetHash()]; ok && at <= i {
				return fmt.Errorf("child %s of the Tree is at %d, after which its parent is at %d", sub.GetDigest().GetHash(), at, i)
			}
		}
	}
	return nil
}

// directoriesOf checks that all Directories below root are present, and that root is the root of the Tree, if there is
// one.
func (c *client) directoriesOf(what string, root, tree *repb.Digest) {
	c.Helper()
	pages, err := c.getTree(&repb.GetTreeRequest{InstanceName: c.instance, RootDigest: root})
	n := map[string]bool{}
	for _, page := range pages {
		for _, d := range page.GetDirectories() {
			_, digest := encoded(c, d)
			n[digest.Hash] = true
		}
	}
	// The root, d/x, d/y, d/empty, and d/x/same, which equals d/y/same.
	expect.That(c, err == nil && len(n) == 5 && n[root.GetHash()],
		"%s: GetTree of root_directory_digest: got %d directories, %v, want 5", what, len(n), err)
	if tree == nil {
		return
	}
	if _, d := encoded(c, c.decodeTree(tree).GetRoot()); !proto.Equal(d, root) {
		c.Errorf("%s: root_directory_digest %v differs from the root of the Tree %v", what, root, d)
	}
}

func specialFiles(c *client) {
	for _, special := range []string{"fifo", "socket"} {
		a := c.try(job{steps: []string{special + " odd", "write fine 1"}, outputs: []string{"fine", "odd"}})
		if a.err != nil {
			c.wantText("a "+special+" as an output", a.err, []string{"odd"}, codes.FailedPrecondition)
		} else {
			_, r := c.wantSuccess(special, a)
			c.wantOutputs("a "+special+" as an output", r, "file fine")
			expect.That(c, !c.ours, "a %s as an output: got %v, want FAILED_PRECONDITION", special, r)
		}
		a = c.try(job{steps: []string{"mkdir d", special + " d/odd", "write d/fine 1"}, outputs: []string{"d"}})
		if !c.wantCode("a "+special+" in an output directory", a.err, codes.OK, codes.FailedPrecondition) || a.err != nil {
			continue
		}
		_, r := c.wantSuccess(special, a)
		expect.Slices(c, c.treeOf(r, "d"), []string{"fine"}, "a %s in an output directory (only fine)", special)
		if text := a.response.GetMessage(); c.ours && !strings.Contains(text, `"d/odd"`) {
			c.Errorf("a %s in an output directory: got message %q, want one that names d/odd", special, text)
		}
	}
	if c.ours {
		// If the action itself failed, the client needs to see that.
		r := c.run(job{steps: []string{"fifo odd", "write fine 1", "exit 3"}, outputs: []string{"fine", "odd"}})
		expect.That(c, r.Result.GetExitCode() == 3,
			"a failed action with a fifo as an output: got %v, want its exit code 3", r)
		c.wantOutputs("a failed action with a fifo as an output", r.Result, "file fine")
	}
	_, r := c.succeed(job{
		steps:   []string{"write f secret", "chmod 0 f", "mkdir d", "write d/f secret", "chmod 0 d/f", "chmod 0 d"},
		outputs: []string{"d", "f"},
	})
	expect.Equal(c, c.file(r, "f"), "secret", "a file of mode 000")
	expect.Slices(c, c.treeOf(r, "d"), []string{"f"}, "a directory of mode 000 (f in it)")
}

func nonUTF8Names(c *client) {
	d := c.prepare(job{steps: []string{"mkdir d", "odd d"}, outputs: []string{"d"}})
	c.wantText("a name that is not UTF-8 in an output directory", c.request(d, nil).err, []string{`\xff`}, codes.FailedPrecondition)
	c.notRecorded("a name that is not UTF-8 in an output directory", d)
}
