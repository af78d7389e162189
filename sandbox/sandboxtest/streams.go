// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// A soleWriter collects written data and detects concurrent calls.
type soleWriter struct {
	text       strings.Builder
	writing    atomic.Bool
	concurrent atomic.Bool
}

func (w *soleWriter) Write(b []byte) (int, error) {
	if w.writing.Swap(true) {
		w.concurrent.Store(true)
	}
	defer w.writing.Store(false)
	return w.text.Write(b)
}

// equalWriters: a writer that gets both stdout and stderr is called by one goroutine at a time and gets everything in
// the order in which the run wrote it.
func equalWriters(t *testing.T, b sandbox.Backend) {
	const script = `i=0; while [ $i -lt 500 ]; do echo out$i; echo err$i >&2; i=$((i+1)); done`
	spec := &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", script}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"},
		Inputs: host(t), Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}, Limits: Limits(),
	}
	var both soleWriter
	must.Get(perform(t.Context(), b, spec, sandbox.Stdio{Stdout: &both, Stderr: &both}))(t)
	if both.concurrent.Load() {
		t.Error("got concurrent calls of Write, want one at a time")
	}
	var want strings.Builder
	for i := range 500 {
		fmt.Fprintf(&want, "out%d\nerr%d\n", i, i)
	}
	if got := both.text.String(); got != want.String() {
		t.Errorf("got %d bytes, %.30q..., want %d bytes, %.30q...", len(got), got, want.Len(), want.String())
	}
}

// stdin: a run reads the pipe from its Stdio, also as /dev/stdin; without one, stdin is empty.
func stdin(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct{ name, script, input, want string }{
		{"none", "cat; echo end", "", "end\n"},
		{"read", "cat; echo end", "some\nlines\n", "some\nlines\nend\n"},
		{"opened by name", "cat /dev/stdin", "some\n", "some\n"},
		{"not read", "echo end", strings.Repeat("x", 1<<20), "end\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var std sandbox.Stdio
			if c.input != "" {
				r, w, err := os.Pipe()
				must.Succeed(t, err)
				written := make(chan struct{})
				go func() {
					defer close(written)
					_, _ = io.WriteString(w, c.input) // fails once nobody can read it
					w.Close()
				}()
				defer func() { r.Close(); <-written }()
				std.Stdin = r
			}
			var out strings.Builder
			std.Stdout = &out
			res, err := perform(t.Context(), b, &sandbox.Spec{
				Args: []string{"/bin/sh", "-c", c.script}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"},
				Inputs: host(t), Temp: []sandbox.Temp{{Target: "/tmp", Bytes: mebibyte}}, Limits: Limits(),
			}, std)
			must.Succeed(t, err)
			if res.ExitCode != 0 || out.String() != c.want {
				t.Errorf("got exit code %d, stdout %q; want 0, %q", res.ExitCode, out.String(), c.want)
			}
		})
	}
}
