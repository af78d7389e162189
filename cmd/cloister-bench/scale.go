// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/scale"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/soak"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

// scaleBench is the configuration of cloister-bench scale.
type scaleBench struct {
	size     scale.Size // the largest
	sizes    int
	delay    time.Duration
	timeout  time.Duration
	cloister string // program; "" is the one beside this program, or in PATH
}

func scaleCommand() *cobra.Command {
	var c scaleBench
	cmd := &cobra.Command{
		Use:   "scale [--workers 100] [--waiting 64000]",
		Short: "Measure the head of a large simulated farm",
		Long: `Start cloister serve without slots of its own, and simulate clients and workers that execute nothing. All
actions wait before the workers join. When half of them are answered, a tenth of the workers vanishes, and
then the head is killed and restarted. A wrong, missing or second answer exits with 1.

Each row of the table has twice the workers, actions and builds of the row above. Figures that grow with
them show what does not scale.`,
		Example: "  cloister-bench scale --workers 1000 --waiting 128000 --sizes 4 --delay 10s",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s := c.size; min(s.Workers, s.Actions, s.Builds)>>(max(c.sizes, 1)-1) < 2 || s.Slots < 1 || c.sizes < 1 {
				return errors.New("the smallest size must have 2 workers, actions and builds, and a slot")
			}
			if c.delay <= 0 || c.timeout < time.Second {
				return errors.New("--delay must be positive, and --worker-timeout a second or more")
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&c.size.Workers, "workers", 100, "number of workers of the largest size")
	f.IntVar(&c.size.Slots, "slots", 64, "slots of each worker")
	f.IntVar(&c.size.Actions, "waiting", 64000, "number of waiting actions of the largest size")
	f.IntVar(&c.size.Builds, "builds", 200, "number of builds of the largest size")
	f.IntVar(&c.sizes, "sizes", 3, "number of sizes, each twice the one before")
	f.DurationVar(&c.delay, "delay", time.Second, "mean duration of an action")
	f.DurationVar(&c.timeout, "worker-timeout", 20*time.Second, "silence after which the head loses a worker")
	return cmd
}

// run prints the table to out, and its progress to info.
func (c *scaleBench) run(ctx context.Context, out, info io.Writer) error {
	var results []*scale.Result
	for n := c.sizes - 1; n >= 0; n-- {
		size := scale.Size{
			Workers: c.size.Workers >> n, Slots: c.size.Slots, Actions: c.size.Actions >> n, Builds: c.size.Builds >> n,
		}
		fmt.Fprintf(info, "%d workers, %d waiting actions\n", size.Workers, size.Actions)
		r, err := c.measure(ctx, size, info)
		if err != nil {
			return errors.Join(exit.New(exit.No, err), scale.Text(out, results, c.timeout))
		}
		results = append(results, r)
	}
	return scale.Text(out, results, c.timeout)
}

// measure measures a new head.
func (c *scaleBench) measure(ctx context.Context, size scale.Size, info io.Writer) (_ *scale.Result, err error) {
	program, err := findProgram(c.cloister)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "cloister-scale-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // contains plain files; a head mounts nothing
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	var addresses [3]string // of clients, workers and metrics
	for i := range addresses {
		if addresses[i], err = freeAddress(); err != nil {
			return nil, err
		}
	}
	var head *ownServer
	start := func() error {
		s, err := startServer(ctx, program, log, "--dir", filepath.Join(dir, "store"), "--jobs", "0", "--listen", addresses[0],
			"--worker-listen", addresses[1], "--metrics", addresses[2], "--worker-timeout", c.timeout.String(),
			"--max-queued", fmt.Sprint(size.Actions), "--caller-limit", "calls=0,executions=0",
			"--instance-limit", "calls=0,executions=0")
		if err == nil {
			head = s
		}
		return err
	}
	if err := start(); err != nil {
		return nil, err
	}
	r, err := scale.Run(ctx, scale.Config{
		Size: size, Salt: rand.Text(), Delay: c.delay, Clients: addresses[0], Joining: addresses[1],
		Metric: func(ctx context.Context, name string) (float64, error) {
			return soak.Metric(ctx, "http://"+addresses[2]+"/metrics", name)
		},
		Restart: func(context.Context) error {
			if err := head.kill(); err != nil {
				return err
			}
			return start()
		},
	})
	if err != nil {
		if b, readErr := os.ReadFile(log.Name()); readErr == nil {
			_, _ = info.Write(b[max(0, len(b)-8<<10):])
		}
	}
	return r, errors.Join(err, head.kill())
}
