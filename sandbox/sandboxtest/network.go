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

	"github.com/cloister-build/cloister/sandbox"
)

// endpoints: allowed endpoints are reached and recorded, and nothing else is.
func endpoints(t *testing.T, b sandbox.Backend) {
	if !features(t, b).Endpoints {
		Unavailable(t, "namespaces", "this host cannot allow network endpoints")
	}
	open, shut := greeter(t), greeter(t)
	to := func(e sandbox.Endpoint, allow ...sandbox.Endpoint) Run {
		r := Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/bin/bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d && echo ping >&3 && cat <&3", e.Host, e.Port)}
			s.Network = sandbox.Network{Loopback: true, Allow: allow}
		}}
		r.Do(t, b)
		return r
	}
	events := func(r Run, kind sandbox.EventKind) []sandbox.Event {
		return slices.DeleteFunc(slices.Clone(r.Result.Events), func(e sandbox.Event) bool { return e.Kind != kind })
	}
	r := to(open, open)
	if r.Stdout != "hello ping\n" {
		t.Errorf("allowed endpoint: got %q, %s", r.Stdout, r.Stderr)
	}
	if got := events(r, sandbox.EventAllowed); len(got) != 1 || len(r.Result.Events) != 1 || got[0].Subject != open.String() ||
		got[0].Count != 1 || !strings.Contains(got[0].Detail, "5 bytes sent, 11 received") {
		t.Errorf("allowed endpoint: got events %v", r.Result.Events)
	}
	for _, c := range []struct {
		name string
		run  Run
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
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
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

func listen(t *testing.T, b sandbox.Backend) {
	if _, err := os.Stat("/usr/bin/perl"); err != nil {
		Unavailable(t, "namespaces", "the test listens with perl")
	}
	for _, permitted := range []bool{false, true} {
		r := Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/usr/bin/perl", "-MSocket", "-e", `socket(S, PF_INET, SOCK_STREAM, 0) && bind(S, sockaddr_in(0, INADDR_LOOPBACK)) or die "no socket"; listen(S, 1) or die $!`}
			s.Network = sandbox.Network{Loopback: true, Listen: permitted}
		}}
		r.Do(t, b)
		if (r.Result.ExitCode == 0) != permitted || strings.Contains(r.Stderr, "not permitted") == permitted {
			t.Errorf("listen %v: exit code %d, %s", permitted, r.Result.ExitCode, r.Stderr)
		}
		if denied := len(r.Result.Events) == 1 && r.Result.Events[0].Subject == "listen"; denied == permitted {
			t.Errorf("listen %v: got events %v", permitted, r.Result.Events)
		}
	}
}
