// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// insideVariable makes the test binary a program that performs the listed actions inside a sandbox.
const insideVariable = "CLOISTER_TEST_INSIDE"

// inside is that program.
func inside(words string) {
	for word := range strings.FieldsSeq(words) {
		what, rest, _ := strings.Cut(word, "=")
		act, ok := acts[what]
		if !ok {
			panic("unknown action " + word)
		}
		if err := act(rest); err != nil {
			fmt.Printf("%s: %v\n", word, err)
		}
	}
}

// acts are its actions.
var acts = map[string]func(string) error{
	"cat":     printFile,
	"link":    printLink,
	"tcp":     func(string) error { return connectTCP() },
	"udp":     func(string) error { return sendUDP([4]byte{127, 0, 0, 1}) },
	"away":    func(string) error { return sendUDP([4]byte{192, 0, 2, 1}) },
	"netlink": func(string) error { return openSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE) },
	"unix":    func(string) error { return openSocket(unix.AF_UNIX, unix.SOCK_STREAM, 0) },
	"cycle":   leaveCycles,
	"lock":    func(p string) error { return lockFile(p, unix.LOCK_EX|unix.LOCK_NB) },
	"wait":    func(string) error { _, err := unix.Poll(nil, -1); return err },
	"lookup":  lookUp,
	"state":   func(string) error { return printState() },
}

// program is a run of actions.
func program(t testing.TB, words ...string) *sandboxtest.Run {
	t.Helper()
	self := must.Get(os.Executable())(t)
	return &sandboxtest.Run{Spec: func(s *sandbox.Spec) {
		s.Args = []string{"/inside"}
		s.Timeout = 2 * time.Minute
		// The race detector would have each program wait a second before it ends.
		s.Env = []string{insideVariable + "=" + strings.Join(words, " "), "GORACE=atexit_sleep_ms=0"}
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/inside", Content: "x", Source: self})
	}}
}

// act runs actions and returns their output.
func act(t testing.TB, b *namespace.Backend, words ...string) string {
	t.Helper()
	r := program(t, words...)
	r.Do(t, b)
	must.Be(t, r.Result.ExitCode == 0, "%v: exit code %d\n%s%s", words, r.Result.ExitCode, r.Stdout, r.Stderr)
	return r.Stdout
}

// lookUp looks a name up as a static Go program does.
func lookUp(name string) error {
	_, err := (&net.Resolver{PreferGo: true}).LookupHost(context.Background(), name)
	if e, ok := errors.AsType[*net.DNSError](err); ok && e.IsNotFound {
		fmt.Println("not found by", e.Server)
		return nil
	}
	return err
}

func printFile(name string) error {
	text, err := os.ReadFile(name)
	if err == nil {
		fmt.Printf("%s:\n%s", name, text)
	}
	return err
}

func printLink(name string) error {
	text, err := os.Readlink(name)
	if err == nil {
		fmt.Println(text)
	}
	return err
}

func openSocket(family, kind, protocol int) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// connectTCP leaves a connection in TIME_WAIT.
func connectTCP() error {
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return err
	}
	if err := unix.Listen(l, 1); err != nil {
		return err
	}
	at, err := unix.Getsockname(l)
	if err != nil {
		return err
	}
	c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Connect(c, at); err != nil {
		return err
	}
	s, _, err := unix.Accept(l)
	if err != nil {
		return err
	}
	unix.Close(c)
	unix.Close(s)
	return printFile("/proc/self/net/tcp")
}

func sendUDP(to [4]byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: to})
}

// leaveCycles leaves named unix sockets in flight inside themselves, which the kernel must find to be unreachable.
func leaveCycles(count string) error {
	var n int
	if _, err := fmt.Sscan(count, &n); err != nil {
		return err
	}
	from, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	for i := range n {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		at := &unix.SockaddrUnix{Name: fmt.Sprintf("@left%d", i)}
		if err := unix.Bind(fd, at); err != nil {
			return err
		}
		locked, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		if err := unix.Flock(locked, unix.LOCK_SH); err != nil {
			return err
		}
		if err := unix.Sendmsg(from, []byte("x"), unix.UnixRights(fd, locked), at, 0); err != nil {
			return err
		}
		unix.Close(fd)
		unix.Close(locked)
	}
	return nil
}

func lockFile(name string, how int) error {
	fd, err := unix.Open(name, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return unix.Flock(fd, how) // as long as the process lives
}

// printState prints the state of the network.
func printState() error {
	for _, f := range []string{"snmp", "snmp6", "netstat", "dev", "tcp", "tcp6", "unix"} {
		if err := printFile("/proc/self/net/" + f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, f := range []string{"udp", "udp6"} {
		text, err := os.ReadFile("/proc/self/net/" + f)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) == 13 && f[0] != "sl" {
				f[0], f[9], f[11] = "", "", "" // bucket, inode and hashed address of the socket
				line = strings.Join(f, " ") + "\n"
			}
			fmt.Print(f, " ", line)
		}
	}
	return nil
}
