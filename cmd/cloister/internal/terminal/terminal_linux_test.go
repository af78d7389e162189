// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// shell starts a shell on t and ends it with the test.
func shell(t *testing.T, on *PTY) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-i")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = on.TTY, on.TTY, on.TTY
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "PS1=", "PS2="}
	must.Succeed(t, cmd.Start())
	return cmd
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must.Succeed(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// TestTerminalOfPipes: commands that are no terminal's are typed, and their end ends the shell, even if a
// program of it reads the end first.
func TestTerminalOfPipes(t *testing.T) {
	in, keys := pipe(t)
	shown, out := pipe(t)
	term := must.Get(Open(in, out))(t)
	defer term.Close()
	cmd := shell(t, term)
	// The last line has no end, and cat wants one of its own.
	must.Get(io.WriteString(keys, "tty; test -t 0 && echo $((40+2))\nhead -c 100000 /dev/zero | tr '\\0' x; echo\ncat; exit 7"))(t)
	keys.Close()
	text := make(chan string)
	go func() {
		b, _ := io.ReadAll(shown)
		text <- string(b)
	}()
	cmd.Wait()
	term.Close()
	out.Close()
	got := <-text
	if cmd.ProcessState.ExitCode() != 7 && cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("exit code %d", cmd.ProcessState.ExitCode())
	}
	for _, want := range []string{"/dev/pts/", "42\n", strings.Repeat("x", 100_000)} {
		expect.That(t, strings.Contains(got, want),
			"%.40q is not among the %d bytes shown: %.200q", want, len(got), got)
	}
	expect.That(t, !strings.Contains(got, "$((40") && !strings.Contains(got, "\r"),
		"commands are shown, or lines end as on a terminal: %.200q", got)
}

// TestTerminalOfAPerson: keys are passed on as they are, sizes follow, and the terminal is given back as it
// was. A second pseudo-terminal is the person's.
func TestTerminalOfAPerson(t *testing.T) {
	none, _ := pipe(t)
	_, ignored := pipe(t)
	persons := must.Get(Open(none, ignored))(t)
	defer persons.Close()
	settings := func() (s *unix.Termios) {
		must.Succeed(t, Control(persons.TTY, func(fd int) (err error) {
			s, err = unix.IoctlGetTermios(fd, unix.TCGETS)
			return err
		}))
		return s
	}
	size := func(rows, columns uint16) {
		must.Succeed(t, Control(persons.TTY, func(fd int) error {
			return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
		}))
	}
	before := settings()
	size(33, 77)
	shown, out := pipe(t)
	term := must.Get(Open(persons.TTY, out))(t)
	defer term.Close()
	if s := settings(); s.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != 0 || s.Oflag&unix.OPOST != 0 {
		t.Errorf("the person's terminal still has a mind of its own: %+v", s)
	}
	cmd := shell(t, term)
	lines := bufio.NewScanner(shown)
	await := func(want string) {
		t.Helper()
		shown.SetReadDeadline(time.Now().Add(time.Minute)) // a bound, which is not met
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("%q never came: %v", want, lines.Err())
	}
	say := func(keys string) {
		must.Get(io.WriteString(persons.PTMX, keys))(t)
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
	term.Close()
	expect.Equal(t, cmd.ProcessState.ExitCode(), 5, "exit code")
	if after := settings(); *after != *before {
		t.Errorf("the person's terminal is not as it was: %+v, before %+v", after, before)
	}
}

// TestSecretIsNotShown: what is typed after the prompt is returned and not shown, and the terminal is given back, also
// if a signal comes first.
func TestSecretIsNotShown(t *testing.T) {
	none, _ := pipe(t)
	shown, out := pipe(t)
	persons := must.Get(Open(none, out))(t)
	defer persons.Close()
	tty := must.Get(os.OpenFile(persons.TTY.Name(), os.O_RDWR|unix.O_NOCTTY, 0))(t)
	defer tty.Close()
	settings := func() (s unix.Termios) {
		must.Succeed(t, Control(tty, func(fd int) error {
			now, err := unix.IoctlGetTermios(fd, unix.TCGETS)
			if err == nil {
				s = *now
			}
			return err
		}))
		return s
	}
	// As a shell has it.
	must.Get(setTerminal(tty, func(s *unix.Termios) { s.Lflag |= unix.ECHO }))(t)
	before := settings()
	shown.SetReadDeadline(time.Now().Add(time.Minute)) // a bound, which is not met
	var text strings.Builder
	await := func(want string) {
		t.Helper()
		b := make([]byte, 100)
		for !strings.Contains(text.String(), want) {
			n, err := shown.Read(b)
			text.Write(b[:n])
			must.Be(t, err == nil, "%q never came: %v in %q", want, err, text.String())
		}
	}
	type answer struct {
		line []byte
		err  error
	}
	for _, typed := range []string{"to be kept\n", "", strings.Repeat("x", 2*maxSecret) + "\n"} {
		ctx, end := context.WithCancelCause(t.Context())
		got := make(chan answer, 1)
		go func() {
			line, err := readSecret(ctx, tty, "Passphrase: ")
			got <- answer{line, err}
		}()
		await("Passphrase: ")
		if s := settings(); s.Lflag&unix.ECHO != 0 || s.Lflag&unix.ISIG == 0 {
			t.Errorf("what is typed is shown, or Ctrl-C is no signal: %+v", s)
		}
		if typed == "" {
			end(&interrupt.Error{Signal: syscall.SIGINT})
		} else if _, err := io.WriteString(persons.PTMX, typed); err != nil {
			t.Fatal(err)
		}
		a := <-got
		var by *interrupt.Error
		switch {
		case typed == "" && !errors.As(a.err, &by):
			t.Errorf("after a signal: %q, %v", a.line, a.err)
		case len(typed) > maxSecret && a.err == nil:
			t.Errorf("a line of %d bytes is taken", len(a.line))
		case typed != "" && len(typed) <= maxSecret && (a.err != nil || string(a.line)+"\n" != typed):
			t.Errorf("%q: %q, %v", typed, a.line, a.err)
		}
		expect.Equal(t, settings(), before, "the terminal")
		await("\n")
		expect.That(t, !strings.Contains(text.String(), "kept") && !strings.Contains(text.String(), "xx"),
			"shown is %q", text.String())
		text.Reset()
		end(nil)
		must.Succeed(t, tty.SetReadDeadline(time.Time{}))
	}
	if _, err := readSecret(t.Context(), none, "Passphrase: "); err == nil {
		t.Error("a pipe is a terminal")
	}
}
