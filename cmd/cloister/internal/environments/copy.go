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
	return &Command{Args: append([]string{program, "sandbox", verb, "--", file}, more...), Stderr: os.Stderr}
}

func copyIn(ctx context.Context, from, name, dir string) error {
	if _, err := os.Stat(from); err != nil {
		return exit.New(exit.No, err)
	}
	whole, err := filepath.Abs(from)
	if err != nil {
		return exit.New(exit.No, err)
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
	c.Stdout = os.Stderr // it prints nothing
	code, err := Exec(ctx, name, c)
	r.CloseWithError(errEnded)
	if failed := <-packed; failed != nil && !errors.Is(failed, errEnded) {
		return exit.New(exit.No, fmt.Errorf("copy %s: %w", from, failed))
	}
	return copied(code, err)
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
	code, err := Exec(ctx, name, c)
	w.Close()
	failed := <-unpacked
	if err := copied(code, err); err != nil {
		return err
	}
	if failed != nil {
		return exit.New(exit.No, fmt.Errorf("copy to %s: %w", to, failed))
	}
	return nil
}

// copied returns the error of a copy whose other end has reported why it failed.
func copied(code int, err error) error {
	if err == nil && code != 0 {
		return exit.New(exit.No, nil)
	}
	return err
}
