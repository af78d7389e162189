// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestLongerDirectoryDecides(t *testing.T) {
	v := Config{Writable: []string{"/build", "/tmp", "/build/in/out"}, Inputs: []string{"/usr", "/build/in"}}
	for p, want := range map[string]struct{ writable, input bool }{
		"/build":            {true, false},
		"/build/x":          {true, false},
		"/buildx":           {false, false},
		"/build/in":         {false, true},
		"/build/in/x":       {false, true},
		"/build/in/out/x":   {true, false},
		"/build/inx":        {true, false},
		"/usr/include":      {false, true},
		"/":                 {false, false},
		"/etc/passwd":       {false, false},
		"/tmp/usr/not-real": {true, false},
	} {
		if v.writable(p) != want.writable || v.input(p) != want.input {
			t.Errorf("%s: got %t, %t, want %v", p, v.writable(p), v.input(p), want)
		}
	}
}

func TestIgnoredPaths(t *testing.T) {
	for p, want := range map[string]bool{
		"/dev/null": true, "/dev/tty": true, "/dev/fd/3": true, "/dev/fdx": false, "/dev/kvm": false,
		"/proc/self": true, "/proc/self/fd/1": true, "/proc/thread-self/comm": true, "/proc/12/status": true,
		"/proc": false, "/proc/": false, "/proc/cpuinfo": false, "/proc/selfish": false, "/procself": false,
		"/proc/sys/kernel/core_pattern": false, "self": false, "12": false,
	} {
		expect.That(t, ignored(p) == want, "%s: got %t", p, !want)
	}
}

// TestTextIsHarmless: hostile names become one line of bounded length and keep their end.
func TestTextIsHarmless(t *testing.T) {
	r := newMonitor(Config{})
	r.record(sandbox.Event{Kind: sandbox.EventWrite, Subject: "/a\x1b[2J\n\xff\u202e", Process: "x\ny"})
	r.record(sandbox.Event{Kind: sandbox.EventWrite, Subject: "/" + strings.Repeat("long/", 1000) + "end"})
	close(r.done)
	events, _, _ := r.Events()
	must.Be(t, len(events) == 2, "got %v", events)
	if e := events[1]; e.Subject != `/a\x1b[2J\n\xff\u202e` || e.Process != `x\ny` {
		t.Errorf("got %q by %q", e.Subject, e.Process)
	}
	if s := events[0].Subject; len(s) != maxSubject || !strings.HasPrefix(s, "...") || !strings.HasSuffix(s, "long/end") {
		t.Errorf("got %d bytes: %q", len(s), s)
	}
}

// TestFoundProgramRemovesFailures covers a search that continues after a recorded failure, also for a program whose
// name is recorded shortened.
func TestFoundProgramRemovesFailures(t *testing.T) {
	r := newMonitor(Config{})
	name := strings.Repeat("\xff", 250)
	r.record(sandbox.Event{Kind: sandbox.EventExec, Subject: "/a/" + name})
	r.record(sandbox.Event{Kind: sandbox.EventExec, Subject: "/a/cc"})
	r.record(sandbox.Event{Kind: programFound, Subject: "/b/" + name})
	r.record(sandbox.Event{Kind: sandbox.EventExec, Subject: "/c/" + name})
	close(r.done)
	if events, _, _ := r.Events(); len(events) != 1 || events[0].Subject != "/a/cc" {
		t.Errorf("got %v", events)
	}
}

// TestMemoryIsBounded: a run cannot grow its monitor without limit.
func TestMemoryIsBounded(t *testing.T) {
	r := newMonitor(Config{})
	name := func(i int) string { return string([]byte{'/', byte(i), byte(i >> 8), byte(i >> 16), 1}) }
	for i := range maxOpened + 10 {
		r.record(sandbox.Event{Kind: inputOpened, Subject: name(i)})
	}
	for i := range maxPrograms + 10 {
		r.record(sandbox.Event{Kind: programFound, Subject: name(i)})
	}
	for i := range maxExecuted + 10 {
		r.record(sandbox.Event{Kind: inputExecuted, Subject: name(i)})
	}
	expect.That(t, len(r.opened) == maxOpened && len(r.programs) == maxPrograms && len(r.executed) == maxExecuted,
		"got %d, %d and %d", len(r.opened), len(r.programs), len(r.executed))
	close(r.done)
	if _, all := r.Executed(); all {
		t.Error("Executed reports a truncated list as complete")
	}
}

// TestMinorEventsLeaveRoom: what never counts as a violation hides none.
func TestMinorEventsLeaveRoom(t *testing.T) {
	r := newMonitor(Config{Minor: func(e sandbox.Event) bool { return strings.HasPrefix(e.Subject, "/usr/__pycache__/") }})
	for i := range 2 * maxKind {
		r.record(sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/__pycache__/" + strconv.Itoa(i)})
	}
	for i := range maxKind / 2 {
		r.record(sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/" + strconv.Itoa(i)})
	}
	close(r.done)
	events, unrecorded, _ := r.Events()
	if n := len(events); n != maxKind || events[n-1].Subject != "/usr/__pycache__/99" || unrecorded != maxKind*3/2 {
		t.Errorf("%d events, %d unrecorded, the last is %v", n, unrecorded, events[len(events)-1])
	}
}

// TestCallsLeaveRoomForTheNetwork: refused local calls displace no event of a listener or a network socket.
func TestCallsLeaveRoomForTheNetwork(t *testing.T) {
	r := newMonitor(Config{})
	refuse := func(subject, process string) {
		r.record(sandbox.Event{Kind: sandbox.EventSyscall, Subject: subject, Process: process})
	}
	for i := range maxKind {
		refuse("mount", strconv.Itoa(i))
		refuse("listen(unix)", strconv.Itoa(i))
		refuse("socket(AF_NETLINK, protocol "+strconv.Itoa(i)+")", "p")
	}
	late := []string{"bind(udp 0.0.0.0:53)", "listen", "listen(tcp 0.0.0.0:80)", "socket(AF_INET, SOCK_RAW)", "socket(AF_VSOCK)"}
	for _, subject := range late {
		refuse(subject, "p")
	}
	close(r.done)
	events, unrecorded, _ := r.Events()
	for _, subject := range late {
		expect.That(t, slices.ContainsFunc(events, func(e sandbox.Event) bool { return e.Subject == subject }),
			"%s is not recorded", subject)
	}
	expect.Equal(t, unrecorded, 3*maxKind-maxKind/2, "unrecorded events")
}
