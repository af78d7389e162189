# SPDX-License-Identifier: Apache-2.0

"""A minimal stand-in for rules_go without a download, for remote builds on Linux with the host's Go.

A binary or test is one action that runs the go command. What most of them need is compiled once, in
@go_modules//:compiled. A library is only a set of sources; nothing compiles it alone.
"""

GoSources = provider("A package and its dependencies.", fields = {"files": "their sources"})
GoCompiled = provider("A build cache.", fields = {"go": "the shell commands that prepare it", "files": "their inputs"})

_sources = {
    "srcs": attr.label_list(allow_files = True),
    "embedsrcs": attr.label_list(allow_files = True),
    "embed": attr.label_list(providers = [GoSources]),
    "deps": attr.label_list(providers = [GoSources]),
    "importpath": attr.string(),
}

_go = """ln -s "$root"/external/go_modules/go.mod "$root"/external/go_modules/vendor .
export CGO_ENABLED=0 GOCACHE="$(mktemp -d)" GOENV=off GOTOOLCHAIN=local
export GODEBUG=goindex=0 GOFLAGS='-mod=vendor -trimpath -buildvcs=false'
PATH="%s/bin:$PATH"
"""

# The shell commands before _go choose where the go command runs: below the sources, or in a directory of its own.
_here = """set -eu
root=$PWD
trap 'rm go.mod vendor' EXIT
"""
_elsewhere = """set -eu
root=$PWD
cd "$(mktemp -d)"
"""

def _collect(ctx):
    transitive = [d[GoSources].files for d in ctx.attr.embed + ctx.attr.deps]
    return depset(ctx.files.srcs + ctx.files.embedsrcs, transitive = transitive)

def _go_library_impl(ctx):
    return [GoSources(files = _collect(ctx))]

go_library = rule(_go_library_impl, attrs = _sources)

def _go_compiled_impl(ctx):
    cache = ctx.actions.declare_directory(ctx.label.name)
    go = _go % ctx.attr.root

    # Each entry of the cache ends with the time at which it was made, in nanoseconds.
    ctx.actions.run_shell(
        inputs = ctx.files.srcs + ctx.files.packages,
        outputs = [cache],
        command = _elsewhere + go + """cp -r "$root"/external/go_modules/packages/* .
go build $(cat "$root"/external/go_modules/compiled.txt)
find "$GOCACHE" -name '*-a' -exec sed -i 's/[0-9]\\{19\\}$/1000000000000000000/' {} +
mkdir -p "$root"/'%s' && cp -r "$GOCACHE"/?? "$_"
""" % cache.path,
        mnemonic = "GoModules",
    )

    # The go command updates the times of entries that it uses.
    return [GoCompiled(
        go = _here + go + "cp -r --no-preserve=mode '%s'/* \"$GOCACHE\"\n" % cache.path,
        files = depset([cache] + ctx.files.srcs),
    )]

go_compiled = rule(_go_compiled_impl, attrs = {
    "srcs": attr.label_list(allow_files = True),
    "packages": attr.label_list(allow_files = True),
    "root": attr.string(),
})

def _compile(ctx, name, verb):
    out = ctx.actions.declare_file(name)
    compiled = ctx.attr._compiled[GoCompiled]
    ctx.actions.run_shell(
        inputs = depset(transitive = [_collect(ctx), compiled.files]),
        outputs = [out],
        command = compiled.go + "go " + verb + " -o " + out.path + " ./" + ctx.label.package,
        mnemonic = "GoLink",
    )
    return out

_executable = dict(
    _sources,
    data = attr.label_list(allow_files = True),
    _compiled = attr.label(default = "@go_modules//:compiled"),
)

def _go_binary_impl(ctx):
    return [DefaultInfo(executable = _compile(ctx, ctx.label.name, "build"))]

go_binary = rule(_go_binary_impl, attrs = _executable, executable = True)

def _go_test_impl(ctx):
    test = _compile(ctx, ctx.label.name + ".bin", "test -c")
    main = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(main, "#!/bin/sh\ncd '%s' && exec './%s' \"$@\"\n" % (ctx.label.package, test.basename), True)
    return [DefaultInfo(executable = main, runfiles = ctx.runfiles(ctx.files.data + [test]))]

go_test = rule(_go_test_impl, attrs = _executable, test = True)
