// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// large is a text that is not copied into the sandbox but mounted from the store.
var large = strings.Repeat("0123456789abcdef", 8<<10)

func TestExecute(t *testing.T) {
	c := serve(t)
	for _, test := range []struct {
		name string
		run  func(*client)
	}{
		{"Rule070_MissingActionIsListed", missingAction},
		{"Rule071_CommandMustBeWhole", badCommands},
		{"Rule072_AllMissingBlobsAreListedAtOnce", missingInputs},
		{"Rule074_DirectoryMustBeCanonical", badDirectory},
		{"Rule081_TimeoutMustBeSane", badTimeout},
		{"Rule094_HitsAndSkips", hits},
		{"Rule095_EqualActionsMerge", merge},
		{"Rule096_DoNotCacheIsNotCached", doNotCache},
		{"Rule098_InputTreeIsExact", inputTree},
		{"Rule098_NodePropertiesInAndOut", nodeProperties},
		{"Rule099_InputsCannotBeChanged", changeInputs},
		{"Rule100_ParentsOfOutputsExist", parents},
		{"Rule101_InputAtOutputPathMayBeReplaced", replaceInput},
		{"Rule102_ProgramIsFoundAsByAShell", programs},
		{"Rule103_EnvironmentIsTheCommands", environment},
		{"Rule105_NothingPersists", fresh},
		{"Rule107_BackgroundProcessesDie", background},
		{"Rule108_TimeoutComesWithResult", timeouts},
		{"Rule109_SignalIsExitCode", signals},
		{"Rule112_WrongTypeOfOutput", wrongType},
		{"Rule113_Outputs", outputs},
		{"Rule114_SymlinksAreKept", symlinks},
		{"Rule115_OutputDirectories", directories},
		{"Rule116_SpecialFilesAreLeftOut", specialFiles},
		{"Rule118_OutputStreamsAreExact", streams},
		{"Rule120_OnlySuccessIsCached", onlySuccess},
		{"Rule121_MetadataIsWhole", metadata},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(c.in(t)) })
	}
}

// wantMissing checks that r lists exactly the blobs ds, in one detail (rule 72).
func (c *client) wantMissing(r *repb.ExecuteResponse, ds ...*repb.Digest) {
	c.Helper()
	if code(r) != codes.FailedPrecondition || len(r.Status.Details) != 1 {
		c.Fatalf("got status %v, want FAILED_PRECONDITION with one detail", r.Status)
	}
	var f errdetails.PreconditionFailure
	if err := r.Status.Details[0].UnmarshalTo(&f); err != nil {
		c.Fatal(err)
	}
	var got, want []string
	for _, v := range f.Violations {
		if v.Type != "MISSING" {
			c.Errorf("violation of type %q", v.Type)
		}
		got = append(got, v.Subject)
	}
	for _, d := range ds {
		want = append(want, fmt.Sprintf("blobs/%s/%d", d.Hash, d.SizeBytes))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		c.Errorf("missing: got %v, want %v", got, want)
	}
}

func absent(text string) *repb.Digest { return cas.SHA256.Sum([]byte(text)).Proto() }

func missingAction(c *client) {
	d := absent("no such action")
	c.wantMissing(c.execute(d, false), d)
}

func missingInputs(c *client) {
	a, b, cmd := absent("file a"), absent("file b"), absent("a command")
	sub := absent("a directory")
	root := c.putProto(&repb.Directory{
		Files: []*repb.FileNode{{Name: "a", Digest: a}, {Name: "b", Digest: b}, {Name: "c", Digest: c.put([]byte("present"))}},
		Directories: []*repb.DirectoryNode{
			{Name: "known", Digest: c.putProto(&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: a}}})},
			{Name: "sub", Digest: sub},
		},
	})
	r := c.execute(c.putProto(&repb.Action{CommandDigest: cmd, InputRootDigest: root}), false)
	c.wantMissing(r, a, b, cmd, sub)
}

// wantInvalid checks that a is refused with words that name what.
func (c *client) wantInvalid(a action, what string) {
	c.Helper()
	r := c.do(a)
	if code(r) != codes.InvalidArgument || !strings.Contains(r.Status.Message, what) {
		c.Errorf("got status %v, want INVALID_ARGUMENT that names %q", r.Status, what)
	}
}

