// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/command"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/filemetadata"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/outerr"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/rexec"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// sdk builds examples/text with the SDK's client: it compiles each source, links each test and runs it.
type sdk struct {
	rexec rexec.Client
	root  string // a copy of the example, which receives the outputs
	log   func(format string, args ...any)
}

func newSDK(ctx context.Context, cfg config) (*sdk, error) {
	// The SDK logs with glog, which by default writes to the temporary directory.
	logs := filepath.Join(cfg.dir, "log")
	err := errors.Join(os.Mkdir(logs, 0o755), flag.Set("log_dir", logs), flag.Set("stderrthreshold", "FATAL"))
	if err != nil {
		return nil, err
	}
	root := filepath.Join(cfg.dir, "workspace")
	if err := bazelrun.CopyWorkspace(root, cfg.root); err != nil {
		return nil, err
	}
	c, err := client.NewClient(ctx, "", client.DialParams{Service: cfg.endpoint, NoSecurity: true})
	if err != nil {
		return nil, err
	}
	return &sdk{
		rexec: rexec.Client{FileMetadataCache: filemetadata.NewNoopCache(), GrpcClient: c},
		root:  root,
		log:   func(format string, args ...any) { fmt.Fprintf(cfg.out, "  "+format+"\n", args...) },
	}, nil
}

// An action is one command with its inputs and outputs.
type action struct {
	args, inputs, outputs []string
}

// plan returns the steps of the build. The actions of a step depend only on outputs of earlier steps.
func (s *sdk) plan() (compile, link, test []action, err error) {
	var sources, headers []string
	for _, dir := range []string{"examples/check", "examples/text"} {
		names, err := os.ReadDir(filepath.Join(s.root, dir))
		if err != nil {
			return nil, nil, nil, err
		}
		for _, name := range names {
			switch path := dir + "/" + name.Name(); filepath.Ext(path) {
			case ".cc":
				sources = append(sources, path)
			case ".h":
				headers = append(headers, path)
			}
		}
	}
	var objects, tests []string
	for _, source := range sources {
		name := strings.TrimSuffix(source, ".cc")
		object := "out/" + name + ".o"
		compile = append(compile, action{
			args:    []string{"/usr/bin/gcc", "-std=c++17", "-I.", "-c", source, "-o", object},
			inputs:  append([]string{source}, headers...),
			outputs: []string{object},
		})
		if strings.HasSuffix(name, "_test") {
			tests = append(tests, "out/"+name)
		} else {
			objects = append(objects, object)
		}
	}
	for _, program := range tests {
		inputs := append([]string{program + ".o"}, objects...)
		args := append([]string{"/usr/bin/gcc", "-o", program}, inputs...)
		link = append(link, action{args: append(args, "-lstdc++"), inputs: inputs, outputs: []string{program}})
		test = append(test, action{args: []string{program}, inputs: []string{program}})
	}
	return compile, link, test, nil
}

// Build executes all steps.
func (s *sdk) Build(ctx context.Context) (*count, error) {
	start := time.Now()
	compile, link, test, err := s.plan()
	if err != nil {
		return nil, err
	}
	total := &count{}
	for _, step := range []struct {
		name    string
		actions []action
	}{{"compile", compile}, {"link", link}, {"test", test}} {
		s.log("%s: %d actions", step.name, len(step.actions))
		if err := s.execute(ctx, step.actions, total); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	total.wall = time.Since(start)
	return total, nil
}

// execute executes actions, eight at a time, and adds them to total.
func (s *sdk) execute(ctx context.Context, actions []action, total *count) error {
	var (
		mu   sync.Mutex
		errs []error // guarded by mu, as is total
		all  sync.WaitGroup
	)
	slots := make(chan struct{}, 8)
	for _, a := range actions {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			hit, err := s.executeOne(ctx, a)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				errs = append(errs, err)
			case hit:
				total.hits++
			default:
				total.executed++
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// executeOne executes an action and reports whether it was a cache hit.
func (s *sdk) executeOne(ctx context.Context, a action) (hit bool, err error) {
	output := outerr.NewRecordingOutErr()
	result, _ := s.rexec.Run(ctx, &command.Command{
		Args:     a.args,
		ExecRoot: s.root,
		InputSpec: &command.InputSpec{
			Inputs: a.inputs, EnvironmentVariables: map[string]string{"PATH": "/usr/bin:/bin"},
		},
		OutputFiles: a.outputs,
		Timeout:     time.Minute,
	}, command.DefaultExecutionOptions(), output)
	if !result.IsOk() {
		return false, fmt.Errorf("%s: %v, exit %d, %v\n%s%s",
			strings.Join(a.args, " "), result.Status, result.ExitCode, result.Err, output.Stdout(), output.Stderr())
	}
	return result.Status == command.CacheHitResultStatus, nil
}

// Clean removes the outputs.
func (s *sdk) Clean(context.Context) error { return bazelrun.Remove(filepath.Join(s.root, "out")) }

// Close closes the connection.
func (s *sdk) Close() error { return s.rexec.GrpcClient.Close() }
