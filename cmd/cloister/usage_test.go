// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

// TestMistakesAreToldByWhatIsRight: a mistake in the command line is one line that says what would be right, and exits with 2.
func TestMistakesAreToldByWhatIsRight(t *testing.T) {
	for _, c := range []struct{ line, says string }{
		{"sevre", `cloister has no command "sevre": did you mean serve?`},
		{"blow", `cloister has no command "blow": see cloister --help`},
		{"action shwo", `cloister action has no command "shwo": did you mean show?`},
		{"serve now", "wrong number of arguments (1): write cloister serve [flags]"},
		{"join", "wrong number of arguments (0): write cloister join ADDRESS [flags]"},
		{"diff a", "wrong number of arguments (1): write cloister diff A B [--as KIND] [--results] [--names] [--cas URL] [--instance NAME] [--json], or cloister diff --invocation"},
		{"serve --jobs x", `--jobs "x": write a whole number`},
		{"action ls -n x", `--number "x": write a whole number`},
		{"join grpc://a:1 --size-class -1", `--size-class "-1": write a whole number from 0`},
		{"serve --jobs 99999999999999999999", `--jobs "99999999999999999999": the number is too large`},
		{"serve --bogus", "cloister serve has no flag --bogus: see cloister serve --help"},
		{"serve --liste a", "cloister serve has no flag --liste: did you mean --listen?"},
		{"drain a --resaon=b", "cloister drain has no flag --resaon: did you mean --reason?"},
		{"join -x", "cloister join has no flag -x: see cloister join --help"},
		{"join -\u00e9", `cloister join has no flag -\u00e9: see cloister join --help`},
		{"serve --=x", "cloister serve has no flag --=x: see cloister serve --help"},
		{"serve --listen", "--listen needs a value: address and port of the gRPC services"},
		{"top -n", "-n needs a value: number of updates"},
		{"serve --cas a --store b", "--cas and --store exclude each other: give one of them"},
		{"runner --socket s", "--build-dir is missing: bb_worker's build directory"},
		{"audit ls --since yesterday", `--since "yesterday": write 90s, 5m or 2h`},
		{"gc --dry-run=maybe", `--dry-run "maybe": write true or false, or the flag alone`},
		{"gc --max-size much", `--max-size "much": write 50GiB, 500MB or 10%`},
		{"audit ls --kind shout", `--kind "shout": there are refused, connect, allowed, write, exec, syscall, read, output, limit, more, note`},
		{"check --policy /nonexistent/policy.yaml", "--policy: open /nonexistent/policy.yaml: no such file or directory"},
		{"cas put /nonexistent/file", "/nonexistent/file: no such file or directory"},
		{"run --in /nonexistent -- true", "--in /nonexistent: no such file or directory"},
	} {
		said, code := runCLI(t, strings.Fields(c.line)...)
		if code != exit.Usage || !strings.HasPrefix(said, c.says) || strings.Contains(said, "\n") {
			t.Errorf("cloister %s: exit %d, %q; want exit 2, and one line that begins with %q", c.line, code, said, c.says)
		}
	}
}

// cobras are words of cobra, pflag and Go's parsers for mistakes.
var cobras = regexp.MustCompile(`arg\(s\)|unknown (command|flag|shorthand)|invalid argument|flag needs an argument|in the group|required flag\(s\)|strconv|bad flag`)

// TestNoCommandSpeaksForItself: whatever command is added, its mistakes are told in the same words.
func TestNoCommandSpeaksForItself(t *testing.T) {
	var each func(*cobra.Command, []string)
	each = func(c *cobra.Command, path []string) {
		for _, line := range [][]string{{"--no-such-flag"}, {"-\u00e9"}, nil, strings.Fields("a b c d e f g")} {
			// Only of arguments that do not fit: the command is not to begin.
			if len(line) != 1 && (!c.Runnable() || c.Args == nil || c.Args(c, line) == nil) {
				continue
			}
			if said, code := runCLI(t, append(path, line...)...); code != exit.Usage || cobras.MatchString(said) {
				t.Errorf("cloister %v %v: exit %d, %s", path, line, code, said)
			}
		}
		for _, sub := range c.Commands() {
			each(sub, append(path[:len(path):len(path)], sub.Name()))
		}
	}
	each(rootCommand(), nil)
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
		{taken.Addr().String(), taken.Addr().String() + " is in use by another process: stop it, or choose another port with --metrics", exit.Environment},
		{"8980", `--metrics "8980": write ADDRESS:PORT`, exit.Usage},
		{"127.0.0.1:80000", `--metrics "127.0.0.1:80000": write ADDRESS:PORT`, exit.Usage},
	} {
		said, code := runCLI(t, "serve", "--jobs", "0", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--dir", t.TempDir(), "--max-size", "64MiB", "--metrics", c.address)
		if code != c.code || !strings.HasSuffix(said, c.says) {
			t.Errorf("--metrics %s: exit %d, %q; want exit %d, %q", c.address, code, said, c.code, c.says)
		}
	}
}

// TestUnreachableServerIsTold: which command ever asks, a server that is not there is told in one line with the reason, without
// the names that gRPC has for it.
func TestUnreachableServerIsTold(t *testing.T) {
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := gone.Addr().String()
	gone.Close()
	for _, line := range []string{"status", "action ls", "action show ^1", "action log -f " + noDigest, "cas stat " + noDigest, "cache show " + noDigest} {
		said, code := runCLI(t, append(strings.Fields(line), "--cas", "grpc://"+address)...)
		if code != exit.Unreachable || !strings.Contains(said, "dial tcp "+address+": ") || strings.Contains(said, "rpc error") || strings.Contains(said, `\"`) {
			t.Errorf("cloister %s: exit %d, %s", line, code, said)
		}
	}
}

// noDigest is that of a blob that nobody has.
const noDigest = "9f2c1e7700000000000000000000000000000000000000000000000000000000/142"
