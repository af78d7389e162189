// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// terminal: a person's shell has its own terminal with job control.
func terminal(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct {
		name, script string
		answer       [2]string // typed after the first is printed
		code         int
		want         string
	}{
		{
			"it is one", "test -t 0 && test -t 1 && test -t 2 && tty -s && echo yes > /dev/tty; exit 5",
			[2]string{},
			5,
			"yes\r\n",
		},
		{"it is read", "echo ready; read x; echo got $x", [2]string{"ready", "word\n"}, 0, "got word\r\n"},
		{"Ctrl-C interrupts", "echo ready; exec sleep 60", [2]string{"ready", "\x03"}, 130, ""},
		{"Ctrl-C interrupts what is in front", `set -m; sh -c 'trap "exit 9" INT; echo ready; while :; do sleep 0.1;
			done'; echo code $?; exit 7`, [2]string{"ready", "\x03"}, 7, "code 9\r\n"},
		{
			"Ctrl-Z stops what is in front", "set -m; sh -c 'echo ready; exec sleep 60'; echo code $?; kill %1; exit 8",
			[2]string{"ready", "\x1a"},
			8, "code 148\r\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours, theirs := pty(t)
			heard := make(chan string)
			go func() {
				var text strings.Builder
				typed := c.answer[0] == ""
				buf := make([]byte, 1024)
				for {
					n, err := ours.Read(buf)
					text.Write(buf[:n])
					if !typed && strings.Contains(text.String(), c.answer[0]) {
						typed = true
						_, _ = io.WriteString(ours, c.answer[1])
					}
					if err != nil { // EIO once nobody has the other end
						heard <- text.String()
						return
					}
				}
			}()
			w := must.Get(b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited))(t)
			defer w.Close()
			res, err := perform(t.Context(), b, &sandbox.Spec{
				Args: []string{"/bin/bash", "-c", c.script}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"},
				Inputs: host(t), Temp: []sandbox.Temp{{Target: "/tmp", Bytes: mebibyte}}, Limits: Limits(),
			}, sandbox.Stdio{Terminal: theirs})
			theirs.Close()
			if f := features(t, b); f.Kernel != "" && errors.Is(err, sandbox.ErrUnsupported) {
				lacks(t, f, "namespaces", err.Error())
			}
			must.Succeed(t, err)
			// It ends only if no copy of the run's end is left.
			text := <-heard
			if res.ExitCode != c.code || !strings.Contains(text, c.want) {
				t.Errorf("got exit code %d, %q; want %d, %q", res.ExitCode, text, c.code, c.want)
			}
			if len(res.Events) > 0 {
				t.Errorf("got events %v", res.Events)
			}
		})
	}
}

// pty returns the two ends of a new pseudo-terminal (pty(7)).
func pty(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		Unavailable(t, "namespaces", err)
	}
	ours = os.NewFile(uintptr(fd), "/dev/ptmx")
	t.Cleanup(func() { ours.Close() })
	must.Succeed(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n := must.Get(unix.IoctlGetInt(fd, unix.TIOCGPTN))(t)
	return ours, must.Get(os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0))(t)
}
