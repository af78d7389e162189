// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// write makes a file in dir and returns its path.
func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// misspelt is a policy with a mistake, and caret is its error message without the file name.
const (
	misspelt = "version: 1\nprofiles:\n  build: {memori: 8GiB}\n"
	caret    = `: [3:11] unknown key "memori"
   1 | version: 1
   2 | profiles:
>  3 |   build: {memori: 8GiB}
                 ^ did you mean "memory"?
`
)

func TestPolicyIsCheckedAndExplained(t *testing.T) {
	dir := t.TempDir()
	good := write(t, dir, "good.yaml", `version: 1
profiles:
  fetch: {memory: 2GiB, network: {allow: [example.org:443]}}
rules:
  - {name: downloads, when: {mnemonic: Fetch}, profile: fetch, max: {memory: 8GiB}}
`)
	bad := write(t, dir, "bad.yaml", misspelt)
	for _, c := range []struct {
		args []string
		code int
		out  string // regular expressions for the complete output
		err  string
	}{
		{[]string{"check", good}, 0, `(?s)^# policy [0-9a-f]{64}\nversion: 1\n.*\n    memory: 2GiB\n.*  - name: downloads\n.*`, ``},
		{[]string{"check", bad}, 2, ``, `cloister: ` + regexp.QuoteMeta(bad+caret)},
		{[]string{"check", "no/such/file"}, 2, ``, `cloister: .*no/such/file.*\n`},
		{[]string{"check"}, 2, ``, `cloister: .*\n`},
		{[]string{"explain"}, 0, `(?s)granted by rule default: profile build, hermetic true, results recorded true\n.*`, ``},
		{[]string{"explain", "--mnemonic", "TestRunner"}, 0, `(?s)granted by rule default: profile test, .*\n  processes 1024: profile test .*`, ``},
		{
			[]string{"explain", good, "--mnemonic", "Fetch", "--property", "cloister-network=example.org:443", "--property", "cloister-memory=8GiB"},
			0,
			`(?s)granted by rule downloads: profile fetch, hermetic false, results recorded false\n.*\n  memory 8GiB: property cloister-memory, of at most 8GiB \(.*good\.yaml:5\)\n.*`, ``,
		},
		{
			[]string{"explain", good, "--mnemonic", "Fetch", "--property", "cloister-memory=9GiB"},
			1, ``,
			`cloister: property cloister-memory=9GiB: rule "downloads" grants at most 8GiB \(.*good\.yaml:5\); .*\n`,
		},
		{[]string{"explain", "--property", "cloister-memori=9GiB"}, 1, ``, `cloister: .*did you mean cloister-memory\?\n`},
		{[]string{"explain", "--property", "memory"}, 2, ``, `cloister: --property "memory": write NAME=VALUE\n`},
		{[]string{"explain", bad}, 2, ``, `cloister: ` + regexp.QuoteMeta(bad+caret)},
	} {
		s := cloister(t, "", append([]string{"policy"}, c.args...)...)
		if s.code != c.code || !whole(c.out, s.out) || !whole(c.err, s.err) {
			t.Errorf("policy %v: exit code %d, want %d\nstdout %q\n  want %q\nstderr %q\n  want %q", c.args, s.code, c.code, s.out, c.out, s.err, c.err)
		}
	}
}

// whole reports whether the regular expression matches all of s.
func whole(expression, s string) bool {
	return regexp.MustCompile(`^(?:` + expression + `)$`).MatchString(s)
}

// TestExamplePolicyIsSound checks the documented example and the commands in its comments.
func TestExamplePolicyIsSound(t *testing.T) {
	const file = "../../examples/policy.yaml"
	if s := cloister(t, "", "policy", "check", file); s.code != 0 {
		t.Errorf("check: %+v", s)
	}
	s := cloister(t, "", "policy", "explain", file, "--target", "//third_party/zlib:fetch", "--mnemonic", "Fetch", "--property", "pool=net")
	if s.code != 0 || !strings.HasPrefix(s.out, "granted by rule downloads: profile fetch, ") {
		t.Errorf("explain: %+v", s)
	}
}

func TestFlagsOfConfinement(t *testing.T) {
	dir := t.TempDir()
	bad := write(t, dir, "bad.yaml", misspelt)
	for _, c := range []struct {
		flag, err string
	}{
		{"--policy=" + bad, "cloister: " + bad + caret},
		{"--policy=no/such/file", "cloister: --policy: open no/such/file: no such file or directory\n"},
		{"--sandbox=bogus", "cloister: --sandbox \"bogus\": write full or namespaces\n"},
	} {
		for _, command := range [][]string{
			{"run", c.flag, "--", "/bin/echo", "it ran"},
			{"serve", c.flag, "--listen", "127.0.0.1:0", "--dir", filepath.Join(dir, "store"), "--max-size", "1GiB"},
		} {
			if got, want := cloister(t, dir, command...), (said{"", c.err, 2}); got != want {
				t.Errorf("%v: got %+v, want %+v", command, got, want)
			}
		}
	}
}

// TestRunReportsViolations checks that run prints events like a server's message, and applies the policy of the command line.
func TestRunReportsViolations(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, src, "input", "")
	write(t, dir, "header.h", "")
	write(t, dir, "few.yaml", "version: 1\nprofiles:\n  build: {open_files: 16}\n")
	write(t, dir, "full.yaml", "version: 1\nprofiles:\n  build: {audit: full}\n")
	for _, c := range []struct {
		args []string
		want said
	}{
		{[]string{"--in", "src", "--", "/bin/sh", "-c", "exec 2> /dev/null; echo x >> input; echo x > beside; exit 3"}, said{
			"",
			"cloister: tried to write /build/input: not an output (sh, openat)\ncloister: left beside: not a declared output\n", 3,
		}},
		{[]string{"--", "/bin/bash", "-c", "exec 2> /dev/null; echo > /dev/tcp/192.0.2.1/443; exit 3"}, said{
			"",
			"cloister: tried to connect to tcp 192.0.2.1:443: there is no network (bash, connect)\n", 3,
		}},
		{[]string{"--sandbox=namespaces", "--", "/bin/bash", "-c", "exec 2> /dev/null; echo > /dev/tcp/192.0.2.1/443 || echo refused"}, said{"refused\n", "", 0}},
		{[]string{"--policy=few.yaml", "--", "/bin/sh", "-c", "ulimit -n"}, said{"16\n", "", 0}},
		{[]string{"--policy=full.yaml", "--source-tree=.", "--in", "src", "--", "/bin/sh", "-c", "cat header.h 2> /dev/null"}, said{
			"",
			"cloister: tried to read /build/header.h: not an input, in the source tree: add it to the inputs (cat, openat)\n", 1,
		}},
	} {
		if got := cloister(t, dir, append([]string{"run"}, c.args...)...); got != c.want {
			t.Errorf("run %v: got %+v, want %+v", c.args, got, c.want)
		}
	}
	if got := cloister(t, dir, "run", "--source-tree=header.h", "--", "/bin/echo", "it ran"); got.code != 2 || got.out != "" || !strings.Contains(got.err, "--source-tree") {
		t.Errorf("a source tree that is a file: %+v", got)
	}
}
