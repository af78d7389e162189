// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// writable is a package whose actions write beside their inputs, as Bazel's own sandbox permits.
var writable = map[string]string{
	"BUILD.bazel": `
load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")
load("@rules_shell//shell:sh_test.bzl", "sh_test")

genrule(
    name = "scratch",
    srcs = ["in/a.txt"],
    outs = ["scratch.txt"],
    cmd = "cp $< tmp.txt; echo b >> tmp.txt; cp tmp.txt $@; cp $@ tmp.txt; echo x > $$(dirname $<)/beside; mkdir -p $$(dirname $<)/d/e",
)

genrule(
    name = "configured",
    srcs = glob(["project/*"]),
    outs = ["program"],
    cmd = "cp -r $$(dirname $(location project/configure.ac)) tree && (cd tree && autoconf && ./configure && make -s) && cp tree/program $@",
)

genrule(
    name = "go",
    srcs = ["go/main.go", "go/go.mod"],
    outs = ["goprogram"],
    cmd = "O=$$PWD/$@; cd $$(dirname $(location go/main.go)) && GOCACHE=/tmp/go GOFLAGS=-mod=mod CGO_ENABLED=0 GOTOOLCHAIN=local /usr/local/go/bin/go build -o $$O .",
)

sh_test(
    name = "python_test",
    size = "small",
    srcs = ["python_test.sh"],
    data = ["module.py"],
)

cc_library(
    name = "covered",
    srcs = ["covered.cc"],
)

cc_test(
    name = "cc_test",
    size = "small",
    srcs = ["test.cc"],
    deps = [":covered"],
)
`,
	"in/a.txt": "a\n",
	"project/configure.ac": `
AC_INIT([program], [1])
AC_PROG_CC
AC_CHECK_HEADERS([stdio.h])
AC_DEFINE([ANSWER], [42])
AC_CONFIG_HEADERS([config.h])
AC_CONFIG_FILES([Makefile])
AC_OUTPUT
`,
	"project/Makefile.in": "@PACKAGE_NAME@: main.c config.h\n\t@CC@ -o $@ main.c\n",
	"project/config.h.in": "#undef ANSWER\n#undef HAVE_STDIO_H\n",
	"project/main.c":      "#include \"config.h\"\nint main(void) { return ANSWER - 42; }\n",
	"go/main.go":          "package main\n\nfunc main() {}\n",
	"go/go.mod":           "module example\n\ngo 1.20\n",
	"python_test.sh": `#!/bin/bash
set -eu
cd writable
/usr/bin/python3 -c 'import module; open("scratch.txt", "w").write("x")'
ls __pycache__/module.*.pyc scratch.txt
`,
	"module.py":  "x = 1\n",
	"covered.cc": "int covered() { return 0; }\n",
	"test.cc":    "int covered();\nint main() { return covered(); }\n",
}

// TestActionsWriteBesideTheirInputs builds and tests targets whose actions write into directories of their inputs. The
// protection of inputs depends on whether the server runs as root.
func TestActionsWriteBesideTheirInputs(t *testing.T) {
	sandboxtest.Tool(t, "/usr/local/go/bin/go")
	sandboxtest.Tool(t, "/usr/bin/python3")
	sandboxtest.Tool(t, "autoconf")
	sandboxtest.Tool(t, "/usr/bin/gcov")
	t.Run("current user", func(t *testing.T) { testWritable(t, nil) })
	if os.Geteuid() == 0 {
		t.Run("ordinary user", func(t *testing.T) { testWritable(t, unusedUser(t)) })
	}
}

func testWritable(t *testing.T, user *syscall.Credential) {
	r := newRig(t, user)
	for name, text := range writable {
		p := filepath.Join(r.Workspace, "writable", name)
		mode := os.FileMode(0o644)
		if strings.HasSuffix(name, ".sh") {
			mode = 0o755
		}
		must.Succeed(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must.Succeed(t, os.WriteFile(p, []byte(text), mode))
	}
	for _, c := range [][]string{
		{"build", "//writable:all"},
		{"test", "//writable:all"},
		{"coverage", "//writable:cc_test", "--test_output=all"},
	} {
		t.Run(c[0], func(t *testing.T) {
			build := r.bazel(t, c[0], c[1:]...)
			if build.ExitCode != 0 {
				t.Errorf("bazel %v: exit %d, want 0\n%s", c, build.ExitCode, build.Output)
			}
			if c[0] == "coverage" {
				wantCovered(t, r, build)
			}
		})
	}
}

// wantCovered checks the coverage of the library. Bazel's scripts write counters below the directory of the inputs, run
// gcov in that directory, and succeed even if they cannot write.
func wantCovered(t *testing.T, r *rig, build *bazelrun.Build) {
	t.Helper()
	for _, refusal := range []string{"Read-only file system", "Permission denied"} {
		expect.That(t, !strings.Contains(build.Output, refusal), "a script could not write:\n%s", build.Output)
	}
	found := must.Get(filepath.Glob(filepath.Join(
		r.Root, "base/execroot/*/bazel-out/*/testlogs/writable/cc_test/coverage.dat")))(t)
	must.Be(t, len(found) == 1, "got reports %q, want one", found)
	report := must.Get(os.ReadFile(found[0]))(t)
	for _, want := range []string{`"file": "writable/covered.cc"`, `"execution_count": 1`} {
		expect.Text(t, string(report), want, "coverage.dat")
	}
}
