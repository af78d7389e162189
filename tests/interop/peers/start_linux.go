// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// A Server is a running peer. The caller stops it.
type Server struct {
	Addr    string // HOST:PORT
	PID     int
	cmd     *exec.Cmd
	done    chan struct{} // closed when it has ended and err is set
	err     error
	stopped bool // by Stop or Kill
	log     syncbuf.Buffer
}

const (
	startTime = 3 * time.Minute
	stopTime  = time.Minute
)

// Start starts the peer and returns when it listens. If the peer ends before, the error has its output.
func (k Kind) Start(ctx context.Context, o Options) (*Server, error) {
	if o.Size == 0 {
		o.Size = 1 << 30
	}
	addr := o.Listen
	if addr == "" {
		var err error
		if addr, err = loopback.Address(); err != nil {
			return nil, err
		}
	}
	if k.config != nil {
		text, err := json.Marshal(k.config(o, addr))
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(o.Dir, configName), text, 0o600); err != nil {
			return nil, err
		}
	}
	s := &Server{Addr: addr, done: make(chan struct{})}
	s.cmd = exec.Command(o.Program, k.args(o, s.Addr)...)
	s.cmd.Dir = o.Dir
	s.cmd.Env = []string{"HOME=" + o.Dir, "PATH=/usr/bin:/bin"}
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	// Stop the peer if this process dies.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", k.Name, err)
	}
	s.PID = s.cmd.Process.Pid
	go func() {
		s.err = s.cmd.Wait()
		close(s.done)
	}()
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		if c, err := net.Dial("tcp", s.Addr); err == nil {
			return s, c.Close()
		}
		select {
		case <-s.done:
			return nil, fmt.Errorf("%s ended before it was ready: %v\n%s", k.Name, s.err, s.log.String())
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("%s does not listen on %s: %w\n%s", k.Name, s.Addr, ctx.Err(), s.log.String()), s.Stop())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop sends SIGTERM to the peer and waits for its end. It fails if the peer had already ended or must be killed. After
// Stop or Kill it does nothing. Calls must not be concurrent.
func (s *Server) Stop() error {
	if s.stopped {
		return nil
	}
	s.stopped = true
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-s.done
		return fmt.Errorf("%s had already ended: %w\n%s", s.cmd.Path, errors.Join(err, s.err), s.log.String())
	}
	select {
	case <-s.done:
		return nil // some exit with 0, some by the signal
	case <-time.After(stopTime):
		s.Kill()
		return fmt.Errorf("%s did not stop within %v and was killed\n%s", s.cmd.Path, stopTime, s.log.String())
	}
}

// Kill kills the peer and waits for its end.
func (s *Server) Kill() {
	s.stopped = true
	_ = s.cmd.Process.Kill() // fails only if it has ended
	<-s.done
}
