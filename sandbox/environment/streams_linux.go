// SPDX-License-Identifier: Apache-2.0

package environment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"golang.org/x/sys/unix"
)

// streams are the standard streams of one command.
type streams struct {
	theirs  []int      // sent to the agent, then closed
	ours    []*os.File // the reading ends of stdout and stderr
	joined  bool       // they are one
	relayed bool       // what the command has written may still arrive
	copying sync.WaitGroup
	mu      sync.Mutex
	err     error
}

// open makes the streams of a command and gives its pipes to the user of the commands, which open /dev/stderr.
func (e *Environment) open(std sandbox.Stdio) (_ *streams, err error) {
	s := &streams{relayed: e.relayed}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if std.Terminal != nil {
		if e.relayed {
			return nil, fmt.Errorf("%w: this sandbox cannot have terminals, since it has a kernel of its own", sandbox.ErrUnsupported)
		}
		if err := s.add(std.Terminal); err != nil {
			return nil, err
		}
		return s, e.own(s)
	}
	stdin := std.Stdin
	if stdin == nil {
		if stdin, err = os.Open(os.DevNull); err != nil {
			return nil, err
		}
		defer stdin.Close()
	}
	if err := s.add(stdin); err != nil {
		return nil, err
	}
	for i, w := range []io.Writer{std.Stdout, std.Stderr} {
		if w == nil {
			w = io.Discard
		}
		if i == 1 && wire.SameWriter(std.Stdout, std.Stderr) {
			fd, err := unix.FcntlInt(uintptr(s.theirs[1]), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("output pipe: %w", err)
			}
			s.theirs, s.joined = append(s.theirs, fd), true
			continue
		}
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
			return nil, fmt.Errorf("output pipe: %w", err)
		}
		s.theirs = append(s.theirs, pipe[1])
		err := unix.SetNonblock(pipe[0], true) // so that deadlines work
		r := os.NewFile(uintptr(pipe[0]), "output")
		s.ours = append(s.ours, r)
		if err != nil {
			return nil, fmt.Errorf("output pipe: %w", err)
		}
		s.copying.Go(func() { s.copy(w, r) })
	}
	return s, e.own(s)
}

// add adds a descriptor of f that blocks, as programs expect.
func (s *streams) add(f *os.File) error {
	fd := -1
	conn, err := f.SyscallConn()
	if err == nil {
		var failed error
		err = conn.Control(func(raw uintptr) { fd, failed = blocking(int(raw)) })
		err = errors.Join(err, failed)
	}
	if err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	s.theirs = append(s.theirs, fd)
	return nil
}

// blocking returns a descriptor of a file that blocks. If the given one does not, it opens the file again, because its
// owner relies on that. Sockets cannot be opened: they block afterwards.
func blocking(of int) (int, error) {
	flags, err := unix.FcntlInt(uintptr(of), unix.F_GETFL, 0)
	if err != nil {
		return -1, err
	}
	fd, again := -1, flags&unix.O_NONBLOCK != 0
	if again { // without waiting for the other end of a named pipe
		fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", of), flags&unix.O_ACCMODE|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	}
	if !again || err != nil {
		if fd, err = unix.FcntlInt(uintptr(of), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return -1, err
		}
	}
	if !again {
		return fd, nil
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// own gives pipes to the user of the commands.
func (e *Environment) own(s *streams) error {
	for _, fd := range s.theirs {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return fmt.Errorf("stream: %w", err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFIFO || int(st.Uid) == e.owner {
			continue
		}
		if err := unix.Fchown(fd, e.owner, e.owner); err != nil {
			return fmt.Errorf("owner of a stream: %w", err)
		}
	}
	return nil
}

// handOver closes what the agent has received.
func (s *streams) handOver() {
	for _, fd := range s.theirs {
		unix.Close(fd)
	}
	s.theirs = nil
}

func (s *streams) close() {
	s.handOver()
	for _, r := range s.ours {
		r.Close()
	}
}

// copy copies an output to its writer until the command and its children have closed it or, after drain, until nothing
// is left in the pipe. A relay closes it when everything has arrived.
func (s *streams) copy(w io.Writer, r *os.File) {
	err := wire.CopyOutput(w, r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = errors.Join(s.err, err)
}

// drain waits until everything that the command has written is copied. When ctx has ended, it waits at most a second: a
// writer may block.
func (s *streams) drain(ctx context.Context) error {
	if !s.relayed {
		for _, r := range s.ours {
			_ = r.SetReadDeadline(time.Unix(1, 0)) // it may be closed
		}
	}
	done := make(chan struct{})
	go func() {
		s.copying.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		select {
		case <-done:
		case <-time.After(time.Second):
			return nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return fmt.Errorf("copy the command's output: %w", s.err)
	}
	return nil
}
