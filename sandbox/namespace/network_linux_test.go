// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestNetworkIsKeptOnlyUnused: the second run in a slot gets the network of the first only if that made no socket in
// it, and always an unused one.
func TestNetworkIsKeptOnlyUnused(t *testing.T) {
	t.Parallel()
	off := func(s *sandbox.Spec) { s.Audit = sandbox.AuditOff }
	ownBase := func(s *sandbox.Spec) {
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in", Content: "x", Source: "in"})
	}
	for _, c := range []struct {
		name    string
		without []namespace.Layer
		spec    func(*sandbox.Spec)
		does    string
		kept    bool
	}{
		{"nothing", nil, nil, "", true},
		{"unix sockets", nil, nil, "unix", true},
		{"a connection", nil, nil, "tcp", false},
		{"a datagram", nil, nil, "udp", false},
		{"a netlink socket", nil, nil, "netlink", false},
		{"a connection, in a base of its own", nil, ownBase, "tcp", false},
		{"nothing, in a base of its own", nil, ownBase, "", true},
		{"nothing, without audit", nil, off, "", false},
		{"nothing, without the monitor", []namespace.Layer{namespace.Monitor}, off, "", false},
		{"nothing, without a filter", []namespace.Layer{namespace.Seccomp}, off, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, _ := backend(t, namespace.Config{Without: c.without})
			run := func(words ...string) (id, text string) {
				r := program(t, append([]string{"link=/proc/self/ns/net"}, words...)...)
				if set := r.Spec; c.spec != nil {
					r.Spec = func(s *sandbox.Spec) { set(s); c.spec(s) }
				}
				r.Setup = func(t testing.TB, ws *os.Root) {
					must.Succeed(t, ws.Mkdir("in", 0o755))
				}
				r.Do(t, b)
				id, text, _ = strings.Cut(r.Stdout, "\n")
				must.Be(t, r.Result.ExitCode == 0 && strings.HasPrefix(id, "net:["),
					"%v: got %+v, %s%s", words, r.Result, r.Stdout, r.Stderr)
				return id, text
			}
			_, fresh := run("state")
			first, said := run(c.does)
			second, state := run("state")
			if n := b.Slots(); n != 1 {
				t.Fatalf("the runs had %d slots", n)
			}
			if c.does == "tcp" && !strings.Contains(said, " 06 ") { // TCP_TIME_WAIT
				t.Errorf("the connection left nothing:\n%s", said)
			}
			expect.That(t, state == fresh, "the network is not as it was:\n%s\nbut\n%s", fresh, state)
			expect.Equal(t, first == second, c.kept, "the network was kept")
		})
	}
}

// TestKilledRunTakesItsNetworkAlong: a run that was stopped with an open connection leaves no trace in the next
// network.
func TestKilledRunTakesItsNetworkAlong(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	fresh := act(t, b, "state")
	r := program(t, "tcp", "wait")
	set, limit := r.Spec, 3*time.Second
	r.Spec = func(s *sandbox.Spec) { set(s); s.Timeout = limit }
	for r.Do(t, b); !strings.Contains(r.Stdout, " 06 ") && limit < time.Minute; r.Do(t, b) {
		limit *= 6 // the machine stalled
	}
	must.Be(t, r.Result.Stopped && strings.Contains(r.Stdout, " 06 "), "got %+v, %s", r.Result, r.Stdout)
	if got := act(t, b, "state"); got != fresh || b.Slots() != 1 {
		t.Errorf("in %d slots, the network is not as it was:\n%s\nbut\n%s", b.Slots(), fresh, got)
	}
}

// TestNetworkHidesTheWorker: what finds the listeners of a run in its network shows no process ID of the host.
func TestNetworkHidesTheWorker(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	got := act(t, b, "tcp", "cat=/proc/self/net/netlink")
	for line := range strings.Lines(got) {
		f := strings.Fields(line)
		if len(f) == 10 && f[2] != "Pid" && f[2] != "0" && f[2] != "1" {
			t.Errorf("got %q", line)
		}
	}
	expect.Text(t, got, "Pid")
}

// TestPacketsAreOfTheirRun: packets count for the run that sent them only.
func TestPacketsAreOfTheirRun(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	for i, c := range []struct {
		does    string
		refused bool
	}{{"state", false}, {"away", true}, {"state", false}, {"unix", false}, {"udp", false}, {"away", true}, {"netlink", false}} {
		r := program(t, c.does)
		r.Do(t, b)
		if n := r.Result.Usage.PacketsRefused; n > 0 != c.refused || b.Slots() != 1 {
			t.Errorf("run %d, %s, in one of %d slots: got %d packets, some refused: %t", i, c.does, b.Slots(), n, c.refused)
		}
	}
}

// TestSocketsInFlightAreGone: unreachable unix sockets that the kernel has not collected yet are invisible to later
// runs and hold no lock there.
func TestSocketsInFlightAreGone(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	for range 10 {
		if got := act(t, b, "cycle=100"); got != "" {
			t.Fatal(got)
		}
		if got := act(t, b, "cat=/proc/self/net/unix", "lock=/etc/passwd"); strings.Contains(got, "left") || strings.Count(got, "\n") != 2 {
			t.Fatalf("in one of %d slots, the next run sees\n%s", b.Slots(), got)
		}
	}
}

// TestReleasedMeansNothingIsLeft: runs that leave sockets in flight are not always Released, all others are.
func TestReleasedMeansNothingIsLeft(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	found := 0
	for range 20 {
		r := program(t, "cycle=100")
		r.Do(t, b)
		if !r.Result.Released {
			found++
		}
		r = program(t, "cat=/proc/self/net/unix")
		r.Do(t, b)
		expect.That(t, r.Result.Released, "a run that left nothing is not Released: %s", r.Stdout)
	}
	expect.That(t, found != 0, "20 runs left sockets in flight, and all are Released")
}
