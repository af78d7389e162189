// SPDX-License-Identifier: Apache-2.0

// Package tests holds the tests of Cloister as a whole: of its rules here, of its behaviour in the
// subdirectories, each of which starts the real binary.
package tests

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/cloister-build/cloister"

// A rule says what a package may not depend on, and why.
type rule struct {
	// of is a pattern of packages below the module; a trailing "/..." covers what lies below.
	of string
	// only lists what may be imported, beside the standard library; nil permits everything.
	only []string
	// never lists what may not be imported.
	never []string
	// deep applies the rule to everything that the package depends on, not only to what it imports.
	deep bool
	why  string
}

// rules are docs/architecture.md, section "Who may import whom", as a test.
var rules = []rule{
	{of: "sandbox", only: []string{}, deep: true,
		why: "the vocabulary of the sandbox is read and used without anything else; a Go program can confine a command with it alone"},
	{of: "sandbox/internal/zygote", only: []string{"golang.org/x/sys/unix"}, never: []string{"std/net", "std/os/exec", "std/os/signal", "std/regexp"}, deep: true,
		why: "its init must run before that of any larger package, for every process that it starts runs it"},
	{of: "sandbox/policy", only: []string{"sandbox", "sandbox/policy/strict", "github.com/goccy/go-yaml/..."},
		why: "rules of an operator can be read and tried without anything that runs"},
	{of: "sandbox/policy/strict", only: []string{"github.com/agnivade/levenshtein", "github.com/goccy/go-yaml/..."},
		why: "how a file is read has nothing to do with what it permits"},
	{of: "cmd/cloister/internal/access", never: []string{"cas/...", "worker/...", "sandbox"},
		why: "who may call is decided by names in requests, and by nothing that a call does"},
	{of: "cmd/cloister/internal/notify", only: []string{},
		why: "what a service manager is told is lines on a socket: it knows nothing of what is served"},
	{of: "sandbox/printable", only: []string{},
		why: "every tree may import it"},
	{of: "worker/audit", only: []string{"sandbox"},
		why: "a log that shows tampering is small enough to be read"},
	{of: "sandbox/internal/cgroup", only: []string{"github.com/containerd/cgroups/v3/...", "github.com/opencontainers/runtime-spec/specs-go", "golang.org/x/sys/unix"},
		why: "control groups are managed by the module of containerd, and are independent of the rest of the sandbox"},
	{of: "sandbox/internal/seccomp", only: []string{"golang.org/x/sys/unix"},
		why: "each part of the confinement can be reviewed on its own"},
	{of: "sandbox/internal/monitor", only: []string{"sandbox", "sandbox/internal/seccomp", "golang.org/x/sys/unix"},
		why: "each part of the confinement can be reviewed on its own"},
	{of: "sandbox/...", never: []string{"cas/...", "worker/...", "cmd/...", "proto/...", "google.golang.org/..."},
		why: "the sandbox knows paths and processes, and neither blobs nor the wire: it can be reviewed alone"},
	{of: "cas/...", never: []string{"sandbox/...", "worker/...", "cmd/..."},
		why: "a store can be served and tested where nothing can be executed"},
	{of: "cas", only: []string{"github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
		"google.golang.org/protobuf/...", "google.golang.org/grpc/codes", "google.golang.org/grpc/status",
		"cas/internal/sha256tree", "github.com/zeebo/blake3"},
		why: "the vocabulary of the store speaks the API's messages and hashes by its functions, and no more"},
	{of: "cas/internal/sha256tree", only: []string{},
		why: "a digest function is bytes in and a hash out"},
	{of: "cas/tree", only: []string{"cas", "cas/tree/internal/erofs", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
		"google.golang.org/protobuf/...", "golang.org/x/sys/unix"},
		why: "input trees are laid out the same over every store"},
	{of: "cas/tree/internal/erofs", only: []string{},
		why: "an encoder of a format: trees of names and places, no blobs"},
	{of: "cas/compress", only: []string{"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
		"github.com/andybalholm/brotli/...", "github.com/klauspost/compress/..."},
		why: "what foreign bytes decompress to is bounded and fuzzed in one place, for who serves and who asks"},
	{of: "cas/chunk", only: []string{"github.com/buildbarn/go-cdc"},
		why: "cut points depend only on the bytes of the stream"},
	{of: "cas/remote", never: []string{"cas/disk", "cas/casserver", "cas/tree"},
		why: "a store behind a server is an implementation of package cas like any other"},
	{of: "cas/durable", only: []string{},
		why: "it replaces files and appends lines for every package that keeps state"},
	{of: "cas/disk", only: []string{"cas", "cas/durable", "cas/disk/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
		"google.golang.org/protobuf/...", "golang.org/x/sys/..."},
		why: "a store is an implementation of package cas and serves nothing"},
	{of: "cas/disk/internal/index", only: []string{},
		why: "the table of what is there is found and measured alone"},
	{of: "cas/disk/internal/commit", only: []string{},
		why: "a moment to die at is a name, and no more"},
	{of: "cas/disk/internal/segment", only: []string{"cas/disk/internal/index", "cas/disk/internal/commit", "cas/durable", "golang.org/x/sys/unix"},
		why: "where bytes are and when they are safe has nothing to do with what they mean and how long they stay"},
	{of: "cas/overlay", only: []string{"cas", "cas/durable", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "google.golang.org/protobuf/..."},
		why: "one store in front of another is the same whichever they are"},
	{of: "cas/diskctl", only: []string{"cas", "cas/disk", "proto/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/...", "golang.org/x/sys/unix"},
		why: "what operators do to a store is done by the store: this is the way there, and knows no other store"},
	{of: "cas/object", only: []string{"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "google.golang.org/protobuf/...",
		"github.com/minio/minio-go/v7/...", "golang.org/x/oauth2/...", "golang.org/x/sync/..."},
		why: "a store in an object store is an implementation of package cas like any other"},
	{of: "cas/revision", only: []string{"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"},
		why: "a commit is read by git and put into any store: what is run of it is another's business"},
	{of: "worker", never: []string{"cas/disk", "cas/remote", "cas/casserver", "sandbox/namespace", "worker/queue", "worker/execserver", "google.golang.org/grpc/..."},
		why: "the straight line of an action is the same over every store, backend and mouth"},
	{of: "worker/...", never: []string{"cas/disk", "cas/remote", "cas/casserver", "sandbox/namespace", "cmd/..."},
		why: "concrete stores and backends are chosen in cmd and in tests alone"},
	{of: "worker/repro/manifest", only: []string{"cas", "sandbox"},
		why: "a record is texts and digests: whoever reads one needs neither a worker nor its messages"},
	{of: "worker/telemetry", never: []string{"worker/queue", "worker/execserver", "google.golang.org/grpc/..."},
		why: "what is counted is an Executor, whoever asks it"},
	{of: "worker/repro", never: []string{"worker/queue", "worker/execserver", "worker/telemetry", "google.golang.org/grpc/..."},
		why: "what is judged is an Executor, whoever asks it and when"},
	{of: "worker/repro/compare", only: []string{"cas", "worker/repro/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "github.com/klauspost/compress/zstd"},
		why: "what reads the outputs of hostile actions runs nothing and asks nobody"},
	{of: "worker/repro/attest", only: []string{"github.com/secure-systems-lab/go-securesystemslib/dsse", "golang.org/x/crypto/ssh", "golang.org/x/crypto/ssh/agent"},
		why: "whoever checks a statement trusts this package alone: it can be read without a worker and a store"},
	{of: "worker/logstream", never: []string{"worker/queue", "worker/execserver"},
		why: "reading logs is independent of waiting for results"},
	{of: "worker/history", only: []string{"cas", "cas/durable", "proto/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
		"google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "the history does not depend on the services that report to it"},
	{of: "worker/repro/changes", only: []string{"cas", "worker/repro/manifest", "worker/repro/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"},
		why: "how two actions differ is read in a store, of whatever make, and in no blob that they name"},
	{of: "worker/response", never: []string{"worker/execserver", "worker/buildbarn", "google.golang.org/grpc"},
		why: "what a message says of an outcome is the same whoever sends it"},
	{of: "worker/runner", only: []string{"sandbox", "sandbox/policy", "worker", "proto/buildbarn/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "commands of others' workers have neither store nor queue: their inputs lie in a directory"},
	{of: "worker/queue", never: []string{"worker/execserver", "worker/logstream", "google.golang.org/grpc/..."},
		why: "scheduling is independent of the protocols of its clients"},
	{of: "worker/buildbarn", never: []string{"cas/tree", "sandbox/...", "worker/execserver", "worker/logstream", "worker/telemetry", "worker/history"},
		why: "assigning actions to workers is independent of their clients and of their execution"},
	{of: "worker/fleet", only: []string{"worker", "worker/queue", "proto/cloister/v1", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "the service only translates between the queue and messages"},
	{of: "...", never: []string{"cas/castest", "sandbox/sandboxtest"},
		why: "what only tests need is imported by tests only"},
}

// leaves are packages without dependencies that every package may import, whatever the rules say.
var leaves = []string{"sandbox/printable"}

// A pkg is what go list says of one package of this module.
type pkg struct {
	ImportPath, Dir, Name string
	Imports, Deps         []string
	GoFiles, CgoFiles     []string
	Standard              bool
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Name,Imports,Deps,GoFiles,CgoFiles", module+"/...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var ps []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
	if len(ps) < 10 {
		t.Fatalf("go list names %d packages only", len(ps))
	}
	return ps
}

// covers reports whether a pattern of a rule covers an import path. A pattern without a dot in its
// first element is below the module, one that begins with "std/" in the standard library.
func covers(pattern, path string) bool {
	if pattern == "..." {
		return true
	}
	if std, ok := strings.CutPrefix(pattern, "std/"); ok {
		pattern = std
	} else if first, _, _ := strings.Cut(pattern, "/"); !strings.Contains(first, ".") {
		pattern = module + "/" + pattern
	}
	if stem, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == stem || strings.HasPrefix(path, stem+"/")
	}
	return path == pattern
}

// standard reports whether an import path is of the standard library, or vendored into it.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".") || first == "vendor"
}

// fakes are the packages that only tests import, and that no rule is about.
var fakes = map[string]bool{"castest": true, "sandboxtest": true}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		if strings.HasPrefix(p.ImportPath, module+"/tests") {
			continue
		}
		for _, r := range rules {
			if !covers(r.of, p.ImportPath) || fakes[p.Name] {
				continue
			}
			imports := p.Imports
			if r.deep {
				imports = p.Deps
			}
			for _, i := range imports {
				if slices.ContainsFunc(leaves, func(l string) bool { return covers(l, i) }) {
					continue
				}
				bad := slices.ContainsFunc(r.never, func(n string) bool { return covers(n, i) })
				if r.only != nil && !standard(i) {
					bad = bad || !slices.ContainsFunc(r.only, func(o string) bool { return covers(o, i) })
				}
				if bad {
					t.Errorf("%s may not depend on %s: %s", strings.TrimPrefix(p.ImportPath, module+"/"), i, r.why)
				}
			}
		}
	}
}

// TestRulesBite checks the checker with imports that must be refused.
func TestRulesBite(t *testing.T) {
	for _, c := range []struct{ pattern, path string }{
		{"cas/...", module + "/cas"}, {"cas/...", module + "/cas/disk"}, {"...", "x"},
		{"google.golang.org/...", "google.golang.org/grpc"}, {"sandbox", module + "/sandbox"}, {"std/net", "net"}, {"std/net/...", "net/http"},
	} {
		if !covers(c.pattern, c.path) {
			t.Errorf("%s does not cover %s", c.pattern, c.path)
		}
	}
	for _, c := range []struct{ pattern, path string }{
		{"cas", module + "/cas/disk"}, {"cas/...", module + "/castle"}, {"worker", module + "/workers"},
	} {
		if covers(c.pattern, c.path) {
			t.Errorf("%s covers %s", c.pattern, c.path)
		}
	}
	if standard("golang.org/x/sys/unix") || !standard("net/http") {
		t.Error("the standard library is not told from the rest")
	}
}

func TestNoCgoAndUnsafeIsNamed(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.CgoFiles) > 0 {
			t.Errorf("%s: %v use cgo: go build must be the only step, without a C compiler", p.ImportPath, p.CgoFiles)
		}
		for _, name := range p.GoFiles {
			if strings.HasSuffix(name, ".pb.go") {
				continue // generated, and nobody reviews it
			}
			f := parse(t, filepath.Join(p.Dir, name), parser.ImportsOnly)
			for _, i := range f.Imports {
				if i.Path.Value == `"unsafe"` && !strings.HasSuffix(name, "_unsafe.go") {
					t.Errorf("%s: unsafe is imported in files named *_unsafe.go alone, where reviewers look for it", name)
				}
			}
		}
	}
}

