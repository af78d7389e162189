// SPDX-License-Identifier: Apache-2.0

// Command program uses a backend and prints what Probe returned. It has an init function that panics without HOME.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

func init() {
	if os.Getenv("HOME") == "" {
		panic("program needs HOME")
	}
}

func main() {
	if os.Getenv("PROGRAM_CALLS_INIT") != "no" {
		namespace.Init()
	}
	b := namespace.New(namespace.Config{})
	defer b.Close()
	_, err := b.Probe(context.Background())
	fmt.Printf("%v\nunsupported: %t\n", err, errors.Is(err, sandbox.ErrUnsupported))
}
