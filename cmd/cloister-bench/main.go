// SPDX-License-Identifier: Apache-2.0

// Command cloister-bench measures Remote Execution API servers, a local store, and the machine itself. It is a tool for
// contributors and is not part of the release.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
)

func main() {
	root := rootCommand()
	flags.ExplainMistakes(root)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return
	}
	e, ok := errors.AsType[*exit.Error](err)
	if !ok { // cobra found a mistake in the command line
		e = exit.New(exit.Usage, err)
	}
	if e.Err != nil {
		fmt.Fprintf(os.Stderr, "cloister-bench: %v\n", e.Err)
	}
	os.Exit(e.Code)
}
