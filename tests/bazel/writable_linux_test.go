// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// writable is a package whose actions write beside their inputs, as Bazel's own sandbox permits.
var writable = map[string]string{
	"BUILD.bazel": `
load("@rules_cc//cc:defs.bzl", "cc_test")
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

cc_test(
    name = "cc_test",
    size = "small",
    srcs = ["test.cc"],
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
	"module.py": "x = 1\n",
	"test.cc":   "int main() { return 0; }\n",
}

// TestActionsWriteBesideTheirInputs builds and tests targets whose actions write into directories of their inputs.
func TestActionsWriteBesideTheirInputs(t *testing.T) {
	sandboxtest.Tool(t, "/usr/local/go/bin/go")
	sandboxtest.Tool(t, "/usr/bin/python3")
	sandboxtest.Tool(t, "autoconf")
	r := newRig(t, nil)
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
		{"coverage", "//writable:cc_test"},
	} {
		t.Run(c[0], func(t *testing.T) {
			if build := r.bazel(t, c[0], c[1:]...); build.ExitCode != 0 {
				t.Errorf("bazel %v: exit %d, want 0\n%s", c, build.ExitCode, build.Output)
			}
		})
	}
}
