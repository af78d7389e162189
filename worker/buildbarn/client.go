// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
)

// ClientConfig configures a Client. Scheduler, Executor, Instances, Worker and Slots are required.
type ClientConfig struct {
	Scheduler remoteworkerpb.OperationQueueClient
	// Executor executes the actions, as many at once as there are Slots.
	Executor worker.Executor
	// Instances holds the store of the Executor, for pages of the Browser.
	Instances cas.Instances
	// Worker is the name of this machine, unique among the scheduler's workers.
	Worker string
	// Store, if not "", identifies a resource that one process at a time owns and that survives restarts. It tells the
	// scheduler a restarted worker from a second one of the same name.
	Store string
	Slots int
	// Prefix limits the worker to instances whose names begin with it; "" means all.
	Prefix string
	// Properties are what actions may demand of this worker; a name may have several values. They need not be sorted.
	Properties []worker.Property
	// SizeClass is the size of this worker in the scheduler's terms; 0 if there are no size classes.
	SizeClass uint32
	// Toolchain, if not nil, returns the fingerprint of this machine's toolchain, which schedulers may require, or "". It
	// is called often.
	Toolchain func() string
	// Ready, if not nil, returns why no action can be executed now. It is called often.
	Ready func() error
	// Browser, if not nil, is the address of a Buildbarn browser for the store.
	Browser *url.URL
	// Log receives failures; nil discards them.
	Log *slog.Logger
}

// A Client takes actions from a scheduler, each of its slots one at a time, as a separate worker. NewClient makes
// it; the zero Client is not usable.
type Client struct {
	cfg       ClientConfig
	platform  *repb.Platform
	draining  chan struct{}
	drain     sync.Once
	busy      atomic.Int64
	link      link
	readiness *readiness
}

// NewClient checks the configuration and returns a Client, which does nothing before Run.
func NewClient(c ClientConfig) (*Client, error) {
	switch {
	case c.Scheduler == nil:
		return nil, errors.New("buildbarn: ClientConfig.Scheduler is missing")
	case c.Executor == nil:
		return nil, errors.New("buildbarn: ClientConfig.Executor is missing")
	case c.Instances == nil:
		return nil, errors.New("buildbarn: ClientConfig.Instances is missing")
	case c.Worker == "":
		return nil, errors.New("buildbarn: ClientConfig.Worker is missing: a worker needs a name")
	case c.Slots < 1:
		return nil, fmt.Errorf("buildbarn: ClientConfig.Slots is %d: a worker needs at least one", c.Slots)
	}
	if err := cas.CheckInstanceName(c.Prefix); err != nil {
		return nil, err
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Toolchain == nil {
		c.Toolchain = func() string { return "" }
	}
	if c.Ready == nil {
		c.Ready = func() error { return nil }
	}
	// Schedulers refuse unsorted properties.
	sorted := slices.Clone(c.Properties)
	slices.SortFunc(sorted, worker.Property.Compare)
	platform := &repb.Platform{}
	for _, p := range slices.Compact(sorted) {
		platform.Properties = append(platform.Properties, &repb.Platform_Property{Name: p.Name, Value: p.Value})
	}
	client := &Client{cfg: c, platform: platform, draining: make(chan struct{}), readiness: newReadiness()}
	client.link.log = c.Log
	return client, nil
}

// Drain makes Run return once no slot executes and the scheduler knows. It may be called at any time and repeatedly.
func (c *Client) Drain() { c.drain.Do(func() { close(c.draining) }) }

// Busy returns the number of slots that execute an action.
func (c *Client) Busy() int { return int(c.busy.Load()) }

// Down describes since when and why the scheduler does not answer; "" if it does.
func (c *Client) Down() string { return c.link.down() }

// Run takes and executes actions until Drain is called. When ctx ends, it cancels running actions, tells the scheduler,
// and returns within seconds; no process of an action is left then.
func (c *Client) Run(ctx context.Context) {
	ended := make(chan struct{})
	var watch, slots sync.WaitGroup
	watch.Go(func() { c.watchReady(ctx, ended) })
	for i := range c.cfg.Slots {
		s := &slot{Client: c, name: strconv.Itoa(i + 1)}
		slots.Go(func() { s.loop(ctx) })
	}
	slots.Wait()
	close(ended)
	watch.Wait()
}

// stopping reports whether no more actions are to be taken.
func (c *Client) stopping(ctx context.Context) bool {
	select {
	case <-c.draining:
		return true
	default:
		return ctx.Err() != nil
	}
}

// watchReady updates c.readiness until Run has ended.
func (c *Client) watchReady(ctx context.Context, ended <-chan struct{}) {
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	for !c.stopping(ctx) {
		c.checkReady()
		select {
		case <-tick.C:
		case <-c.draining:
		case <-ctx.Done():
		case <-ended:
			return
		}
	}
	c.readiness.clear("draining", true)
}

// checkReady updates c.readiness and reports whether actions can be executed now.
func (c *Client) checkReady() bool {
	err := c.cfg.Ready()
	if err == nil {
		if c.readiness.set() {
			c.cfg.Log.Info("ready for actions", "worker", c.cfg.Worker, "slots", c.cfg.Slots)
		}
		return true
	}
	if c.readiness.clear(err.Error(), false) {
		c.cfg.Log.Warn("not ready for actions", "worker", c.cfg.Worker, "why", err)
	}
	return false
}
