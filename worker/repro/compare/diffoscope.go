// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// Bounds of what diffoscope may say and take.
const (
	maxDiffoscope     = 256 << 10 // bytes of text
	diffoscopeTimeout = 5 * time.Minute
)

// ErrNoDiffoscope says that diffoscope is not installed.
var ErrNoDiffoscope = errors.New("diffoscope is not installed, or not in PATH")

// Diffoscope returns what diffoscope(1) says of two files or directories, in printable lines of at most 256 KiB in
// all; "" if they are equal. It runs outside of any sandbox, with the tools that it finds: it is for those who ask for
// it. Where it is not installed the error is ErrNoDiffoscope.
func Diffoscope(ctx context.Context, a, b string) (string, error) {
	program, err := exec.LookPath("diffoscope")
	if err != nil {
		return "", ErrNoDiffoscope
	}
	return diffoscope(ctx, program, a, b)
}

func diffoscope(ctx context.Context, program, a, b string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, diffoscopeTimeout, fmt.Errorf("diffoscope took more than %v", diffoscopeTimeout))
	defer cancel()
	// When a directory was written, and by whom, is no difference: copies are compared.
	cmd := exec.CommandContext(ctx, program, "--text=-", "--no-progress", "--text-color=never", "--exclude-directory-metadata=yes",
		fmt.Sprint("--max-text-report-size=", maxDiffoscope), "--", a, b)
	out, errs := &atMost{left: maxDiffoscope}, &atMost{left: 4 << 10}
	cmd.Stdout, cmd.Stderr = out, errs
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case err == nil:
		return "", nil
	case errors.As(err, &exit) && exit.ExitCode() == 1: // they differ
		return printableLines(out.b.String()), nil
	}
	return "", fmt.Errorf("diffoscope: %w: %s", err, printable(strings.TrimSpace(errs.b.String()), MaxText))
}

// atMost keeps the first bytes that are written to it.
type atMost struct {
	b    strings.Builder
	left int
}

func (w *atMost) Write(p []byte) (int, error) {
	keep := p[:min(len(p), w.left)]
	w.left -= len(keep)
	w.b.Write(keep)
	return len(p), nil
}

// frame has the lines that diffoscope draws, which are not ASCII, in ASCII.
var frame = strings.NewReplacer("\u2502", "|", "\u251c", "|", "\u2500", "-", "\u2504", "-", "\u2575", "'")

// printableLines is text line by line in printable text; what names and contents are in it is foreign.
func printableLines(text string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		if out.Len() > maxDiffoscope {
			break
		}
		out.WriteString(printable(frame.Replace(strings.TrimRight(line, "\n")), 4<<10) + "\n")
	}
	return out.String()
}
