// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// rootFiles stores a root file system with a shell, and files by path, and returns its digest.
func (c *confining) rootFiles(files map[string]string) cas.Digest {
	c.t.Helper()
	dir := must.Get(os.OpenRoot(c.t.TempDir()))(c.t)
	defer dir.Close()
	sandboxtest.CopyPrograms(c.t, dir, "sh", "cat", "cp", "id", "ls", "mkdir", "readlink", "rm", "touch")
	for p, text := range files {
		if i := strings.LastIndex(p, "/"); i > 0 {
			must.Succeed(c.t, dir.MkdirAll(p[:i], 0o755))
		}
		must.Succeed(c.t, dir.WriteFile(p, []byte(text), 0o644))
	}
	return must.Get(tree.Ingest(c.t.Context(), c.in.Store, cas.SHA256, dir))(c.t)
}

// A rootRun is an action and what it did.
type rootRun struct {
	script   string
	env      map[string]string
	dir      string // working directory
	outputs  []string
	platform *repb.Platform
	input    cas.Digest // the zero Digest is a root with the file "input"
	cache    bool       // the result may be cached

	action  cas.Digest
	stdout  string
	outcome *Outcome
	meta    *cloisterpb.Execution
}

// actionOf stores the action of r and returns its digest.
func (c *confining) actionOf(r *rootRun) cas.Digest {
	c.t.Helper()
	if r.input.IsZero() {
		input := must.Get(cas.FromProto(cas.SHA256, c.message(&repb.Directory{
			Files: []*repb.FileNode{{Name: "input", Digest: c.blob([]byte("an input\n"))}},
		})))(c.t)
		r.input = input
	}
	command := &repb.Command{
		Arguments: []string{"/bin/sh", "-c", r.script}, WorkingDirectory: r.dir, OutputPaths: r.outputs, Platform: r.platform,
	}
	for k, v := range r.env {
		command.EnvironmentVariables = append(command.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: k, Value: v})
	}
	action := must.Get(cas.FromProto(cas.SHA256, c.message(&repb.Action{
		CommandDigest: c.message(command), InputRootDigest: r.input.Proto(), DoNotCache: !r.cache,
	})))(c.t)
	return action
}

// try executes r as a task, which it completes.
func (c *confining) try(r *rootRun, task Task) error {
	c.t.Helper()
	r.action = c.actionOf(r)
	var text bytes.Buffer
	var err error
	task.Action, task.Stdout, task.Stderr = r.action, &text, &text
	r.outcome, err = c.Execute(c.t.Context(), &task, func(Stage) {})
	r.stdout = text.String()
	if err == nil {
		r.meta = &cloisterpb.Execution{}
		err = r.outcome.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(r.meta)
	}
	return err
}

// run is try for a task that must succeed with this output.
func (c *confining) run(r rootRun, task Task, want string) *rootRun {
	c.t.Helper()
	must.Succeed(c.t, c.try(&r, task))
	if r.stdout != want || r.outcome.Result.ExitCode != 0 {
		c.t.Errorf("%s: got %q and exit code %d, want %q\n%s", r.script, r.stdout, r.outcome.Result.ExitCode, want, r.outcome.Message)
	}
	return &r
}

// needsRoots skips the test where c cannot replace the root file system.
func (c *confining) needsRoots() {
	c.t.Helper()
	if !c.cfg.Features.Root {
		sandboxtest.Unavailable(c.t, "namespaces", "this kernel cannot replace the root file system")
	}
}

