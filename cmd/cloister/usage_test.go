// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestMistakesNameTheCorrection: a mistake in the command line exits with 2 and one line that says what to write.
func TestMistakesNameTheCorrection(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"sevre", `cloister has no command "sevre": did you mean serve?`},
		{"blow", `cloister has no command "blow": see cloister --help`},
		{"action shwo", `cloister action has no command "shwo": did you mean show?`},
		{"serve now", "wrong number of arguments (1): write cloister serve [flags]"},
		{"foo", `cloister has no command "foo": see cloister --help`},
		{"join", "missing argument ADDRESS: write cloister join ADDRESS [flags]"},
		{"cas cat", "missing argument DIGEST: write cloister cas cat DIGEST..."},
		{"diff a", "missing argument B: write cloister diff A B [--as KIND] [--results] [--names] [--server URL] [--instance NAME] [--json], or cloister diff --invocation"},
		{"serve --jobs x", `--jobs "x": write a whole number`},
		{"action ls --limit x", `--limit "x": write a whole number`},
		{"join grpc://a:1 --size-class -1", `--size-class "-1": write a whole number from 0`},
		{"serve --jobs 99999999999999999999", `--jobs "99999999999999999999": the number is too large`},
		{"serve --bogus", "cloister serve has no flag --bogus: see cloister serve --help"},
		{"serve --liste a", "cloister serve has no flag --liste: did you mean --listen?"},
		{"drain a --resaon=b", "cloister drain has no flag --resaon: did you mean --reason?"},
		{"join -x", "cloister join has no flag -x: see cloister join --help"},
		{"join -\u00e9", `cloister join has no flag -\u00e9: see cloister join --help`},
		{"serve --=x", "cloister serve has no flag --=x: see cloister serve --help"},
		{"serve --listen", "--listen needs a value: address and port of the gRPC services"},
		{"serve --auth= too many", "--auth is empty: write a value or omit the flag; it is the file of callers and their rights"},
		{"repro -n", "-n needs a value: number of runs to compare"},
		{"serve --cas a --store b", "--cas and --store are mutually exclusive: pass one of them"},
		{"runner --socket s", "--build-dir is missing: bb_worker's build directory"},
		{"audit ls --since yesterday", `--since "yesterday": write 90s, 5m or 2h`},
		{"gc --dry-run=maybe", `--dry-run "maybe": write true or false, or the flag alone`},
		{"serve --max-size 10", `--max-size "10": 10 bytes are too few: write a unit, such as 10GiB, or a percentage of the disk, such as 10%`},
		{"gc --max-size much", `--max-size "much": write 50GiB, 500MB or 10%`},
		{"audit ls --kind shout", `--kind "shout": write one of refused, connect, allowed, unreachable, write, exec, syscall, read, output, limit, more, note`},
		{"check --policy /nonexistent/policy.yaml", "--policy: open /nonexistent/policy.yaml: no such file or directory"},
		{"cas put /nonexistent/file", "/nonexistent/file: no such file or directory"},
		{"run --in /nonexistent -- true", "--in /nonexistent: no such file or directory"},
	} {
		got, code := runCLI(t, strings.Fields(c.line)...)
		expect.That(t, code == exit.Usage && strings.HasPrefix(got, c.want) && !strings.Contains(got, "\n"),
			"cloister %s: exit %d, %q; want exit 2, and one line that begins with %q", c.line, code, got, c.want)
	}
}

// TestEmptyValuesAreMistakes: every command refuses a flag with an empty value, such as an unset variable of a unit
// file, unless the empty text has a meaning. Otherwise --auth "" would start a server that is open to everybody.
func TestEmptyValuesAreMistakes(t *testing.T) {
	tried := 0
	var each func(path ...string)
	each = func(path ...string) {
		find := func() *cobra.Command { // a new one each time, with no flag given
			c, _, err := rootCommand().Find(path)
			must.Succeed(t, err)
			return c
		}
		find().Flags().VisitAll(func(f *pflag.Flag) {
			if f.Name == "help" || f.Name == "instance" && path[0] != "join" || f.Name == "web" {
				return
			}
			tried++
			c := find()
			err := c.ParseFlags([]string{"--" + f.Name + "="})
			if err == nil {
				err = c.Args(c, nil)
				expect.That(t, err != nil && strings.HasPrefix(err.Error(), "--"+f.Name+" is empty"),
					"cloister %v --%s=: %v; want that it is empty", path, f.Name, err)
			} // else the empty text is not of the flag's type
		})
		for _, sub := range find().Commands() {
			each(append(slices.Clip(path), sub.Name())...)
		}
	}
	each()
	expect.That(t, tried >= 100, "tried only %d flags", tried)
}

