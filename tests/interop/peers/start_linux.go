// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// A Server is a running peer. The caller ends it by Stop.
type Server struct {
	Addr string // HOST:PORT
	PID  int
	cmd  *exec.Cmd
	done chan struct{} // closed once it has ended, after err is set
	err  error
	told bool // Stop or Kill has been called
	log  logged
}

const (
	startTime = 30 * time.Second
	stopTime  = 20 * time.Second
)

// FreeAddress returns an address on loopback, HOST:PORT, that was free a moment ago: for a server that cannot be
// asked which port it was given.
func FreeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// Start starts the peer and returns once it listens. It fails with what the peer printed if that ends first.
func (k Kind) Start(ctx context.Context, o Options) (*Server, error) {
	if o.Size == 0 {
		o.Size = 1 << 30
	}
	addr := o.Listen
	if addr == "" {
		var err error
		if addr, err = FreeAddress(); err != nil {
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
	// If this process dies, nothing is left to stop the peer.
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
			return nil, fmt.Errorf("%s ended before it was ready: %v\n%s", k.Name, s.err, s.log.text())
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("%s does not listen on %s: %w\n%s", k.Name, s.Addr, ctx.Err(), s.log.text()), s.Stop())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop tells the peer to end and waits until it has; after another Stop or Kill it does nothing. It returns an
// error if the peer had ended by itself, or has to be killed. One goroutine at a time may call it, or Kill.
func (s *Server) Stop() error {
	if s.told {
		return nil
	}
	s.told = true
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-s.done
		return fmt.Errorf("%s had already ended: %w\n%s", s.cmd.Path, errors.Join(err, s.err), s.log.text())
	}
	select {
	case <-s.done:
		return nil // some end in order, some by the signal
	case <-time.After(stopTime):
		s.Kill()
		return fmt.Errorf("%s did not end in %v and was killed\n%s", s.cmd.Path, stopTime, s.log.text())
	}
}

// Kill ends the peer as a crash would, and waits until it has ended.
func (s *Server) Kill() {
	s.told = true
	_ = s.cmd.Process.Kill() // the only error is that it has ended
	<-s.done
}

// logged keeps what a peer prints.
type logged struct {
	mu   sync.Mutex
	seen bytes.Buffer // guarded by mu
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen.String()
}
