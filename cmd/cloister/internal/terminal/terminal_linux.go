// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"golang.org/x/sys/unix"
)

// A terminal is a pseudo-terminal made for one run, joined to the terminal, or the pipes, of a person.
type PTY struct {
	// run is the run's end.
	Slave *os.File

	Ours    *os.File
	in      *os.File
	before  *unix.Termios // of in, nil if it is no terminal
	resized chan os.Signal
	drained chan struct{} // closed once all that the run wrote has been passed on
	once    sync.Once
}

// Open makes a pseudo-terminal and begins to copy what comes from in to it and what it shows to
// out. If in is a terminal, its settings and its size become those of the new one, and it passes on
// every key, until close. If in is none, its lines are typed without being shown, and its end ends the
// shell that reads them.
func Open(in, out *os.File) (_ *PTY, err error) {
	t := &PTY{in: in, resized: make(chan os.Signal, 1), drained: make(chan struct{})}
	if t.Ours, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, fmt.Errorf("pseudo-terminal: %w", err)
	}
	if err := t.prepare(); err != nil {
		t.Ours.Close()
		if t.Slave != nil {
			t.Slave.Close()
		}
		return nil, fmt.Errorf("pseudo-terminal: %w", err)
	}
	go func() {
		io.Copy(out, t.Ours)
		// Where nobody reads any more, this tells the run so.
		t.Ours.Close()
		close(t.drained)
	}()
	go t.typeIn()
	if t.before != nil {
		signal.Notify(t.resized, unix.SIGWINCH)
		go func() {
			for range t.resized {
				t.resize()
			}
		}()
	}
	return t, nil
}

// prepare opens the run's end and gives both terminals their settings.
func (t *PTY) prepare() error {
	var number int
	err := Control(t.Ours, func(fd int) (err error) {
		if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	if err != nil {
		return err
	}
	// Opened by package os it would not block, and neither would the shell's reads.
	path := fmt.Sprintf("/dev/pts/%d", number)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	t.Slave = os.NewFile(uintptr(fd), path)

	settings, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return err
	}
	err = Control(t.in, func(fd int) (err error) {
		t.before, err = unix.IoctlGetTermios(fd, unix.TCGETS)
		return err
	})
	if err != nil {
		t.before = nil
		settings.Lflag &^= unix.ECHO
		settings.Oflag &^= unix.OPOST
		return unix.IoctlSetTermios(fd, unix.TCSETS, settings)
	}
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, t.before); err != nil {
		return err
	}
	t.resize()
	return t.set(raw(*t.before))
}

// raw returns s without anything that the terminal itself would do about a key or a character.
func raw(s unix.Termios) *unix.Termios {
	s.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	s.Oflag &^= unix.OPOST
	s.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	s.Cflag = s.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	s.Cc[unix.VMIN], s.Cc[unix.VTIME] = 1, 0
	return &s
}

func (t *PTY) set(s *unix.Termios) error {
	return Control(t.in, func(fd int) error { return unix.IoctlSetTermios(fd, unix.TCSETS, s) })
}

// resize gives the run's terminal the size of the person's. A size that is not known is none.
func (t *PTY) resize() {
	var size *unix.Winsize
	if Control(t.in, func(fd int) (err error) {
		size, err = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		return err
	}) == nil {
		Control(t.Ours, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
	}
}

// typeIn types what comes from in, and then says that this was all until the run is over: whoever reads
// at that moment, a program of the shell or it itself, takes only one such word.
func (t *PTY) typeIn() {
	io.Copy(t.Ours, t.in)
	const pause = 100 * time.Millisecond
	for end := []byte{4}; ; time.Sleep(pause) { // Ctrl-D
		if _, err := t.Ours.Write(end); err != nil {
			return
		}
	}
}

// Close gives the person's terminal back as it was, after all that the run wrote has been shown. The run
// is over. Calls after the first do nothing.
func (t *PTY) Close() {
	t.once.Do(func() {
		t.Slave.Close()
		// Nobody has the run's end open now, and reading ends behind its last byte. Should somebody have it
		// open all the same, it ends soon.
		t.Ours.SetReadDeadline(time.Now().Add(time.Second))
		<-t.drained
		if t.before != nil {
			signal.Stop(t.resized)
			close(t.resized)
			t.set(t.before)
		}
	})
}

// CharMode has a terminal hand on each key at once, and show none. Ctrl-C remains a signal. The caller calls what it returns
// to give the terminal back as it was. A file that is no terminal stays as it is.
func CharMode(in *os.File) (restore func()) {
	restore, err := setTerminal(in, func(s *unix.Termios) {
		s.Lflag &^= unix.ICANON | unix.ECHO
		s.Cc[unix.VMIN], s.Cc[unix.VTIME] = 1, 0
	})
	if err != nil {
		return func() {}
	}
	return restore
}

// setTerminal has change change the settings of a terminal. The caller calls what it returns to give the terminal back as
// it was. It fails for a file that is no terminal.
func setTerminal(in *os.File, change func(*unix.Termios)) (restore func(), err error) {
	var before *unix.Termios
	err = Control(in, func(fd int) (err error) {
		if before, err = unix.IoctlGetTermios(fd, unix.TCGETS); err != nil {
			return err
		}
		s := *before
		change(&s)
		return unix.IoctlSetTermios(fd, unix.TCSETS, &s)
	})
	return func() {
		Control(in, func(fd int) error { return unix.IoctlSetTermios(fd, unix.TCSETS, before) })
	}, err
}

// AskSecret asks a person for one line on the terminal of this process, wherever its streams lead to, and does not show what
// is typed. It fails where there is no terminal, and with *interrupted after Ctrl-C or another signal that would end this process. The
// PTY is then as it was.
func AskSecret(ctx context.Context, prompt string) ([]byte, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil, errors.New("there is no terminal")
	}
	defer tty.Close()
	return readSecret(ctx, tty, prompt)
}

// maxSecret is how many bytes a line has that readSecret takes.
const maxSecret = 1 << 10

// readSecret is askSecret on a terminal, from which reads can be given up.
func readSecret(ctx context.Context, tty *os.File, prompt string) ([]byte, error) {
	ctx, end := interrupt.Context(ctx)
	defer end()
	defer context.AfterFunc(ctx, func() { tty.SetReadDeadline(time.Now()) })()
	restore, err := setTerminal(tty, func(s *unix.Termios) {
		s.Lflag &^= unix.ECHO
		s.Lflag |= unix.ICANON | unix.ISIG
		s.Iflag |= unix.ICRNL
	})
	if err != nil {
		return nil, err
	}
	defer restore()
	if _, err := io.WriteString(tty, prompt); err != nil {
		return nil, err
	}
	defer io.WriteString(tty, "\n")
	// The rest of a line that was given up must not become a command of the person's shell.
	defer Control(tty, func(fd int) error { return unix.IoctlSetInt(fd, unix.TCFLSH, unix.TCIFLUSH) })
	line, err := bufio.NewReaderSize(io.LimitReader(tty, maxSecret), maxSecret).ReadSlice('\n')
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, fmt.Errorf("it ends before the line does, or the line is too long: %w", err)
	}
	return line[:len(line)-1], nil
}

// Rows returns how many lines a terminal has, 0 if that is not known.
func Rows(out *os.File) int {
	var size *unix.Winsize
	if Control(out, func(fd int) (err error) {
		size, err = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		return err
	}) != nil {
		return 0
	}
	return int(size.Row)
}

// Control calls f with the descriptor of file, and leaves the file as it is.
func Control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := conn.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}
