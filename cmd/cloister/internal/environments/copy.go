// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cloister-build/cloister/cmd/cloister/internal/archive"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/environment"
	"github.com/cloister-build/cloister/worker"
)

// Words of the hidden commands that are the sandbox's end of a copy.
const (
	PackCommand   = "pack"
	UnpackCommand = "unpack"
)

// Copy copies a file or directory into a sandbox or out of one: either from or to is NAME:PATH, where PATH is absolute
// or relative to the sandbox's working directory. The sandbox's end has the rights of its commands. What it sends is
// not trusted: nothing outside of to is changed.
func Copy(ctx context.Context, from, to string) error {
	name, file, out := split(from)
	target, dir, in := split(to)
	switch {
	case in == out:
		return exit.New(exit.Usage, errors.New("write one of the two paths as NAME:PATH, in a sandbox"))
	case in:
		return copyIn(ctx, from, target, dir)
	}
	return copyOut(ctx, name, file, to)
}

// split splits NAME:PATH. A path of this host with a colon is written with a slash before it.
func split(s string) (name, file string, inside bool) {
	name, file, ok := strings.Cut(s, ":")
	return name, file, ok && !strings.Contains(name, "/")
}

// command returns the sandbox's end of a copy.
func command(verb, file string, more ...string) *Command {
	if file == "" {
		file = "."
	}
	program := path.Join(worker.ExecRoot, localworker.ProgramDir, environment.Program)
	return &Command{Args: append([]string{program, "sandbox", verb, "--", file}, more...)}
}

func copyIn(ctx context.Context, from, name, dir string) error {
	if _, err := os.Stat(from); err != nil {
		return exit.New(exit.Usage, errors.New(printableLines(err.Error())))
	}
	whole, err := filepath.Abs(from)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	c := command(UnpackCommand, dir, archive.Base(whole))
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := archive.Pack(w, from)
		w.CloseWithError(err)
		packed <- err
	}()
	c.Stdin = r
	err = executeEnd(ctx, name, c)
	r.CloseWithError(errEnded)
	if failed := <-packed; failed != nil && !errors.Is(failed, errEnded) {
		return copyError(from, failed)
	}
	return err
}

// errEnded is the error of a writer whose reader has ended.
var errEnded = errors.New("the copy has ended")

func copyOut(ctx context.Context, name, file, to string) error {
	c := command(PackCommand, file)
	r, w, err := os.Pipe()
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	c.Stdout = w
	unpacked := make(chan error, 1)
	go func() {
		err := archive.Unpack(r, to, archive.Base(file))
		if err == nil {
			_, err = io.Copy(io.Discard, r) // padding
		}
		r.Close()
		unpacked <- err
	}()
	err = executeEnd(ctx, name, c)
	w.Close()
	failed := <-unpacked
	// An incomplete archive results from the failure of the sandbox's end. Any other error of this end is the cause:
	// the sandbox's end may have failed because this one no longer read from it.
	if failed != nil && (err == nil || !errors.Is(failed, archive.ErrIncomplete)) {
		return copyError(to, failed)
	}
	return err
}

// copyError returns the error of this host's end of a copy. The exit code is exit.Environment for system call errors of
// this host, and exit.No for others: invalid data or an existing destination.
func copyError(file string, err error) error {
	code := exit.No
	if _, ok := errors.AsType[syscall.Errno](err); ok {
		code = exit.Environment
	}
	return exit.New(code, errors.New(printableLines(fmt.Sprintf("copy %s: %v", file, err))))
}

// maxReason bounds the text, in bytes, that the sandbox's end of a copy gives as the reason of a failure.
const maxReason = 4 << 10

// executeEnd executes the sandbox's end of a copy. Its output explains a failure, but commands in the sandbox may have
// forged it.
func executeEnd(ctx context.Context, name string, c *Command) error {
	r, w, err := os.Pipe()
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	c.Stderr = w
	if c.Stdout == nil {
		c.Stdout = w
	}
	reason := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(io.LimitReader(r, maxReason))
		_, _ = io.Copy(io.Discard, r)
		r.Close()
		reason <- strings.TrimPrefix(string(text), "cloister: ")
	}()
	code, err := Exec(ctx, name, c)
	w.Close()
	text := printableLines(<-reason)
	if err == nil && code != 0 {
		if text == "" {
			text = fmt.Sprintf("the copy failed in the sandbox with exit code %d", code)
		}
		err = exit.New(exit.No, errors.New(text))
	}
	return err
}