// rootWorkers are the ways in which a worker stages root file systems. Changes apply to its store.
func rootWorkers(t *testing.T, test func(t *testing.T, c *confining), changes ...func(*disk.Config)) {
	t.Helper()
	forms := []tree.Form{tree.FormCopy}
	if os.Geteuid() == 0 {
		forms = []tree.Form{tree.FormImage, tree.FormCopy}
		t.Run("ordinary user", func(t *testing.T) { asOrdinaryUser(t, strings.Split(t.Name(), "/")[0]) })
	}
	for _, form := range forms {
		t.Run(string(form), func(t *testing.T) {
			c := newConfining(t, onDisk(t), 1<<30, changes...)
			c.needsRoots()
			if form == tree.FormCopy {
				c.cfg.Stager = tree.NewStager(tree.StagerConfig{Budget: 1 << 30})
				t.Cleanup(func() { c.cfg.Stager.Close() })
			} else if c.why != nil {
				sandboxtest.Unavailable(t, "namespaces", c.why)
			}
			test(t, c)
		})
	}
}

// TestActionRunsInRoot: an action with a root file system sees that and its inputs, nothing of this host, and changes
// neither.
func TestActionRunsInRoot(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		large := strings.Repeat("large file\n", 20_000)
		root := c.rootFiles(map[string]string{"etc/marker": "first\n", "data/large": large})
		other := c.rootFiles(map[string]string{"etc/marker": "second\n"})
		task := Task{Root: root, RootEnv: []string{"PATH=/bin", "LANG=image", "ONLY=root"}}
		r := c.run(rootRun{
			script: `cat /etc/marker input; echo $PATH $LANG $ONLY $HOME; cp /data/large copy; id -u
				ls -d /usr/share /etc/passwd /home /var 2>/dev/null; (echo x > /etc/new) 2>/dev/null && echo wrote
				(echo x > /etc/marker) 2>/dev/null && echo wrote; (echo x > input) 2>/dev/null && echo wrote input; true`,
			env: map[string]string{"LANG": "command"}, outputs: []string{"copy"},
		}, task, "first\nan input\n/bin command root /tmp\n1000\n")
		if copied := r.outcome.Result.OutputFiles; len(copied) != 1 || copied[0].Digest.GetSizeBytes() != int64(len(large)) ||
			copied[0].Digest.GetHash() != c.blob([]byte(large)).GetHash() {
			t.Errorf("a large file of the root: got %v", copied)
		}
		expect.Text(t, r.outcome.Message, "denied: write to /etc/new", "message (the attempt to write to the root)")
		expect.Equal(t, r.meta.Root, root.String(), "metadata: root")
		c.run(rootRun{script: "cat /etc/marker"}, task, "first\n")
		c.run(rootRun{script: "cat /etc/marker"}, Task{Root: other}, "second\n")
		c.run(rootRun{script: "cat /etc/marker 2>/dev/null; ls -d /usr/bin"}, Task{}, "/usr/bin\n")
	})
}

// TestRootIsPartOfTheStableHash: runs in different roots never have the same stable hash, and the hash does not depend
// on how the root was staged.
func TestRootIsPartOfTheStableHash(t *testing.T) {
	var hashes []string
	rootWorkers(t, func(t *testing.T, c *confining) {
		for _, c2 := range []struct{ root, path string }{{"", ""}, {"one", ""}, {"two", ""}, {"one", "/"}, {"two", "/"}, {"one", "/work"}} {
			task, r := Task{}, rootRun{script: "true", env: map[string]string{"PATH": "/bin:/usr/bin"}}
			if c2.root != "" {
				task.Root = c.rootFiles(map[string]string{"etc/marker": c2.root})
			}
			if c2.path != "" {
				r.platform = platform("InputRootAbsolutePath", c2.path)
			}
			hashes = append(hashes, c.run(r, task, "").outcome.StableHash)
		}
	})
	if len(hashes) == 0 {
		return // no kind of root is available here
	}
	half := len(hashes) - 6
	if half == 6 && !slices.Equal(hashes[:half], hashes[half:]) {
		t.Errorf("the stable hashes depend on the staging: images %v, copies %v", hashes[:half], hashes[half:])
	}
	distinct := slices.Clone(hashes[half:])
	slices.Sort(distinct)
	expect.Equal(t, len(slices.Compact(distinct)), len(hashes[half:]), "different stable hashes of different runs")
}

