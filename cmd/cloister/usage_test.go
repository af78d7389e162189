// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"strings"
	"testing"
)

// TestMistakesAreToldByWhatIsRight: a mistake in the command line is one line that says what would be right, and exits with 2.
func TestMistakesAreToldByWhatIsRight(t *testing.T) {
	for _, c := range []struct{ line, says string }{
		{"sevre", `cloister has no command "sevre": did you mean serve?`},
		{"blow", `cloister has no command "blow": cloister --help lists them`},
		{"action shwo", `cloister action has no command "shwo": did you mean show?`},
		{"serve now", "1 arguments do not fit: write it as cloister serve [flags]"},
		{"join", "0 arguments do not fit: write it as cloister join ADDRESS [flags]"},
		{"diff a", "1 arguments do not fit: write it as cloister diff A B [--as KIND] [--results] [--names] [--cas URL] [--instance NAME] [--json], or cloister diff --invocation"},
		{"serve --jobs x", `--jobs "x": write a whole number`},
		{"action ls -n x", `--number "x": write a whole number`},
		{"join grpc://a:1 --size-class -1", `--size-class "-1": write a whole number that is not negative`},
		{"audit ls --since yesterday", `--since "yesterday": write it as 90s, 5m or 2h`},
		{"gc --dry-run=maybe", `--dry-run "maybe": write true or false, or the flag alone`},
		{"gc --max-size much", `--max-size "much": write it as 50GiB, 500MB or 10%`},
		{"audit ls --kind shout", `--kind "shout": there are connect, allowed, write, exec, syscall, read, output, limit, note`},
		{"check --policy /nonexistent/policy.yaml", "--policy: open /nonexistent/policy.yaml: no such file or directory"},
		{"cas put /nonexistent/file", "/nonexistent/file: no such file or directory"},
		{"run --in /nonexistent -- true", "--in /nonexistent: no such file or directory"},
	} {
		said, code := told(t, strings.Fields(c.line)...)
		if code != exitUsage || !strings.HasPrefix(said, c.says) || strings.Contains(said, "\n") {
			t.Errorf("cloister %s: exit %d, %q; want exit 2, and one line that begins with %q", c.line, code, said, c.says)
		}
	}
}

// TestPortsAreToldByTheirFlags: of a port that cannot be had, whichever flag names it, the flag and the reason are told.
func TestPortsAreToldByTheirFlags(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		address, says string
		code          int
	}{
		{taken.Addr().String(), taken.Addr().String() + " is in use by another process: stop it, or choose another port with --metrics", exitEnvironment},
		{"8980", `--metrics "8980": write it as ADDRESS:PORT`, exitUsage},
		{"127.0.0.1:80000", `--metrics "127.0.0.1:80000": write it as ADDRESS:PORT`, exitUsage},
	} {
		said, code := told(t, "serve", "--jobs", "0", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--dir", t.TempDir(), "--max-size", "64MiB", "--metrics", c.address)
		if code != c.code || !strings.HasSuffix(said, c.says) {
			t.Errorf("--metrics %s: exit %d, %q; want exit %d, %q", c.address, code, said, c.code, c.says)
		}
	}
}
