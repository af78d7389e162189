// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/cloister/internal/unixsocket"
	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// forwarded are the signals that are passed on to the command.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// dial connects to the supervisor of a running sandbox.
func dial(ctx context.Context, name string) (*net.UnixConn, error) {
	dir, s, err := find(name)
	if err != nil {
		return nil, err
	}
	if !s.Running {
		return nil, endedError(name, s.Reason)
	}
	conn, err := unixsocket.Dial(ctx, dir, socketFile)
	if err != nil {
		return nil, exit.New(exit.Unreachable, fmt.Errorf("sandbox %s does not answer: %w", name, err))
	}
	return conn, nil
}

// endedError explains that a sandbox has ended.
func endedError(name, reason string) error {
	return exit.New(exit.Unreachable, fmt.Errorf("sandbox %s has ended: %s; see cloister sandbox logs %[1]s", name, reason))
}

// Exec executes a command in a sandbox and returns its exit code. Signals to this process are passed on to it. The
// error is an *exit.Error.
func Exec(ctx context.Context, name string, c *Command) (int, error) {
	conn, err := dial(ctx, name)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	signals := make(chan os.Signal, len(forwarded))
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	files, done, err := c.streams()
	if err != nil {
		return 0, exit.New(exit.Internal, err)
	}
	defer done()
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	r := request{Verb: "exec", Args: c.Args, Env: c.Env, Dir: c.Dir, Terminal: c.TTY, Session: c.Session}
	if err := send(conn, &r, fds...); err != nil {
		return 0, exit.New(exit.Unreachable, err)
	}
	go func() {
		for s := range signals {
			if n, ok := s.(syscall.Signal); ok {
				_, _ = conn.Write([]byte{byte(n)}) // the command may have ended
			}
		}
	}()
	defer context.AfterFunc(ctx, func() { conn.Close() })() // the supervisor then ends the command
	var end reply
	switch _, err := receive(conn, &end); {
	case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return 0, exit.New(exit.Timeout, errors.New("the command has not ended within --timeout and is terminated"))
	case err != nil:
		return 0, exit.New(exit.Unreachable, fmt.Errorf("the supervisor of sandbox %s was killed: %w", name, err))
	case end.Ended:
		return 0, endedError(name, end.Error)
	case end.Error != "":
		return 0, exit.New(end.Code, errors.New(printableLines(end.Error)))
	}
	return end.Code, nil
}

// streams returns the streams for the command: never a terminal or file of this host as its stdin.
func (c *Command) streams() (files []*os.File, done func(), err error) {
	if c.TTY {
		t, err := terminal.Open(os.Stdin, os.Stdout)
		if err != nil {
			return nil, nil, err
		}
		return []*os.File{t.TTY}, t.Close, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	if c.Stdin == nil {
		w.Close()
	} else {
		go func() {
			_, _ = io.Copy(w, c.Stdin) // it fails when the command ends
			w.Close()
		}()
	}
	return []*os.File{r, c.Stdout, c.Stderr}, func() { r.Close() }, nil
}

// Stop ends a sandbox, waits for its end and returns its last state.
func Stop(ctx context.Context, name string) (*State, error) {
	return finish(ctx, name, func(string) error { return nil })
}

// Remove ends a sandbox, removes its directory and returns its last state.
func Remove(ctx context.Context, name string) (*State, error) { return finish(ctx, name, discard) }

// finish ends a sandbox, passes its directory to leave and returns its last state.
func finish(ctx context.Context, name string, leave func(dir string) error) (*State, error) {
	dir, held, err := end(ctx, name)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	s, err := read(dir)
	if err := errors.Join(err, leave(dir)); err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	return s, nil
}

// stopPatience is longer than a supervisor takes to end.
const stopPatience = 20 * time.Second

// end ends a sandbox if it runs, waits until its supervisor has exited and takes its lock.
func end(ctx context.Context, name string) (dir string, held *os.File, err error) {
	dir, s, err := find(name)
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	if s.Running {
		requestEnd(ctx, dir)
	}
	for {
		held, err := localworker.Hold(dir, false)
		if err == nil {
			if _, err := os.Stat(filepath.Join(dir, tempFile)); errors.Is(err, os.ErrNotExist) {
				return dir, held, nil
			}
			held.Close()
			if err := sweep(filepath.Dir(dir)); err != nil && unswept(dir) { // the supervisor was killed meanwhile
				return "", nil, err
			}
		}
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return "", nil, errAbsent(name) // another process has removed it
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return "", nil, exit.New(exit.Unreachable,
				fmt.Errorf("sandbox %s has not ended: %w; kill its supervisor, process %d", name, context.Cause(ctx), s.PID))
		}
	}
}

// requestEnd asks a supervisor to end its sandbox, and waits for the answer. A supervisor that does not answer still
// holds the lock.
func requestEnd(ctx context.Context, dir string) {
	conn, err := unixsocket.Dial(ctx, dir, socketFile)
	if err != nil {
		return
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })() // a stopped supervisor answers nothing
	if send(conn, &request{Verb: "stop"}) == nil {
		var r reply
		_, _ = receive(conn, &r)
	}
}
