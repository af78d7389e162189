// SPDX-License-Identifier: Apache-2.0

// Package main sorts a file in the sandbox, with declared inputs, outputs and limits, and prints denied accesses.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

func main() {
	namespace.Init() // the backend starts this program again as its helper
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	backend := namespace.New(namespace.Config{})
	defer backend.Close()
	files, err := backend.Workspace(ctx, 64<<20, 100)
	if err != nil {
		return err
	}
	defer files.Close()
	if err := files.Root().WriteFile("words", []byte("pear\napple\n"), 0o644); err != nil {
		return err
	}
	tools, err := sandbox.HostToolchain()
	if err != nil {
		return err
	}
	spec, err := sandbox.ForBuild(sandbox.Profile{
		Args:    []string{"/bin/sh", "-c", "sort /in/words > sorted; echo plum > /in/words; exit 3"},
		Tools:   tools,
		Inputs:  []sandbox.Input{{Target: "/in/words", Source: "words"}},
		Outputs: []string{"/out"},
	})
	if err != nil {
		return err
	}
	spec.Workspace, spec.Timeout = files.Name(), time.Minute
	spec.Limits.Processes = 16
	result, err := backend.Run(ctx, spec, sandbox.Stdio{Stdout: os.Stdout})
	if err != nil {
		return err
	}
	sorted, err := files.Root().ReadFile("out/sorted")
	fmt.Printf("%sexit code %d\n", sorted, result.ExitCode)
	for _, e := range result.Events {
		fmt.Println(e)
	}
	return err
}
