// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

// lookups: a name that a program looks up is an event, however it does so, and the lookup fails as if the name did not
// exist.
func lookups(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	const asks = `
import socket, struct, sys
name = b"".join(bytes([len(l)]) + l for l in b"x.example.com".split(b".")) + b"\0"
query = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + name + struct.pack(">2H", int(sys.argv[2]), 1)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
`
	address := sandbox.Event{Kind: sandbox.EventConnect, Subject: "dns x.example.com", Detail: "A, AAAA", Count: 1}
	of := func(e sandbox.Event, process, detail string) []sandbox.Event {
		e.Process, e.Detail = process, detail
		return []sandbox.Event{e}
	}
	for _, c := range []struct {
		name, tool, script string
		want               []sandbox.Event
		text               string // of stdout
	}{
		{"getent", "getent", "getent ahosts x.example.com; getent hosts localhost cloister", of(address, "getent", "A, AAAA"), "cloister"},
		{"case and count", "getent", "for i in 1 2; do getent ahosts X.example.com; done; getent ahosts x.EXAMPLE.com", []sandbox.Event{{
			Kind: sandbox.EventConnect, Subject: "dns x.example.com", Process: "getent", Detail: "A, AAAA", Count: 3,
		}}, ""},
		{"curl", "curl", "curl -s http://x.example.com/; echo $?", of(address, "curl", "A, AAAA"), "6\n"},
		{"Python", "python3", `python3 -c '
import socket
try: socket.getaddrinfo("x.example.com", 443)
except socket.gaierror as e: print(e.errno == socket.EAI_NONAME)'`, of(address, "python3", "A, AAAA"), "True\n"},
		{"Node", "node", `node -e 'require("dns").lookup("x.example.com", e => console.log(e.code))'`, of(address, "node", "A, AAAA"), "ENOTFOUND\n"},
		{"Node's own resolver", "node", `node -e 'require("dns").resolveMx("x.example.com", e => console.log(e.code))'`, of(address, "node", "MX"), "ENOTFOUND\n"},
		{"musl", "musl-gcc", `printf '#include <netdb.h>
			int main(void){struct addrinfo *a; return getaddrinfo("x.example.com", "80", 0, &a) != EAI_NONAME;}' > a.c &&
			musl-gcc -static -o a a.c && ./a && echo yes`, of(address, "a", "A, AAAA"), "yes\n"},
		{"a datagram to loopback", "python3", `python3 -c '` + asks + `
s.sendto(query, ("127.0.0.53", 53)); print(s.recvfrom(512)[1])' - 16`, of(address, "python3", "TXT"), "('127.0.0.53', 53)\n"},
		{"a connected socket", "python3", `python3 -c '` + asks + `
s.connect(("127.0.0.1", 53)); s.send(query); print(s.recv(512)[3] & 15)' - 28`, of(address, "python3", "AAAA"), "3\n"},
		{"an unnoticed call", "python3", `python3 -c '` + asks + `
s.sendmsg([query], [], 0, ("127.0.0.1", 53)); print(s.recv(512)[3] & 15)' - 999`, of(address, "", "TYPE999"), "3\n"},
		{"nobody waits", "python3", `python3 -c '` + asks + `
s.connect(("127.0.0.1", 53)); s.send(query)' - 1`, of(address, "python3", "A"), ""},
		{"IPv6", "python3", `python3 -c '` + asks + `
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.settimeout(60)
s.sendto(query, ("::1", 53)); print(s.recvfrom(512)[1][0])' - 255`, of(address, "python3", "ALL"), "::1\n"},
		{"a datagram to another host", "python3", `python3 -c '` + asks + `
try: s.sendto(query, ("192.0.2.1", 53))
except OSError as e: print(e.strerror)' - 1`, append(of(address, "python3", "A"), sandbox.Event{
			Kind: sandbox.EventConnect, Subject: "udp 192.0.2.1:53", Syscall: "sendto", Process: "python3", Count: 1,
			Endpoint: sandbox.Endpoint{Host: "192.0.2.1", Port: 53},
		}), "Network is unreachable\n"},
		{"packets to another host", "python3", `python3 -c '` + asks + `
try: s.sendmsg([query], [], 0, ("192.0.2.1", 53))
except OSError as e: print(e.strerror)' - 1`, []sandbox.Event{{Kind: sandbox.EventConnect, Subject: "other hosts", Count: 1}}, "Network is unreachable\n"},
		{"no query", "python3", `python3 -c '` + asks + `s.sendto(b"junk", ("127.0.0.1", 53))' - 1`, []sandbox.Event{{
			Kind: sandbox.EventConnect, Subject: "udp 127.0.0.1:53", Process: "python3", Count: 1, Detail: "not a query",
		}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			Tool(t, c.tool)
			if c.name == "IPv6" {
				needIPv6(t)
			}
			r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/bin/bash", "-c", c.script}
				s.Env = []string{"HOME=/tmp", "PATH=/usr/bin:/bin"}
			}})
			if !slices.EqualFunc(r.Result.Events, c.want, sameLookup) {
				t.Errorf("got events\n%#v, want\n%#v; %s%s", r.Result.Events, c.want, r.Stdout, r.Stderr)
			}
			if !strings.Contains(r.Stdout, c.text) {
				t.Errorf("got %q, want %q; %s", r.Stdout, c.text, r.Stderr)
			}
		})
	}
}

