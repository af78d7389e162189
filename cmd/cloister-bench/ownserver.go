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

// findProgram returns the path of cloister: that of --cloister, or beside this program, or in PATH.
func (c *execBench) findProgram() (string, error) {
	if c.cloister != "" {
		return c.cloister, nil
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

// startServer starts cloister serve with a new store in dir, and makes it the server to measure. The caller calls stop,
// which waits for the end of the server.
func (c *execBench) startServer(ctx context.Context, dir string, info io.Writer) (stop func() error, err error) {
	program, err := c.findProgram()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, "serve", "--dir", filepath.Join(dir, "store"), "--listen", "127.0.0.1:0")
	cmd.Stderr = info
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
	pidfile := filepath.Join(dir, "pid")
	if err := os.WriteFile(pidfile, []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), wait())
	}
	c.servers.executor = "cloister=" + address
	c.servers.watch = append(c.servers.watch, "cloister="+pidfile)
	ended := make(chan error, 1)
	go func() { ended <- wait() }() // also drains stdout while the server runs
	return func() error {
		err := cmd.Process.Signal(os.Interrupt)
		return errors.Join(err, <-ended)
	}, nil
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