func badCommands(c *client) {
	sh := []string{"/bin/true"}
	for name, cmd := range map[string]*repb.Command{
		"arguments":         {},
		"set twice":         {Arguments: sh, EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A"}, {Name: "A"}}},
		"malformed":         {Arguments: sh, EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A=B"}}},
		"leads out":         {Arguments: sh, OutputPaths: []string{"../x"}},
		"relative":          {Arguments: sh, OutputPaths: []string{"/x"}},
		"trailing":          {Arguments: sh, OutputPaths: []string{"x/"}},
		"same path":         {Arguments: sh, OutputPaths: []string{"x", "x"}},
		"parent":            {Arguments: sh, OutputFiles: []string{"x", "x/y"}},
		"working_directory": {Arguments: sh, WorkingDirectory: "/x"},
		"nowhere":           {Arguments: sh, WorkingDirectory: "nowhere"},
		"node_properties":   {Arguments: sh, OutputNodeProperties: []string{"mtime", "owner"}},
	} {
		c.wantInvalid(action{command: cmd}, name)
	}
	d := c.putProto(&repb.Action{CommandDigest: c.put([]byte("\xff\xff\xff")), InputRootDigest: c.tree(nil)})
	if r := c.execute(d, false); code(r) != codes.InvalidArgument {
		c.Errorf("a command that is none: got status %v", r.Status)
	}
}

func badDirectory(c *client) {
	f := c.put([]byte("x"))
	for what, dir := range map[string]*repb.Directory{
		"ascend":  {Files: []*repb.FileNode{{Name: "b", Digest: f}, {Name: "a", Digest: f}}},
		`"a"`:     {Files: []*repb.FileNode{{Name: "a", Digest: f}}, Symlinks: []*repb.SymlinkNode{{Name: "a", Target: "x"}}},
		`".."`:    {Files: []*repb.FileNode{{Name: "..", Digest: f}}},
		`"x/y"`:   {Files: []*repb.FileNode{{Name: "x/y", Digest: f}}},
		"digest":  {Files: []*repb.FileNode{{Name: "a"}}},
		`"target`: {Symlinks: []*repb.SymlinkNode{{Name: "target-less"}}},
	} {
		root := c.putProto(dir)
		c.wantInvalid(action{script: "true", change: func(a *repb.Action) { a.InputRootDigest = root }}, what)
	}
}

func badTimeout(c *client) {
	for what, d := range map[string]*durationpb.Duration{
		"negative":  durationpb.New(-time.Second),
		"permitted": durationpb.New(1000 * time.Hour),
	} {
		c.wantInvalid(action{script: "true", change: func(a *repb.Action) { a.Timeout = d }}, what)
	}
}

func hits(c *client) {
	a := action{script: "cat /proc/sys/kernel/random/uuid 2>/dev/null; head -c 100000 /dev/urandom > out", outputs: []string{"out"}}
	_, first := c.ok(a)
	r := c.do(a)
	if !r.CachedResult || !proto.Equal(r.Result, first) {
		c.Errorf("the second execution is not a hit with the first's result: %v", r)
	}
	a.skip = true
	if r := c.do(a); r.CachedResult || proto.Equal(r.Result.OutputFiles[0].Digest, first.OutputFiles[0].Digest) {
		c.Error("skip_cache_lookup was answered from the cache")
	}
	got, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{ActionDigest: c.upload(a)})
	if err != nil || proto.Equal(got.OutputFiles[0].Digest, first.OutputFiles[0].Digest) {
		c.Errorf("skip_cache_lookup did not replace the entry: %v, %v", got, err)
	}
}

func merge(c *client) {
	d := c.upload(action{script: "sleep 2; head -c 20 /dev/urandom | od -An -tx1 > out", outputs: []string{"out"}})
	results := make([]*repb.ExecuteResponse, 4)
	var all sync.WaitGroup
	for i := range results {
		all.Go(func() { results[i] = c.execute(d, true) })
	}
	all.Wait()
	for _, r := range results[1:] {
		if !proto.Equal(r.Result, results[0].Result) {
			c.Errorf("equal actions at once have different results: %v and %v", r.Result, results[0].Result)
		}
	}
}

func doNotCache(c *client) {
	a := action{script: "echo done > out", outputs: []string{"out"}, doNotCache: true}
	c.ok(a)
	if r := c.do(a); r.CachedResult {
		c.Error("an action with do_not_cache was cached")
	}
	if _, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{ActionDigest: c.upload(a)}); status.Code(err) != codes.NotFound {
		c.Errorf("its result is recorded: %v", err)
	}
}

