// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// A Command is executed in a sandbox.
type Command struct {
	Args []string
	Env  []string // in addition to the sandbox's: KEY=VALUE
	Dir  string   // "" is the sandbox's working directory
	TTY  bool     // on a terminal of its own, connected to ours
	// Session makes Args a shell script, with its arguments, that continues where the last one has ended.
	Session bool

	Stdin          io.Reader // nil is an empty stdin
	Stdout, Stderr *os.File
}

// A Ran is how a command ended, with its output. It is JSON for programs.
type Ran struct {
	ExitCode int `json:"exit_code"`
	// Stdout and Stderr are the first MiB of each; bytes that are not UTF-8 are replaced.
	Stdout string `json:"stdout"`
	Stderr string `json:"stderr"`
	// Truncated means that one of them was longer.
	Truncated bool    `json:"truncated,omitempty"`
	Seconds   float64 `json:"seconds"`
}

// maxCaptured bounds each output of a Ran, in bytes.
const maxCaptured = 1 << 20

// Capture executes a command as Exec does, and returns what it writes instead of copying it to c.
func Capture(ctx context.Context, name string, c *Command) (*Ran, error) {
	r := &Ran{}
	done := make(chan bool)
	var ends []*os.File
	capture := func(to *string) (*os.File, error) {
		from, w, err := os.Pipe()
		if err != nil {
			return nil, exit.New(exit.Internal, err)
		}
		ends = append(ends, w)
		go func() {
			text, _ := io.ReadAll(io.LimitReader(from, maxCaptured)) // a pipe of our own
			more, _ := io.Copy(io.Discard, from)
			from.Close()
			*to = string(text)
			done <- more > 0
		}()
		return w, nil
	}
	began := time.Now()
	var err error
	if c.Stdout, err = capture(&r.Stdout); err == nil {
		if c.Stderr, err = capture(&r.Stderr); err == nil {
			r.ExitCode, err = Exec(ctx, name, c)
		}
	}
	for _, w := range ends {
		w.Close()
	}
	for range ends {
		r.Truncated = <-done || r.Truncated
	}
	r.Seconds = time.Since(began).Seconds()
	return r, err
}
