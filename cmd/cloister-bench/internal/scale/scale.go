// SPDX-License-Identifier: Apache-2.0

// Package scale measures the head of a large farm. One process simulates the workers, which speak the protocol of
// package buildbarn and answer after random delays without executing anything, and the clients of all builds.
package scale

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// A Size is that of a farm and its load.
type Size struct {
	Workers, Slots int // Slots is that of one worker
	Actions        int // that wait before the first worker joins
	Builds         int // of different lengths and of three priorities
}

// Config configures Run.
type Config struct {
	Size
	Salt             string // of the actions
	Delay            time.Duration
	Timeout          time.Duration // the head's --worker-timeout
	Clients, Joining string        // the head's addresses for clients and workers
	// Metric returns the present value of one of the head's metrics.
	Metric func(ctx context.Context, name string) (float64, error)
	// Restart kills the head and starts it again with the same addresses and directory.
	Restart func(ctx context.Context) error
}

// A Result is what Run measured.
type Result struct {
	Size
	Idle      float64       // bytes of the head for each slot that waits for an action
	Submitted float64       // actions per second that clients submitted before any worker joined
	Memory    float64       // bytes of the head for each waiting action
	Rate      float64       // actions per second through the head while all slots were in use
	CPU       time.Duration // of the head for each of these actions
	Waiting   Excess
	Lost      int           // workers that vanished at once
	Noticed   time.Duration // from their end until the head had removed all of their slots
	Again     int           // actions that were given to a slot more than once
	Restarted time.Duration // from killing the head until it had every slot and every action again
}

// An action is simulated by its digest alone.
type action struct {
	digest *repb.Digest
	build  int
	given  atomic.Int32 // number of times a slot got it
}

// A farm is the workers and clients of one head.
type farm struct {
	cfg     Config
	actions map[string]*action // by hash
	builds  []build

	answered atomic.Int64
	waiting  atomic.Int64  // actions that the present head has accepted and not answered
	halfway  chan struct{} // closed when half of the actions are answered

	mu   sync.Mutex
	hold chan struct{} // closed while workers may complete actions
	gave []assignment  // the first assignment of each action
}

// Run loads a head in five steps: all slots wait, and then a new head takes over; all actions wait; workers execute
// half of them; a tenth of the workers vanishes; the head restarts. Then workers execute the rest. It fails unless
// every action is answered once, with its own result.
func Run(ctx context.Context, c Config) (*Result, error) {
	clients, err := dial(c.Clients, 1+c.Actions/streams)
	if err != nil {
		return nil, err
	}
	defer closeAll(clients)
	workers, err := dial(c.Joining, c.Workers)
	if err != nil {
		return nil, err
	}
	defer closeAll(workers)
	f := &farm{cfg: c, actions: make(map[string]*action), halfway: make(chan struct{}), hold: make(chan struct{})}
	close(f.hold)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	r := &Result{Size: c.Size, Lost: max(1, c.Workers/10)}
	err = f.run(ctx, group, clients, workers, r)
	failed := ctx.Err() != nil // before cancel
	cancel()
	if first := group.Wait(); failed {
		err = first
	}
	return r, err
}

