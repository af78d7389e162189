// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
)

// runConfig is what the flags of run say.
type runConfig struct {
	in      string
	out     []string
	env     []string
	timeout time.Duration
	args    []string
}

func runCommand() *cobra.Command {
	var c runConfig
	cmd := &cobra.Command{
		Use:   "run [--in DIR] [--out PATH]... [--env K=V]... [--timeout D] -- COMMAND [ARG]...",
		Short: "Runs one command in the sandbox, without a server",
		Long: `Run executes one command as an action: the files of --in are its inputs, read-only, in the working
directory; the paths of --out, relative to it, are copied to the current directory when it has
ended; the environment is exactly the variables of --env, and PATH, HOME and TMPDIR. There is no
network but loopback.

It exits with the command's own code, 128+N if signal N ended it, and 125 if Cloister itself failed.`,
		Example: `  cloister run -- /bin/sh -c 'id; ls -l /'
  cloister run --in src --out app -- gcc -o app main.c
  cloister run -- /bin/sh -c 'cat /etc/shadow'        # No such file or directory`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.args = args
			ctx, cancel := context.WithCancelCause(cmd.Context())
			defer cancel(nil)
			signals := make(chan os.Signal, 1)
			signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			go func() { cancel(&interrupted{<-signals}) }()
			// A reader that went away is an error like any other: it must not leave our files behind.
			signal.Ignore(syscall.SIGPIPE)
			if err := c.check(); err != nil {
				return err
			}
			code, err := run(ctx, &c)
			if err != nil {
				return &exit{exitOurs, err}
			}
			if code != 0 {
				return &exit{code: code}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.in, "in", "", "directory of inputs (default: none)")
	f.StringArrayVar(&c.out, "out", nil, "path of an output, relative to the working directory; repeatable")
	f.StringArrayVar(&c.env, "env", nil, "environment variable, KEY=VALUE; repeatable")
	f.DurationVar(&c.timeout, "timeout", 0, "kill the command after this time (default: 24h)")
	return cmd
}

// interrupted is why a context ended: a signal that this process was sent.
type interrupted struct{ signal os.Signal }

func (i *interrupted) Error() string { return fmt.Sprintf("interrupted by %v", i.signal) }

// exitCode is what a shell would report.
func (i *interrupted) exitCode() int {
	if s, ok := i.signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exitOurs
}

// check returns what is wrong with the command line.
func (c *runConfig) check() error {
	for _, kv := range c.env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" {
			return fmt.Errorf("--env %q: write it as KEY=VALUE", kv)
		}
	}
	for _, p := range c.out {
		if !filepath.IsLocal(p) {
			return fmt.Errorf("--out %q: write a path below the working directory", p)
		}
	}
	if c.timeout < 0 {
		return fmt.Errorf("--timeout %v: write a positive time", c.timeout)
	}
	return nil
}

// run carries the command through the same seven verbs as an action of a client, with a store that
// lasts as long as the run. It returns the command's exit code.
func run(ctx context.Context, c *runConfig) (int, error) {
	dir, err := os.MkdirTemp("", "cloister-run-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir) // plain files of ours: nothing is ever mounted in a store
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return 0, err
	}
	store, err := disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: math.MaxInt64})
	if err != nil {
		return 0, err
	}
	defer store.Close()
	in, err := store.Instance("")
	if err != nil {
		return 0, err
	}
	action, err := ingest(ctx, in.Store, c)
	if err != nil {
		return 0, err
	}
	backend := namespace.New(namespace.Config{})
	defer backend.Close()
	features, err := backend.Probe(ctx)
	if err != nil {
		return 0, fmt.Errorf("the command cannot be sandboxed here, and is never run without: %w", err)
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		return 0, err
	}
	local := worker.New(worker.Config{
		Name: "run", Instances: store.Instance, Backend: backend, Features: features, Toolchain: toolchain, Grace: time.Second,
		MaxTimeout: max(c.timeout, 24*time.Hour),
	})
	out, err := local.Execute(ctx, &worker.Task{Action: action, Queued: time.Now(), Stdout: os.Stdout, Stderr: os.Stderr},
		func(worker.Stage) {})
	if err != nil {
		var by *interrupted
		if errors.As(context.Cause(ctx), &by) {
			return by.exitCode(), nil
		}
		return 0, err
	}
	if out.Code != codes.OK || out.Result.ExitCode > 128 {
		fmt.Fprintln(os.Stderr, out.Message)
	}
	here, err := os.OpenRoot(".")
	if err != nil {
		return 0, err
	}
	defer here.Close()
	if err := tree.Extract(ctx, in.Store, cas.SHA256, out.Result, here); err != nil {
		return 0, fmt.Errorf("write outputs: %w", err)
	}
	if out.Code != codes.OK {
		return max(int(out.Result.ExitCode), 1), nil
	}
	return int(out.Result.ExitCode), nil
}

// ingest puts the action that c describes into the store.
func ingest(ctx context.Context, store cas.Store, c *runConfig) (cas.Digest, error) {
	cmd := &repb.Command{Arguments: c.args}
	for _, kv := range c.env {
		k, v, _ := strings.Cut(kv, "=")
		cmd.EnvironmentVariables = append(cmd.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: k, Value: v})
	}
	slices.SortFunc(cmd.EnvironmentVariables, func(a, b *repb.Command_EnvironmentVariable) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range c.out {
		cmd.OutputPaths = append(cmd.OutputPaths, filepath.ToSlash(filepath.Clean(p)))
	}
	slices.Sort(cmd.OutputPaths)

	var root cas.Digest
	var err error
	if c.in == "" {
		root, err = cas.PutProto(ctx, store, cas.SHA256, &repb.Directory{})
	} else {
		var dir *os.Root
		if dir, err = os.OpenRoot(c.in); err != nil {
			return cas.Digest{}, fmt.Errorf("--in: %w", err)
		}
		root, err = tree.Ingest(ctx, store, cas.SHA256, dir)
		err = errors.Join(err, dir.Close())
	}
	if err != nil {
		return cas.Digest{}, fmt.Errorf("read inputs: %w", err)
	}
	command, err := cas.PutProto(ctx, store, cas.SHA256, cmd)
	if err != nil {
		return cas.Digest{}, err
	}
	action := &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto(), DoNotCache: true}
	if c.timeout > 0 {
		action.Timeout = durationpb.New(c.timeout)
	}
	return cas.PutProto(ctx, store, cas.SHA256, action)
}