// TestInputRootPath: platform properties and the operator's defaults place the input root, also at /.
func TestInputRootPath(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		root := c.rootFiles(map[string]string{"etc/marker": "root\n", "usr/local/of-root": ""})
		c.cfg.Policy = parsePolicy(t, "version: 1\nprofiles:\n  build: {superuser: true}\n")
		for _, c2 := range []struct {
			name string
			run  rootRun
			task Task
			want string
		}{
			{
				"in a root",
				rootRun{script: "readlink -f .; cat input /etc/marker", platform: platform("InputRootAbsolutePath", "/usr/local/work")},
				Task{Root: root},
				"/usr/local/work\nan input\nroot\n",
			},
			{
				"on the host",
				rootRun{script: "readlink -f .; cat input; ls -d /usr/bin", platform: platform("inputRootAbsolutePath", "/b/f/w")},
				Task{},
				"/b/f/w\nan input\n/usr/bin\n",
			},
			{
				"merged with a root",
				rootRun{script: "readlink -f .; cat /input /etc/marker; touch /etc/new && ls /etc/new", platform: platform("chroot-path", "/")},
				Task{Root: root},
				"/\nan input\nroot\n/etc/new\n",
			},
			{"user 0", rootRun{script: "id -u; id -g", platform: platform("dockerRunAsRoot", "True")}, Task{}, "0\n0\n"},
		} {
			t.Run(c2.name, func(t *testing.T) {
				old := c.t
				c.t = t
				defer func() { c.t = old }()
				c.run(c2.run, c2.task, c2.want)
			})
		}
	})
}

// TestInputRootIsTheRoot: the operator can make the input roots of an instance root file systems, for example for
// BuildStream, which sends no property. Every directory accepts new entries, and no input can be changed.
func TestInputRootIsTheRoot(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		c.cfg.Policy = parsePolicy(t, `version: 1
profiles:
  build: {superuser: true}
default_properties:
  "": {chroot-path: /, dockerRunAsRoot: "true"}
`)
		r := c.run(rootRun{
			script: `readlink -f . ; cat source; mkdir -p /install/bin && echo new > /install/bin/x && echo o > out; echo $HOME; id -u
				ls -d /usr/share /var /build 2>/dev/null; (echo x > /bin/sh) 2>/dev/null && echo wrote; rm -f /bin/sh 2>/dev/null && echo removed
				touch /new /bin/new /etc-new && echo created`,
			dir: "project/element", outputs: []string{"out", "../../install"},
			input: c.rootFiles(map[string]string{"project/element/source": "source\n"}),
		}, Task{}, "/project/element\nsource\n/tmp\n0\ncreated\n")
		result := r.outcome.Result
		if len(result.OutputFiles) != 1 || len(result.OutputDirectories) != 1 || result.OutputDirectories[0].Path != "../../install" {
			t.Errorf("outputs: got %v and %v", result.OutputFiles, result.OutputDirectories)
		}
		var left []string
		for _, e := range r.meta.Events {
			if e.Kind == "output" {
				left = append(left, e.Subject)
			}
		}
		slices.Sort(left)
		expect.Slices(t, left, []string{"bin/new", "etc-new", "new"}, "left")
	})
}

