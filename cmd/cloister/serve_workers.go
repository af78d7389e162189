// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

// workersConfig is the flags of serve that say who else executes actions.
type workersConfig struct {
	listen  string
	timeout time.Duration
	texts   []string // of properties

	properties []worker.Property
}

func (f *workersConfig) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.listen, "worker-listen", "", "address and port at which workers of other machines take actions, with cloister join (default: none)")
	flags.DurationVar(&f.timeout, "worker-timeout", time.Minute, "how long a worker may not be heard of before its actions run on another")
	flags.StringArrayVar(&f.texts, "property", nil, "with --worker-listen: what actions may demand of this machine, NAME=VALUE; repeatable. Without, it takes every action")
}

// check returns what is wrong with the flags.
func (c *serveConfig) checkWorkers(cmd *cobra.Command) (err error) {
	changed := cmd.Flags().Changed
	c.head, c.fleet = c.jobs == 0, c.workers.listen != ""
	if !c.fleet {
		for _, name := range []string{"worker-timeout", "property"} {
			if changed(name) {
				return fmt.Errorf("--%s goes with --worker-listen", name)
			}
		}
		if c.head {
			return errors.New("--jobs 0: nothing would be executed; add --worker-listen for workers of other machines, or write 1 or more")
		}
		return nil
	}
	if c.workers.timeout < 3*time.Second {
		return fmt.Errorf("--worker-timeout %v: write at least 3s, of which a worker is to call three times", c.workers.timeout)
	}
	if c.repro.gate {
		return errors.New("--repro-gate: workers of other machines would record results without it; leave out --worker-listen")
	}
	if c.head {
		for _, name := range []string{"policy", "sandbox", "source-tree", "mounted-trees", "property"} {
			if changed(name) {
				return fmt.Errorf("--%s with --jobs 0: this machine executes nothing; give it to cloister join of those that do", name)
			}
		}
		if changed("repro-sample") {
			return errors.New("--repro-sample with --jobs 0: this machine executes nothing, and what others execute is not run again; write --jobs 1 or more, or leave it out")
		}
	}
	c.workers.properties, err = parseProperties(c.workers.texts)
	return err
}

// offer is what this machine's own slots take.
func (c *serveConfig) offer(name string) *queue.Offer {
	return &queue.Offer{Worker: name, Any: !c.fleet, Properties: c.workers.properties}
}

// matchHint says what to do about an action that no worker takes.
func matchHint(u queue.Unmatched) string {
	switch {
	case u.NoWorker:
		return "start one with cloister join, then retry"
	case len(u.Missing) == 0:
		return "use an instance that cloister status lists, or start a worker with cloister join --instance"
	}
	return fmt.Sprintf("add --property %s to its cloister join, or request an offered value", u.Missing[0])
}

// A workersPort is where workers of other machines take actions, and find all that they need for them.
type workersPort struct {
	listener   net.Listener
	server     *grpc.Server
	queue      *buildbarn.Server
	endUploads func()
}

// openWorkers opens the port of the flags. The caller calls stop once nothing is executed any more.
func (c *serveConfig) openWorkers(n *node, work *queue.Queue) (*workersPort, error) {
	listener, err := listen(c.workers.listen, "--worker-listen")
	if err != nil {
		return nil, err
	}
	// A worker whose machine or network has gone is to be noticed while its call waits for an action.
	gone := grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second})
	server := grpc.NewServer(append(append(casserver.ServerOptions(n.log), gone), c.door.workers()...)...)
	p := &workersPort{listener: listener, server: server}
	p.endUploads = casserver.Register(server, casserver.Config{Rights: c.door.workerRights(), Instances: n.instances, MaxBlobBytes: c.maxBlob.bytes})
	p.queue = buildbarn.Register(server, buildbarn.ServerConfig{
		Queue: work, Instances: n.instances, Action: n.local.Action, Silence: c.workers.timeout,
		Caller: c.door.caller(), Ready: n.behindUs, Log: n.log,
	})
	alive := health.NewServer()
	healthpb.RegisterHealthServer(server, alive)
	for service := range server.GetServiceInfo() {
		alive.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	if err := access.CheckWorkers(server.GetServiceInfo()); err != nil {
		p.stop()
		listener.Close()
		return nil, err
	}
	if c.door.unguarded(listener.Addr()) {
		n.log.Warn("everybody who reaches this address can be a worker, and so decide what clients get: see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}
	return p, nil
}

// behindUs says why nothing that is behind the store answers: inputs would be absent, and outputs not kept.
func (n *node) behindUs() error {
	if n.ready.upstream != nil {
		if text := n.ready.upstream.down(); text != "" {
			return errors.New(text)
		}
	}
	return nil
}

// stop ends what the workers ask for.
func (p *workersPort) stop() {
	p.queue.Close()
	stopServer(p.server)
	p.endUploads() // the store waits for them when it is closed
}
