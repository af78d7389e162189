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
	"golang.org/x/term"
)

// A PTY is a pseudo-terminal for one run, connected to a person's terminal or to pipes.
type PTY struct {
	TTY  *os.File // the end of the run
	PTMX *os.File // our end

	in      *os.File
	before  *term.State // of in, nil if it is not a terminal
	resized chan os.Signal
	drained chan struct{} // closed when all output has been copied
	once    sync.Once
}

// Open makes a pseudo-terminal, and copies in to it and its output to out. If in is a terminal, the new one takes its
// settings and its size, and in passes on every key until Close. Otherwise its lines are typed without an echo, and its
// end ends the shell that reads them.
func Open(in, out *os.File) (_ *PTY, err error) {
	t := &PTY{in: in, resized: make(chan os.Signal, 1), drained: make(chan struct{})}
	if t.PTMX, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, fmt.Errorf("pseudo-terminal: %w", err)
	}
	if err := t.prepare(); err != nil {
		t.PTMX.Close()
		if t.TTY != nil {
			t.TTY.Close()
		}
		return nil, fmt.Errorf("pseudo-terminal: %w", err)
	}
	go func() {
		_, _ = io.Copy(out, t.PTMX) // it fails when the run ends
		t.PTMX.Close()              // hangs up on the run if out cannot be written
		close(t.drained)
	}()
	go t.typeInput()
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

// prepare opens the end of the run and sets up both terminals.
func (t *PTY) prepare() error {
	var number int
	err := Control(t.PTMX, func(fd int) (err error) {
		if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	if err != nil {
		return err
	}
	// Package os would make it non-blocking, also for the shell.
	path := fmt.Sprintf("/dev/pts/%d", number)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	t.TTY = os.NewFile(uintptr(fd), path)

	var settings *unix.Termios
	err = Control(t.in, func(fd int) (err error) {
		settings, err = unix.IoctlGetTermios(fd, unix.TCGETS)
		return err
	})
	if err != nil {
		if settings, err = unix.IoctlGetTermios(fd, unix.TCGETS); err != nil {
			return err
		}
		settings.Lflag &^= unix.ECHO
		settings.Oflag &^= unix.OPOST
		return unix.IoctlSetTermios(fd, unix.TCSETS, settings)
	}
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, settings); err != nil {
		return err
	}
	t.resize()
	return Control(t.in, func(fd int) (err error) { t.before, err = term.MakeRaw(fd); return err })
}

// resize gives the pseudo-terminal the size of the person's terminal, if that is known.
func (t *PTY) resize() {
	var size *unix.Winsize
	if Control(t.in, func(fd int) (err error) {
		size, err = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		return err
	}) == nil {
		_ = Control(t.PTMX, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
	}
}

// typeInput types the input, and then Ctrl-D until the run ends: each reader, a program or the shell, takes one.
func (t *PTY) typeInput() {
	_, _ = io.Copy(t.PTMX, t.in)
	const pause = 100 * time.Millisecond
	for end := []byte{4}; ; time.Sleep(pause) {
		if _, err := t.PTMX.Write(end); err != nil {
			return
		}
	}
}

// Close waits until all output of the run, which is over, has been shown, and restores the person's terminal. Later
// calls do nothing.
func (t *PTY) Close() {
	t.once.Do(func() {
		t.TTY.Close()
		// Reading ends when nobody has the other end open. The deadline is for a process that still has.
		_ = t.PTMX.SetReadDeadline(time.Now().Add(time.Second))
		<-t.drained
		if t.before != nil {
			signal.Stop(t.resized)
			close(t.resized)
			_ = Control(t.in, func(fd int) error { return term.Restore(fd, t.before) })
		}
	})
}

// Background reports whether w is the controlling terminal of this process, which is in the background there.
func Background(w io.Writer) bool {
	f, ok := w.(*os.File)
	foreground := 0
	return ok && Control(f, func(fd int) (err error) {
		foreground, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	}) == nil && foreground != unix.Getpgrp()
}

// CharMode makes a terminal pass on each key at once, without an echo; Ctrl-C remains a signal. The caller calls
// restore. A file that is not a terminal stays unchanged.
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

// setTerminal changes the settings of a terminal until the caller calls restore. It fails for other files.
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
		_ = Control(in, func(fd int) error { return unix.IoctlSetTermios(fd, unix.TCSETS, before) })
	}, err
}

// AskSecret prompts for a line on the controlling terminal, wherever the standard streams lead, without an echo. It
// fails without a terminal, and with an *interrupt.Error after a signal, having restored the terminal.
func AskSecret(ctx context.Context, prompt string) ([]byte, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil, errors.New("no terminal")
	}
	defer tty.Close()
	return readSecret(ctx, tty, prompt)
}

// maxSecret is the size limit of a line that readSecret accepts.
const maxSecret = 1 << 10

// readSecret is AskSecret on a terminal that supports deadlines.
func readSecret(ctx context.Context, tty *os.File, prompt string) ([]byte, error) {
	ctx, stop := interrupt.Context(ctx)
	defer stop()
	defer context.AfterFunc(ctx, func() { _ = tty.SetReadDeadline(time.Now()) })()
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
	// The rest of an abandoned line must not become a command of the person's shell.
	defer func() {
		_ = Control(tty, func(fd int) error { return unix.IoctlSetInt(fd, unix.TCFLSH, unix.TCIFLUSH) })
	}()
	line, err := bufio.NewReaderSize(io.LimitReader(tty, maxSecret), maxSecret).ReadSlice('\n')
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, fmt.Errorf("incomplete or too long: %w", err)
	}
	return line[:len(line)-1], nil
}
