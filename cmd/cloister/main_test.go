// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// runCLI runs a command line, and returns what it prints, followed by its error, and its exit code.
func runCLI(t *testing.T, args ...string) (string, int) {
	t.Helper()
	var out bytes.Buffer
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(&out)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := root.ExecuteContext(ctx)
	code := 0
	if e, ok := errors.AsType[*exit.Error](err); ok {
		code = e.Code
	} else if err != nil {
		code = exit.Usage
	}
	if err != nil {
		out.WriteString(err.Error())
	}
	return out.String(), code
}
