// SPDX-License-Identifier: Apache-2.0

package revision_test

import (
	"bytes"
	"compress/zlib"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/revision"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

// A repository is a Git repository with its own environment.
type repository struct {
	t   *testing.T
	dir string
	env []string
}

// newRepository creates an empty repository with flags for git init.
func newRepository(t *testing.T, flags ...string) *repository {
	t.Helper()
	sandboxtest.Tool(t, "git")
	home := t.TempDir()
	t.Setenv("HOME", home) // also for the package under test, which must not read the user's configuration
	t.Setenv("XDG_CONFIG_HOME", home)
	r := &repository{t: t, dir: t.TempDir(), env: []string{
		"HOME=" + home, "PATH=" + os.Getenv("PATH"), "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_AUTHOR_DATE=1700000000 +0100",
		"GIT_COMMITTER_NAME=C", "GIT_COMMITTER_EMAIL=c@example.com", "GIT_COMMITTER_DATE=1700000001 +0100",
	}}
	r.git("", append([]string{"init", "-q", "-b", "main"}, flags...)...)
	return r
}

// git runs git with stdin, which must succeed, and returns its output.
func (r *repository) git(stdin string, args ...string) string {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), "git", args...)
	cmd.Dir, cmd.Env, cmd.Stdin = r.dir, r.env, strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	must.Be(r.t, err == nil, "git %v: %v\n%s", args, err, out)
	return strings.TrimSpace(string(out))
}

func (r *repository) write(name, text string, mode fs.FileMode) {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	must.Succeed(r.t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)))
}

// commit commits all files and returns the name of the commit.
func (r *repository) commit() string {
	r.t.Helper()
	r.git("", "add", "-A")
	r.git("", "commit", "-q", "-m", "x")
	return r.git("", "rev-parse", "HEAD")
}

// odd commits a tree with one entry that need not be possible in a worktree, and returns the name of the commit.
func (r *repository) odd(mode, kind, object, name string) string {
	r.t.Helper()
	tree := r.git(fmt.Sprintf("%s %s %s\t%s\x00", mode, kind, object, name), "mktree", "-z", "--missing")
	return r.git("", "commit-tree", "-m", "x", tree)
}

// raw commits a tree of entries, each a mode, a name and an object, without any checks by git.
func (r *repository) raw(entries ...[3]string) string {
	r.t.Helper()
	var text strings.Builder
	for _, e := range entries {
		object := must.Get(hex.DecodeString(e[2]))(r.t)
		fmt.Fprintf(&text, "%s %s\x00%s", e[0], e[1], object)
	}
	tree := r.git(text.String(), "hash-object", "-w", "-t", "tree", "--literally", "--stdin")
	return r.git("", "commit-tree", "-m", "x", tree)
}

// read reads a revision into a new store.
func read(t *testing.T, dir, rev string, change func(*revision.Config)) (*revision.Revision, cas.Store, error) {
	t.Helper()
	in := must.Get(castest.Instances()(""))(t)
	c := revision.Config{Store: in.Store, Function: cas.SHA256, Dir: t.TempDir(), MaxBytes: 1 << 30}
	if change != nil {
		change(&c)
	}
	rv, err := revision.Read(t.Context(), c, dir, rev)
	if left, _ := os.ReadDir(c.Dir); len(left) > 0 {
		t.Errorf("temporary files remain: %v", left)
	}
	return rv, in.Store, err
}

// listing returns everything below a Directory, as lines.
func listing(t *testing.T, s cas.Store, d cas.Digest, above string) []string {
	t.Helper()
	var dir repb.Directory
	must.Succeed(t, cas.ReadProto(t.Context(), s, d, &dir))
	digest := func(p *repb.Digest) cas.Digest {
		return must.Get(cas.FromProto(cas.SHA256, p))(t)
	}
	var lines []string
	for _, f := range dir.Files {
		b := must.Get(cas.ReadAll(t.Context(), s, digest(f.Digest), 16<<20))(t)
		text := string(b)
		if len(b) > 100 {
			text = fmt.Sprintf("%d bytes", len(b))
		}
		lines = append(lines, fmt.Sprintf("%s%s %v %s", above, f.Name, f.IsExecutable, text))
	}
	for _, l := range dir.Symlinks {
		lines = append(lines, fmt.Sprintf("%s%s -> %s", above, l.Name, l.Target))
	}
	for _, sub := range dir.Directories {
		lines = append(lines, above+sub.Name+"/")
		lines = append(lines, listing(t, s, digest(sub.Digest), above+sub.Name+"/")...)
	}
	return lines
}

