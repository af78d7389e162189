// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// shell starts a shell on t and ends it with the test.
func shell(t *testing.T, on *terminal) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-i")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = on.run, on.run, on.run
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "PS1=", "PS2="}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// TestTerminalOfPipes: commands that are no terminal's are typed, and their end ends the shell, even if a
// program of it reads the end first.
func TestTerminalOfPipes(t *testing.T) {
	in, keys := pipe(t)
	shown, out := pipe(t)
	term, err := openTerminal(in, out)
	if err != nil {
		t.Fatal(err)
	}
	defer term.close()
	cmd := shell(t, term)
	// The last line has no end, and cat wants one of its own.
	if _, err := io.WriteString(keys, "tty; test -t 0 && echo $((40+2))\nhead -c 100000 /dev/zero | tr '\\0' x; echo\ncat; exit 7"); err != nil {
		t.Fatal(err)
	}
	keys.Close()
	text := make(chan string)
	go func() {
		b, _ := io.ReadAll(shown)
		text <- string(b)
	}()
	cmd.Wait()
	term.close()
	out.Close()
	got := <-text
	if cmd.ProcessState.ExitCode() != 7 && cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("exit code %d", cmd.ProcessState.ExitCode())
	}
	for _, want := range []string{"/dev/pts/", "42\n", strings.Repeat("x", 100_000)} {
		if !strings.Contains(got, want) {
			t.Errorf("%.40q is not among the %d bytes shown: %.200q", want, len(got), got)
		}
	}
	if strings.Contains(got, "$((40") || strings.Contains(got, "\r") {
		t.Errorf("commands are shown, or lines end as on a terminal: %.200q", got)
	}
}

// TestTerminalOfAPerson: keys are passed on as they are, sizes follow, and the terminal is given back as it
// was. A second pseudo-terminal is the person's.
func TestTerminalOfAPerson(t *testing.T) {
	none, _ := pipe(t)
	_, ignored := pipe(t)
	persons, err := openTerminal(none, ignored)
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
	size := func(rows, columns uint16) {
		if err := control(persons.run, func(fd int) error {
			return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
		}); err != nil {
			t.Fatal(err)
		}
	}
	before := settings()
	size(33, 77)
	shown, out := pipe(t)
	term, err := openTerminal(persons.run, out)
	if err != nil {
		t.Fatal(err)
	}
	defer term.close()
	if s := settings(); s.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != 0 || s.Oflag&unix.OPOST != 0 {
		t.Errorf("the person's terminal still has a mind of its own: %+v", s)
	}
	cmd := shell(t, term)
	shown.SetReadDeadline(time.Now().Add(time.Minute)) // a bound, which is not met
	lines := bufio.NewScanner(shown)
	await := func(want string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("%q never came: %v", want, lines.Err())
	}
	say := func(keys string) {
		if _, err := io.WriteString(persons.ours, keys); err != nil {
			t.Fatal(err)
		}
	}
	say("stty size\n")
	await("33 77")
	size(44, 88)
	syscall.Kill(os.Getpid(), syscall.SIGWINCH)
	say("until [ \"$(stty size)\" = '44 88' ]; do sleep 0.01; done; echo resiz''ed\n")
	await("resized")
	// Ctrl-C is for what runs in the shell, not for us.
	say("/bin/sh -c 'echo begu\"\"n; exec sleep 60'\n")
	await("begun")
	say("\x03")
	say("echo interrup''ted; exit 5\n")
	await("interrupted")
	cmd.Wait()
	term.close()
	if code := cmd.ProcessState.ExitCode(); code != 5 {
		t.Errorf("exit code %d, want 5", code)
	}
	if after := settings(); *after != *before {
		t.Errorf("the person's terminal is not as it was: %+v, before %+v", after, before)
	}
}
