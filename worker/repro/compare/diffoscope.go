// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// Limits of diffoscope.
const (
	maxDiffoscope     = 256 << 10 // bytes of text
	diffoscopeTimeout = 5 * time.Minute
)

// ErrNoDiffoscope means that diffoscope is not installed.
var ErrNoDiffoscope = errors.New("diffoscope is not installed, or not in PATH")

// Diffoscope returns the report of diffoscope(1) on two files or directories in printable lines, at most 256 KiB; "" if
// they are equal. diffoscope and its tools run outside of any sandbox, so callers should only use it on request. It
// fails with ErrNoDiffoscope if diffoscope is not installed.
func Diffoscope(ctx context.Context, a, b string) (string, error) {
	program, err := exec.LookPath("diffoscope")
	if err != nil {
		return "", ErrNoDiffoscope
	}
	return diffoscope(ctx, program, a, b)
}

func diffoscope(ctx context.Context, program, a, b string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, diffoscopeTimeout,
		fmt.Errorf("diffoscope took more than %v", diffoscopeTimeout))
	defer cancel()
	// The paths are copies, so that metadata of directories is meaningless.
	cmd := exec.CommandContext(ctx, program, "--text=-", "--no-progress", "--text-color=never",
		"--exclude-directory-metadata=yes", fmt.Sprint("--max-text-report-size=", maxDiffoscope), "--", a, b)
	out, errs := &headBuffer{left: maxDiffoscope}, &headBuffer{left: 4 << 10}
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
	return "", fmt.Errorf("diffoscope: %w: %s", err, printable.Head(strings.TrimSpace(errs.b.String()), maxText))
}

// A headBuffer keeps the first left bytes written to it.
type headBuffer struct {
	b    strings.Builder
	left int
}

func (w *headBuffer) Write(p []byte) (int, error) {
	keep := p[:min(len(p), w.left)]
	w.left -= len(keep)
	w.b.Write(keep)
	return len(p), nil
}

// frame replaces the lines that diffoscope draws with ASCII.
var frame = strings.NewReplacer("\u2502", "|", "\u251c", "|", "\u2500", "-", "\u2504", "-", "\u2575", "'")

// printableLines returns text as printable lines, because names and contents in it are hostile.
func printableLines(text string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		if out.Len() > maxDiffoscope {
			break
		}
		out.WriteString(printable.Head(frame.Replace(strings.TrimRight(line, "\n")), 4<<10) + "\n")
	}
	return out.String()
}
