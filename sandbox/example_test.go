// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
)

// TestMain skips the examples that run a command on hosts without namespaces.
func TestMain(m *testing.M) {
	namespace.Init()
	flag.Parse()
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(context.Background()); err != nil {
		fmt.Println("skipping the examples that run a command: they need namespaces:", err)
		if slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") {
			os.Exit(1)
		}
		_ = flag.Set("test.skip", "^Example(Backend|ForBuild|ForTest)$")
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
	// 2 [denied: write to /usr/x (read-only) by sh (openat)]
}

// A build action reads its inputs, uses the host's tools and writes to its output directory, which the caller reads
// afterwards.
func ExampleForBuild() {
	ctx := context.Background()
	b := namespace.New(namespace.Config{}) // main begins with namespace.Init()
	defer b.Close()
	source, err := os.MkdirTemp("", "source")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(source)
	if err := os.WriteFile(filepath.Join(source, "greeting"), []byte("hello\n"), 0o644); err != nil {
		log.Fatal(err)
	}
	tools, err := sandbox.HostToolchain()
	if err != nil {
		log.Fatal(err)
	}
	spec, err := sandbox.ForBuild(sandbox.Profile{
		Args:    []string{"sh", "-c", "tr a-z A-Z < /src/greeting > /out/greeting"},
		Tools:   tools,
		Inputs:  []sandbox.Input{{Target: "/src/greeting", Source: filepath.Join(source, "greeting")}},
		Outputs: []string{"/out"},
	})
	if err != nil {
		log.Fatal(err)
	}
	// These two need control groups, which not every host offers.
	spec.Limits.Memory, spec.Limits.CPU = sandbox.Unlimited, sandbox.Unlimited

	w, err := b.Workspace(ctx, spec.Limits.OutputBytes, spec.Limits.OutputFiles)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	spec.Workspace = w.Name()
	res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: os.Stdout, Stderr: os.Stderr})
	if err != nil {
		log.Fatal(err)
	}
	out, err := w.Root().ReadFile("out/greeting")
	fmt.Printf("%d %q %v\n", res.ExitCode, out, err)
	// Output:
	// 0 "HELLO\n" <nil>
}

// A test has a loopback interface of its own and no other network. Its violations are values.
func ExampleForTest() {
	b := namespace.New(namespace.Config{}) // main begins with namespace.Init()
	defer b.Close()
	tools, err := sandbox.HostToolchain()
	if err != nil {
		log.Fatal(err)
	}
	spec, err := sandbox.ForTest(sandbox.Profile{
		Args:  []string{"bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/443"},
		Env:   []string{"LANG=C"},
		Tools: tools,
	})
	if err != nil {
		log.Fatal(err)
	}
	// These two need control groups, which not every host offers.
	spec.Limits.Memory, spec.Limits.CPU = sandbox.Unlimited, sandbox.Unlimited
	res, err := b.Run(context.Background(), spec, sandbox.Stdio{})
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range res.Events {
		fmt.Println(e.Kind, e.Endpoint.Host, e.Endpoint.Port)
	}
	// Output:
	// connect 192.0.2.1 443
}

// Features say whether a host can enforce a Spec, before anything runs.
func ExampleFeatures_Covers() {
	spec, err := sandbox.ForBuild(sandbox.Profile{Args: []string{"cc"}})
	if err != nil {
		log.Fatal(err)
	}
	var forgotten sandbox.Features // usually from Backend.Probe
	fmt.Println(forgotten.Covers(spec))
	// Output:
	// not supported on this host: the Features are empty: set them to the result of Backend.Probe
}

func ExampleParseEndpoint() {
	e, err := sandbox.ParseEndpoint("Example.org:443")
	fmt.Println(e.Host, e.Port, err)
	// Output:
	// example.org 443 <nil>
}

func ExampleEnvironment() {
	fmt.Println(sandbox.Environment("PATH=/usr/bin", "LANG=C", "TMPDIR"))
	// Output:
	// [HOME=/tmp LANG=C PATH=/usr/bin]
}

// The event for a limit has its values as text and as numbers.
func ExampleEvent() {
	e := sandbox.Event{
		Kind: sandbox.EventLimit, Subject: "memory", Count: 1,
		Actual: "4.0 GiB", Limit: "4.0 GiB", ActualValue: 4 << 30, LimitValue: 4 << 30, Unit: "bytes",
	}
	fmt.Println(e)
	fmt.Println(e.LimitValue, e.Unit)
	// Output:
	// reached the limit of memory: 4.0 GiB of 4.0 GiB
	// 4294967296 bytes
}
