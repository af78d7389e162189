# SPDX-License-Identifier: Apache-2.0

"""The modules in go.mod as repositories, from Go's module cache: run "go mod download" first.

@go_modules also has a copy of this module's own packages, so that they are compiled once and not again for each test.
The copy may be old: the go command then compiles what has changed.
"""

def _go_modules_impl(ctx):
    root = ctx.path(ctx.attr.go_mod).dirname
    ctx.path(ctx.attr.go_sum)
    ctx.symlink(ctx.attr.go_mod, "go.mod")
    script = """set -eu
go mod vendor -o "$1/vendor"
mkdir "$1/packages"
cp -r $(go list -f '{{.Dir}}' ./... | sed "s,^$PWD/,,; s,/.*,," | sort -u) "$1/packages"
find "$1/vendor" "$1/packages" '(' -name BUILD -o -name BUILD.bazel -o -name WORKSPACE -o -name '*_test.go' ')' -delete
CGO_ENABLED=0 go list -deps -test -f '{{if .GoFiles}}{{if not .ForTest}}{{if ne .Name "main"}}{{.ImportPath}}{{end}}{{end}}{{end}}' \\
	${GO_PACKAGES:-./...} > "$1/compiled.txt"
go env GOROOT"""
    done = ctx.execute(["sh", "-c", script, "sh", str(ctx.path("."))], working_directory = str(root))
    if done.return_code:
        fail("go mod vendor: " + done.stderr)
    ctx.file("BUILD.bazel", """load("@rules_go//go:def.bzl", "go_compiled", "go_library")

package(default_visibility = ["//visibility:public"])

go_library(name = "modules")

go_compiled(
    name = "compiled",
    srcs = glob(["go.mod", "vendor/**"]),
    packages = glob(["compiled.txt", "packages/**"]),
    root = "%s",
)
""" % done.stdout.strip())

_go_modules = repository_rule(
    _go_modules_impl,
    attrs = {"go_mod": attr.label(), "go_sum": attr.label()},
    environ = [
        "GO_PACKAGES",  # patterns of packages that are compiled once, with what they and their tests import
        "GOROOT",
        "GOTOOLCHAIN",
        "PATH",
    ],
)

def _repository(module):
    """Returns the name that Gazelle gives the repository of a module."""
    host, _, path = module.lower().partition("/")
    name = "_".join(reversed(host.split("."))) + "_" + path.replace("/", "_")
    return name.replace("-", "_").replace(".", "_")

def _go_module_impl(ctx):
    module = ""
    for line in ctx.read(Label("@go_modules//:vendor/modules.txt")).splitlines():
        if line.startswith("# "):
            module = line.split(" ")[1]
        elif not line.startswith("#") and _repository(module) == ctx.name:
            parts = line.split("/")
            version = parts[-1][0] == "v" and parts[-1][1:].isdigit()
            ctx.file(
                (line[len(module):] + "/BUILD.bazel")[1:],
                "alias(name = \"%s\", actual = \"@go_modules//:modules\", visibility = [\"//visibility:public\"])\n" %
                parts[-2 if version else -1],
            )

_go_module = repository_rule(_go_module_impl)

def go_modules(repositories):
    """Declares @go_modules, and repositories for the modules that BUILD files mention.

    Args:
      repositories: their names.
    """
    _go_modules(name = "go_modules", go_mod = "@cloister//:go.mod", go_sum = "@cloister//:go.sum")
    for name in repositories:
        _go_module(name = name)
