// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// endpoints: allowed endpoints are reached and recorded, even if nothing listens there, and no others are.
func endpoints(t *testing.T, b sandbox.Backend) {
	if f := features(t, b); !f.Endpoints {
		lacks(t, f, "namespaces", "it cannot allow network endpoints")
	}
	open, shut := greeter(t), greeter(t)
	to := func(e sandbox.Endpoint, allow ...sandbox.Endpoint) *Run {
		r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{
				"/bin/bash", "-c",
				fmt.Sprintf("exec 3<>/dev/tcp/%s/%d && echo ping >&3 && cat <&3", e.Host, e.Port),
			}
			s.Network = sandbox.Network{Loopback: true, Allow: allow}
		}})
		return r
	}
	events := func(r *Run, kind sandbox.EventKind) []sandbox.Event {
		return slices.DeleteFunc(slices.Clone(r.Result.Events), func(e sandbox.Event) bool { return e.Kind != kind })
	}
	r := to(open, open)
	if r.Stdout != "hello ping\n" {
		t.Errorf("allowed endpoint: got %q, %s", r.Stdout, r.Stderr)
	}
	if got := events(r, sandbox.EventAllowed); len(got) != 1 || len(r.Result.Events) != 1 ||
		got[0].Subject != open.String() || got[0].Endpoint != open ||
		got[0].Count != 1 || !strings.Contains(got[0].Detail, "5 bytes sent, 11 received") {
		t.Errorf("allowed endpoint: got events %v", r.Result.Events)
	}
	closed := closedPort(t, open.Host)
	r = to(closed, closed)
	if got := r.Result.Events; r.Stdout != "" || len(got) != 1 || got[0].Kind != sandbox.EventUnreachable || got[0].Endpoint != closed ||
		!strings.Contains(got[0].String(), "failed: connection to "+closed.String()+", which is permitted; ") ||
		!strings.Contains(got[0].Detail, "connection refused") {
		t.Errorf("allowed endpoint without a listener: got %q and events %v, want why it is unreachable", r.Stdout, got)
	}
	for _, c := range []struct {
		name string
		run  *Run
		why  string
	}{
		{"another port", to(shut, open), "refused"},
		{"without an exception", to(shut), "unreachable"},
		{"another host", to(sandbox.Endpoint{Host: "192.0.2.99", Port: open.Port}, open), "unreachable"},
	} {
		if c.run.Result.ExitCode == 0 || c.run.Stdout != "" || !strings.Contains(c.run.Stderr, c.why) {
			t.Errorf("%s: got %q, %s", c.name, c.run.Stdout, c.run.Stderr)
		}
		if got := events(c.run, sandbox.EventConnect); len(got) != 1 || len(c.run.Result.Events) != 1 {
			t.Errorf("%s: got events %v, want the violation", c.name, c.run.Result.Events)
		}
	}
}

// greeter serves "hello" and the line it received, once for each connection, on an address of this host.
func greeter(t *testing.T) sandbox.Endpoint {
	t.Helper()
	addresses := must.Get(net.InterfaceAddrs())(t)
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || !p.Addr().Is4() || p.Addr().IsLoopback() {
			continue
		}
		l, err := net.Listen("tcp", netip.AddrPortFrom(p.Addr(), 0).String())
		if err != nil {
			continue
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return // closed
				}
				line, _ := bufio.NewReader(c).ReadString('\n')
				fmt.Fprint(c, "hello "+line)
				c.Close()
			}
		}()
		at := netip.MustParseAddrPort(l.Addr().String())
		return sandbox.Endpoint{Host: at.Addr().String(), Port: at.Port()}
	}
	Unavailable(t, "address", "this host has only loopback IPv4 addresses")
	return sandbox.Endpoint{}
}

// closedPort returns an endpoint of an address of this host at which nobody listens.
func closedPort(t *testing.T, host string) sandbox.Endpoint {
	t.Helper()
	l := must.Get(net.Listen("tcp", net.JoinHostPort(host, "0")))(t)
	defer l.Close()
	return sandbox.Endpoint{Host: host, Port: netip.MustParseAddrPort(l.Addr().String()).Port()}
}

