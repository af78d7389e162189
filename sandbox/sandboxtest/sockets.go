// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// connectScript connects to the socket at each of its arguments and prints the line that it reads, or the error.
const connectScript = `
import socket, sys
for path in sys.argv[1:]:
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect(path)
        s.sendall(b"ask\n")
        print(path, s.makefile().readline().strip())
    except OSError as e:
        print(path, e.strerror)
`

// sockets: a run reaches the sockets of its Spec, in an output, over inputs and in a temporary directory, and that is
// no violation; it can neither replace them nor reach another socket beside them.
func sockets(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	targets := []string{"/build/dir/s", "/build/s", "/tmp/s"}
	if !f.Sockets {
		r := Run{Script: "true", Spec: func(s *sandbox.Spec) {
			s.Sockets = []sandbox.Input{{Target: "/tmp/s", Content: "x", Source: "s"}}
		}}
		if err := r.Try(t.Context(), t, b); err == nil || !strings.Contains(err.Error(), "/tmp/s") {
			t.Errorf("got %v, want an error that names the socket", err)
		}
		return
	}
	Tool(t, "python3")
	r := bash(`mkdir -p dir; python3 -c '` + connectScript + `' dir/s ` + strings.Join(targets, " ") + ` /tmp/other
		rm -f s /tmp/s; mv /tmp/s /tmp/moved; echo x > s; test -S s && test -S /tmp/s && echo kept`)
	r.Setup = func(t testing.TB, ws *os.Root) {
		for _, name := range []string{"s", "other"} {
			answer(t, ws, name)
		}
		must.Succeed(t, ws.Mkdir("out/dir", 0o777))
		must.Succeed(t, ws.Chmod("out/dir", 0o777))
	}
	args := r.Spec
	r.Spec = func(s *sandbox.Spec) {
		args(s)
		for _, target := range targets {
			s.Sockets = append(s.Sockets, sandbox.Input{Target: target, Content: "x", Source: "s"})
		}
	}
	r.Do(t, b)
	want := "dir/s from s\n/build/dir/s from s\n/build/s from s\n/tmp/s from s\n/tmp/other No such file or directory\nkept\n"
	if r.Stdout != want {
		t.Errorf("got\n%s%s\nwant\n%s", r.Stdout, r.Stderr, want)
	}
	for _, e := range r.Result.Events {
		if e.Kind == sandbox.EventConnect {
			t.Errorf("got the violation %v, want none", e)
		}
	}
}

// answer makes a socket in a workspace that answers a line with its name until the test ends.
func answer(t testing.TB, ws *os.Root, name string) {
	t.Helper()
	dir := must.Get(ws.Open("."))(t)
	defer dir.Close()
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)}))(t)
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	must.Succeed(t, ws.Chmod(name, 0o666))
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := bufio.NewReader(c).ReadString('\n'); err == nil {
				fmt.Fprintln(c, "from", name)
			}
			c.Close()
		}
	}()
}
