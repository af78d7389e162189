// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs the scripts in testdata/script, which need neither a server nor a sandbox. They use two additional
// commands: "cloister CODE ARGS..." runs the program and checks its exit code, and "usage REGEXP ARGS..." checks that it
// reports a usage error.
func TestScripts(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	path := built.Path(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("ROOT", root)
			env.Setenv("ESC", "\x1b")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"cloister": func(ts *testscript.TestScript, _ bool, args []string) {
				want, err := strconv.Atoi(args[0])
				ts.Check(err)
				checkCode(ts, want, ts.Exec(path, args[1:]...))
			},
			"usage": func(ts *testscript.TestScript, _ bool, args []string) {
				checkCode(ts, 2, ts.Exec(path, args[1:]...))
				if out := ts.ReadFile("stdout"); out != "" {
					ts.Fatalf("got stdout %q, want none", out)
				}
				got := ts.ReadFile("stderr")
				want := `\Acloister: [^\n]*(?:` + args[0] + `)(?:.*\n){1,3}\z`
				if !regexp.MustCompile(want).MatchString(got) {
					ts.Fatalf("got stderr %q, want at most three lines that match %q", got, want)
				}
			},
		},
	})
}

// checkCode checks the exit code of a program that ended with err.
func checkCode(ts *testscript.TestScript, want int, err error) {
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("got exit code %d, want %d", got, want)
	}
}
