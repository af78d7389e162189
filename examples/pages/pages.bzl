# SPDX-License-Identifier: Apache-2.0

"""Rules whose outputs are directories of files with names that are not known in advance."""

# An executor creates the parents of an output, but not necessarily an output directory itself.

_SPLIT = """
set -e
mkdir -p "$2"
number=0
while IFS= read -r line; do
    case "$line" in
        '# '*) number=$((number + 1)) ;;
    esac
    printf '%s\\n' "$line" >> "$2/page$number.md"
done < "$1"
"""

_CONTENTS = """
set -e
for page in "$1"/*.md; do
    IFS= read -r title < "$page"
    printf '%s: %s\\n' "${page##*/}" "${title#??}"
done > "$2"
"""

_SOURCES = """
set -e
mkdir -p "$2"
number=0
while IFS= read -r line; do
    case "$line" in
        '# '*)
            number=$((number + 1))
            printf 'namespace pages { const char* Title%s() { return "%s"; } }\\n' \\
                "$number" "${line#??}" > "$2/title$number.cc"
            ;;
    esac
done < "$1"
"""

def _run(ctx, script, output):
    ctx.actions.run_shell(
        inputs = [ctx.file.src],
        outputs = [output],
        command = script,
        arguments = [ctx.file.src.path, output.path],
        mnemonic = "Pages",
    )
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output]))]

_ATTRS = {"src": attr.label(allow_single_file = True, mandatory = True)}

def _pages_impl(ctx):
    return _run(ctx, _SPLIT, ctx.actions.declare_directory(ctx.label.name))

pages = rule(
    implementation = _pages_impl,
    doc = "Cuts a text at its headings, a file for each.",
    attrs = _ATTRS,
)

def _contents_impl(ctx):
    return _run(ctx, _CONTENTS, ctx.actions.declare_file(ctx.label.name + ".txt"))

contents = rule(
    implementation = _contents_impl,
    doc = "Lists the pages of a directory and their headings.",
    attrs = _ATTRS,
)

def _sources_impl(ctx):
    return _run(ctx, _SOURCES, ctx.actions.declare_directory(ctx.label.name))

sources = rule(
    implementation = _sources_impl,
    doc = "Writes a C++ source for each heading of a text.",
    attrs = _ATTRS,
)