// sameLookup reports whether got is want. A program looks a name up more often if it waits some seconds for an answer.
func sameLookup(got, want sandbox.Event) bool {
	if strings.HasPrefix(got.Subject, "dns ") {
		got.Count = min(got.Count, want.Count)
	}
	return got == want
}

func needIPv6(t *testing.T) {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		Unavailable(t, "address", err)
	}
}

// allowedName: the name of an allowed endpoint has an address, at which the endpoint is reached, also for a program
// that ignores /etc/hosts. Other names have none.
func allowedName(t *testing.T, b sandbox.Backend) {
	if f := features(t, b); !f.Endpoints {
		lacks(t, f, "namespaces", "it cannot allow network endpoints")
	}
	Tool(t, "node")
	r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
		s.Args = []string{"/bin/bash", "-c", `node -e '
const dns = require("dns").promises;
(async () => {
	console.log(await dns.resolve4("A.example.org"));
	for (const name of ["a.example.org", "b.example.org"])
		await dns.resolve6(name).catch(e => console.log(e.code));
	require("net").connect(1234, (await dns.resolve4("a.example.org"))[0]).on("connect", s => console.log("connected")).on("close", () => process.exit());
})()'`}
		s.Env = []string{"HOME=/tmp", "PATH=/usr/bin:/bin"}
		s.Network = sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{{Host: "a.example.org", Port: 1234}}}
	}})
	if want := "[ '127.1.0.1' ]\nENODATA\nENOTFOUND\nconnected\n"; r.Stdout != want {
		t.Errorf("got %q, want %q; %s", r.Stdout, want, r.Stderr)
	}
	got := slices.DeleteFunc(slices.Clone(r.Result.Events), func(e sandbox.Event) bool { return e.Kind != sandbox.EventConnect })
	if want := []sandbox.Event{{Kind: sandbox.EventConnect, Subject: "dns b.example.org", Process: "node", Count: 1, Detail: "AAAA"}}; !slices.EqualFunc(got, want, sameLookup) {
		t.Errorf("got events %v, want %v", got, want)
	}
}

// ownLoopback: a connection to the run's own loopback where nothing listens is reported, unless something listens there
// later or at its other address.
func ownLoopback(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	Tool(t, "python3")
	const connects = `
import socket
def connect(host, port):
    for family, _, _, _, to in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as s: print(s.connect_ex(to) == 0)
def listen(port): return socket.create_server(("127.0.0.1", port))
`
	for _, c := range []struct{ name, script, text, want string }{
		{
			"nothing listens", "connect('127.0.0.1', 5432); connect('127.0.0.1', 5432)", "False\nFalse\n",
			"failed: connection to 127.0.0.1:5432 by python3 (connect), 2 times; nothing in the sandbox listens there",
		},
		{
			"another address or port", "l = listen(8080); connect('127.0.0.2', 8080); connect('::1', 8081)", "False\nFalse\n",
			"failed: connection to 127.0.0.2:8080 by python3 (connect); nothing in the sandbox listens there\n" +
				"failed: connection to [::1]:8081 by python3 (connect); nothing in the sandbox listens there",
		},
		{"it listens", "l = listen(8080); connect('127.0.0.1', 8080)", "True\n", ""},
		{"it listens later", "connect('127.0.0.1', 8080); l = listen(8080); connect('127.0.0.1', 8080)", "False\nTrue\n", ""},
		{"at every address", "l = socket.create_server(('::', 8080), family=socket.AF_INET6, dualstack_ipv6=True); connect('127.0.0.9', 8080)", "True\n", ""},
		{
			"at no address", "l = listen(8080); connect('0.0.0.0', 8080); connect('0.0.0.0', 8081)", "True\nFalse\n",
			"failed: connection to 0.0.0.0:8081 by python3 (connect); nothing in the sandbox listens there",
		},
		{
			"a lookup", "connect('127.0.0.53', 53)", "False\n",
			"denied: connection to tcp 127.0.0.53:53 (no network) by python3 (connect); it looks a name up",
		},
		{"a datagram", "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 5432)); print(s.send(b'x'))", "1\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.Contains(c.script, "::") {
				needIPv6(t)
			}
			r := run(t, b, Run{Spec: func(s *sandbox.Spec) { s.Args = []string{"/usr/bin/python3", "-c", connects + c.script} }})
			var got []string
			for _, e := range r.Result.Events {
				got = append(got, e.String())
			}
			if strings.Join(got, "\n") != c.want || r.Stdout != c.text {
				t.Errorf("got %q and events %q, want %q and %q; %s", r.Stdout, got, c.text, c.want, r.Stderr)
			}
		})
	}
}
