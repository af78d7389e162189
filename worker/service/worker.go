// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"fmt"

	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"google.golang.org/grpc"
)

// A Worker executes the actions of a scheduler: a Server with RegisterWorkers, or Buildbarn's. Use NewWorker; the zero
// Worker is not usable. Run takes actions until Drain; the caller closes the Worker after Run has returned.
type Worker struct {
	*machine
	*buildbarn.Client
}

// NewWorker returns a Worker, which the caller closes. It probes the sandbox and fails if that cannot run anything, if
// a required field is missing, or if Config.Metrics has metrics of the same names. The caller closes the connection to
// the scheduler. Config.Worker.Instances must write to the store of the scheduler's clients: when a write returns, that
// store must have the blob.
func NewWorker(ctx context.Context, scheduler grpc.ClientConnInterface, c Config) (_ *Worker, err error) {
	switch {
	case scheduler == nil:
		return nil, errors.New("service: NewWorker needs a connection to a scheduler")
	case c.Worker.Backend == nil:
		return nil, errors.New("service: Config.Worker.Backend is missing")
	}
	c.Worker.Fleet = true
	m, err := newMachine(ctx, &c)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	join := c.Join
	if join.Toolchain == nil {
		join.Toolchain = c.Worker.Fingerprint
	}
	join.Scheduler, join.Executor, join.Instances = remoteworkerpb.NewOperationQueueClient(scheduler), m.telemetry.Executor(m.local), c.Worker.Instances
	join.Worker, join.Slots, join.Log = c.Worker.Name, c.Slots, c.Worker.Log
	client, err := buildbarn.NewClient(join)
	if err != nil {
		return nil, err
	}
	m.metrics.add("cloister_actions_running", "Actions with a slot.", nil, func() float64 { return float64(client.Busy()) })
	m.metrics.add("cloister_slots", "Maximum number of concurrent actions.", nil, func() float64 { return float64(c.Slots) })
	m.metrics.add("cloister_scheduler_up", "1 if the scheduler answers.", nil, func() float64 {
		if client.Down() != "" {
			return 0
		}
		return 1
	})
	if err := m.metrics.err(); err != nil {
		return nil, fmt.Errorf("service: Config.Metrics: %w", err)
	}
	return &Worker{machine: m, Client: client}, nil
}
