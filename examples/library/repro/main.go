// SPDX-License-Identifier: Apache-2.0

// Package main checks whether commands are reproducible and gets the verdicts as Go values.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
)

func main() {
	namespace.Init()
	ctx, store, backend := context.Background(), memory.New(64<<20), namespace.New(namespace.Config{})
	defer backend.Close()
	features, err := backend.Probe(ctx)
	tools, err2 := sandbox.HostToolchain()
	local, err3 := worker.New(worker.Config{
		Name: "example", Backend: backend, Features: features, Toolchain: tools,
		Instances: func(string) (*cas.Instance, error) { return &cas.Instance{Store: store, Actions: store}, nil },
	})
	if err := errors.Join(err, err2, err3); err != nil {
		log.Fatal(err)
	}
	on := repro.Executor{Name: "here", Executor: local, Store: store, Features: &features}
	for _, script := range []string{"echo hello > out", "hostname > out"} {
		v, err := check(ctx, on, script)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %s\n", script, v.Result)
		for _, d := range v.Differences {
			fmt.Println(d.Output, d.Cause, d.Factors)
		}
	}
}

func check(ctx context.Context, on repro.Executor, script string) (*repro.Verdict, error) {
	root, err := cas.PutProto(ctx, on.Store, cas.SHA256, &repb.Directory{})
	command, err2 := cas.PutProto(ctx, on.Store, cas.SHA256, &repb.Command{
		Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"out"},
	})
	action, err3 := cas.PutProto(ctx, on.Store, cas.SHA256, &repb.Action{
		CommandDigest: command.Proto(), InputRootDigest: root.Proto(),
	})
	if err := errors.Join(err, err2, err3); err != nil {
		return nil, err
	}
	options := repro.Options{Bisect: true, Factors: []repro.Factor{"hostname"}, Executors: []repro.Executor{on}}
	return repro.Check(ctx, &worker.Task{Action: action}, options)
}