func inputTree(c *client) {
	out, _ := c.ok(action{
		script: `find . -printf '%y %m %T@ %p %l\n' | LC_ALL=C sort -k4; cat a dir/b; cksum dir/large dir/tool; ./dir/tool | head -c 4`,
		files: map[string]file{
			"a": {text: "A\n"}, "dir/b": {text: "B\n"}, "dir/large": {text: large}, "dir/tool": {text: "#!/bin/sh\necho tool\n#" + large, x: true},
			"dir/script": {text: "#!/bin/sh\n", x: true}, "empty/": {}, "dir/link": {link: "../a"}, "dangling": {link: "no/where"},
			"absolute": {link: "/no/where"}, "dir/sub/deep/file": {text: "x"},
		},
	})
	for _, want := range []string{
		"f 444 1000000000.0000000000 ./a", "f 444 1000000000.0000000000 ./dir/b", "f 444 1000000000.0000000000 ./dir/large", "f 555 1000000000.0000000000 ./dir/tool",
		"f 555 1000000000.0000000000 ./dir/script", "d 555", "./empty", "./dir/link ../a", "./dangling no/where", "./absolute /no/where",
		"./dir/sub/deep/file", "A\nB\n", "tool",
	} {
		if !strings.Contains(out, want) {
			c.Errorf("the tree lacks %q:\n%s", want, out)
		}
	}
	if n := strings.Count(out, "\n"); n != 18 {
		c.Errorf("the tree has other entries than the inputs (%d lines):\n%s", n, out)
	}
}

func changeInputs(c *client) {
	for _, p := range []string{"top", "dir/sub", "dir/large", "dir/tool", "big"} {
		r := c.do(action{
			script: fmt.Sprintf("chmod u+w %[1]s; echo x >> %[1]s || { rm -f %[1]s && echo gone; }", p),
			files: map[string]file{
				"top": {text: "text"}, "dir/sub": {text: "text"}, "dir/large": {text: large + "1"}, "dir/tool": {text: large + "2", x: true}, "big": {text: large + "3"},
			},
			outputs: []string{"out", "dir/out"},
		})
		if r.Result.GetExitCode() == 0 {
			c.Errorf("%s: an input was changed", p)
		}
	}
	// The end of the test compares every blob with its name.
}

func parents(c *client) {
	_, r := c.ok(action{
		script: `test -d a/b && test ! -e a/b/out && test -d w && echo 1 > a/b/out && echo 2 > top && mkdir new && mv new w/moved`,
		files:  map[string]file{"w/in": {text: "x"}}, outputs: []string{"a/b/out", "top", "w/moved"},
	})
	if len(r.OutputFiles) != 2 || len(r.OutputDirectories) != 1 {
		c.Errorf("got outputs %v", r)
	}
	// What API 2.0 declares as a directory is one from the start, as it is where Bazel runs locally.
	_, r = c.ok(action{command: &repb.Command{Arguments: []string{"/bin/sh", "-c", "echo x > d/f"}, OutputDirectories: []string{"d", "e"}}})
	if len(r.OutputDirectories) != 2 {
		c.Errorf("output_directories: got %v", r)
	}
	// And between writable directories things move by rename alone.
	c.ok(action{script: `echo x > x && python3 -c 'import os; os.rename("x", "a/b/out")' 2>/dev/null || perl -e 'rename("x", "a/b/out") or die'`, outputs: []string{"a/b/out"}})
}

func replaceInput(c *client) {
	out, r := c.ok(action{
		script: `cat f; echo new > tmp && mv tmp f; echo more >> g; rm -r d/sub; echo d > d/new`,
		files: map[string]file{
			"f": {text: "old\n"}, "g": {text: "old\n"}, "d/sub/x": {text: "old\n"}, "d/keep": {text: "kept\n"},
		},
		outputs: []string{"d", "f", "g"},
	})
	if out != "old\n" || len(r.OutputFiles) != 2 || len(r.OutputDirectories) != 1 {
		c.Fatalf("got stdout %q, outputs %v", out, r)
	}
	if f, g := c.get(r.OutputFiles[0].Digest), c.get(r.OutputFiles[1].Digest); f != "new\n" || g != "old\nmore\n" {
		c.Errorf("got f %q, g %q", f, g)
	}
	var tree repb.Tree
	if err := proto.Unmarshal([]byte(c.get(r.OutputDirectories[0].TreeDigest)), &tree); err != nil {
		c.Fatal(err)
	}
	if got := fmt.Sprint(len(tree.Children), tree.Root.Files[0].Name, tree.Root.Files[1].Name); got != "0keepnew" {
		c.Errorf("got the directory %v", &tree)
	}
}

