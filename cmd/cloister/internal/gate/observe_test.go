// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func observing(allowed ...sandbox.Endpoint) *observation {
	return newObservation(&step{listen: true}, allowed, "/gate/step")
}

// executes is a line of every trace.
const executes = `7<sh> execve("/usr/bin/x", [""...], 0x7ffd /* 5 vars */) = 0` + "\n"

// seenBy returns the events of an observation as sorted texts.
func seenBy(o *observation) (all []string) {
	for _, e := range o.events() {
		all = append(all, strings.TrimSpace(string(e.Kind)+" "+e.Subject+" "+e.Process))
	}
	slices.Sort(all)
	return all
}

// TestTraceShowsTheNetwork: every system call that addresses another host or listens, and no other, is an event.
func TestTraceShowsTheNetwork(t *testing.T) {
	const socket = `3<TCP:[28603710]>`
	peer := func(ip, port string) string {
		return `{sa_family=AF_INET, sin_port=htons(` + port + `), sin_addr=inet_addr("` + ip + `")}`
	}
	for _, c := range []struct{ text, want string }{
		{`7<curl> connect(` + socket + `, ` + peer("192.0.2.1", "80") + `, 16) = -1 EINPROGRESS (Operation now in progress)`, "connect tcp 192.0.2.1:80 curl"},
		{`7<a b> connect(` + socket + `, ` + peer("192.0.2.1", "80") + `, 16) = -1 ECONNREFUSED (Connection refused)`, "connect tcp 192.0.2.1:80 a b"},
		{`7<x> connect(` + socket + `, ` + peer("127.0.0.1", "80") + `, 16) = 0`, ""},
		{`7<x> sendto(3<UDP:[127.0.0.1:4->127.0.0.53:53]>, ""..., 29, 0, ` + peer("127.0.0.53", "53") + `, 16) = 29`, "connect udp 127.0.0.53:53 x"},
		{`7<x> sendmmsg(3<UDP:[1]>, [{msg_hdr={msg_name=` + peer("192.0.2.1", "1") + `}}, {msg_hdr={msg_name=` + peer("192.0.2.2", "1") + `}}], 2, 0) = 2`, "connect udp 192.0.2.1:1 x, connect udp 192.0.2.2:1 x"},
		{
			`7<x> connect(3<UDPv6:[1]>, {sa_family=AF_INET6, sin6_port=htons(9), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "2001:db8::1", &sin6_addr), sin6_scope_id=0}, 28) = 0`,
			"connect udp [2001:db8::1]:9 x",
		},
		{
			`7<x> connect(3<TCPv6:[1]>, {sa_family=AF_INET6, sin6_port=htons(9), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "::ffff:127.0.0.1", &sin6_addr), sin6_scope_id=0}, 28) = 0`,
			"",
		},
		{`7<x> recvfrom(3<UDP:[1]>, ""..., 9, 0, ` + peer("192.0.2.1", "53") + `, [16]) = 9`, ""},
		// A call whose line another thread interrupts.
		{"7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=\"/run/docker.sock\"}, 18 <unfinished ...>\n8<y> socket(AF_INET, SOCK_STREAM, 0) = 3<TCP:[1]>\n7<x> <... connect resumed>) = 0", "connect unix /run/docker.sock x"},
		{"7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=\"/run/docker.sock\"}, 18 <unfinished ...>\n7<x> <... connect resumed>) = -1 ENOENT (No such file or directory)", ""},
		{`7<x> connect(` + socket + `, ` + peer("192.0.2.1", "80") + `, 16 <unfinished ...>`, "connect tcp 192.0.2.1:80 x"},
		{`7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path="/gate/step/tmp/socket"}, 18) = 0`, ""},
		{`7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path="/run/systemd/resolve/io.systemd.Resolve"}, 42) = 0`, "connect unix /run/systemd/resolve/io.systemd.Resolve x"},
		{`7<x> listen(3<TCP:[0.0.0.0:8000]>, 128) = 0`, "syscall listen(tcp 0.0.0.0:8000) x"},
		{`7<x> listen(3<TCPv6:[[::]:8000]>, 128) = 0`, "syscall listen(tcp [::]:8000) x"},
		{`7<x> listen(3<TCP:[28603710]>, 128) = 0`, "syscall listen(tcp) x"},
		{`7<x> listen(3<SCTP:[28603710]>, 128) = 0`, "syscall listen(sctp) x"},
		{`7<x> connect(3<SCTPv6:[1]>, ` + peer("192.0.2.1", "80") + `, 16) = 0`, "connect sctp 192.0.2.1:80 x"},
		{`7<x> bind(3<UDPLITE:[1]>, ` + peer("0.0.0.0", "53") + `, 16) = 0`, "syscall bind(udplite 0.0.0.0:53) x"},
		// Abstract sockets, of the host and of the step.
		{`7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=@"/tmp/.X11-\"x"}, 20) = 0`, `connect unix @"/tmp/.X11-\"x" x`},
		{`7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=@"a"}, 4) = -1 ECONNREFUSED (Connection refused)`, ""},
		{"7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=@\"a\"}, 4) = 0\n8<y> bind(3<UNIX-STREAM:[2]>, {sa_family=AF_UNIX, sun_path=@\"a\"}, 4) = 0", ""},
		{"8<y> getsockname(3<UNIX-STREAM:[2,@\"43c8f\"]>, {sa_family=AF_UNIX, sun_path=@\"43c8f\"}, [110 => 8]) = 0\n7<x> connect(3<UNIX-STREAM:[1]>, {sa_family=AF_UNIX, sun_path=@\"43c8f\"}, 8) = 0", ""},
		{`7<x> listen(3<TCP:[127.0.0.1:8000]>, 128) = 0`, ""}, // which this step may
		{`7<x> listen(3<UNIX-STREAM:[1]>, 128) = 0`, ""},
		{`7<x> bind(3<UDP:[1]>, ` + peer("0.0.0.0", "53") + `, 16) = 0`, "syscall bind(udp 0.0.0.0:53) x"},
		{`7<x> bind(3<UDP:[1]>, ` + peer("0.0.0.0", "0") + `, 16) = 0`, ""},
		{`7<x> socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)) = 3<PACKET:[1]>`, "syscall socket(AF_PACKET) x"},
		{`7<x> socket(AF_INET, SOCK_RAW, IPPROTO_ICMP) = -1 EPERM (Operation not permitted)`, ""},
	} {
		o := observing()
		must.Succeed(t, o.trace(strings.NewReader(executes+c.text+"\n")))
		expect.Equal(t, strings.Join(seenBy(o), ", "), c.want, "%s", c.text)
	}
	o := observing(sandbox.Endpoint{Host: "192.0.2.1", Port: 443})
	must.Succeed(t, o.trace(strings.NewReader(executes+
		`7<x> connect(`+socket+`, `+peer("192.0.2.1", "443")+`, 16) = 0`+"\n"+
		`7<x> connect(3<UDP:[1]>, `+peer("192.0.2.1", "443")+`, 16) = 0`+"\n"+
		`7<x> io_uring_setup(8, {flags=0}) = 4`)))
	if got := seenBy(o); !slices.Equal(got, []string{"allowed 192.0.2.1:443 x", "connect udp 192.0.2.1:443 x"}) || !strings.Contains(o.blind, "io_uring") {
		t.Errorf("got %q, blind %q, want an allowed connection, a datagram, and that io_uring is invisible", got, o.blind)
	}
}