// TestRefusedPlaces: a path that the input root cannot have is refused, and the message names the property.
func TestRefusedPlaces(t *testing.T) {
	c := newConfining(t, onDisk(t), 0)
	root := c.rootFiles(map[string]string{"file": ""})
	gone := cas.SHA256.Sum([]byte("an absent Directory"))
	for _, c2 := range []struct {
		name     string
		task     Task
		platform *repb.Platform
		kind     FaultKind
		want     string
	}{
		{"the toolchain", Task{}, platform("InputRootAbsolutePath", "/usr/src"), FaultInvalid, "property InputRootAbsolutePath=/usr/src: the path overlaps /usr"},
		{"above the toolchain", Task{Root: root}, platform("chroot-path", "/proc"), FaultInvalid, "property chroot-path=/proc: the path overlaps /proc"},
		{"relative", Task{}, platform("chroot-path", "work"), FaultInvalid, "is not a clean absolute path"},
		{"unclean", Task{}, platform("chroot-path", "/a/../usr"), FaultInvalid, "is not a clean absolute path"},
		{"the hosts file", Task{Root: root}, platform("chroot-path", "/etc/hosts"), FaultInvalid, "the path overlaps /etc/hosts"},
		{"below a file", Task{Root: root}, platform("chroot-path", "/file/work"), FaultInvalid, "below something that is not a directory"},
		{"contradiction", Task{}, platform("InputRootAbsolutePath", "/a", "chroot-path", "/b"), FaultInvalid, "set one of them"},
		{"user 0", Task{}, platform("dockerRunAsRoot", "true"), FaultUnmet, "superuser: true"},
		{"varied", Task{Variation: &Variation{Root: "/x"}}, platform("chroot-path", "/y"), FaultInvalid, "property chroot-path=/y sets it"},
		{"absent root", Task{Root: gone}, nil, FaultMissing, "root file system"},
	} {
		t.Run(c2.name, func(t *testing.T) {
			err := c.try(&rootRun{script: "true", platform: c2.platform}, c2.task)
			expect.Text(t, wantFault(t, c2.name, err, c2.kind).Error(), c2.want, "%s", c2.name)
		})
	}
}

// TestRootIsStagedOnce: concurrent actions share one staging of a root, later ones use it, and one that is closed or
// evicted is staged again.
func TestRootIsStagedOnce(t *testing.T) {
	rootWorkers(t, func(t *testing.T, c *confining) {
		root := must.Get(c.inputs.Load(t.Context(), c.in, c.rootFiles(map[string]string{"etc/marker": "root\n"})))(t)
		stage := func() *tree.Root {
			r, err := c.cfg.Stager.StageRoot(context.Background(), root, []string{"dev", "proc", "tmp", "build"}, c.in,
				func(bytes, files int64) (tree.Workspace, error) {
					return c.cfg.Backend.Workspace(t.Context(), bytes, files)
				})
			if err != nil {
				t.Error(err)
				return &tree.Root{}
			}
			return r
		}
		const n = 8
		staged := make(chan *tree.Root, n)
		for range n {
			go func() { staged <- stage() }()
		}
		var all []*tree.Root
		for range n {
			all = append(all, <-staged)
		}
		for _, r := range all {
			expect.That(t, r.Image == all[0].Image && r.Valid(), "got %s, want %s for all", r.Image, all[0].Image)
			r.Release()
		}
		again := stage()
		expect.Equal(t, again.Image, all[0].Image, "a later action")
		again.Release()
	})
}

func parsePolicy(t *testing.T, text string) *policy.Policy {
	t.Helper()
	return must.Get(policy.Parse("policy.yaml", []byte(text)))(t)
}

// TestRootIsNotCached: the action cache does not know the root, so it has no results of runs in one.
func TestRootIsNotCached(t *testing.T) {
	c := newConfining(t, onDisk(t), 1<<30)
	input := c.message(&repb.Directory{})
	command := &repb.Command{Arguments: []string{"/bin/sh", "-c", "cat /etc/marker"}}
	action, err := cas.FromProto(cas.SHA256, c.message(&repb.Action{CommandDigest: c.message(command), InputRootDigest: input}))
	must.Succeed(t, err)
	for _, text := range []string{"first\n", "second\n"} {
		root := c.rootFiles(map[string]string{"etc/marker": text})
		o := must.Get(c.Execute(t.Context(), &Task{Action: action, Root: root}, func(Stage) {}))(t)
		if want := cas.SHA256.Sum([]byte(text)).Proto(); o.Cached || !o.Uncacheable || !proto.Equal(o.Result.StdoutDigest, want) {
			t.Errorf("in the root with %q: got stdout %v, cached %v, uncacheable %v; want %v, false, true",
				text, o.Result.StdoutDigest, o.Cached, o.Uncacheable, want)
		}
	}
}
