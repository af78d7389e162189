// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Drain is the flags and the argument of drain and undrain.
type Drain struct {
	From           Fleet
	All            bool
	worker, Reason string
	Wait           bool
	Timeout        time.Duration // 0: no limit
	JSON           bool
}

// A Drained is the JSON form of what drain and undrain did.
type Drained struct {
	Workers []string `json:"workers"` // names; with --all also applies to later ones
	All     bool     `json:"all"`
	Running int64    `json:"running"` // actions on these workers; after --wait 0
	Idle    bool     `json:"idle"`    // --wait saw all workers idle
}

// write prints what was done to the workers of r as JSON.
func (c *Drain) write(out io.Writer, r *cloisterpb.DrainResponse, idle bool) error {
	d := &Drained{Workers: append([]string{}, r.Workers...), All: c.All, Running: r.Running, Idle: idle}
	if idle {
		d.Running = 0
	}
	return render.JSON(out, d)
}

// Name sets the worker from the arguments. Only --all stands for all workers: a forgotten name or an empty variable in
// a script must not stop a farm.
func (c *Drain) Name(args []string) error {
	switch {
	case c.All && len(args) > 0:
		return errors.New("--all and WORKER are mutually exclusive: pass one of them")
	case c.All:
		return nil
	case len(args) == 0:
		return errors.New("name a worker as cloister status prints it, or pass --all for all workers")
	case args[0] == "":
		return errors.New("WORKER is empty: name a worker, or pass --all for all workers")
	}
	c.worker = args[0]
	return nil
}

// Run drains the workers, and waits for them if requested.
func (c *Drain) Run(ctx context.Context, out io.Writer) error {
	ctx, end := interrupt.Context(ctx)
	defer end()
	return c.From.Connect(func(client cloisterpb.FleetClient) error {
		r, err := c.call(ctx, client.Drain)
		if err != nil {
			return err
		}
		text := out
		if c.JSON {
			text = io.Discard
		}
		fmt.Fprintf(text, "drained %s; %s running there\n", workerNames(r.Workers, "all future workers"), render.Count(r.Running, "action"))
		if c.Wait {
			err = c.waitIdle(ctx, client, r.Workers, text)
		}
		if c.JSON {
			err = errors.Join(err, c.write(out, r, c.Wait && err == nil))
		}
		return err
	})
}

// Undo ends the drain.
func (c *Drain) Undo(ctx context.Context, out io.Writer) error {
	ctx, end := interrupt.Context(ctx)
	defer end()
	return c.From.Connect(func(client cloisterpb.FleetClient) error {
		r, err := c.call(ctx, client.Undrain)
		switch {
		case err != nil:
		case c.JSON:
			err = c.write(out, r, false)
		default:
			fmt.Fprintf(out, "undrained %s\n", workerNames(r.Workers, "all future workers"))
		}
		return err
	})
}

// waitIdle waits until none of the workers executes anything.
func (c *Drain) waitIdle(ctx context.Context, client cloisterpb.FleetClient, workers []string, out io.Writer) error {
	var over <-chan time.Time
	if c.Timeout > 0 {
		over = time.After(c.Timeout)
	}
	const pause = 500 * time.Millisecond
	answered := time.Now()
	had := make(map[string]int) // slots that each was seen with
	for {
		s, err := c.From.Status(ctx, client)
		if mayAnswer(err) && time.Since(answered) < reconnectTime {
			select {
			case <-time.After(pause):
				continue
			case <-over:
				return exit.New(exit.Timeout, fmt.Errorf("after %s the state of the workers is unknown, and actions may still run: %w", c.Timeout, err))
			case <-ctx.Done():
			}
		}
		if err != nil {
			return err
		}
		answered = time.Now()
		var busy []string
		running := 0
		if s.Up < reconnectTime.Seconds() {
			// The workers were connected when they were drained, so the server may have restarted since. It does not
			// know what ran before until every slot of theirs has called.
			for _, name := range workers {
				if n := missingSlots(s.Workers, name, had[name]); n > 0 {
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
				return exit.New(exit.No, fmt.Errorf("worker %s is no longer drained", render.Quote(w.Name)))
			}
		}
		if running == 0 {
			_, err := fmt.Fprintf(out, "idle    %s\n", workerNames(workers, "no workers"))
			return err
		}
		select {
		case <-time.After(pause):
		case <-over:
			return exit.New(exit.Timeout, fmt.Errorf("after %s %s still running on %s, which stays drained", c.Timeout, render.Count(running, "action"), workerNames(slices.Compact(busy), "")))
		case <-ctx.Done():
			return interrupt.Explain(ctx, ctx.Err(), fmt.Sprintf("stopped waiting: %s still running on %s, which stays drained", render.Count(running, "action"), workerNames(slices.Compact(busy), "")))
		}
	}
}

// mayAnswer reports whether the server may soon answer a query that failed with err: it may be restarting, and it
// remembers its drains, or it refused the query because of others.
func mayAnswer(err error) bool {
	e, ok := errors.AsType[*exit.Error](err)
	return ok && e.Code == exit.Unreachable || status.Code(err) == codes.ResourceExhausted
}

// reconnectTime is how long a server may be unreachable or refuse queries, and how long after its start its workers may
// still be reconnecting: they call every ten seconds.
const reconnectTime = time.Minute

// missingSlots returns how many of the had slots of a worker have not called a restarted server yet. A worker that left
// has none.
func missingSlots(all []workerState, name string, had int) int {
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

// slotsOf returns the number of slots of a worker.
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
func (c *Drain) call(ctx context.Context, do drainMethod) (*cloisterpb.DrainResponse, error) {
	within, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := do(within, &cloisterpb.DrainRequest{Worker: c.worker, Reason: c.Reason})
	if err != nil {
		return nil, c.From.explain(ctx, err)
	}
	return r, nil
}

// workerNames lists workers for a person.
func workerNames(workers []string, none string) string {
	if len(workers) == 0 {
		return none
	}
	quoted := make([]string, len(workers))
	for i, w := range workers {
		quoted[i] = render.Quote(w)
	}
	return strings.Join(quoted, ", ")
}
