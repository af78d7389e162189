// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// findProgram returns the path of cloister: program unless it is empty, or beside this program, or in PATH.
func findProgram(program string) (string, error) {
	if program != "" {
		return program, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "cloister")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	program, err := exec.LookPath("cloister")
	if err != nil {
		return "", fmt.Errorf("%w; pass --cloister or --executor", err)
	}
	return program, nil
}

// An ownServer is a running cloister serve.
type ownServer struct {
	address string
	pid     int
	// stop interrupts the server, waits for its end, and returns its error. The caller calls it once.
	stop func() error
	// kill kills the server and waits for its end.
	kill func() error
}

// startServer starts cloister serve on a free port of loopback, with more flags. Its log goes to log.
func startServer(ctx context.Context, program string, log io.Writer, flags ...string) (*ownServer, error) {
	cmd := exec.CommandContext(ctx, program, append([]string{"serve", "--listen", "127.0.0.1:0"}, flags...)...)
	cmd.Stderr = log
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	wait := func() error {
		_, err := io.Copy(io.Discard, stdout)
		return errors.Join(err, cmd.Wait())
	}
	address, err := readAddress(stdout)
	if err != nil {
		return nil, errors.Join(err, wait())
	}
	ended := make(chan error, 1)
	go func() {
		defer close(ended)
		ended <- wait() // also drains stdout while the server runs
	}()
	stop := func() error {
		err := cmd.Process.Signal(os.Interrupt)
		return errors.Join(err, <-ended)
	}
	kill := func() error {
		err := cmd.Process.Kill()
		for range ended { // that it was killed is no error
		}
		return err
	}
	return &ownServer{address, cmd.Process.Pid, stop, kill}, nil
}

// startServer starts cloister serve with a new store in dir, and makes it the server to measure. The caller calls stop,
// which waits for the end of the server.
func (c *execBench) startServer(ctx context.Context, dir string, info io.Writer) (stop func() error, err error) {
	program, err := findProgram(c.cloister)
	if err != nil {
		return nil, err
	}
	s, err := startServer(ctx, program, info, "--dir", filepath.Join(dir, "store"))
	if err != nil {
		return nil, err
	}
	pidfile := filepath.Join(dir, "pid")
	if err := os.WriteFile(pidfile, []byte(strconv.Itoa(s.pid)), 0o600); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	c.servers.executor = "cloister=" + s.address
	c.servers.watch = append(c.servers.watch, "cloister="+pidfile)
	return s.stop, nil
}

// readAddress reads the address that cloister serve prints before it serves.
func readAddress(stdout io.Reader) (string, error) {
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), "--remote_executor=grpc://"); ok {
			return strings.Fields(rest)[0], nil
		}
	}
	return "", errors.Join(errors.New("cloister serve ended before it printed its address"), lines.Err())
}
