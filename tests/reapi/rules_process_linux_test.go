// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/reapi/probe/seen"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func commandsEnvironment(c *client) {
	r := c.look(job{command: &repb.Command{EnvironmentVariables: variables("A", "x y", "EMPTY", "", "HOME", "/mine", "Z", "a=b\n")}})
	if want := []string{
		"A=x y", "EMPTY=", "HOME=/mine", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp", "Z=a=b\n",
	}; c.ours && !slices.Equal(r.Env, want) {
		c.Errorf("got the environment %q, want %q", r.Env, want)
	}
	var more []string
	names := map[string]bool{}
	for _, v := range r.Env {
		name, _, _ := strings.Cut(v, "=")
		expect.That(c, !names[name], "variable %s is set twice: %q", name, r.Env)
		names[name] = true
		if !slices.Contains([]string{"A", "EMPTY", "HOME", "Z"}, name) {
			more = append(more, v)
		}
	}
	for _, want := range []string{"A=x y", "EMPTY=", "HOME=/mine", "Z=a=b\n"} {
		expect.That(c, slices.Contains(r.Env, want), "got the environment %q, want %q in it", r.Env, want)
	}
	// Only their author can check that these are documented and reveal nothing about the worker.
	c.Logf("the server adds %q", more)
	for _, want := range []string{"PATH=/mine", "TMPDIR=/mine"} {
		name, value, _ := strings.Cut(want, "=")
		if r := c.look(job{command: &repb.Command{EnvironmentVariables: variables(name, value)}}); !slices.Contains(r.Env, want) {
			c.Errorf("got the environment %q, want %q of the command", r.Env, want)
		}
	}
}

func processState(c *client) {
	r := c.look(job{})
	expect.Slices(c, r.FDs, []int{0, 1, 2}, "open descriptors")
	expect.That(c, r.Stdin == 0 && !r.TTY, "%d bytes of stdin, terminal %v: want neither", r.Stdin, r.TTY)
	expect.Equal(c, r.Umask, 0o022, "umask")
	expect.That(c, len(r.Ignored) == 0 && len(r.Blocked) == 0,
		"signals %v are ignored and %v blocked, want none", r.Ignored, r.Blocked)
	again := c.look(job{})
	expect.Equal(c, fmt.Sprint(r.Limits), fmt.Sprint(again.Limits), "limits")
	c.Logf("limits: %v", r.Limits)
}

func newTemporaries(c *client) {
	name := "left-" + uuid()
	look := func() *seen.Report {
		r := c.look(job{})
		expect.That(c, r.TempWorks, "cannot create a file in the temporary directory")
		for _, names := range [][]string{r.Tmp, r.TempDir} {
			if len(names) > 0 {
				c.Errorf("got %q in /tmp and %q in TMPDIR, want both empty", r.Tmp, r.TempDir)
				break
			}
		}
		return r
	}
	first := look()
	c.succeed(job{steps: []string{"write? /tmp/" + name, "write? " + name, "write? /var/tmp/" + name, "write? /dev/shm/" + name}})
	stdout, _ := c.succeed(job{steps: []string{"exists /tmp/" + name, "exists " + name, "exists /var/tmp/" + name, "exists /dev/shm/" + name}})
	expect.Equal(c, stdout, strings.Repeat("no\n", 4),
		"files left in /tmp, the working directory, /var/tmp and /dev/shm")
	second := look()
	if first.Hostname != second.Hostname || first.UID != second.UID || first.GID != second.GID {
		c.Errorf("got host %q and user %d:%d, then %q and %d:%d, want the same", first.Hostname, first.UID, first.GID, second.Hostname, second.UID, second.GID)
	}
	c.Logf("host %q, user %d:%d, directory %s", first.Hostname, first.UID, first.GID, filepath.Clean(first.Dir))
}

func noNetwork(c *client) {
	address := strings.TrimPrefix(c.conn.Target(), "passthrough:///")
	stdout, _ := c.succeed(job{steps: []string{"report", "dial " + address, "dial 192.0.2.1:80"}})
	text, dialled, _ := strings.Cut(stdout, "\n")
	r := c.report(text)
	expect.Equal(c, dialled, "unreachable\nunreachable\n", "the server and an unused address (both unreachable)")
	for _, name := range r.Interfaces {
		if name != "lo" {
			c.Errorf("got interfaces %q, want only loopback", r.Interfaces)
			break
		}
	}
	expect.That(c, r.Loopback, "127.0.0.1 is unreachable")
}

func daemonsEnd(c *client) {
	life := mark()
	a := c.try(job{steps: []string{"mkdir d", "daemon " + life + " d", "say started"}, outputs: []string{"d"}})
	stdout, r := c.wantSuccess("an action that leaves a daemon", a)
	expect.Equal(c, stdout, "started\n", "an action that leaves a daemon: stdout")
	if names := c.treeOf(r, "d"); len(names) == 0 {
		c.Error("the daemon wrote nothing while the action ran")
	}
	if c.ours {
		if alive := sandboxtest.Running(c, life); len(alive) > 0 {
			c.Errorf("processes alive after their action: %v", alive)
		}
	}
}

