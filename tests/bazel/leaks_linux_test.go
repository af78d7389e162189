// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// audit runs cloister audit on the server's log and returns its output.
func (r *rig) audit(t *testing.T, args ...string) string {
	t.Helper()
	args = append([]string{"audit", "--dir", r.config.Dir}, args...)
	out, err := exec.CommandContext(t.Context(), r.config.Binary, args...).Output()
	must.Be(t, err == nil, "cloister %v: %v", args, err)
	return string(out)
}

// wantNoEvents checks that no action had a violation.
func (r *rig) wantNoEvents(t *testing.T) {
	t.Helper()
	expect.Equal(t, r.audit(t, "ls", "--limit", "10"), "")
}

// limits returns the limits that a worker of the current user enforces.
func limits(t *testing.T) []sandbox.Limit {
	t.Helper()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	return must.Get(b.Probe(t.Context()))(t).Limits
}

// reproduce matches the line of a message that names its action.
var reproduce = regexp.MustCompile(`(?m)^cloister: reproduce: cloister run --action (\S+) --server grpc://\S+`)

// TestLeaksAreNamed checks that violations and exceeded limits appear on Bazel's console, in a line each, and in the
// audit log.
func TestLeaksAreNamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	enforced := limits(t)
	for _, c := range []struct {
		target, line, kind, event string // regular expressions for the whole line and event
		limit                     sandbox.Limit
	}{
		{
			target: "connects_outside", kind: "connect",
			event: `denied: connection to tcp 192\.0\.2\.1:443 \(no network\) by bash \(connect\); add what it needs to the inputs, or allow the endpoint in the policy`,
		},
		{
			target: "writes_input", kind: "write",
			event: `denied: write to input examples/hostile/victim\.txt \(read-only\) by bash \(openat\)`,
		},
		{
			target: "includes_undeclared", kind: "read",
			event: `denied: read of examples/hostile/undeclared\.h \(not an input\) by cc1plus \(openat\); the source tree has it: add it to srcs, hdrs or data in BUILD`,
		},
		{
			target: "leaves_undeclared", kind: "output",
			event: `warning: undeclared output discarded: bazel-out/\S+/bin/examples/hostile/beside\.txt`,
		},
		{
			target: "eats_memory", kind: "limit", limit: sandbox.LimitMemory,
			line:  `killed: exceeded the 64 MiB memory limit \(profile \w+\); raise it with exec_properties = \{"cloister-memory": "128MiB"\}`,
			event: `reached the limit of memory: [\d.]+ MiB of 64\.0 MiB`,
		},
		{
			target: "eats_time", kind: "limit", limit: sandbox.LimitCPU,
			line:  `killed: exceeded the 1s CPU time limit \(profile \w+\); raise it with exec_properties = \{"cloister-cpu": "2s"\}`,
			event: `reached the limit of CPU time: [\d.]+s of 1s`,
		},
		// Without control groups, the limit of processes is enforced but not reported, and memory is not limited.
		{
			target: "eats_processes", kind: "limit", limit: sandbox.LimitMemory,
			line:  `exit code [12]: reached the limit of 16 processes \(profile \w+\); raise it with exec_properties = \{"cloister-processes": "32"\}`,
			event: `reached the limit of processes: 16 of 16, \d+ times`,
		},
	} {
		t.Run(c.target, func(t *testing.T) {
			if c.limit != "" && !slices.Contains(enforced, c.limit) {
				sandboxtest.Unavailable(t, "limits", fmt.Sprintf("this worker cannot limit %s", c.limit))
			}
			build := r.bazel(t, "build", "//examples/hostile:"+c.target)
			expect.Equal(t, build.ExitCode, 1, "bazel: exit")
			if c.line == "" {
				c.line = c.event
			}
			expect.That(t, regexp.MustCompile(`(?m)^cloister: `+c.line+`$`).MatchString(build.Output),
				"got no console line %q", "cloister: "+c.line)
			action := reproduce.FindStringSubmatch(build.Output)
			must.Be(t, action != nil, "got no console line that matches %q", reproduce)
			event := fmt.Sprintf(`^\S+  %s  %-7s  %s\n$`, action[1][:12], c.kind, c.event)
			if got := r.audit(t, "ls", "--action", action[1]); !regexp.MustCompile(event).MatchString(got) {
				t.Errorf("the audit log has of the action\n%swant one line that matches %q", got, event)
			}
		})
	}
	t.Run("asks_too_much", func(t *testing.T) {
		build := r.bazel(t, "build", "//examples/hostile:asks_too_much")
		expect.That(t, build.ExitCode != 0, "bazel: got exit 0, want a failure")
		const want = `(?m)^Failed Precondition: confine: property cloister-memory=1TiB: rule "default" grants at most \d+[MG]iB \(this machine\); lower the property`
		expect.That(t, regexp.MustCompile(want).MatchString(build.Output), "got no console line that matches %q", want)
	})
	t.Run("fetches", func(t *testing.T) { testFetches(t, r) })
	if got := r.audit(t, "verify"); !regexp.MustCompile(`^\d+ entries, head [0-9a-f]{64}\n$`).MatchString(got) {
		t.Errorf("audit verify: got %q, want a number of entries and a head", got)
	}
}

