// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/soak"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
)

// soakStore is the size of the store, which the load fills in less than two minutes.
const soakStore = 512 << 20

// soakBench is the configuration of cloister-bench soak.
type soakBench struct {
	duration time.Duration
	cloister string // program; "" is the one beside this program, or in PATH
}

func soakCommand() *cobra.Command {
	var c soakBench
	cmd := &cobra.Command{
		Use:   "soak [--duration 60m]",
		Short: "Look for growth during a long mixed load",
		Long: `Start cloister serve with a small store, write and read blobs and execute actions of all kinds so that
the store always evicts, and measure the server between rounds. The table shows start, end and slope per
hour of everything that must not grow.

A value or a slope beyond its bound, a wrong answer, or something left behind after the end of the server
exits with 1. Slopes are fitted to the second half of the run, and checked in runs of 40 minutes or more.`,
		Example: "  cloister-bench soak --duration 60m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.duration <= 0 {
				return errors.New("--duration must be positive")
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&c.duration, "duration", time.Hour, "duration of the load")
	return cmd
}

// run prints the table to out, and its progress to info.
func (c *soakBench) run(ctx context.Context, out, info io.Writer) error {
	dir, err := os.MkdirTemp("", "cloister-soak-")
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	defer os.RemoveAll(dir) // contains plain files; the server mounts only in its own namespaces
	samples, left, err := c.measure(ctx, dir, info)
	var exceeded []string
	if len(samples) > 0 {
		var printErr error
		if exceeded, printErr = soak.Text(out, samples, soak.Bounds(soakStore)); printErr != nil {
			return printErr
		}
	}
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("the server left behind:\n%s", strings.Join(left, "\n")))
	}
	if len(exceeded) > 0 {
		err = errors.Join(err, fmt.Errorf("beyond the bound: %s", strings.Join(exceeded, ", ")))
	}
	if err != nil {
		if log, readErr := os.ReadFile(filepath.Join(dir, "log")); readErr == nil {
			_, _ = info.Write(log[max(0, len(log)-8<<10):])
		}
		return exit.New(exit.No, err)
	}
	return nil
}

// measure runs a server in dir under load and returns the samples, and what is left of the server after its end.
func (c *soakBench) measure(ctx context.Context, dir string, info io.Writer) (samples []soak.Sample, left []string, err error) {
	program, err := findProgram(c.cloister)
	if err != nil {
		return nil, nil, err
	}
	metrics, err := freeAddress()
	if err != nil {
		return nil, nil, err
	}
	p := soak.Process{Dir: filepath.Join(dir, "store"), Log: filepath.Join(dir, "log"), Metrics: "http://" + metrics + "/metrics"}
	log, err := os.Create(p.Log)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	// Every log and cache is small enough to be full in the first half of an hour.
	server, err := startServer(ctx, program, log, "--dir", p.Dir, "--jobs", "2", "--metrics", metrics,
		"--max-size", fmt.Sprint(soakStore), "--lease", "30s", "--history-size", "1MiB", "--memory", "32MiB")
	if err != nil {
		return nil, nil, err
	}
	p.PID = server.pid
	samples, err = c.load(ctx, p, server.address, info)
	err = errors.Join(err, server.stop())
	return samples, p.Leftovers(), err
}

// load puts the server at address under load.
func (c *soakBench) load(ctx context.Context, p soak.Process, address string, info io.Writer) ([]soak.Sample, error) {
	var servers [2]*load.Server
	for i := range servers {
		var options []grpc.DialOption // no credentials
		s, err := load.Dial(ctx, "cloister", address, options...)
		if err != nil {
			return nil, err
		}
		defer s.Close()
		servers[i] = s
	}
	shown := time.Duration(0)
	return soak.Run(ctx, soak.Config{
		Salt: rand.Text(), Duration: c.duration, Process: p,
		Blobs: servers[0], Actions: servers[1],
		Progress: func(s soak.Sample) {
			if s.At >= shown {
				fmt.Fprintf(info, "%s of %s\n", s.At.Round(time.Second), c.duration)
				shown += max(c.duration/20, time.Minute)
			}
		},
	})
}

// freeAddress returns an address and port that were free a moment ago.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
