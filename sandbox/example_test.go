// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// TestMain skips the example that runs a command on hosts without namespaces.
func TestMain(m *testing.M) {
	flag.Parse()
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(context.Background()); err != nil {
		fmt.Println("skipping ExampleBackend: it needs namespaces:", err)
		if slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") {
			os.Exit(1)
		}
		_ = flag.Set("test.skip", "^ExampleBackend$")
	}
	b.Close()
	os.Exit(m.Run())
}

// A command sees what its Spec lists, and the Result records what else it tried.
func ExampleBackend() {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	spec := &sandbox.Spec{
		Args:   []string{"/bin/sh", "-c", "id -un; echo x > /usr/x"},
		Dir:    "/",
		Env:    []string{"PATH=/usr/bin"},
		Limits: sandbox.DefaultLimits(),
		Inputs: []sandbox.Input{
			{Target: "/bin", Source: "/usr/bin"},
			{Target: "/usr", Source: "/usr"},
			{Target: "/lib", Source: "/usr/lib"},
			{Target: "/lib64", Source: "/usr/lib64"},
		},
	}
	// These two need control groups, which not every host offers.
	spec.Limits.Memory, spec.Limits.CPU = sandbox.Unlimited, sandbox.Unlimited
	res, err := b.Run(context.Background(), spec, sandbox.Stdio{Stdout: os.Stdout})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(res.ExitCode, res.Events)
	// Output:
	// build
	// 2 [tried to write /usr/x: not an output (sh, openat)]
}
