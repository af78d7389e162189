// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/protobuf/proto"
)

// TestMain skips the example on hosts without namespaces.
func TestMain(m *testing.M) {
	namespace.Init()
	flag.Parse()
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(context.Background()); err != nil {
		fmt.Println("skipping ExampleLocal: it needs namespaces:", err)
		if slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") {
			os.Exit(1)
		}
		_ = flag.Set("test.skip", "^ExampleLocal$")
	}
	b.Close()
	os.Exit(m.Run())
}

// A Local executes an action that a store holds, and puts its outputs into the store.
func ExampleLocal() {
	ctx := context.Background()
	store := castest.NewMemory()
	instance := &cas.Instance{Store: store, Actions: store}
	put := func(m proto.Message) cas.Digest {
		d, err := cas.PutProto(ctx, store, cas.SHA256, m)
		if err != nil {
			panic(err)
		}
		return d
	}
	file, err := cas.PutBytes(ctx, store, cas.SHA256, []byte("hello"))
	if err != nil {
		panic(err)
	}
	root := put(&repb.Directory{Files: []*repb.FileNode{{Name: "in", Digest: file.Proto()}}})
	command := put(&repb.Command{
		Arguments:   []string{"/bin/sh", "-c", "tr a-z A-Z < in > out"},
		OutputPaths: []string{"out"},
	})
	action := put(&repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()})

	backend := namespace.New(namespace.Config{})
	defer backend.Close()
	features, err := backend.Probe(ctx)
	if err != nil {
		panic(err)
	}
	toolchain, err := sandbox.HostToolchain()
	if err != nil {
		panic(err)
	}
	local, err := worker.New(worker.Config{
		Name:      "example",
		Instances: func(string) (*cas.Instance, error) { return instance, nil },
		Backend:   backend,
		Features:  features,
		Toolchain: toolchain,
	})
	if err != nil {
		panic(err)
	}
	for range 2 { // the second time, the action cache has the result
		var stages []worker.Stage
		report := func(s worker.Stage) { stages = append(stages, s) }
		out, err := local.Execute(ctx, &worker.Task{Action: action}, report)
		if err != nil {
			panic(err)
		}
		digest, err := cas.FromProto(cas.SHA256, out.Result.OutputFiles[0].Digest)
		if err != nil {
			panic(err)
		}
		text, err := cas.ReadAll(ctx, store, digest, 100)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%v\ncached %v, exit code %d, out: %s\n", stages, out.Cached, out.Result.ExitCode, text)
	}
	// Output:
	// [fetch confine stage run collect seal publish]
	// cached false, exit code 0, out: HELLO
	// [fetch]
	// cached true, exit code 0, out: HELLO
}