func programs(c *client) {
	for _, p := range []struct {
		args []string
		dir  string
		exit int32
	}{
		{[]string{"./dir/tool"}, "", 3},
		{[]string{"dir/tool"}, "", 3},
		{[]string{"./tool"}, "dir", 3},
		{[]string{"true"}, "", 0},
		{[]string{"no-such-program"}, "", 127},
		{[]string{"./no-such-file"}, "", 127},
		{[]string{"./dir/data"}, "", 126},
	} {
		r := c.do(action{
			command: &repb.Command{Arguments: p.args, WorkingDirectory: p.dir},
			files:   map[string]file{"dir/tool": {text: "#!/bin/sh\nexit 3\n", x: true}, "dir/data": {text: "x"}},
		})
		if code(r) != codes.OK || r.Result.GetExitCode() != p.exit {
			c.Errorf("%v in %q: got status %v, exit code %d; want %d", p.args, p.dir, r.Status, r.Result.GetExitCode(), p.exit)
		}
		if p.exit >= 126 && !strings.Contains(c.stderr(r), p.args[0]) {
			c.Errorf("%v: stderr %q does not name the program", p.args, c.stderr(r))
		}
	}
}

func environment(c *client) {
	out, _ := c.ok(action{command: &repb.Command{
		Arguments:            []string{"env"},
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "Z", Value: "1"}, {Name: "A", Value: "x y"}, {Name: "HOME", Value: "/mine"}},
	}})
	want := "A=x y\nHOME=/mine\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nTMPDIR=/tmp\nZ=1\n"
	if out != want {
		c.Errorf("got %q, want %q", out, want)
	}
}

func fresh(c *client) {
	c.ok(action{script: "echo left > /tmp/left; echo left > left; echo left > /dev/shm/left"})
	if out, _ := c.ok(action{script: "ls -A /tmp /dev/shm ."}); strings.Contains(out, "left") {
		c.Errorf("something was left for the next action: %s", out)
	}
}

func background(c *client) {
	mark := fmt.Sprintf("5%d.25", time.Now().UnixNano()%1e9)
	c.ok(action{script: fmt.Sprintf("setsid sleep %s & echo $!", mark)})
	if alive := sandboxtest.Running(c, mark); len(alive) > 0 {
		c.Errorf("alive after its action: %v", alive)
	}
}

func timeouts(c *client) {
	mark := fmt.Sprintf("6%d.25", time.Now().UnixNano()%1e9)
	a := action{
		script:  fmt.Sprintf("echo before; echo partial > out; trap 'echo told; exit 0' TERM; (trap '' TERM; setsid sleep %[1]s) & sleep %[1]s & wait", mark),
		outputs: []string{"out"}, timeout: 2 * time.Second,
	}
	r := c.do(a)
	if code(r) != codes.DeadlineExceeded || r.Result == nil || len(r.Result.OutputFiles) != 1 || !strings.Contains(r.Message, "2s") {
		c.Fatalf("got %v", r)
	}
	if got := c.get(r.Result.StdoutDigest); !strings.Contains(got, "before\n") || !strings.Contains(got, "told\n") {
		c.Errorf("stdout %q lacks what was written before the end", got)
	}
	if alive := sandboxtest.Running(c, mark); len(alive) > 0 {
		c.Errorf("alive after the timeout: %v", alive)
	}
	if r := c.do(a); r.CachedResult {
		c.Error("a timeout was cached")
	}
}

func signals(c *client) {
	r := c.do(action{script: "kill -SEGV $$"})
	if code(r) != codes.OK || r.Result.GetExitCode() != 139 || !strings.Contains(r.Message, "signal 11") {
		c.Errorf("got %v", r)
	}
}

func wrongType(c *client) {
	for what, cmd := range map[string]*repb.Command{
		"mkdir out":                              {OutputFiles: []string{"out"}},
		"rmdir out; echo > out":                  {OutputDirectories: []string{"out"}},
		"mkfifo out":                             {OutputPaths: []string{"out"}},
		"mkdir out; touch out/$(printf '\\377')": {OutputPaths: []string{"out"}},
	} {
		cmd.Arguments = []string{"/bin/sh", "-c", what}
		a := action{command: cmd}
		if r := c.do(a); code(r) != codes.FailedPrecondition || len(r.Status.Details) != 0 || !strings.Contains(r.Status.Message, "out") {
			c.Errorf("%s as %v: got %v", what, cmd, r)
		}
		if r := c.do(a); r.CachedResult {
			c.Errorf("%s: cached", what)
		}
	}
}