func TestReadGivesTheFilesOfTheCommit(t *testing.T) {
	for _, format := range []string{"sha1", "sha256"} {
		t.Run(format, func(t *testing.T) {
			r := newRepository(t, "--object-format="+format)
			r.write("a", "first\n", 0o644)
			r.write("run", "#!/bin/sh\n", 0o755)
			r.write("empty", "", 0o644)
			r.write("large", strings.Repeat("x", 3<<20), 0o644)
			// Git sorts "lib-x/" before "lib/", unlike the API.
			r.write("lib/x", "same\n", 0o644)
			r.write("lib-x/x", "same\n", 0o644)
			r.write("lib.c", "same\n", 0o644)
			r.write("copy/lib/x", "same\n", 0o644)
			r.write("target", "a", 0o644) // the same blob as the symlink
			r.write(".gitattributes", "a export-ignore\n* text eol=crlf\n", 0o644)
			if err := os.Symlink("a", filepath.Join(r.dir, "link")); err != nil {
				t.Skip("needs symlinks")
			}
			commit := r.commit()
			r.git("", "tag", "-a", "-m", "x", "v1")
			r.write("a", "second\n", 0o644)
			r.commit()

			rv, s, err := read(t, r.dir, "v1", nil)
			must.Succeed(t, err)
			expect.That(t, rv.Commit == commit && rv.Time.Equal(time.Unix(1700000001, 0)) && rv.Files == 7, "%+v", rv)
			want := []string{
				".gitattributes false a export-ignore\n* text eol=crlf\n", "a false first\n", "empty false ",
				"large false 3145728 bytes", "lib.c false same\n",
				"run true #!/bin/sh\n", "target false a", "link -> a", "copy/", "copy/lib/", "copy/lib/x false same\n",
				"lib/", "lib/x false same\n",
				"lib-x/", "lib-x/x false same\n",
			}
			if diff := cmp.Diff(want, listing(t, s, rv.Root, "")); diff != "" {
				t.Error(diff)
			}
			// Other names of the commit, a bare clone and a subdirectory.
			r.git("", "clone", "-q", "--bare", ".", "../bare-"+format)
			bare := filepath.Join(filepath.Dir(r.dir), "bare-"+format)
			t.Cleanup(func() { os.RemoveAll(bare) })
			for _, c := range [][2]string{
				{r.dir, commit},
				{r.dir, commit[:10]},
				{r.dir, "main~1"},
				{r.dir, "HEAD@{1}"},
				{filepath.Join(r.dir, "lib"), "v1^0"},
				{bare, "v1"},
			} {
				again, _, err := read(t, c[0], c[1], nil)
				expect.That(t, err == nil && again.Root == rv.Root && again.Commit == commit,
					"%v: %+v, %v", c, again, err)
			}
		})
	}
}

