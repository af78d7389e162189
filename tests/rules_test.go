// SPDX-License-Identifier: Apache-2.0

// Package tests checks the rules of the code base: imports, documentation, prose. The tests in its subdirectories start
// the real binary.
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

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const module = "github.com/cloister-build/cloister"

// A rule restricts the imports of packages and gives the reason.
type rule struct {
	// of is a pattern of packages below the module; a trailing "/..." includes subdirectories.
	of string
	// only lists the permitted imports besides the standard library; nil permits everything.
	only []string
	// never lists the forbidden imports.
	never []string
	// except is a package that the rule does not restrict.
	except string
	// deep applies the rule to indirect dependencies as well.
	deep bool
	why  string
}

// rules are the import rules; docs/architecture.md summarises them.
var rules = []rule{
	{
		of: "sandbox", only: []string{}, deep: true,
		why: "a Go program can confine a command with the vocabulary of the sandbox alone",
	},
	{
		of: "sandbox/internal/zygote", only: []string{"golang.org/x/sys/unix"}, never: []string{"std/net", "std/os/exec", "std/os/signal", "std/regexp"}, deep: true,
		why: "its init runs before that of any larger package, in every process that it starts",
	},
	{
		of: "sandbox/internal/agent", only: []string{"sandbox/internal/wire", "sandbox/internal/zygote", "golang.org/x/sys/unix"}, never: []string{"std/net", "std/os/exec", "std/regexp"}, deep: true,
		why: "its init runs before that of any larger package, in every process of the sandbox",
	},
	{
		of: "sandbox/environment", only: []string{"sandbox", "sandbox/internal/agent", "sandbox/internal/wire", "sandbox/internal/zygote", "golang.org/x/sys/unix"},
		why: "an environment works with every backend",
	},
	{
		of: "sandbox/policy", only: []string{"sandbox", "sandbox/policy/strict"},
		why: "operators can read and test policies without anything that runs",
	},
	{
		of: "sandbox/policy/strict", only: []string{"github.com/agnivade/levenshtein", "github.com/goccy/go-yaml/..."},
		why: "parsing a file is independent of what it permits",
	},
	{
		of: "worker/access", only: []string{
			"cas", "proto/...", "sandbox/policy/strict", "worker/internal/filestate", "worker/internal/pemblocks",
			"cloud.google.com/go/longrunning/...", "github.com/bazelbuild/remote-apis/...",
			"github.com/golang-jwt/jwt/v5", "google.golang.org/grpc/...",
		},
		why: "authorization depends only on names in requests; cas says which instance names are valid",
	},
	{
		of: "cmd/cloister/internal/notify", only: []string{"github.com/coreos/go-systemd/v22/daemon"},
		why: "it writes lines to the service manager's socket and knows nothing about the server",
	},
	{
		of: "sandbox/printable", only: []string{},
		why: "every tree may import it",
	},
	{
		of: "worker/audit", only: []string{"sandbox", "cas/durable"},
		why: "a tamper-evident log is small enough to be reviewed",
	},
	{
		of: "sandbox/microvm/initramfs", only: []string{"golang.org/x/sys/unix"},
		why: "the initial root of a virtual machine is files and nothing else",
	},
	{
		of: "sandbox/internal/cgroup", only: []string{"github.com/containerd/cgroups/v3/...", "github.com/opencontainers/runtime-spec/specs-go", "golang.org/x/sys/unix"},
		why: "containerd's module manages control groups, independently of the rest of the sandbox",
	},
	{
		of: "sandbox/internal/seccomp", only: []string{"golang.org/x/sys/unix"},
		why: "each part of the confinement can be reviewed on its own",
	},
	{
		of: "sandbox/internal/monitor", only: []string{"sandbox", "sandbox/internal/seccomp", "golang.org/x/net/dns/dnsmessage", "golang.org/x/sys/unix"},
		why: "each part of the confinement can be reviewed on its own",
	},
	{
		of: "sandbox/...", never: []string{"cas/...", "worker/...", "cmd/...", "proto/...", "google.golang.org/..."},
		why: "the sandbox knows paths and processes but neither blobs nor the wire, so it can be reviewed on its own",
	},
	{
		of: "cas/...", never: []string{"sandbox/...", "worker/...", "cmd/..."},
		why: "a store can be served and tested where nothing can be executed",
	},
	{
		of: "cas", only: []string{
			"github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"google.golang.org/protobuf/...",
			"cas/internal/sha256tree", "github.com/zeebo/blake3",
		},
		why: "the vocabulary of the store consists of the API's messages and hash functions",
	},
	{
		of: "cas/casstatus", only: []string{"cas", "google.golang.org/grpc/codes", "google.golang.org/grpc/status"},
		why: "one table of codes serves every service, and importers of cas do without it",
	},
	{
		of: "cas/quota", only: []string{"google.golang.org/genproto/googleapis/rpc/errdetails", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "services of every tree enforce the limits of callers in the same way",
	},
	{
		of: "cas/memory", only: []string{
			"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "google.golang.org/protobuf/...",
		},
		why: "a store in memory costs its importers nothing more",
	},
	{
		of: "cas/internal/sha256tree", only: []string{},
		why: "a digest function maps bytes to a hash",
	},
	{
		of: "cas/internal/health", only: []string{"cas"},
		why: "one circuit breaker serves every kind of upstream",
	},
	{
		of: "cas/tree", only: []string{
			"cas", "cas/tree/internal/erofs", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"google.golang.org/protobuf/...", "golang.org/x/sys/unix",
		},
		why: "input trees are staged in the same way from every store",
	},
	{
		of: "cas/tree/internal/erofs", only: []string{},
		why: "it encodes names and locations and knows no blobs",
	},
	{
		of: "cas/internal/compress", only: []string{
			"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"github.com/andybalholm/brotli/...", "github.com/klauspost/compress/...",
		},
		why: "decompression of foreign bytes is bounded and fuzzed in one place, for servers and clients",
	},
	{
		of: "cas/internal/chunk", only: []string{"github.com/buildbarn/go-cdc"},
		why: "cut points depend only on the bytes of the stream",
	},
	{
		of: "cas/remote", never: []string{"cas/disk", "cas/casserver", "cas/tree"},
		why: "it implements package cas like any other store",
	},
	{
		of: "tests/must", only: []string{},
		why: "tests of every package use it",
	},
	{
		of: "tests/expect", only: []string{"google.golang.org/grpc/codes", "google.golang.org/grpc/status"},
		why: "likewise",
	},
	{
		of: "cas/durable", only: []string{"golang.org/x/sys/windows"},
		why: "every package that keeps state uses it",
	},
	{
		of: "cas/disk", only: []string{
			"cas", "cas/durable", "cas/disk/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"google.golang.org/protobuf/...", "golang.org/x/sys/...",
		},
		why: "it implements package cas and serves nothing",
	},
	{
		of: "cas/disk/internal/index", only: []string{},
		why: "the index can be measured and tested on its own",
	},
	{
		of: "cas/disk/internal/commit", only: []string{},
		why: "it only names the points at which crash tests kill the process",
	},
	{
		of: "cas/disk/internal/fault", only: []string{"cas/durable"},
		why: "the store and its segments agree on which errors are about a file",
	},
	{
		of: "cas/disk/internal/segment", only: []string{
			"cas/disk/internal/index", "cas/disk/internal/commit", "cas/disk/internal/fault", "cas/durable", "golang.org/x/sys/unix",
		},
		why: "where bytes are stored is independent of what they mean and how long they stay",
	},
	{
		of: "cas/overlay", only: []string{"cas", "cas/durable", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "google.golang.org/protobuf/..."},
		why: "it combines any two stores",
	},
	{
		of: "cmd/cloister/internal/diskctl", only: []string{"cas", "cas/casstatus", "cas/disk", "cmd/cloister/internal/unixsocket", "proto/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "it only carries operators' requests to the disk store",
	},
	{
		of: "cmd/cloister/internal/assetservice", only: []string{"cas", "cas/casstatus", "proto/...", "github.com/bazelbuild/remote-apis/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "it finds assets in any store, and contacts nobody",
	},
	{
		of: "cmd/cloister/internal/buildevents", only: []string{
			"cas", "cas/durable", "cas/quota", "proto/...", "google.golang.org/genproto/googleapis/devtools/build/v1",
			"google.golang.org/grpc/...", "google.golang.org/protobuf/...",
		},
		why: "it keeps what clients claim, and depends on nothing that runs or is served",
	},
	{
		of: "cmd/cloister/internal/imageservice", only: []string{"cas", "cas/casstatus", "cas/image", "cas/tree", "proto/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "it only carries operators' requests to the library of images",
	},
	{
		of: "cas/object", only: []string{
			"cas", "cas/internal/health", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "google.golang.org/protobuf/...",
			"github.com/minio/minio-go/v7/...", "golang.org/x/oauth2/...", "golang.org/x/sync/...",
		},
		why: "it implements package cas like any other store",
	},
	{
		of: "cas/revision", only: []string{"cas", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"},
		why: "it reads a commit and puts it into any store",
	},
	{
		of: "cas/image", only: []string{
			"cas", "cas/durable", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"github.com/google/go-containerregistry/pkg/...", "github.com/klauspost/compress/zstd", "golang.org/x/sync/errgroup", "golang.org/x/sync/singleflight",
		},
		why: "it reads hostile layers into any store, and runs and mounts nothing",
	},
	{
		of: "...", never: []string{"github.com/google/go-containerregistry/pkg/v1/daemon", "github.com/google/go-containerregistry/pkg/crane"},
		why: "images come from registries and files, so that no client of a container daemon is linked in",
	},
	{
		of: "worker", never: []string{"cas/disk", "cas/remote", "cas/casserver", "sandbox/namespace", "sandbox/gvisor", "sandbox/microvm", "worker/queue", "worker/execserver", "google.golang.org/grpc/..."},
		why: "the stages of an action are the same for every store, backend and protocol",
	},
	{
		of: "worker/...", never: []string{"cas/disk", "cas/remote", "cas/object", "sandbox/namespace", "sandbox/gvisor", "sandbox/microvm", "cmd/..."},
		why: "programs and tests choose concrete stores and backends",
	},
	{
		of: "worker/transport", only: []string{"worker/internal/filestate", "worker/internal/pemblocks", "google.golang.org/grpc/..."},
		why: "servers and clients of any service use it",
	},
	{
		of: "...", never: []string{"github.com/bazelbuild/remote-apis-sdks/..."}, except: "worker/execclient",
		why: "its digest function is a global variable, and it checks neither names nor all blobs that it downloads (ADR 0063)",
	},
	{
		of: "worker/execclient", never: []string{"worker/queue", "worker/execserver", "sandbox/...", "cas/tree"},
		why: "it executes on another machine",
	},
	{
		of: "worker/repro/manifest", only: []string{"cas", "sandbox"},
		why: "reading a manifest requires neither a worker nor the API's messages",
	},
	{
		of: "worker/telemetry", never: []string{"worker/queue", "worker/execserver", "google.golang.org/grpc/..."},
		why: "it observes any Executor",
	},
	{
		of: "worker/repro", never: []string{"worker/queue", "worker/execserver", "worker/telemetry", "google.golang.org/grpc/..."},
		why: "it runs any Executor",
	},
	{
		of: "worker/repro/compare", only: []string{"cas", "worker/repro/changes", "worker/repro/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "github.com/klauspost/compress/zstd", "github.com/mikelolasagasti/xz"},
		why: "it reads hostile outputs, so it runs nothing and calls nobody",
	},
	{
		of: "worker/repro/attest", only: []string{"github.com/secure-systems-lab/go-securesystemslib/dsse", "golang.org/x/crypto/ssh", "golang.org/x/crypto/ssh/agent"},
		why: "verifying a statement requires trust in this package alone",
	},
	{
		of: "worker/logstream", never: []string{"worker/queue", "worker/execserver"},
		why: "reading logs is independent of waiting for results",
	},
	{
		of: "worker/history", only: []string{
			"cas", "cas/casstatus", "cas/durable", "cas/quota", "proto/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2",
			"google.golang.org/grpc/...", "google.golang.org/protobuf/...",
		},
		why: "the history does not depend on the services that report to it",
	},
	{
		of: "worker/repro/changes", only: []string{"cas", "worker/repro/manifest", "worker/repro/internal/...", "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2", "golang.org/x/sync/errgroup"},
		why: "it compares actions by names and digests in any store",
	},
	{
		of: "worker/internal/response", never: []string{"worker/execserver", "worker/buildbarn", "google.golang.org/grpc"},
		why: "a response is the same for every protocol",
	},
	{
		of: "worker/runner", only: []string{"sandbox", "sandbox/policy", "sandbox/violation", "worker", "proto/buildbarn/...", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "runner commands have neither store nor queue: their inputs are in a directory",
	},
	{
		of: "worker/queue", never: []string{"worker/execserver", "worker/logstream", "google.golang.org/grpc/..."},
		why: "scheduling is independent of its clients' protocols",
	},
	{
		of: "worker/buildbarn", never: []string{"cas/tree", "sandbox/...", "worker/execserver", "worker/logstream", "worker/telemetry", "worker/history"},
		why: "assigning actions to workers is independent of clients and execution",
	},
	{
		of: "worker/internal/fleet", only: []string{"worker", "worker/queue", "proto/cloister/v1", "google.golang.org/grpc/...", "google.golang.org/protobuf/..."},
		why: "it only translates between the queue and messages",
	},
	{
		of: "...", never: []string{"cas/castest/...", "sandbox/sandboxtest", "tests/..."},
		why: "test fixtures are imported by tests only",
	},
}

// leaves are packages without dependencies that every package may import, whatever the rules say.
var leaves = []string{"sandbox/printable"}

// A pkg is the output of go list for one package.
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
	out := must.Get(cmd.Output())(t)
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
	must.Be(t, len(ps) >= 10, "got %d packages from go list, want at least 10", len(ps))
	return ps
}

// covers reports whether a rule's pattern covers an import path. A pattern without a dot in its first element is
// relative to the module; one that begins with "std/" is in the standard library.
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

// standard reports whether an import path is in the standard library or vendored into it.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".") || first == "vendor"
}

// fakes are the packages that only tests import, which the rules do not restrict.
var fakes = map[string]bool{"castest": true, "faulty": true, "sandboxtest": true, "grpctest": true}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		if strings.HasPrefix(p.ImportPath, module+"/tests") {
			continue
		}
		for _, r := range rules {
			if !covers(r.of, p.ImportPath) || covers(r.except, p.ImportPath) || fakes[p.Name] {
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

// TestRulesBite checks the checker.
func TestRulesBite(t *testing.T) {
	for _, c := range []struct{ pattern, path string }{
		{"cas/...", module + "/cas"},
		{"cas/...", module + "/cas/disk"},
		{"...", "x"},
		{"google.golang.org/...", "google.golang.org/grpc"},
		{"sandbox", module + "/sandbox"},
		{"std/net", "net"},
		{"std/net/...", "net/http"},
	} {
		expect.That(t, covers(c.pattern, c.path), "covers(%q, %q) = false, want true", c.pattern, c.path)
	}
	for _, c := range []struct{ pattern, path string }{
		{"cas", module + "/cas/disk"}, {"cas/...", module + "/castle"}, {"worker", module + "/workers"},
	} {
		expect.That(t, !covers(c.pattern, c.path), "covers(%q, %q) = true, want false", c.pattern, c.path)
	}
	expect.That(t, !standard("golang.org/x/sys/unix") && standard("net/http"),
		"standard confuses the standard library with other modules")
}

func TestNoCgoAndUnsafeIsNamed(t *testing.T) {
	for _, p := range packages(t) {
		expect.That(t, len(p.CgoFiles) == 0,
			"%s: %v use cgo, want none: go build must work without a C compiler", p.ImportPath, p.CgoFiles)
		for _, name := range p.GoFiles {
			if strings.HasSuffix(name, ".pb.go") {
				continue // generated
			}
			f := parse(t, filepath.Join(p.Dir, name), parser.ImportsOnly)
			for _, i := range f.Imports {
				expect.That(t, i.Path.Value != `"unsafe"` || strings.HasSuffix(name, "_unsafe.go"),
					"%s imports unsafe, which only files named *_unsafe.go may, so that reviewers find it", name)
			}
		}
	}
}

func parse(t *testing.T, path string, mode parser.Mode) *ast.File {
	t.Helper()
	return must.Get(parser.ParseFile(token.NewFileSet(), path, nil, mode))(t)
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
		expect.That(t, documented || len(p.GoFiles) == 0,
			"%s has no package comment that begins with %q", p.ImportPath, "Package "+p.Name)
	}
}

// root is the top of the repository.
const root = ".."

// sources calls visit with the path, relative to the repository, and the text of each file with one of the extensions.
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
	must.Succeed(t, err)
	must.Be(t, n != 0, "got no file with an extension of %v, want some", extensions)
}

func TestEveryFileStatesItsLicence(t *testing.T) {
	sources(t, func(path, text string) {
		head := strings.SplitN(text, "\n", 4)
		expect.Text(t, strings.Join(head[:min(3, len(head))], "\n"), "SPDX-License-Identifier: Apache-2.0", "%s", path)
	}, ".go", ".sh", ".bzl", ".cc", ".h")
}

// link is a Markdown link to a file of the repository.
var link = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)

func TestDocumentLinksExist(t *testing.T) {
	sources(t, func(path, text string) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			expect.Error(t, expect.Err(os.Stat(filepath.Join(root, filepath.Dir(path), m[1]))), nil,
				"%s links to %s, which does not exist", path, m[1])
		}
	}, ".md")
}

func TestEveryDecisionIsIndexed(t *testing.T) {
	index := must.Get(os.ReadFile(filepath.Join(root, "docs/adr/README.md")))(t)
	records, err := filepath.Glob(filepath.Join(root, "docs/adr/[0-9]*.md"))
	must.Be(t, err == nil && len(records) != 0, "no decisions: %v", err)
	for _, r := range records {
		name := filepath.Base(r)
		expect.That(t, strings.Contains(string(index), "("+name+")"), "docs/adr/README.md does not list %s", name)
		b := must.Get(os.ReadFile(r))(t)
		expect.Texts(t, string(b), []string{"## Context", "## Decision", "## Consequences"}, "%s", name)
	}
}

// TestTopLevel checks that the top-level folder contains only the agreed names.
func TestTopLevel(t *testing.T) {
	agreed := []string{
		"worker", "cas", "sandbox", "cmd", "proto", "tests", "go.mod", "go.sum", "WORKSPACE",
		"MODULE.bazel", "BUILD.bazel", "Makefile", "LICENSE", "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples", "bin",
	}
	entries := must.Get(os.ReadDir(root))(t)
	for _, e := range entries {
		if n := e.Name(); !strings.HasPrefix(n, ".") && !strings.HasPrefix(n, "bazel-") && !strings.HasPrefix(n, "MODULE.bazel") && !slices.Contains(agreed, n) {
			t.Errorf("%s is new at the top level: move it into a folder", n)
		}
	}
}

// TestStubsHaveThePlatforms checks that the offline stand-in for rules_go declares the platforms that build files name.
func TestStubsHaveThePlatforms(t *testing.T) {
	stub := string(must.Get(os.ReadFile(filepath.Join(root, "tests/bazel/stubs/rules_go/go/platform/BUILD.bazel")))(t))
	platform := regexp.MustCompile(`"@rules_go//go/platform:(?:linux_)?([a-z0-9_]+)"`)
	sources(t, func(path, text string) {
		for _, name := range platform.FindAllStringSubmatch(text, -1) {
			expect.That(t, strings.Contains(stub, `"`+name[1]+`"`), "%s: the stand-in lacks %s", path, name[0])
		}
	}, ".bazel")
}

// skips counts the skips per file that do not depend on the host. All others use sandboxtest.Unavailable, which fails
// if CLOISTER_REQUIRE names the requirement.
var skips = map[string]int{
	"cas/internal/chunk/chunk_test.go":              1, // a picture that its licence keeps out of this tree
	"cas/castest/castest.go":                        1, // optional abilities of a store
	"cas/disk/crash_test.go":                        1, // tests that run only as a child process
	"cas/disk/fault_linux_test.go":                  1,
	"cas/disk/full_linux_test.go":                   1,
	"cas/disk/kill_test.go":                         1,
	"cas/disk/internal/segment/segment_test.go":     1, // other operating systems and architectures
	"cas/revision/revision_test.go":                 2,
	"worker/audit/audit_test.go":                    1,
	"sandbox/internal/cgroup/cgroup_linux_test.go":  2, // tests/vm runs one; version 1 only
	"sandbox/internal/seccomp/kernel_linux_test.go": 1,
	"sandbox/internal/seccomp/rules_linux_test.go":  1,
	"sandbox/sandboxtest/terminal_other.go":         1,
	"worker/repro/compare/diffoscope_test.go":       1,
	"worker/record_test.go":                         1,
	"cas/tree/order_linux_test.go":                  1, // kernels whose tmpfs has another order
	"cas/tree/stager_linux_test.go":                 1, // required for root only
	"cas/tree/internal/erofs/kernel_linux_test.go":  1,
	"cas/tree/capture_test.go":                      1, // -short
	"cas/tree/internal/erofs/erofs_test.go":         1,
	"sandbox/namespace/cost_linux_test.go":          1, // a benchmark
	"sandbox/namespace/lacking_linux_test.go":       1, // tests that run only as a child process
	"sandbox/namespace/namespace_test.go":           1, // ordinary users run the same in another test
	"tests/bazel/bazel_linux_test.go":               1,
	"tests/bazel/self_linux_test.go":                1, // make self-build
	"tests/escape/escape_linux_test.go":             1,
	"tests/escape/gvisor_linux_test.go":             1, // attacks on the host's kernel
	"tests/escape/neighbours_linux_test.go":         1, // make neighbours
	"tests/farm/build_linux_test.go":                1, // make farm
	"sandbox/sandboxtest/sandboxtest.go":            2, // Unavailable, and what no host could add to a backend
	"sandbox/environment/environment_linux_test.go": 1, // the race detector
	"sandbox/internal/wire/copy_linux_test.go":      1, // old kernels
	"sandbox/gvisor/gvisor_linux_test.go":           1, // the race detector
	"sandbox/microvm/microvm_linux_test.go":         1, // KVM, which few test machines have
	"sandbox/microvm/msb_linux_test.go":             2, // the race detector; KVM
}

// TestRequirementsAreDocumented checks that CONTRIBUTING.md explains what tests may need of the host.
func TestRequirementsAreDocumented(t *testing.T) {
	text := must.Get(os.ReadFile(filepath.Join(root, "CONTRIBUTING.md")))(t)
	for _, word := range sandboxtest.Requirements {
		expect.That(t, strings.Contains(string(text), "`"+word+"`"),
			"CONTRIBUTING.md does not mention the requirement %q", word)
	}
}

// TestSkipsCanBeRequired checks that every other skip obeys CLOISTER_REQUIRE.
func TestSkipsCanBeRequired(t *testing.T) {
	skip := regexp.MustCompile(`\b(?:t|b|tb)\.Skip(?:f|Now)?\(`)
	sources(t, func(path, text string) {
		name := filepath.ToSlash(path)
		if n := len(skip.FindAllString(text, -1)); n != skips[name] && name != "tests/rules_test.go" {
			t.Errorf("%s skips %d times, want %d: use sandboxtest.Unavailable or add it to skips", name, n, skips[name])
		}
	}, ".go")
}