// Rule 116: what the API cannot say is left out of a directory, and the client is told.
func specialFiles(c *client) {
	r := c.do(action{script: "mkdir d; mkfifo d/pipe; echo x > d/f", outputs: []string{"d"}})
	if code(r) != codes.OK || r.GetResult().GetExitCode() != 0 || !strings.Contains(r.Message, `the named pipe "d/pipe"`) {
		c.Fatalf("got %v", r)
	}
	var tree repb.Tree
	if err := proto.Unmarshal([]byte(c.get(r.Result.OutputDirectories[0].TreeDigest)), &tree); err != nil || len(tree.Root.Files) != 1 {
		c.Errorf("got %v, %v", &tree, err)
	}
}

func outputs(c *client) {
	_, r := c.ok(action{
		command: &repb.Command{
			Arguments:        []string{"/bin/sh", "-c", "echo 1 > one; : > ../empty; echo x > tool; chmod 711 tool; echo secret > closed; chmod 0 closed; head -c 300000 /dev/zero > big"},
			WorkingDirectory: "w", OutputPaths: []string{"../empty", "big", "closed", "never", "one", "tool"},
		},
		files: map[string]file{"w/": {}},
	})
	var got []string
	for _, f := range r.OutputFiles {
		got = append(got, fmt.Sprintf("%s %d %v", f.Path, f.Digest.SizeBytes, f.IsExecutable))
		c.get(f.Digest)
	}
	want := []string{"../empty 0 false", "big 300000 false", "closed 7 false", "one 2 false", "tool 2 true"}
	if !slices.Equal(got, want) {
		c.Errorf("got %q, want %q", got, want)
	}
}

func symlinks(c *client) {
	script := "ln -s target file; mkdir dir; ln -s dir link; ln -s /etc/shadow abs"
	_, r := c.ok(action{script: script, outputs: []string{"abs", "file", "link"}})
	var got []string
	for _, s := range r.OutputSymlinks {
		got = append(got, s.Path+" "+s.Target)
	}
	if want := []string{"abs /etc/shadow", "file target", "link dir"}; !slices.Equal(got, want) || len(r.OutputFiles) != 0 {
		c.Errorf("output_paths: got %q in %v, want %q", got, r, want)
	}
	_, r = c.ok(action{command: &repb.Command{Arguments: []string{"/bin/sh", "-c", "rmdir link; " + script}, OutputFiles: []string{"file"}, OutputDirectories: []string{"link"}}})
	if len(r.OutputFileSymlinks) != 1 || len(r.OutputDirectorySymlinks) != 1 || r.OutputDirectorySymlinks[0].Target != "dir" {
		c.Errorf("API 2.0: got %v", r)
	}
}

func directories(c *client) {
	for _, cmd := range []*repb.Command{
		{OutputPaths: []string{"d"}},
		{OutputDirectories: []string{"d"}},
		{OutputPaths: []string{"d"}, OutputDirectoryFormat: repb.Command_TREE_AND_DIRECTORY},
	} {
		cmd.Arguments = []string{"/bin/sh", "-c", "mkdir -p d/x/same d/y/same d/empty; echo s | tee d/x/same/f > d/y/same/f; ln -s x d/link; echo t > d/t; chmod +x d/t"}
		_, r := c.ok(action{command: cmd})
		if len(r.OutputDirectories) != 1 || r.OutputDirectories[0].Path != "d" {
			c.Fatalf("got %v", r)
		}
		o := r.OutputDirectories[0]
		var tree repb.Tree
		if err := proto.Unmarshal([]byte(c.get(o.TreeDigest)), &tree); err != nil {
			c.Fatal(err)
		}
		if len(tree.Root.Directories) != 3 || len(tree.Children) != 3 || !o.IsTopologicallySorted ||
			tree.Root.Symlinks[0].Target != "x" || !tree.Root.Files[0].IsExecutable {
			c.Errorf("got %v of %v", &tree, o)
		}
		if cmd.OutputDirectoryFormat != repb.Command_TREE_AND_DIRECTORY {
			continue
		}
		got, err := c.cas.GetTree(c.Context(), &repb.GetTreeRequest{RootDigest: o.RootDirectoryDigest})
		if err != nil {
			c.Fatal(err)
		}
		if page, err := got.Recv(); err != nil || !proto.Equal(page.Directories[0], tree.Root) {
			c.Errorf("root_directory_digest: got %v, %v", page, err)
		}
	}
}

