// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// An observer is a program that records what a step does without a sandbox. It prevents nothing.
type observer struct {
	program string // "strace" or "ss"
	record  string // name of its file in the evidence
}

var (
	strace = &observer{"strace", "strace.txt"}
	ss     = &observer{"ss", "ss_established.txt"}
)

// straceFlags follow all processes and print addresses, but no payload, which may contain secrets. With -D, strace is
// not the parent of the command and does not delay its exit. Abbreviated, sendmmsg shows no address.
var straceFlags = []string{
	"-D", "-f", "-Y", "-yy", "-s", "0", "-q", "-e", "trace=network,execve,io_uring_setup", "-e", "abbrev=!sendmmsg",
	"-e", "signal=none", "-o",
}

// ssFlags list the sockets of all processes and states.
var ssFlags = []string{"-Htunap"}

// findObserver returns strace if it works here, otherwise ss. It writes a file into dir.
func findObserver(ctx context.Context, dir string) (*observer, error) {
	file := filepath.Join(dir, "probe")
	tried := exec.CommandContext(ctx, "strace", append(straceFlags, file, "true")...).Run()
	if text, err := os.ReadFile(file); tried == nil && err == nil && strings.Contains(string(text), "execve(") {
		return strace, nil
	}
	tried = cmp.Or(tried, errUntraced)
	if err := exec.CommandContext(ctx, "ss", ssFlags...).Run(); err != nil {
		return nil, fmt.Errorf("--fallback needs strace or ss: strace: %w; ss: %w", tried, err)
	}
	return ss, nil
}

var (
	// errUntraced means that strace ran a command without tracing it, for example because ptrace is forbidden.
	errUntraced = errors.New("strace recorded nothing")
	// errCut means that strace was killed, after which nobody traces its processes.
	errCut = errors.New("strace ended before the command")
)

// An observation collects the events of a step. Connections to loopback do not count: the step may be the peer.
type observation struct {
	step     *step
	allowed  []sandbox.Endpoint
	dir      string // of the step, where its Unix sockets are its own
	counts   map[sandbox.Event]int
	listed   map[[4]string]bool // sockets that ss has listed
	abstract []sandbox.Event    // connections to abstract Unix sockets
	bound    map[string]bool    // those that the step may have made, by name
	blind    string             // why the observer did not see everything
	failed   error              // of an observer that saw nothing for a time
	// executed are the programs outside of dir.
	executed map[string]bool
	traced   bool
	exited   bool // the command, while it was traced; not if a signal killed it
}

// add adds an event, of which the process may have chosen every word.
func (o *observation) add(e sandbox.Event) {
	e.Subject, e.Process = printable.Text(e.Subject), printable.Text(e.Process)
	o.counts[e]++
}

func newObservation(s *step, allowed []sandbox.Endpoint, dir string) *observation {
	return &observation{
		step: s, allowed: allowed, dir: dir,
		counts: map[sandbox.Event]int{}, listed: map[[4]string]bool{}, executed: map[string]bool{},
		bound: map[string]bool{},
	}
}

// events returns the events with their counts.
func (o *observation) events() (all []sandbox.Event) {
	for e, n := range o.counts {
		e.Count = n
		all = append(all, e)
	}
	return all
}

// connect records a connection or datagram, or an attempt. A resolver may be on loopback.
func (o *observation) connect(process, syscall, protocol string, to netip.AddrPort, reached bool) {
	const dns = 53
	if a := to.Addr(); (a.IsLoopback() || a.IsUnspecified()) && to.Port() != dns {
		return
	}
	peer := sandbox.Endpoint{Host: to.Addr().String(), Port: to.Port()}
	e := sandbox.Event{Kind: sandbox.EventConnect, Subject: protocol + " " + to.String(), Syscall: syscall, Process: process, Endpoint: peer}
	for _, a := range o.allowed {
		if protocol == "tcp" && a == peer {
			if e.Kind, e.Subject = sandbox.EventAllowed, peer.String(); !reached {
				e.Kind = sandbox.EventUnreachable
			}
		}
	}
	o.add(e)
}