func listen(t *testing.T, b sandbox.Backend) {
	if _, err := os.Stat("/usr/bin/perl"); err != nil {
		Unavailable(t, "namespaces", "the test listens with perl")
	}
	monitored := slices.Contains(features(t, b).Audits, sandbox.AuditViolations)
	for event, script := range map[string]string{
		"listen(tcp 127.0.0.1:": `socket(S, PF_INET, SOCK_STREAM, 0) &&
			bind(S, sockaddr_in(0, INADDR_LOOPBACK)) or die "no socket"; listen(S, 1) or die $!`,
		"bind(udp 127.0.0.1:": `socket(S, PF_INET, SOCK_DGRAM, 0) or die "no socket"; bind(S, sockaddr_in(0, INADDR_LOOPBACK)) or die $!`,
		"bind(udp unknown":    `socket(S, PF_INET, SOCK_DGRAM, 0) or die "no socket"; bind(S, "\0" x 16) or die $!`,
	} {
		if !monitored && strings.HasPrefix(event, "bind") {
			continue // see Network.Listen
		}
		for _, permitted := range []bool{false, true} {
			r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/usr/bin/perl", "-MSocket", "-e", script}
				s.Network = sandbox.Network{Loopback: true, Listen: permitted}
			}})
			if (r.Result.ExitCode == 0) != permitted || strings.Contains(r.Stderr, "not permitted") == permitted {
				t.Errorf("%s, permitted %v: exit code %d, %s", event, permitted, r.Result.ExitCode, r.Stderr)
			}
			denied := len(r.Result.Events) == 1 && strings.HasPrefix(r.Result.Events[0].Subject, event)
			if denied == permitted && monitored {
				t.Errorf("%s, permitted %v: got events %v", event, permitted, r.Result.Events)
			}
		}
	}
}

func hostNetwork(t *testing.T, b sandbox.Backend) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	must.Succeed(t, err)
	abstract := fmt.Sprintf("@cloister-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	u := must.Get(net.Listen("unix", abstract))(t)
	defer u.Close()
	r := run(t, b, bash("exec 3<>/dev/tcp/127.0.0.1/"+port))
	if r.Result.ExitCode == 0 {
		t.Error("a listener of the host's loopback was reached")
	}
	if !strings.Contains(r.Stderr, "refused") {
		t.Errorf("the host's loopback: got %q, want a refused connection on the run's own loopback", r.Stderr)
	}
	if got := shell(t, b, "cat /proc/net/unix /proc/self/net/unix 2>/dev/null; true"); strings.Contains(got, abstract) {
		t.Errorf("an abstract socket of the host is visible:\n%s", got)
	}
	if got := shell(t, b, "cat /proc/self/net/dev | grep -c :"); got != "1\n" {
		t.Errorf("network interfaces: got %q, want loopback alone", got)
	}
	if got := shell(t, b, "cat /proc/self/net/route | wc -l"); got != "1\n" {
		t.Errorf("routes: got %q lines, want the heading alone", got)
	}
}

func loopback(t *testing.T, b sandbox.Backend) {
	for _, up := range []bool{true, false, true} {
		r := run(t, b, Run{
			// Nobody listens: "refused" if the interface is up, otherwise "unreachable".
			Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9"}
				s.Network = sandbox.Network{Loopback: up}
			},
		})
		if got := strings.Contains(r.Stderr, "refused"); got != up {
			t.Errorf("loopback %v: got %q", up, r.Stderr)
		}
	}
}

// freshNetwork: traffic of one run is invisible to the next, even in counters.
func freshNetwork(t *testing.T, b sandbox.Backend) {
	for range 3 {
		r := run(t, b, bash("cat /proc/self/net/dev | grep lo:; exec 3<>/dev/tcp/127.0.0.1/9; true"))
		if f := strings.Fields(r.Stdout); len(f) < 3 || f[1] != "0" {
			t.Errorf("loopback was used before: %q", r.Stdout)
		}
	}
}