func parse(t *testing.T, path string, mode parser.Mode) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, mode)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestEveryPackageIsDocumented(t *testing.T) {
	for _, p := range packages(t) {
		documented := false
		for _, name := range p.GoFiles {
			f := parse(t, filepath.Join(p.Dir, name), parser.ParseComments|parser.PackageClauseOnly)
			text := f.Doc.Text()
			if strings.HasPrefix(text, "Package "+p.Name+" ") || p.Name == "main" && strings.HasPrefix(text, "Command ") {
				documented = true
			}
		}
		if !documented && len(p.GoFiles) > 0 {
			t.Errorf("%s has no comment that begins with %q: a stranger must know which room this is", p.ImportPath, "Package "+p.Name)
		}
	}
}

// root is the top of the repository.
const root = ".."

// sources calls visit with the path, relative to the repository, and the text of each file with one of
// these extensions.
func sources(t *testing.T, visit func(path, text string), extensions ...string) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if e.IsDir() && (rel == ".git" || rel == "bin" || strings.HasPrefix(rel, "bazel-")) {
			return fs.SkipDir
		}
		if !e.Type().IsRegular() || !slices.Contains(extensions, filepath.Ext(path)) {
			return nil
		}
		n++
		b, err := os.ReadFile(path)
		visit(rel, string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n == 0 {
		t.Fatalf("there is no file with an extension of %v", extensions)
	}
}