// listen records a listener.
func (o *observation) listen(process, call, protocol string, at netip.AddrPort) {
	if o.step.listen && at.Addr().IsLoopback() {
		return
	}
	o.add(sandbox.Event{Kind: sandbox.EventSyscall, Subject: fmt.Sprintf("%s(%s %v)", call, protocol, at), Process: process})
}

// Parts of the lines of strace.
var (
	tracedCall    = regexp.MustCompile(`^(\d+)<(.*?)> +(?:(\w+)\((.*)|<\.\.\. \w+ resumed>(.*))$`)
	tracedExit    = regexp.MustCompile(`^(\d+)<.*> \+\+\+ exited with \d+ \+\+\+$`)
	tracedPeer    = regexp.MustCompile(`sa_family=AF_INET6?, sin6?_port=htons\((\d+)\),[^}]*?"([0-9a-fA-F.:]+)"`)
	tracedLocal   = regexp.MustCompile(`^\d+<(TCP|SCTP|DCCP|UDP|UDPLITE)(?:v6)?:\[(.*?)\]>`)
	tracedPath    = regexp.MustCompile(`sun_path="(/[^"]*)"`)
	abstractPath  = regexp.MustCompile(`sun_path=(@"(?:\\.|[^"\\])*")`)
	tracedProgram = regexp.MustCompile(`^"(/[^"]*)"`)
	otherSocket   = regexp.MustCompile(`^(AF_PACKET|AF_VSOCK|AF_XDP|AF_INET6?, SOCK_RAW)\b`)
)

// trace reads the output of strace.
func (o *observation) trace(r io.Reader) error {
	unfinished := map[string][]string{} // calls by thread
	command := ""                       // its thread, which makes the first call
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m := tracedCall.FindStringSubmatch(lines.Text())
		if m == nil {
			end := tracedExit.FindStringSubmatch(lines.Text())
			o.exited = o.exited || end != nil && end[1] == command
			continue
		}
		command = cmp.Or(command, m[1])
		thread, process, name, rest := m[1], m[2], m[3], m[4]
		if begun, ok := unfinished[thread]; ok && name == "" {
			process, name, rest = begun[0], begun[1], begun[2]+m[5]
			delete(unfinished, thread)
		} else if begun, ok := strings.CutSuffix(rest, "<unfinished ...>"); ok {
			unfinished[thread] = []string{process, name, begun}
			continue
		}
		o.call(process, name, rest)
	}
	for _, c := range unfinished { // during which a process ended
		o.call(c[0], c[1], c[2])
	}
	for _, e := range o.abstract {
		if !o.bound[e.Subject] {
			o.add(e)
		}
	}
	if err := lines.Err(); err != nil || o.traced {
		return err
	}
	return errUntraced
}

