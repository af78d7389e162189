// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
)

// drainConfig is what the arguments and flags of drain and undrain say.
type drainConfig struct {
	from           operator
	worker, reason string
	wait           bool
	timeout        time.Duration // 0 is none
}

func drainCommand() *cobra.Command {
	var c drainConfig
	cmd := &cobra.Command{
		Use:   "drain [WORKER] [--reason TEXT] [--wait [--timeout TIME]] [--cas URL]",
		Short: "Gives a worker of a server no more actions",
		Long: `Drain tells a cloister serve to give a worker no more actions, or, without a WORKER, all of them and those that join
later. What they execute, they go on with; what waits, waits for other workers. A worker is called as cloister status
calls it. It stays drained until cloister undrain, also if it leaves and joins again, or the server is restarted.
A server all of whose workers are drained is not ready.

With --wait it returns once the workers execute nothing, so that the machine can be switched off. That is another thing
than to end the worker: that drains itself when it is told to end.

It exits with 4 if no worker is called so, with 5 if the server cannot be reached, and with 6 if the time of --timeout
is over and something still runs; the worker stays drained then.`,
		Example: `  cloister drain build-7 --reason 'new kernel' --wait --timeout 30m && ssh build-7 reboot
  cloister drain --cas grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case c.timeout < 0:
				return fmt.Errorf("--timeout %s: write it as 90s or 30m, or 0 for as long as it takes", c.timeout)
			case c.timeout > 0 && !c.wait:
				return errors.New("--timeout is for how long to --wait: state that, too")
			}
			return c.named(args, func() error { return c.drain(cmd.Context(), cmd.OutOrStdout()) })
		},
	}
	c.from.register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.reason, "reason", "", "what cloister status is to say of it")
	f.BoolVar(&c.wait, "wait", false, "return once the workers execute nothing")
	f.DurationVar(&c.timeout, "timeout", 0, "how long to wait at most; 0 is as long as it takes")
	return cmd
}

func undrainCommand() *cobra.Command {
	var c drainConfig
	cmd := &cobra.Command{
		Use:   "undrain [WORKER] [--cas URL]",
		Short: "Gives a drained worker actions again",
		Long: `Undrain ends what cloister drain began: of one worker, or, without a WORKER, of all.

It exits with 4 if no worker is called so, and with 5 if the server cannot be reached.`,
		Example: `  cloister undrain build-7
  cloister undrain --cas grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.named(args, func() error { return c.undrain(cmd.Context(), cmd.OutOrStdout()) })
		},
	}
	c.from.register(cmd)
	return cmd
}

// named goes on with the worker that the arguments name. An empty name would be all of them.
func (c *drainConfig) named(args []string, next func() error) error {
	if len(args) > 0 {
		if c.worker = args[0]; c.worker == "" {
			return errors.New("WORKER is empty: name one, or leave it out for all")
		}
	}
	return next()
}

// drain drains, and waits if it is to.
func (c *drainConfig) drain(ctx context.Context, out io.Writer) error {
	ctx, end := stop(ctx)
	defer end()
	return c.from.reach(func(client cloisterpb.FleetClient) error {
		r, err := c.call(ctx, client.Drain)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "drained %s; %d actions run there\n", names(r.Workers, "every worker that will join"), r.Running)
		if !c.wait {
			return nil
		}
		return c.idle(ctx, client, r.Workers, out)
	})
}

// undrain undoes drain.
func (c *drainConfig) undrain(ctx context.Context, out io.Writer) error {
	ctx, end := stop(ctx)
	defer end()
	return c.from.reach(func(client cloisterpb.FleetClient) error {
		r, err := c.call(ctx, client.Undrain)
		if err == nil {
			fmt.Fprintf(out, "undrained %s\n", names(r.Workers, "every worker that will join"))
		}
		return err
	})
}