// testFetches checks that an allowed endpoint is reachable, that each connection is an event, and that the result is
// not cached.
func testFetches(t *testing.T, r *rig) {
	listener := must.Get(net.Listen("tcp4", ownAddress(t)+":0"))(t)
	defer listener.Close()
	var silent atomic.Bool
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if !silent.Load() {
				fmt.Fprintln(conn, "news")
			}
			conn.Close()
		}
	}()
	endpoint := listener.Addr().String()
	file := filepath.Join(filepath.Dir(r.Workspace), "policy.yaml")
	text := fmt.Sprintf(`version: 1
profiles:
  fetch: {network: {allow: [%q]}}
rules:
  - {name: downloads, when: {target: "//examples/hostile:fetches", mnemonic: Genrule}, profile: fetch}
`, endpoint)
	must.Succeed(t, os.WriteFile(file, []byte(text), 0o644))
	must.Succeed(t, r.server.Stop())
	r.config.Args = append(r.config.Args, "--policy", file)
	r.serve(t)

	flags := []string{
		"//examples/hostile:fetches", "--remote_default_exec_properties=cloister-network=" + endpoint,
		"--define=HOSTILE_HOST=" + listener.Addr().(*net.TCPAddr).IP.String(), "--define=HOSTILE_PORT=" + port(listener),
	}
	for range 2 {
		wantAll(t, r.bazel(t, "build", flags...), "remote")
		ctx, cancel := context.WithTimeout(t.Context(), bazelTime)
		defer cancel()
		must.Succeed(t, r.Clean(ctx))
	}
	silent.Store(true)
	build := r.bazel(t, "build", flags...)
	expect.Equal(t, build.ExitCode, 1, "bazel: exit")
	want := fmt.Sprintf("\ncloister: not hermetic, so its result is not cached: profile \"fetch\", chosen by rule \"downloads\", permits %s\n", endpoint)
	expect.Text(t, build.Output, want)
	expect.That(t, !strings.Contains(build.Output, "denied: connection"),
		"the console reports a permitted connection as an attempt")
	var events string
	for _, received := range []int{5, 5, 0} {
		at := regexp.QuoteMeta(endpoint)
		events += fmt.Sprintf(`\S+  \S+  allowed  allowed: connection to %s; at %s, 0 bytes sent, %d received\n`, at, at, received)
	}
	action := reproduce.FindStringSubmatch(build.Output)
	must.Be(t, action != nil, "got no console line that matches %q", reproduce)
	if got := r.audit(t, "ls", "--action", action[1]); !regexp.MustCompile("^" + events + "$").MatchString(got) {
		t.Errorf("the audit log has of the action\n%swant lines that match %q", got, events)
	}
}

// ownAddress returns a non-loopback address of this host, which a policy may allow.
func ownAddress(t *testing.T) string {
	t.Helper()
	addresses := must.Get(net.InterfaceAddrs())(t)
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	sandboxtest.Unavailable(t, "address", "this host has only the IPv4 loopback address")
	return ""
}