// run runs the steps of Run. The caller then ends ctx, which ends the workers.
func (f *farm) run(ctx context.Context, group *errgroup.Group, clients, workers []*grpc.ClientConn, r *Result) error {
	if err := f.measureIdle(ctx, workers, r); err != nil {
		return err
	}
	if err := upload(ctx, clients[0], f.prepare()); err != nil {
		return err
	}
	if err := f.submit(ctx, group, clients, r); err != nil {
		return err
	}
	lost, vanish := context.WithCancel(ctx)
	defer vanish()
	for i, conn := range workers {
		life := ctx
		if i < r.Lost {
			life = lost
		}
		f.join(life, group, conn, i)
	}
	if err := f.measureRate(ctx, r); err != nil {
		return err
	}
	vanish()
	for _, step := range []func(context.Context, *Result) error{f.notice, f.restart, f.finish} {
		if err := step(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// measureIdle measures the memory of idle slots, and replaces the head with one without slots.
func (f *farm) measureIdle(ctx context.Context, workers []*grpc.ClientConn, r *Result) error {
	before, err := f.cfg.Metric(ctx, memory)
	if err != nil {
		return err
	}
	err = f.visit(ctx, workers, func() error {
		after, err := f.cfg.Metric(ctx, memory)
		r.Idle = (after - before) / float64(f.cfg.Workers*f.cfg.Slots)
		return err
	})
	if err != nil {
		return err
	}
	if err := f.cfg.Restart(ctx); err != nil {
		return err
	}
	// A head that knows no worker refuses actions after five minutes. It waits longer for one that has left.
	return f.visit(ctx, workers[:1], func() error { return nil })
}

// visit lets workers join, calls then, and lets them leave.
func (f *farm) visit(ctx context.Context, workers []*grpc.ClientConn, then func() error) error {
	life, leave := context.WithCancel(ctx)
	group, life := errgroup.WithContext(life)
	for i, conn := range workers {
		f.join(life, group, conn, i)
	}
	err := f.countSlots(life, len(workers)*f.cfg.Slots)
	if err == nil {
		err = then()
	}
	leave()
	return errors.Join(group.Wait(), err)
}

// submit makes the clients of all builds submit their actions.
func (f *farm) submit(ctx context.Context, group *errgroup.Group, conns []*grpc.ClientConn, r *Result) error {
	before, err := f.cfg.Metric(ctx, memory)
	if err != nil {
		return err
	}
	start, n := time.Now(), 0
	for i := range f.builds {
		for _, a := range f.builds[i].actions {
			conn := conns[n/streams]
			group.Go(func() error { return f.execute(ctx, conn, a) })
			n++
		}
	}
	if err := f.allWaiting(ctx); err != nil {
		return err
	}
	r.Submitted = float64(n) / time.Since(start).Seconds()
	after, err := f.cfg.Metric(ctx, memory)
	r.Memory = (after - before) / float64(n)
	return err
}

// allWaiting waits until the head has accepted every action that is not answered.
func (f *farm) allWaiting(ctx context.Context) error {
	return poll(ctx, func() (bool, error) {
		return f.waiting.Load()+f.answered.Load() == int64(f.cfg.Actions), nil
	})
}

// measureRate measures until half of the actions are answered, and then makes the workers keep what they execute.
func (f *farm) measureRate(ctx context.Context, r *Result) error {
	start := time.Now()
	cpu, err := f.cfg.Metric(ctx, cpuSeconds)
	if err != nil {
		return err
	}
	select {
	case <-f.halfway:
	case <-ctx.Done():
		return ctx.Err()
	}
	n := float64(f.answered.Load())
	r.Rate = n / time.Since(start).Seconds()
	after, err := f.cfg.Metric(ctx, cpuSeconds)
	r.CPU = time.Duration((after - cpu) / n * float64(time.Second))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hold = make(chan struct{})
	r.Waiting = excess(f.builds, f.gave)
	return err
}

// notice waits until the head has removed the lost workers.
func (f *farm) notice(ctx context.Context, r *Result) error {
	start := time.Now()
	err := f.allSlots(ctx, r)
	r.Noticed = time.Since(start)
	return err
}

// allSlots waits until the head knows the slots of the workers that are left, and no others.
func (f *farm) allSlots(ctx context.Context, r *Result) error {
	return f.countSlots(ctx, (r.Workers-r.Lost)*r.Slots)
}

// countSlots waits until the head knows n slots.
func (f *farm) countSlots(ctx context.Context, n int) error {
	return poll(ctx, func() (bool, error) {
		slots, err := f.cfg.Metric(ctx, "cloister_slots")
		return int(slots) == n, err
	})
}

// restart replaces the head, and waits until clients have submitted their actions again and workers have joined again.
func (f *farm) restart(ctx context.Context, r *Result) error {
	start := time.Now()
	if err := f.cfg.Restart(ctx); err != nil {
		return err
	}
	if err := f.allSlots(ctx, r); err != nil {
		return err
	}
	err := f.allWaiting(ctx)
	r.Restarted = time.Since(start)
	return err
}

// finish lets the workers execute the remaining actions.
func (f *farm) finish(ctx context.Context, r *Result) error {
	f.mu.Lock()
	close(f.hold)
	f.mu.Unlock()
	err := poll(ctx, func() (bool, error) { return f.answered.Load() == int64(f.cfg.Actions), nil })
	for _, a := range f.actions {
		if a.given.Load() > 1 {
			r.Again++
		}
	}
	return err
}

// Metrics of the head.
const memory, cpuSeconds = "process_resident_memory_bytes", "process_cpu_seconds_total"

// poll waits until done returns true or an error.
func poll(ctx context.Context, done func() (bool, error)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// dial returns n connections to an address, which reconnect within a second.
func dial(address string, n int) (conns []*grpc.ClientConn, err error) {
	quick := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.5, MaxDelay: time.Second}
	for range n {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: 20 * time.Second}),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true))) // repeated failures would take the head's CPU time
		if err != nil {
			closeAll(conns)
			return nil, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

func closeAll(conns []*grpc.ClientConn) {
	for _, c := range conns {
		_ = c.Close() // no call is left
	}
}