func TestReadRejects(t *testing.T) {
	r := newRepository(t)
	r.write("dir/a", "text\n", 0o644)
	r.commit()
	blob := r.git("odd", "hash-object", "-w", "--stdin")
	nothing := r.git("", "hash-object", "-w", "--stdin")
	nul := r.git("a\x00b", "hash-object", "-w", "--stdin")
	long := r.git(strings.Repeat("x", 5000), "hash-object", "-w", "--stdin")
	notUTF8 := r.odd("100644", "blob", blob, "caf\xe9")
	absent := strings.Repeat("1", 40)
	r.git("", "tag", "tree", "HEAD^{tree}")
	for _, c := range []struct {
		name, dir, rev, want string
		absent               bool
	}{
		{"an unknown revision", r.dir, "nosuch", `"nosuch" is not a commit of the repository`, true},
		{"a flag", r.dir, "--help", `"--help" is not a commit`, true},
		{"a tree", r.dir, "tree", `"tree" is not a commit`, true},
		{"two lines", r.dir, "HEAD\nHEAD", "not a revision", false},
		{"no revision", r.dir, "", "not a revision", false},
		{"no repository", os.TempDir(), "HEAD", "not a Git repository", true},
		{"a name that is not UTF-8", r.dir, notUTF8, `"caf\xe9" cannot be an input: its name is not UTF-8`, false},
		{
			"a submodule", r.dir, r.odd("160000", "commit", absent, "sub"),
			`"sub" is a submodule, whose files are in another repository (commit ` + absent, false,
		},
		{"a symlink to nothing", r.dir, r.odd("120000", "blob", nothing, "l"), `"l": a symlink to ""`, false},
		{"a symlink with NUL", r.dir, r.odd("120000", "blob", nul, "l"), `a symlink to "a\x00b"`, false},
		{"a symlink too long", r.dir, r.odd("120000", "blob", long, "l"), "a symlink of 5000 bytes", false},
		{"an absent blob", r.dir, r.odd("100644", "blob", absent, "gone"), absent + `" is missing`, true},
		{
			"a name that leaves the tree", r.dir, r.raw([3]string{"100644", "..", blob}),
			`".": ".." cannot be an input: its name is not a file name`, false,
		},
		{
			"two files of one name", r.dir, r.raw([3]string{"100644", "a", blob}, [3]string{"100644", "a", nul}),
			`"a" is a duplicate`, false,
		},
		{
			"a file and a directory of one name", r.dir, r.raw([3]string{"100644", "a", blob},
				[3]string{"100644", "a.b", blob}, [3]string{"40000", "a", r.git("", "rev-parse", "HEAD^{tree}")}),
			`"a" is a duplicate`, false,
		},
		{"an absent tree", r.dir, r.odd("040000", "tree", absent, "gone"), absent + `" is missing`, true},
	} {
		_, _, err := read(t, c.dir, c.rev, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, revision.ErrNotFound) != c.absent {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if err != nil && strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%s: not printable: %q", c.name, err)
		}
	}
	// EmptySubmodules turns a submodule into an empty directory.
	rv, s, err := read(t, r.dir, r.odd("160000", "commit", absent, "sub"),
		func(c *revision.Config) { c.EmptySubmodules = true })
	expect.That(t, err == nil && slices.Equal(listing(t, s, rv.Root, ""), []string{"sub/"}), "%+v, %v", rv, err)
	// MaxBytes counts blocks.
	for _, most := range []int64{4096, 4095} {
		_, _, err := read(t, r.dir, "HEAD", func(c *revision.Config) { c.MaxBytes = most })
		if (err == nil) != (most == 4096) || err != nil && !errors.Is(err, revision.ErrTooLarge) {
			t.Errorf("%d bytes: %v", most, err)
		}
	}
	// A cancelled call returns the cause.
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	expect.Error(t, expect.Err(revision.Read(ctx, revision.Config{Store: s, Function: cas.SHA256}, r.dir, "HEAD")),
		gone)
}

