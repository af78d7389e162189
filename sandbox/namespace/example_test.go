// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// A program that runs commands in namespaces calls Init first in main, because the backend starts the program again as
// its helper.
func ExampleInit() {
	main := func() {
		namespace.Init()
		// The program's own work follows.
	}
	main()
}

// The zero Config is the strictest that the host can enforce. Probe reports what that is.
func ExampleNew() {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	features, err := b.Probe(context.Background())
	if errors.Is(err, sandbox.ErrUnsupported) {
		for _, check := range features.Checks {
			if !check.OK && check.Required {
				fmt.Println(check.Name, check.Detail, check.Fix)
			}
		}
	}
	fmt.Println(features.Tier, features.Layers)
}

// Errors distinguish an invalid Spec from a host that cannot run it.
func ExampleBackend_Run() {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	tools, err := sandbox.HostToolchain()
	if err != nil {
		log.Fatal(err)
	}
	spec, err := sandbox.ForBuild(sandbox.Profile{Args: []string{"cc", "--version"}, Tools: tools})
	if err != nil {
		log.Fatal(err)
	}
	res, err := b.Run(context.Background(), spec, sandbox.Stdio{Stdout: os.Stdout, Stderr: os.Stderr})
	switch {
	case errors.Is(err, sandbox.ErrUnsupported):
		fmt.Println("this host cannot enforce it:", err)
	case errors.Is(err, sandbox.ErrSpec), errors.Is(err, fs.ErrNotExist):
		fmt.Println("the Spec is wrong:", err)
	case errors.Is(err, sandbox.ErrClosed):
		fmt.Println("the backend was closed:", err)
	case err != nil:
		fmt.Println("the run was lost:", err)
	case res.Exceeded != nil:
		fmt.Println("met the limit of", res.Exceeded.Subject, res.Exceeded.LimitValue, res.Exceeded.Unit)
	default:
		fmt.Println("exit code", res.ExitCode, "after", res.End.Sub(res.Start))
		if u := res.Usage; u.Measured.PeakMemory {
			fmt.Println("peak memory:", sandbox.Bytes(u.PeakMemory))
		}
	}
}

// A workspace holds the inputs and outputs of a run in memory.
func ExampleBackend_Workspace() {
	ctx := context.Background()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	w, err := b.Workspace(ctx, 1<<30, 1000)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	if err := w.Root().WriteFile("main.c", []byte("int main(void) { return 0; }\n"), 0o644); err != nil {
		log.Fatal(err)
	}
	tools, err := sandbox.HostToolchain()
	if err != nil {
		log.Fatal(err)
	}
	spec, err := sandbox.ForBuild(sandbox.Profile{
		Args:    []string{"cc", "-o", "/out/main", "/src/main.c"},
		Tools:   tools,
		Inputs:  []sandbox.Input{{Target: "/src/main.c", Source: "main.c"}},
		Outputs: []string{"/out"},
	})
	if err != nil {
		log.Fatal(err)
	}
	spec.Workspace = w.Name()
	if _, err := b.Run(ctx, spec, sandbox.Stdio{Stderr: os.Stderr}); err != nil {
		log.Fatal(err)
	}
	program, err := w.Root().Open("out/main")
	if err != nil {
		log.Fatal(err)
	}
	defer program.Close()
}
