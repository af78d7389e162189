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

// whole reports whether the regular expression matches all of s.
func whole(expression, s string) bool {
	return regexp.MustCompile(`^(?:` + expression + `)$`).MatchString(s)
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
		want output
	}{
		{[]string{"--in", "src", "--", "/bin/sh", "-c", "exec 2> /dev/null; echo x >> input; echo x > beside; exit 3"}, output{
			"",
			"cloister: tried to write /build/input: not an output (sh, openat)\ncloister: left beside: not a declared output\n", 3,
		}},
		{[]string{"--", "/bin/bash", "-c", "exec 2> /dev/null; echo > /dev/tcp/192.0.2.1/443; exit 3"}, output{
			"",
			"cloister: tried to connect to tcp 192.0.2.1:443: there is no network (bash, connect)\n", 3,
		}},
		{[]string{"--sandbox=namespaces", "--", "/bin/bash", "-c", "exec 2> /dev/null; echo > /dev/tcp/192.0.2.1/443 || echo refused"}, output{"refused\n", "", 0}},
		{[]string{"--policy=few.yaml", "--", "/bin/sh", "-c", "ulimit -n"}, output{"16\n", "", 0}},
		{[]string{"--policy=full.yaml", "--source-tree=.", "--in", "src", "--", "/bin/sh", "-c", "cat header.h 2> /dev/null"}, output{
			"",
			"cloister: tried to read /build/header.h: not an input, in the source tree: add it to the inputs (cat, openat)\n", 1,
		}},
	} {
		if got := cloister(t, dir, append([]string{"run"}, c.args...)...); got != c.want {
			t.Errorf("run %v: got %+v, want %+v", c.args, got, c.want)
		}
	}
	if got := cloister(t, dir, "run", "--source-tree=header.h", "--", "/bin/echo", "it ran"); got.code != 2 || got.out != "" || !strings.Contains(got.err, "--source-tree") {
		t.Errorf("source tree that is a file: got %+v, want exit code 2 and --source-tree", got)
	}
}