// TestReadVerifiesObjects checks that objects match their names, which git does not verify for blobs.
func TestReadVerifiesObjects(t *testing.T) {
	r := newRepository(t)
	good := r.git("good", "hash-object", "-w", "--stdin")
	evil := r.git("evil", "hash-object", "-w", "--stdin")
	commit := r.odd("100644", "blob", good, "a")
	object := func(name string) string { return filepath.Join(r.dir, ".git/objects", name[:2], name[2:]) }
	b := must.Get(os.ReadFile(object(evil)))(t)
	must.Succeed(t, errors.Join(os.Remove(object(good)), os.WriteFile(object(good), b, 0o444)))
	if _, _, err := read(t, r.dir, commit, nil); err == nil || !strings.Contains(err.Error(), good) {
		t.Errorf("got %v, want an error that names %s", err, good)
	}
	// Replacements are ignored.
	first := r.odd("100644", "blob", evil, "a")
	second := r.odd("100644", "blob", evil, "b")
	r.git("", "replace", first, second)
	rv, s, err := read(t, r.dir, first, nil)
	if err != nil || rv.Commit != first || !slices.Equal(listing(t, s, rv.Root, ""), []string{"a false evil"}) {
		t.Errorf("%+v, %v", rv, err)
	}
}

// TestMemoryOfGitIsLimited: an object can claim any size, and git reads whole tags into memory.
func TestMemoryOfGitIsLimited(t *testing.T) {
	r := newRepository(t)
	name := strings.Repeat("ab", 20)
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	fmt.Fprintf(w, "tag %d\x00", int64(16<<30))
	must.Succeed(t, w.Close())
	r.write(filepath.Join(".git/objects", name[:2], name[2:]), packed.String(), 0o444)
	if _, _, err := read(t, r.dir, name, nil); err == nil || !strings.Contains(err.Error(), "over limit") {
		t.Errorf("got %v, want an error of the memory limit", err)
	}
}

func TestReadSortsEntries(t *testing.T) {
	r := newRepository(t)
	blob := r.git("odd", "hash-object", "-w", "--stdin")
	rv, s, err := read(t, r.dir, r.raw([3]string{"100644", "b", blob}, [3]string{"120000", "c", blob},
		[3]string{"100644", "a", blob}), nil)
	must.Succeed(t, err)
	must.Get(tree.Load(t.Context(), s, rv.Root))(t)
}

func TestGraftsAreIgnored(t *testing.T) {
	r := newRepository(t)
	r.write("a", "one", 0o644)
	first := r.commit()
	r.write("a", "two", 0o644)
	head := r.commit()
	r.write(".git/info/grafts", head+" "+r.odd("100644", "blob", r.git("odd", "hash-object", "-w", "--stdin"),
		"b")+"\n", 0o644)
	if rv, _, err := read(t, r.dir, "HEAD~1", nil); err != nil || rv.Commit != first {
		t.Errorf("got %+v, %v, want %s", rv, err, first)
	}
}

// TestReadRunsNothingAndWritesNothing covers every program that a repository's configuration can name.
func TestReadRunsNothingAndWritesNothing(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs a shell")
	}
	r := newRepository(t)
	mark := filepath.Join(t.TempDir(), "mark")
	script := filepath.Join(t.TempDir(), "script")
	must.Succeed(t, os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\necho \"$0 $*\" >> %s\nexit 1\n", mark),
		0o755))
	r.write("a", "text\n", 0o644)
	r.write(".gitattributes", "* filter=x diff=x text eol=crlf\n", 0o644)
	commit := r.commit()
	lacking := r.odd("100644", "blob", strings.Repeat("1", 40), "gone")
	for _, kv := range [][2]string{
		{"core.fsmonitor", script},
		{"core.pager", script},
		{"pager.cat-file", "true"},
		{"core.hooksPath", filepath.Dir(script)},
		{"core.editor", script},
		{"filter.x.smudge", script},
		{"filter.x.clean", script},
		{"filter.x.process", script},
		{"filter.x.required", "true"},
		{"diff.x.textconv", script},
		{"diff.external", script},
		{"core.sshCommand", script},
		{"core.gitProxy", script},
		{"core.askPass", script},
		{"credential.helper", script},
		{"alias.cat-file", "!" + script},
		{"gpg.program", script},
		// A partial clone, which would fetch absent objects.
		{"core.repositoryFormatVersion", "1"},
		{"extensions.partialClone", "origin"},
		{"remote.origin.promisor", "true"},
		{"protocol.allow", "always"},
		{"protocol.ext.allow", "always"},
	} {
		r.git("", "config", kv[0], kv[1])
	}
	before := state(t, r.dir)
	if _, _, err := read(t, r.dir, commit, nil); err != nil {
		t.Error(err)
	}
	expect.Equal(t, cmp.Diff(before, state(t, r.dir)), "", "the repository changed")
	for _, url := range []string{"ext::" + script, "ssh://localhost/x", "file://" + r.dir, "git://127.0.0.1:1/x"} {
		r.git("", "config", "remote.origin.url", url)
		r.git("", "config", "remote.origin.uploadpack", script)
		before := state(t, r.dir)
		if _, _, err := read(t, r.dir, lacking, nil); err == nil {
			t.Errorf("%s: an absent blob was read", url)
		}
		expect.Equal(t, cmp.Diff(before, state(t, r.dir)), "", "%s: the repository changed", url)
	}
	if b, err := os.ReadFile(mark); err == nil {
		t.Errorf("Read ran\n%s", b)
	}
}