// TestNothingTracedIsNoEvidence: where ptrace is forbidden, strace runs the command without tracing it.
func TestNothingTracedIsNoEvidence(t *testing.T) {
	expect.Error(t, observing().trace(strings.NewReader("")), errUntraced)
	o := observing()
	must.Succeed(t, o.trace(strings.NewReader(executes+`7<x> execve("/gate/step/files/y", [""...], 0x7ffd /* 5 vars */) = 0`+"\n")))
	if got := slices.Collect(maps.Keys(o.executed)); !slices.Equal(got, []string{"/usr/bin/x"}) {
		t.Errorf("got programs %q, want that of the host", got)
	}
}

// TestTraceOfAKilledStraceIsCut: it does not show the end of the command, though perhaps that of other processes.
func TestTraceOfAKilledStraceIsCut(t *testing.T) {
	for text, want := range map[string]bool{
		"8<x> +++ exited with 0 +++\n":                              false,
		"8<x> +++ exited with 0 +++\n7<a> b> +++ exited with 3 +++": true,
	} {
		o := observing()
		must.Succeed(t, o.trace(strings.NewReader(executes+text)))
		expect.Equal(t, o.exited, want, "%s", text)
	}
}

// TestListsShowSockets: ss lists show the sockets of the step only, and each once.
func TestListsShowSockets(t *testing.T) {
	const text = `udp UNCONN 0 0 0.0.0.0:68 0.0.0.0:* users:(("dhcp",pid=7,fd=6))
udp ESTAB 0 0 127.0.0.1:40000 127.0.0.53%lo:53 users:(("get` + "\x1b" + `[Ment",pid=7,fd=3))
tcp LISTEN 0 128 *:80 *:* users:(("server",pid=7,fd=3),("server",pid=8,fd=3))
tcp LISTEN 0 128 127.0.0.1:81 0.0.0.0:* users:(("server",pid=7,fd=4))
tcp ESTAB 0 0 [2001:db8::2]:40000 [2001:db8::1]:443 users:(("curl",pid=7,fd=3))
tcp ESTAB 0 0 10.0.0.1:22 10.0.0.2:40000 users:(("sshd",pid=9,fd=3))
tcp TIME-WAIT 0 0 10.0.0.1:23 10.0.0.2:40000
`
	o := observing()
	lines := o.list(text, func(pid string) bool { return pid == "7" })
	expect.Equal(t, strings.Count(lines, "\n"), 5, "lines in\n%s", lines)
	expect.Equal(t, o.list(text, func(pid string) bool { return pid == "7" }), "", "again")
	want := []string{"connect tcp [2001:db8::1]:443 curl", "connect udp 127.0.0.53:53 get\\x1b[Ment", "syscall listen(tcp [::]:80) server"}
	expect.Slices(t, seenBy(o), want)
}