// call records a call with its arguments and result.
func (o *observation) call(process, name, rest string) {
	succeeded := !strings.Contains(rest, ") = -1 ") && strings.Contains(rest, ") = ")
	protocol, local := "ip", ""
	if m := tracedLocal.FindStringSubmatch(rest); m != nil {
		protocol, local = strings.ToLower(m[1]), m[2]
	}
	switch name {
	case "connect", "sendto", "sendmsg", "sendmmsg":
		for _, to := range peers(rest) {
			o.connect(process, name, protocol, to, succeeded || strings.Contains(rest, "EINPROGRESS"))
		}
		if m := tracedPath.FindStringSubmatch(rest); m != nil && succeeded && !o.harmlessSocket(m[1]) {
			o.add(sandbox.Event{Kind: sandbox.EventConnect, Subject: "unix " + m[1], Syscall: name, Process: process})
		}
		if m := abstractPath.FindStringSubmatch(rest); m != nil && succeeded {
			e := sandbox.Event{Kind: sandbox.EventConnect, Subject: "unix " + m[1], Syscall: name, Process: process}
			o.abstract = append(o.abstract, e)
		}
	case "bind", "getsockname": // the kernel chooses a name that bind omits
		if m := abstractPath.FindStringSubmatch(rest); m != nil && succeeded {
			o.bound["unix "+m[1]] = true
		}
		// A datagram socket receives once it is bound; to port 0, it is a client.
		for _, at := range peers(rest) {
			if name == "bind" && strings.HasPrefix(protocol, "udp") && at.Port() != 0 {
				o.listen(process, name, protocol, at)
			}
		}
	case "listen":
		if at, err := netip.ParseAddrPort(local); err == nil {
			o.listen(process, name, protocol, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
		} else if protocol != "ip" { // at a port that the kernel chooses, or that strace does not show
			o.add(sandbox.Event{Kind: sandbox.EventSyscall, Subject: name + "(" + protocol + ")", Process: process})
		}
	case "socket":
		if m := otherSocket.FindString(rest); m != "" && succeeded {
			o.add(sandbox.Event{Kind: sandbox.EventSyscall, Subject: "socket(" + m + ")", Process: process})
		}
	case "execve": // at least that of the command
		o.traced = true
		if m := tracedProgram.FindStringSubmatch(rest); m != nil && succeeded && !strings.HasPrefix(m[1], o.dir+"/") {
			o.executed[m[1]] = true
		}
	case "io_uring_setup":
		if succeeded {
			o.blind = "a process used io_uring, whose operations strace does not show"
		}
	}
}

// peers returns the internet addresses among the arguments of a call.
func peers(args string) (all []netip.AddrPort) {
	for _, m := range tracedPeer.FindAllStringSubmatch(args, -1) {
		if at, err := address(m[2], m[1]); err == nil {
			all = append(all, at)
		}
	}
	return all
}

// address returns the address with a host and a port.
func address(host, port string) (netip.AddrPort, error) {
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return netip.AddrPortFrom(ip.Unmap(), uint16(n)), err
}

// harmlessSocket reports whether the step may have made the socket at a path, or whether the C library asks there for
// users.
func (o *observation) harmlessSocket(path string) bool {
	for _, prefix := range []string{o.dir + "/", "/tmp/", "/run/systemd/userdb/", "/run/nscd/", "/var/run/nscd/"} {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// listedSocket matches a line of ss: protocol, state, local and remote address, name and ID of the process.
var listedSocket = regexp.MustCompile(`^(tcp|udp) +(\S+) +\d+ +\d+ +(\S+) +(\S+) +users:\(\("(.*?)",pid=(\d+),`)

// list reads the output of ss and returns the lines about sockets of the step that no earlier call has seen.
func (o *observation) list(text string, ours func(pid string) bool) (lines string) {
	for line := range strings.Lines(text) {
		m := listedSocket.FindStringSubmatch(line)
		if m == nil || !ours(m[6]) {
			continue
		}
		socket := [4]string{m[1], m[3], m[4], m[6]}
		if o.listed[socket] {
			continue
		}
		o.listed[socket] = true
		lines += line
		local, err := listedAddress(m[3])
		remote, noPeer := listedAddress(m[4])
		switch {
		case m[2] == "LISTEN" && err == nil:
			o.listen(m[5], "listen", m[1], local)
		case m[2] != "LISTEN" && noPeer == nil:
			o.connect(m[5], "", m[1], remote, m[2] != "SYN-SENT")
		}
	}
	return lines
}

// listedAddress parses an address of ss, such as 127.0.0.53%lo:53, *:80 or [::1]:80.
func listedAddress(text string) (netip.AddrPort, error) {
	i := max(0, strings.LastIndexByte(text, ':'))
	host, _, _ := strings.Cut(strings.Trim(text[:i], "[]"), "%")
	if host == "*" {
		host = "::"
	}
	return address(host, strings.TrimPrefix(text[i:], ":"))
}

// seen describes a violation that nothing prevented.
func seen(v *violation) string {
	what := v.Subject
	if v.Kind == string(sandbox.EventConnect) && !strings.HasPrefix(what, "socket(") {
		what = "connection to " + what
	}
	if v.Process != "" {
		what += " by " + v.Process
	}
	if v.Count > 1 {
		what += fmt.Sprintf(", %d times", v.Count)
	}
	return "seen: " + what
}