// state returns the mode, size, time and content hash of every file below dir.
func state(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		var text []byte
		if st.Mode().IsRegular() {
			if text, err = os.ReadFile(path); err != nil {
				return err
			}
		}
		files[path] = fmt.Sprint(st.Mode(), st.Size(), st.ModTime().UnixNano(), cas.SHA256.Sum(text))
		return nil
	})
	must.Succeed(t, err)
	return files
}

// TestForeignRepositoryNeedsTrust checks that the error tells how to trust the repository of another user.
func TestForeignRepositoryNeedsTrust(t *testing.T) {
	r := newRepository(t)
	r.write("sub/a", "text\n", 0o644)
	r.commit()
	if err := os.Chown(r.dir, 12345, 12345); err != nil {
		sandboxtest.Unavailable(t, "root", err)
	}
	must.Succeed(t, os.Chown(filepath.Join(r.dir, ".git"), 12345, 12345))
	_, _, err := read(t, filepath.Join(r.dir, "sub"), "HEAD", nil)
	fix := fmt.Sprintf("git config --global --add safe.directory %q", r.dir)
	must.Be(t, err != nil && strings.Contains(err.Error(), fix), "got %v, want %q", err, fix)
	r.git("", "config", "--global", "--add", "safe.directory", r.dir)
	if _, _, err := read(t, r.dir, "HEAD", nil); err != nil {
		t.Errorf("after trusting it: %v", err)
	}
}

func TestSplit(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, dir := range []string{"repo", "a@b", "a"} {
		must.Succeed(t, os.Mkdir(dir, 0o755))
	}
	for spec, want := range map[string][3]string{
		"repo":             {"repo", "HEAD"},
		".":                {".", "HEAD"},
		"repo@v1":          {"repo", "v1"},
		"./repo@HEAD@{1}":  {"./repo", "HEAD@{1}"},
		"a@b":              {"a@b", "HEAD"},
		"a@b@v1":           {"a@b", "v1"},
		"a@c":              {"a", "c"},
		"a@@":              {"a", "@"},
		"a@":               {"", "", "no revision after"},
		"@v1":              {"", "", "is a directory"},
		"":                 {"", "", "is a directory"},
		"nosuch@v1":        {"", "", "not found"},
		"https://x.org/y":  {"", "", "git clone"},
		"git@x.org:y@v1":   {"", "", "git clone"},
		"file:///tmp@main": {"", "", "git clone"},
	} {
		repository, rev, err := revision.Split(spec)
		if repository != want[0] || rev != want[1] || (err == nil) != (want[2] == "") || err != nil &&
			!strings.Contains(err.Error(), want[2]) {
			t.Errorf("%q: got %q, %q, %v, want %q", spec, repository, rev, err, want)
		}
	}
}

func TestReadNamesMissingField(t *testing.T) {
	for field, c := range map[string]revision.Config{
		"Store":    {Function: cas.SHA256},
		"Function": {Store: castest.NewMemory()},
	} {
		expect.Message(t, expect.Err(revision.Read(t.Context(), c, ".", "HEAD")), field)
	}
}