// idle waits until none of the workers executes anything.
func (c *drainConfig) idle(ctx context.Context, client cloisterpb.FleetClient, workers []string, out io.Writer) error {
	var over <-chan time.Time
	if c.timeout > 0 {
		over = time.After(c.timeout)
	}
	const pause = 500 * time.Millisecond
	answered := time.Now()
	had := make(map[string]int) // how many slots each was seen with
	for {
		s, err := c.from.status(ctx, client)
		if e, ok := errors.AsType[*exit](err); ok && e.code == exitConnect && time.Since(answered) < comeBack {
			// It may be on its way back, and knows then who is drained.
			select {
			case <-time.After(pause):
				continue
			case <-over:
				return newExit(exitTimeout, fmt.Errorf("after %s the server does not answer, and it is not known what still runs: %w", c.timeout, err))
			case <-ctx.Done():
			}
		}
		if err != nil {
			return err
		}
		answered = time.Now()
		var busy []string
		running := 0
		if s.Up < comeBack.Seconds() {
			// They were there when they were drained, so that this server may have been started since. It has nothing of what ran
			// before; each slot that may execute that still is to be heard of.
			for _, name := range workers {
				if n := away(s.Workers, name, had[name]); n > 0 {
					running += n
					busy = append(busy, name)
				}
			}
		}
		for _, name := range workers {
			had[name] = max(had[name], slotsOf(s.Workers, name))
		}
		for _, w := range s.Workers {
			if w.Busy > 0 && slices.Contains(workers, w.Name) {
				running += w.Busy
				busy = append(busy, w.Name)
			}
			if w.State == workerWorks && slices.Contains(workers, w.Name) {
				return newExit(exitNo, fmt.Errorf("worker %s is not drained any more: it takes actions", quote(w.Name)))
			}
		}
		if running == 0 {
			_, err := fmt.Fprintf(out, "idle    %s\n", names(workers, "no worker was there"))
			return err
		}
		select {
		case <-time.After(pause):
		case <-over:
			return newExit(exitTimeout, fmt.Errorf("after %s %d actions still run on %s, which stays drained", c.timeout, running, names(slices.Compact(busy), "")))
		case <-ctx.Done():
			return stopped(ctx, ctx.Err(), fmt.Sprintf("stopped waiting: %d actions still run on %s, which stays drained", running, names(slices.Compact(busy), "")))
		}
	}
}

// comeBack is how long a server that was there may not answer, and for how long after the start of a server its workers may
// be on their way back: they call every ten seconds, and take no longer after that server was away.
const comeBack = time.Minute

// away returns how many slots of a worker a server that was just started has not heard of, if the worker had so many before. One
// that has left since has none that execute.
func away(all []workerState, name string, had int) int {
	known := slices.ContainsFunc(all, func(w workerState) bool { return w.Name == name })
	there := slices.ContainsFunc(all, func(w workerState) bool { return w.Name == name && w.State != workerGone })
	switch {
	case !known:
		return max(had, 1)
	case !there:
		return 0
	}
	return had - slotsOf(all, name)
}

// slotsOf returns how many slots there are of a worker.
func slotsOf(all []workerState, name string) int {
	n := 0
	for _, w := range all {
		if w.Name == name {
			n += w.Slots
		}
	}
	return n
}

// drainMethod is Drain or Undrain.
type drainMethod func(context.Context, *cloisterpb.DrainRequest, ...grpc.CallOption) (*cloisterpb.DrainResponse, error)

// call drains or undrains.
func (c *drainConfig) call(ctx context.Context, do drainMethod) (*cloisterpb.DrainResponse, error) {
	within, cancel := context.WithTimeout(ctx, patienceOfACall)
	defer cancel()
	r, err := do(within, &cloisterpb.DrainRequest{Worker: c.worker, Reason: c.reason})
	if err != nil {
		return nil, c.from.explain(ctx, err)
	}
	return r, nil
}

// names lists workers for a person.
func names(workers []string, none string) string {
	if len(workers) == 0 {
		return none
	}
	quoted := make([]string, len(workers))
	for i, w := range workers {
		quoted[i] = quote(w)
	}
	return strings.Join(quoted, ", ")
}
