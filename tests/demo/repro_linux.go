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

// judge has every action that the server at addr has executed made again, three times, and says how many of them are the
// same each time. What is known of the others is written to the file report, whose name says in what form. It fails if there
// are any.
func judge(ctx context.Context, binary, addr, report string, out io.Writer) error {
	cmd := exec.CommandContext(ctx, binary, "repro", "--target", "*", "--bisect", "--cas", "grpc://"+addr, "--report", report)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, os.Stderr // a terminal is shown how far it is
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) {
		return fmt.Errorf("cloister repro: %w\n%s", errors.Join(err, context.Cause(ctx)), &said)
	}
	// A verdict of each action, a line for each, and last what they come to.
	text := said.String()
	if _, werr := fmt.Fprintf(out, "%s\nreport       %s\n", text[strings.LastIndex(text, "\n\n")+1:], report); werr != nil {
		return werr
	}
	if err != nil {
		return errors.New("not every action is reproducible")
	}
	return nil
}