// TestEmptyVariablesAreMistakes: the same holds for environment variables of the commands that read them.
func TestEmptyVariablesAreMistakes(t *testing.T) {
	for _, command := range config.Commands(rootCommand()) {
		command.InheritedFlags() // adds them to Flags
		command.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Name == "help" || f.Name == "web" {
				return
			}
			variable := flags.Variable(f.Name)
			t.Run(command.Name()+" "+variable, func(t *testing.T) {
				t.Setenv(variable, "")
				c, _, err := rootCommand().Find([]string{command.Name()})
				must.Succeed(t, err)
				must.Succeed(t, c.ParseFlags(nil))
				err = c.Args(c, nil)
				expect.That(t, err != nil && strings.HasPrefix(err.Error(), variable+": --"+f.Name+" "), "got %v", err)
			})
		})
	}
}

// cobraWords are words of cobra, pflag and Go's parsers.
var cobraWords = regexp.MustCompile(`arg\(s\)|unknown (command|flag|shorthand)|invalid argument|flag needs an argument|in the group|required flag\(s\)|strconv|bad flag`)

// TestEveryCommandExplainsMistakes: no command reports mistakes in cobra's words.
func TestEveryCommandExplainsMistakes(t *testing.T) {
	var each func(*cobra.Command, []string)
	each = func(c *cobra.Command, path []string) {
		for _, line := range [][]string{{"--no-such-flag"}, {"-\u00e9"}, nil, strings.Fields("a b c d e f g")} {
			// Only arguments that the command rejects, so that it does not start.
			if len(line) != 1 && (!c.Runnable() || c.Args == nil || c.Args(c, line) == nil) {
				continue
			}
			if got, code := runCLI(t, append(path, line...)...); code != exit.Usage || cobraWords.MatchString(got) {
				t.Errorf("cloister %v %v: exit %d, %s", path, line, code, got)
			}
		}
		for _, sub := range c.Commands() {
			each(sub, append(slices.Clip(path), sub.Name()))
		}
	}
	each(rootCommand(), nil)
}

// TestPortErrorsNameTheFlag: if a port cannot be opened, the error names the flag and the reason.
func TestPortErrorsNameTheFlag(t *testing.T) {
	taken := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	for _, c := range []struct {
		address, want string
		code          int
	}{
		{taken.Addr().String(), taken.Addr().String() + " is in use by another process: stop it, or choose another port with --metrics", exit.Environment},
		{"8980", `--metrics "8980": write ADDRESS:PORT`, exit.Usage},
		{"127.0.0.1:80000", `--metrics "127.0.0.1:80000": write ADDRESS:PORT`, exit.Usage},
	} {
		got, code := runCLI(t, "serve", "--jobs", "0", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--dir", t.TempDir(), "--max-size", "64MiB", "--metrics", c.address)
		expect.That(t, code == c.code && strings.HasSuffix(got, c.want),
			"--metrics %s: exit %d, %q; want exit %d, %q", c.address, code, got, c.code, c.want)
	}
}

// TestUnreachableServerIsExplained: every client command reports an unreachable server in one line, without gRPC
// jargon.
func TestUnreachableServerIsExplained(t *testing.T) {
	const address = "127.0.0.1:1"
	for _, line := range []string{"status", "action ls", "action show ^1", "action log -f " + noDigest, "cas stat " + noDigest, "cache show " + noDigest} {
		got, code := runCLI(t, append(strings.Fields(line), "--cas", "grpc://"+address)...)
		if code != exit.Unreachable || !strings.Contains(got, "no server at "+address+"; ") || strings.Contains(got, "rpc error") || strings.Contains(got, `\"`) {
			t.Errorf("cloister %s: exit %d, %s", line, code, got)
		}
	}
}

// noDigest is the digest of an absent blob.
const noDigest = "9f2c1e7700000000000000000000000000000000000000000000000000000000/142"
