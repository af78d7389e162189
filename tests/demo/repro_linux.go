// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// checkRepro runs every action that the server at addr has executed three more times and prints how many are
// reproducible. It writes the differences of the others to the file report, in the format of its extension, and returns
// an error if there are any.
func checkRepro(ctx context.Context, binary, addr, report string, out io.Writer) error {
	cmd := exec.CommandContext(ctx, binary, "repro", "--target", "*", "--bisect", "--cas", "grpc://"+addr, "--report", report)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var stdout strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr // which shows the progress
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) {
		return fmt.Errorf("cloister repro: %w\n%s", errors.Join(err, context.Cause(ctx)), &stdout)
	}
	// A line for each action, an empty line, and the summary.
	text := stdout.String()
	if _, werr := fmt.Fprintf(out, "%s\nreport       %s\n", text[strings.LastIndex(text, "\n\n")+1:], report); werr != nil {
		return werr
	}
	if err != nil {
		return errors.New("not every action is reproducible")
	}
	return nil
}