func TestEveryFileStatesItsLicence(t *testing.T) {
	sources(t, func(path, text string) {
		head := strings.SplitN(text, "\n", 4)
		if !strings.Contains(strings.Join(head[:min(3, len(head))], "\n"), "SPDX-License-Identifier: Apache-2.0") {
			t.Errorf("%s: the first lines lack SPDX-License-Identifier: Apache-2.0", path)
		}
	}, ".go", ".sh", ".bzl", ".cc", ".h")
}

// link is a Markdown link to a file of the repository.
var link = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)

func TestDocumentsLinkToWhatExists(t *testing.T) {
	sources(t, func(path, text string) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s links to %s, which does not exist", path, m[1])
			}
		}
	}, ".md")
}

func TestEveryDecisionIsIndexed(t *testing.T) {
	index, err := os.ReadFile(filepath.Join(root, "docs/adr/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(root, "docs/adr/[0-9]*.md"))
	if err != nil || len(records) == 0 {
		t.Fatalf("no decisions: %v", err)
	}
	for _, r := range records {
		name := filepath.Base(r)
		if !strings.Contains(string(index), "("+name+")") {
			t.Errorf("docs/adr/README.md does not list %s", name)
		}
		b, err := os.ReadFile(r)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{"## Context", "## Decision", "## Consequences"} {
			if !strings.Contains(string(b), part) {
				t.Errorf("%s has no section %q", name, part)
			}
		}
	}
}

// TestTopLevel keeps the top of the repository as it was agreed.
func TestTopLevel(t *testing.T) {
	agreed := []string{
		"worker", "cas", "sandbox", "cmd", "proto", "tests", "go.mod", "go.sum", "WORKSPACE",
		"MODULE.bazel", "BUILD.bazel", "Makefile", "LICENSE", "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples", "bin",
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if n := e.Name(); !strings.HasPrefix(n, ".") && !strings.HasPrefix(n, "bazel-") && !strings.HasPrefix(n, "MODULE.bazel") && !slices.Contains(agreed, n) {
			t.Errorf("%s is new at the top level: it belongs into a folder that says what it is", n)
		}
	}
}

// skips are the files that may skip a test themselves, and how often: what they skip for is nothing that a host could be
// given. sandboxtest.Unavailable skips for what it lacks, and fails where that is required.
var skips = map[string]int{
	"cas/chunk/chunk_test.go":                       1, // a picture whose licence keeps it out of this tree
	"cas/castest/castest.go":                        4, // what a store need not offer
	"cas/castest/chunklist.go":                      1,
	"cas/disk/crash_test.go":                        1, // tests that others start as their children
	"cas/disk/full_linux_test.go":                   1,
	"cas/disk/kill_test.go":                         1,
	"cas/disk/internal/segment/segment_test.go":     1, // other systems and architectures
	"cas/revision/revision_test.go":                 2,
	"worker/audit/audit_test.go":                    1,
	"worker/audit/bound_test.go":                    1,
	"sandbox/internal/seccomp/kernel_linux_test.go": 1,
	"sandbox/internal/seccomp/rules_linux_test.go":  1,
	"sandbox/sandboxtest/terminal_other.go":         1,
	"worker/repro/compare/diffoscope_test.go":       1,
	"worker/record_test.go":                         1,
	"cas/tree/order_linux_test.go":                  1, // a kernel whose tmpfs keeps another order
	"cas/tree/stager_linux_test.go":                 1, // required of root alone, and they ask for that
	"cas/tree/internal/erofs/kernel_linux_test.go":  1,
	"cas/tree/capture_test.go":                      1, // -short
	"cas/tree/internal/erofs/erofs_test.go":         1,
	"sandbox/namespace/cost_linux_test.go":          1, // a benchmark
	"sandbox/namespace/namespace_test.go":           1, // whoever is no root runs the same as another test
	"tests/bazel/bazel_linux_test.go":               1,
	"tests/escape/escape_linux_test.go":             1,
	"tests/farm/build_linux_test.go":                1, // make farm
	"sandbox/sandboxtest/sandboxtest.go":            1, // Unavailable
}

// TestWhatIsLackingCanBeRequired: no other test skips past CLOISTER_REQUIRE.
func TestWhatIsLackingCanBeRequired(t *testing.T) {
	skip := regexp.MustCompile(`\b(?:t|b|tb)\.Skip(?:f|Now)?\(`)
	sources(t, func(path, text string) {
		name := filepath.ToSlash(path)
		if n := len(skip.FindAllString(text, -1)); n != skips[name] && name != "tests/rules_test.go" {
			t.Errorf("%s skips %d times, want %d: say sandboxtest.Unavailable, or why not in skips", name, n, skips[name])
		}
	}, ".go")
}