func streams(c *client) {
	out, result := c.ok(action{script: `printf 'a\000\377b'; printf 'err' >&2`})
	if out != "a\x00\xffb" || c.get(result.StderrDigest) != "err" {
		c.Errorf("got stdout %q, stderr %q", out, c.get(result.StderrDigest))
	}
	// A workspace that is full, or an action that took away its own rights, costs neither log nor exit code.
	if r := c.do(action{script: "echo log; chmod 0 .; exit 7"}); r.Result.GetExitCode() != 7 || c.get(r.Result.StdoutDigest) != "log\n" {
		c.Errorf("chmod 0: got %v", r)
	}
	r := c.do(action{script: "mkfifo bad; echo why > log; exit 3", outputs: []string{"bad", "log"}})
	if code(r) != codes.OK || r.Result.GetExitCode() != 3 || len(r.Result.OutputFiles) != 1 {
		c.Errorf("a failure with a bad output: got %v", r)
	}
	if _, r := c.ok(action{script: "true"}); r.StdoutDigest.GetSizeBytes() != 0 || r.StdoutDigest.GetHash() == "" {
		c.Errorf("silence: got digest %v", r.StdoutDigest)
	}
}

func onlySuccess(c *client) {
	a := action{script: "echo out > out; exit 5", outputs: []string{"out"}}
	r := c.do(a)
	if code(r) != codes.OK || r.Result.GetExitCode() != 5 || len(r.Result.OutputFiles) != 1 || !strings.Contains(r.Message, "5") {
		c.Errorf("got %v", r)
	}
	if _, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{ActionDigest: c.upload(a)}); status.Code(err) != codes.NotFound {
		c.Errorf("a failed action is recorded: %v", err)
	}
	a.script = "echo out > out; exit 0"
	c.ok(a)
	got, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{ActionDigest: c.upload(a)})
	if err != nil || len(got.OutputFiles) != 1 {
		c.Errorf("a successful action is not recorded: %v, %v", got, err)
	}
}

func metadata(c *client) {
	_, r := c.ok(action{script: "sleep 0.05"})
	m := r.ExecutionMetadata
	if m.GetWorker() == "" {
		c.Error("the worker has no name")
	}
	times := []*timestamppb.Timestamp{
		m.QueuedTimestamp, m.WorkerStartTimestamp, m.InputFetchStartTimestamp, m.InputFetchCompletedTimestamp, m.ExecutionStartTimestamp,
		m.ExecutionCompletedTimestamp, m.OutputUploadStartTimestamp, m.OutputUploadCompletedTimestamp, m.WorkerCompletedTimestamp,
	}
	for i, ts := range times {
		if ts == nil || ts.AsTime().IsZero() || i > 0 && ts.AsTime().Before(times[i-1].AsTime()) {
			c.Errorf("timestamp %d is unset or out of order: %v", i, m)
		}
	}
	var x cloisterpb.Execution
	if len(m.AuxiliaryMetadata) != 2 {
		c.Fatalf("auxiliary metadata: %v", m.AuxiliaryMetadata)
	}
	// What Buildbarn's browser reads.
	var posix resourceusagepb.POSIXResourceUsage
	if err := m.AuxiliaryMetadata[1].UnmarshalTo(&posix); err != nil || posix.MaximumResidentSetSize == 0 {
		c.Errorf("resource usage: %v, %v", &posix, err)
	}
	if err := m.AuxiliaryMetadata[0].UnmarshalTo(&x); err != nil {
		c.Fatal(err)
	}
	if x.Sandbox.GetTier() != "full" || len(x.Sandbox.Layers) == 0 || x.SpecHash == "" || x.Usage.GetPeakResidentBytes() == 0 {
		c.Errorf("auxiliary metadata: %v", &x)
	}
	wall := m.ExecutionCompletedTimestamp.AsTime().Sub(m.ExecutionStartTimestamp.AsTime())
	if wall < 50*time.Millisecond || m.VirtualExecutionDuration.AsDuration() > wall {
		c.Errorf("executed for %v, virtually %v", wall, m.VirtualExecutionDuration.AsDuration())
	}
}
