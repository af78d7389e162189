// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTopOnATerminal: it redraws in place, within what the terminal shows, until q is typed, and gives the terminal back.
func TestTopOnATerminal(t *testing.T) {
	address := fleetServer(t, nil)
	none, _ := pipe(t)
	shown, out := pipe(t)
	persons, err := openTerminal(none, out)
	if err != nil {
		t.Fatal(err)
	}
	defer persons.close()
	settings := func() (s *unix.Termios) {
		if err := control(persons.run, func(fd int) (err error) {
			s, err = unix.IoctlGetTermios(fd, unix.TCGETS)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if err := control(persons.run, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 3, Col: 20})
	}); err != nil {
		t.Fatal(err)
	}
	before := settings()
	c := topConfig{interval: 100 * time.Millisecond}
	c.from.at.cas = "grpc://" + address
	ended := make(chan error, 1)
	go func() { ended <- c.watch(t.Context(), persons.run, persons.run) }()

	shown.SetReadDeadline(time.Now().Add(time.Minute)) // a bound, which is not met
	var text strings.Builder
	buffer := make([]byte, 4096)
	await := func(want string, times int) {
		t.Helper()
		for strings.Count(text.String(), want) < times {
			n, err := shown.Read(buffer)
			text.Write(buffer[:n])
			if err != nil {
				t.Fatalf("%q never came %d times: %v in\n%q", want, times, err, text.String())
			}
		}
	}
	await(screenHome, 3) // two whole pages
	if s := settings(); s.Lflag&(unix.ICANON|unix.ECHO) != 0 || s.Lflag&unix.ISIG == 0 {
		t.Errorf("keys do not come at once, or Ctrl-C is no signal: %+v", s)
	}
	if _, err := io.WriteString(persons.ours, "xq"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("q: %v", err)
	}
	await(screenClose, 1)
	if after := settings(); *after != *before {
		t.Errorf("the terminal is not as it was: %+v, before %+v", after, before)
	}
	got := text.String()
	if !strings.HasPrefix(got, screenOpen) || !strings.HasSuffix(got, screenClose) {
		t.Errorf("it does not begin and end on a page of its own: %q", got)
	}
	page := strings.Split(got, screenHome)[1]
	if n := strings.Count(page, "\r\n"); n != 2 || !strings.Contains(page, "lines more") {
		t.Errorf("a page of a terminal of 3 lines has %d: %q", n, page)
	}
}
