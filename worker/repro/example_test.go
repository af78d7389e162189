// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"context"
	"fmt"
	"log"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
)

// A stamper stands for a worker whose actions write the host name into an output.
type stamper struct{ store cas.Store }

// Execute implements worker.Executor.
func (s stamper) Execute(ctx context.Context, t *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	d, err := cas.PutBytes(ctx, s.store, cas.SHA256, []byte("built on "+t.Variation.Conditions.Hostname+"\n"))
	if err != nil {
		return nil, err
	}
	files := []*repb.OutputFile{{Path: "version.txt", Digest: d.Proto()}}
	return &worker.Outcome{Result: &repb.ActionResult{OutputFiles: files}}, nil
}

// Check runs an action twice under different conditions and finds the factor and the cause of the difference.
func ExampleCheck() {
	ctx, store := context.Background(), castest.NewMemory()
	command, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Command{Arguments: []string{"make", "version.txt"}})
	if err != nil {
		log.Fatal(err)
	}
	action, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Action{CommandDigest: command.Proto()})
	if err != nil {
		log.Fatal(err)
	}
	v, err := repro.Check(ctx, &worker.Task{Action: action}, repro.Options{
		Runs: 2, Bisect: true, Factors: []repro.Factor{"hostname", "user"},
		Executors: []repro.Executor{{
			Name: "local", Executor: stamper{store}, Store: store,
			Features: &sandbox.Features{Conditions: sandbox.AllConditions},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(v.Result)
	for _, d := range v.Differences {
		fmt.Println(d.Output, d.Cause, d.Factors)
		fmt.Println(d.Fix)
	}
	// Output:
	// differs
	// version.txt hostname [hostname]
	// omit the host name
}