func timeoutResult(c *client) {
	life := mark()
	j := job{
		steps:   []string{"say before", "write out partial", "mkdir d", "onterm terminated", "daemon " + life + " d", "sleep " + life},
		outputs: []string{"out"}, timeout: 5 * time.Second,
	}
	var d *repb.Digest
	var r *repb.ExecuteResponse
	stdout, whole := "", "before\n"
	if c.ours {
		whole = "before\nterminated\n"
	}
	for ; !strings.HasPrefix(stdout, whole) && j.timeout < time.Minute; j.timeout *= 4 { // a machine that stalls needs a longer one
		d = c.prepare(j)
		a := c.request(d, nil)
		if r = a.response; a.code() != codes.DeadlineExceeded || r.GetResult() == nil {
			c.Fatalf("a timeout: got %v with the result %v, want DEADLINE_EXCEEDED and a result", a.err, r.GetResult())
		}
		stdout = c.stdout(r.Result)
	}
	if !strings.HasPrefix(stdout, "before\n") || c.ours && stdout != "before\nterminated\n" {
		c.Errorf("a timeout: got stdout %q, want the output before and on SIGTERM", stdout)
	}
	expect.Equal(c, c.file(r.Result, "out"), "partial", "a timeout: output")
	if m := r.Result.GetExecutionMetadata(); m.GetWorker() == "" || m.GetExecutionStartTimestamp() == nil {
		c.Errorf("a timeout: got metadata %v, want worker and start time", m)
	}
	c.notRecorded("a timeout", d)
	if c.ours {
		if alive := sandboxtest.Running(c, life); len(alive) > 0 {
			c.Errorf("processes alive after the timeout: %v", alive)
		}
	}
	if !c.ours {
		c.Log("not checked: whether time in the queue counts, which requires its own server")
		return
	}
	small := c.own(bazelrun.ServerConfig{Jobs: 1})
	_, s, leave := small.begin(small.prepare(job{steps: []string{"sleep 11s"}}))
	defer leave()
	small.succeed(job{steps: []string{"sleep 500ms"}, timeout: 10 * time.Second})
	small.wantSuccess("the one before", answered(s, nil))
}

func signalCodes(c *client) {
	for _, signal := range []int{9, 15} {
		j := job{steps: []string{fmt.Sprintf("kill %d", signal)}}
		d := c.prepare(j)
		r := c.wantResult(j.steps[0], c.request(d, nil))
		if got, want := r.Result.GetExitCode(), int32(128+signal); got != want {
			c.Errorf("killed by signal %d: got exit code %d, want %d; stderr %q", signal, got, want, c.output(r.Result.GetStderrRaw(), r.Result.GetStderrDigest()))
		}
		if want := fmt.Sprintf("signal %d", signal); c.ours && !strings.Contains(r.GetMessage(), want) {
			c.Errorf("killed by signal %d: got message %q, want %q in it", signal, r.GetMessage(), want)
		}
		c.notRecorded(j.steps[0], d)
	}
	if !c.ours {
		c.Log("not checked: exceeding the memory limit, which is specific to the server")
		return
	}
	// A signal that Go programs handle as their own crash.
	r := c.run(job{command: &repb.Command{Arguments: []string{"/bin/sh", "-c", "kill -SEGV $$"}}})
	expect.That(c, r.Result.GetExitCode() == 139 && strings.Contains(r.GetMessage(), "signal 11"),
		"killed by signal 11: got exit code %d, message %q", r.Result.GetExitCode(), r.GetMessage())
	d := c.prepare(job{steps: []string{"memory 1000000000"}, change: func(a *repb.Action) {
		a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: "cloister-memory", Value: "64MiB"}}}
	}})
	r = c.wantResult("memory", c.request(d, nil))
	if r.Result.GetExitCode() != 137 || !strings.Contains(r.GetMessage(), "memory") || !strings.Contains(r.GetMessage(), "64 MiB") {
		c.Errorf("more memory than permitted: got exit code %d, message %q, want 137 and the limit", r.Result.GetExitCode(), r.GetMessage())
	}
	c.notRecorded("an action that had too little memory", d)
}

func serverFaults(c *client) {
	c.executeInSmallStore(func(what string, d *repb.Digest, a *answer) {
		if a.response == nil {
			c.Errorf("%s: the call failed with %v, want an ExecuteResponse with a status", what, a.err)
		}
		c.wantCode(what, a.err, codes.ResourceExhausted)
		if r := a.response.GetResult(); r.GetExitCode() != 0 {
			c.Errorf("%s: got exit code %d, want 0: the client would conclude that the action failed", what, r.GetExitCode())
		}
	})
	// The worker is lost while it runs an action.
	old := c.own(bazelrun.ServerConfig{Jobs: 1})
	_, s, leave := old.begin(old.prepare(job{steps: []string{"sleep " + mark()}}))
	defer leave()
	old.kill()
	if a := answered(s, nil); a.code() != codes.Unavailable {
		c.Errorf("a worker that was killed: got %v, %v, want UNAVAILABLE", a.err, status.Code(a.err))
	}
}

// executeInSmallStore executes an action whose outputs do not fit into the store.
func (c *client) executeInSmallStore(evaluate func(what string, d *repb.Digest, a *answer)) {
	c.Helper()
	small := c.own(bazelrun.ServerConfig{MaxSize: "16MiB", Args: []string{"--lease", "0"}})
	d := small.prepare(job{
		steps:   []string{"random 7000000 a", "random 7000000 b", "random 7000000 c"},
		outputs: []string{"a", "b", "c"},
	})
	small.TB = c.TB
	evaluate("outputs of 21 MB for a store of 16 MiB", d, small.request(d, nil))
	small.notRecorded("outputs that have no room", d)
}
