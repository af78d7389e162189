// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/service"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
)

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must.Succeed(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// TestTopOnTerminal: it redraws in place and within the screen until q, and restores the terminal.
func TestTopOnTerminal(t *testing.T) {
	head, err := service.NewServer(t.Context(), service.Config{Worker: worker.Config{Name: "head", Instances: castest.Instances()}})
	must.Succeed(t, err)
	t.Cleanup(func() { head.Close() })
	address := grpctest.Serve(t, func(s *grpc.Server) {
		expect.Error(t, head.Register(s), nil)
	})
	none, _ := pipe(t)
	shown, out := pipe(t)
	persons := must.Get(terminal.Open(none, out))(t)
	defer persons.Close()
	settings := func() (s *unix.Termios) {
		must.Succeed(t, terminal.Control(persons.TTY, func(fd int) (err error) {
			s, err = unix.IoctlGetTermios(fd, unix.TCGETS)
			return err
		}))
		return s
	}
	must.Succeed(t, terminal.Control(persons.TTY, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 3, Col: 20})
	}))
	before := settings()
	c := Top{Interval: 100 * time.Millisecond}
	c.From.Server.Address = "grpc://" + address
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(t.Context(), persons.TTY, persons.TTY) }()

	shown.SetReadDeadline(time.Now().Add(time.Minute)) // a bound, which is not met
	var text strings.Builder
	buffer := make([]byte, 4096)
	await := func(want string, times int) {
		t.Helper()
		for strings.Count(text.String(), want) < times {
			n, err := shown.Read(buffer)
			text.Write(buffer[:n])
			must.Be(t, err == nil, "%q never came %d times: %v in\n%q", want, times, err, text.String())
		}
	}
	await(screenHome, 3) // two whole pages
	if s := settings(); s.Lflag&(unix.ICANON|unix.ECHO) != 0 || s.Lflag&unix.ISIG == 0 {
		t.Errorf("keys do not come at once, or Ctrl-C is no signal: %+v", s)
	}
	must.Get(io.WriteString(persons.PTMX, "xq"))(t)
	expect.Error(t, <-ended, nil, "q")
	await(screenClose, 1)
	if after := settings(); *after != *before {
		t.Errorf("the terminal is not as it was: %+v, before %+v", after, before)
	}
	got := text.String()
	expect.That(t, strings.HasPrefix(got, screenOpen) && strings.HasSuffix(got, screenClose),
		"it does not begin and end on a page of its own: %q", got)
	page := strings.Split(got, screenHome)[1]
	if n := strings.Count(page, "\r\n"); n != 2 || !strings.Contains(page, "more lines") {
		t.Errorf("a page of a terminal of 3 lines has %d: %q", n, page)
	}
}
