// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/digest"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// begin starts a shell script on the server. It returns the action's digest, the operation's name, and a function that waits for
// its end.
func (r *remote) begin(t *testing.T, script string) (action, operation string, end func() *repb.ExecuteResponse) {
	t.Helper()
	put := r.putting(t)
	d := put(&repb.Action{
		CommandDigest:   put(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}}),
		InputRootDigest: put(&repb.Directory{}),
	})
	s, err := r.Execute(t.Context(), &repb.ExecuteRequest{InstanceName: r.InstanceName, ActionDigest: d})
	if err != nil {
		t.Fatal(err)
	}
	op, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return digest.NewFromProtoUnvalidated(d).String(), op.Name, func() *repb.ExecuteResponse {
		t.Helper()
		for !op.Done {
			if op, err = s.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		var response repb.ExecuteResponse
		if err := op.GetResponse().UnmarshalTo(&response); err != nil {
			t.Fatal(err)
		}
		return &response
	}
}

// TestActionLogFollows checks that output appears while the action runs and that the command ends with it.
func TestActionLogFollows(t *testing.T) {
	for _, instance := range []string{"", "main"} {
		r := serving(t, instance)
		mark := fmt.Sprintf("followed in %q %d", instance, os.Getpid())
		_, operation, end := r.begin(t, "trap : USR1; sleep 600 & echo first; echo oh >&2; wait; echo second; exit 3 # "+mark)
		at := []string{"--cas", r.cas, "--instance", instance}
		log := func(args ...string) output {
			return cloister(t, "", append(append([]string{"action", "log"}, args...), at...)...)
		}

		ctx, path := built.Within(t, time.Minute)
		cmd := exec.CommandContext(ctx, path, append([]string{"action", "log", "-f", operation}, at...)...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		text := bufio.NewReader(out)
		if line, err := text.ReadString('\n'); err != nil || line != "first\n" {
			t.Fatalf("got %q, %v, want the first line", line, err)
		}
		if s := log(operation); s.code != 1 || s.out != "" || !whole(`cloister: .*EXECUTING.* -f\n`, s.err) {
			t.Errorf("running action without -f: got %+v, want exit code 1 and a hint", s)
		}
		if sandboxtest.Signal(t, "# "+mark, syscall.SIGUSR1) == 0 {
			t.Fatal("found no process of the action")
		}
		if rest, err := io.ReadAll(text); err != nil || string(rest) != "second\n" {
			t.Errorf("got %q, %v, want the second line", rest, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if response := end(); response.Result.GetExitCode() != 3 {
			t.Errorf("got %v, want exit code 3", response)
		}
		for _, args := range [][]string{{operation}, {"-f", operation}} {
			if s := log(args...); s != (output{out: "first\nsecond\n"}) {
				t.Errorf("%v: got %+v, want both lines", args, s)
			}
			if s := log(append(args, "--stderr")...); s != (output{out: "oh\n"}) {
				t.Errorf("%v --stderr: got %+v, want oh", args, s)
			}
		}
	}
}

func TestActionLogOfAResult(t *testing.T) {
	r := serving(t, "main")
	action, _ := r.execute(t, "cat input; echo oh >&2; echo x > out")
	for _, c := range []struct {
		args []string
		out  string
	}{
		{[]string{action}, "an input\n"}, {[]string{action, "-f"}, "an input\n"}, {[]string{action, "--stderr"}, "oh\n"},
	} {
		args := append([]string{"action", "log", "--cas", r.cas, "--instance", "main"}, c.args...)
		if s := cloister(t, "", args...); s != (output{out: c.out}) {
			t.Errorf("%v: got %+v, want %q", c.args, s, c.out)
		}
	}
	quiet, _ := r.execute(t, "echo x > out")
	if s := cloister(t, "", "action", "log", quiet, "--cas", r.cas, "--instance", "main"); s != (output{}) {
		t.Errorf("action without output: got %+v, want nothing", s)
	}

	for name, want := range map[string]string{
		strings.Repeat("0", 63) + "1/5": strings.Repeat("0", 63) + "1/5", strings.Repeat("0", 32): "operation",
	} {
		s := cloister(t, "", "action", "log", name, "--cas", r.cas, "--instance", "main")
		if s.code != 4 || s.out != "" || !whole(`cloister: .*`+want+`.*\n`, s.err) {
			t.Errorf("action log %s: got %+v, want exit code 4 and a line with %q", name, s, want)
		}
	}
}
