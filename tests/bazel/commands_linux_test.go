// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// commands is a package with rules of several languages, for Bazel's commands and ways to run tests.
var commands = map[string]string{
	"BUILD.bazel": `
load("@rules_shell//shell:sh_test.bzl", "sh_test")

py_library(name = "module", srcs = ["module.py"])

py_test(name = "python_test", size = "small", srcs = ["python_test.py"], data = ["//:python"], deps = [":module"])

sh_binary(name = "tool", srcs = ["tool.sh"])

genrule(name = "made", outs = ["made.txt"], cmd = "$(location :tool) an argument > $@", tools = [":tool"])

genrule(name = "copied", srcs = ["made.txt"], outs = ["copied.txt"], cmd = "cat $< $< > $@")

genrule(
    name = "jar",
    srcs = ["Main.java"],
    outs = ["main.jar"],
    cmd = "javac -d classes $< && jar --create --file $@ --main-class Main -C classes .",
)

genrule(name = "greeting", srcs = ["main.jar"], outs = ["greeting.txt"], cmd = "java -jar $< > $@")

[sh_test(name = n, size = "small", srcs = [n + ".sh"]) for n in ["passes", "fails"]]

sh_test(name = "sharded", size = "small", srcs = ["sharded.sh"], shard_count = 3)

sh_test(name = "flaky", size = "small", srcs = ["flaky.sh"], flaky = True)
`,
	"module.py": "def text(words): return ' '.join(['made with'] + words)\n",
	"python_test.py": `import os, sys
sys.dont_write_bytecode = False
from commands import module
open('scratch.txt', 'w').write('x')
assert os.path.exists('scratch.txt') and module.text(['x']) == 'made with x'
`,
	"tool.sh":    "echo made with \"$@\"\n",
	"Main.java":  "public class Main { public static void main(String[] a) { System.out.println(\"from Java\"); } }\n",
	"passes.sh":  "echo a line of a test that passes\n",
	"fails.sh":   "echo to stdout; echo to stderr >&2; printf 'a\\tb\\n'; exit 7\n",
	"sharded.sh": "touch \"$TEST_SHARD_STATUS_FILE\"; echo shard $TEST_SHARD_INDEX of $TEST_TOTAL_SHARDS\n",
	// A quarter of the attempts fails, so 40 runs without a failure or ten failures in a row are improbable.
	"flaky.sh": "test $(od -An -N1 -tu1 /dev/urandom) -lt 192\n",
}

// commandsRig is a rig with the package commands.
func commandsRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, nil)
	dir := filepath.Join(r.Workspace, "commands")
	must.Succeed(t, os.MkdirAll(dir, 0o755))
	for name, text := range commands {
		if strings.HasSuffix(name, ".sh") {
			text = "#!/bin/sh\n" + text
		}
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	// This version of Bazel starts Python programs with env and python, which Debian does not have. Tests find it in their
	// working directory.
	must.Succeed(t, os.WriteFile(filepath.Join(r.Workspace, "python"), []byte("#!/bin/sh\nexec /usr/bin/python3 \"$@\"\n"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(r.Workspace, "BUILD.bazel"), []byte("exports_files([\"python\"])\n"), 0o644))
	return r
}

// TestCommandsOfBazel runs commands and kinds of tests that the example does not use.
func TestCommandsOfBazel(t *testing.T) {
	t.Parallel()
	sandboxtest.Tool(t, "/usr/bin/python3")
	sandboxtest.Tool(t, "javac")
	r := commandsRig(t)
	for _, c := range []struct {
		name, verb string
		args       []string
		texts      []string
		files      map[string]string // of the package; an empty text: absent
	}{
		{
			"outputs_stay_on_the_server", "build",
			[]string{"--remote_download_minimal", "//commands:copied"},
			nil,
			map[string]string{"made.txt": "", "copied.txt": ""},
		},
		{
			"outputs_of_an_earlier_build_are_downloaded", "build",
			[]string{"//commands:copied"},
			nil,
			map[string]string{"copied.txt": strings.Repeat("made with an argument\n", 2)},
		},
		{"java", "build", []string{"//commands:greeting"}, nil, map[string]string{"greeting.txt": "from Java\n"}},
		{"run", "run", []string{"//commands:tool", "--", "two words"}, []string{"\nmade with two words\n"}, nil},
		{"py_test_writes_to_its_directory", "test", []string{"//commands:python_test"}, []string{"PASSED"}, nil},
		{
			"log_is_streamed", "test",
			[]string{"--test_output=streamed", "//commands:passes"},
			[]string{"\na line of a test that passes\n"},
			nil,
		},
		{
			"shards", "test",
			[]string{"--test_output=all", "//commands:sharded"},
			[]string{"\nshard 0 of 3\n", "\nshard 1 of 3\n", "\nshard 2 of 3\n"},
			nil,
		},
		{
			"flaky_and_repeated", "test",
			[]string{"--test_output=summary", "--runs_per_test=40", "--flaky_test_attempts=10", "//commands:flaky"},
			[]string{"FLAKY, failed in "},
			nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			build := r.bazel(t, c.verb, c.args...)
			expect.Equal(t, build.ExitCode, 0, "exit code of bazel %s", c.verb)
			expect.Texts(t, build.Output, c.texts)
			for kind := range build.Processes() {
				expect.That(t, kind == "internal" || strings.HasPrefix(kind, "remote"), "processes: %v, want only remote ones",
					build.Processes())
			}
			for name, want := range c.files {
				found := must.Get(filepath.Glob(filepath.Join(r.Root, "base/execroot/*/bazel-out/*-fastbuild/bin/commands")))(t)
				must.Be(t, len(found) == 1, "got output directories %q, want one", found)
				b, err := os.ReadFile(filepath.Join(found[0], name))
				expect.That(t, string(b) == want && errors.Is(err, fs.ErrNotExist) == (want == ""), "%s: got %q, %v, want %q", name, b, err, want)
			}
		})
	}
	t.Run("failure_looks_like_a_local_one", func(t *testing.T) { testFailureLooksLikeLocalOne(t, r) })
}

// testLog matches what Bazel prints of a failed test, without the time that it took.
var testLog = regexp.MustCompile(`(?s)=+ Test output for //commands:fails.*?\n(.*?)\n=+\n`)

// testFailureLooksLikeLocalOne: a failing test shows what a local run shows, and then Cloister's lines.
func testFailureLooksLikeLocalOne(t *testing.T, r *rig) {
	var logs []string
	for _, flags := range [][]string{nil, {"--remote_executor=", "--spawn_strategy=standalone", "--strategy=TestRunner=standalone"}} {
		build := r.bazel(t, "test", append(flags, "--test_output=errors", "//commands:fails")...)
		expect.Equal(t, build.ExitCode, 3, "bazel test %v: exit code", flags)
		found := testLog.FindStringSubmatch(build.Output)
		must.Be(t, found != nil, "bazel test %v: the output shows no log:\n%s", flags, build.Output)
		logs = append(logs, found[1])
	}
	own, ours, _ := strings.Cut(logs[0], "\ncloister: ")
	expect.Equal(t, own, logs[1], "log of the remote run, compared with the local one")
	expect.Equal(t, own, "to stdout\nto stderr\na\tb", "log of the remote run")
	expect.Text(t, ours, "exit code 7 after", "Cloister's lines")
}
