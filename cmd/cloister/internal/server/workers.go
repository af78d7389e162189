// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// workersConfig is the flags about other machines that execute actions.
type workersConfig struct {
	listen     string
	timeout    time.Duration
	toolchain  string   // that workers must have; "" for any
	texts      []string // of properties
	properties []worker.Property
}

// Register adds the flags.
func (w *workersConfig) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&w.listen, "worker-listen", "", "address and port for machines that run cloister join (default: none)")
	f.DurationVar(&w.timeout, "worker-timeout", time.Minute, "silence after which a worker is lost and its actions run elsewhere")
	f.StringVar(&w.toolchain, "require-toolchain", "",
		"required toolchain of workers and cached results: the fingerprint that cloister check prints, or their --toolchain; needs --jobs 0 (default: any)")
	f.StringArrayVar(&w.texts, "property", nil, "platform property that this machine offers with --worker-listen, NAME=VALUE; repeatable (default: it takes every action)")
}

// checkWorkers validates the flags.
func (c *Config) checkWorkers(cmd *cobra.Command) (err error) {
	changed := cmd.Flags().Changed
	c.Head, c.Fleet = c.Jobs == 0, c.Workers.listen != ""
	if !c.Fleet {
		for _, name := range []string{"worker-timeout", "require-toolchain", "property"} {
			if changed(name) {
				return fmt.Errorf("--%s needs --worker-listen", name)
			}
		}
		if c.Head {
			return errors.New("--jobs 0: no machine would execute actions; write 1 or more, or add --worker-listen")
		}
		return nil
	}
	if c.Workers.timeout < 3*time.Second {
		return fmt.Errorf("--worker-timeout %v: write at least 3s, so that a worker can call three times", c.Workers.timeout)
	}
	switch {
	case c.Workers.toolchain == "":
	case !c.Head:
		return errors.New("--require-toolchain: only the workers' toolchains are checked; write --jobs 0, and run cloister join " +
			"on this machine")
	case !node.ToolchainIDs.MatchString(c.Workers.toolchain):
		return fmt.Errorf("--require-toolchain %+.80q: write the fingerprint that cloister check prints on a worker, or the workers' --toolchain",
			c.Workers.toolchain)
	}
	if c.Sampling.gate {
		return errors.New("--repro-gate: other workers would record results without it; omit --worker-listen")
	}
	if c.Head {
		for _, name := range []string{"sandbox", "source-tree", "mounted-trees", "property", "toolchain"} {
			if changed(name) {
				return fmt.Errorf("--%s with --jobs 0: this machine executes nothing; pass it to cloister join instead", name)
			}
		}
		if changed("repro-sample") {
			return errors.New("--repro-sample with --jobs 0: only this machine's actions can be sampled; write --jobs 1 or more, or omit it")
		}
	}
	c.Workers.properties, err = flags.ParseProperties(c.Workers.texts)
	return err
}

// offer describes the slots of this machine.
func (c *Config) offer() *queue.Offer {
	all := slices.Concat(c.Workers.properties, c.Sandbox.Offers())
	slices.SortFunc(all, worker.Property.Compare)
	return &queue.Offer{Any: !c.Fleet, Places: true, Properties: all}
}

// matchHint returns what to do about an action that no worker takes.
func matchHint(u queue.Unmatched) string {
	switch {
	case u.NoWorker:
		return "start one with cloister join, then retry"
	case len(u.Missing) == 0:
		return "use an instance that cloister status lists, or start a worker with cloister join --instance"
	}
	if p := u.Missing[0]; p.Name == worker.PropertySandbox {
		return fmt.Sprintf("start a worker with cloister join --sandbox %s, or request an offered value", p.Value)
	}
	return fmt.Sprintf("add --property %s to its cloister join, or request an offered value", u.Missing[0])
}

// A workersPort is where other machines take actions and find everything that they need for them.
type workersPort struct {
	listener net.Listener
	server   *grpc.Server
}

// openWorkers opens the port. The caller stops its server when no action is running any more.
func (s *server) openWorkers() (_ *workersPort, err error) {
	n := s.node
	listener, err := node.Listen(s.Workers.listen, "--worker-listen")
	if err != nil {
		return nil, err
	}
	// Pings notice a lost machine or network while a call waits for an action.
	pings := grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second})
	server := grpc.NewServer(slices.Concat(
		n.ServerOptions(), casserver.ServerOptions(n.Log), []grpc.ServerOption{casserver.Codec(), pings}, s.Auth.workers())...)
	if err = s.services.RegisterWorkers(server); err == nil {
		registerHealth(server)
		err = access.CheckWorkers(server.GetServiceInfo())
	}
	if err != nil {
		listener.Close()
		return nil, err
	}
	if s.Auth.public(listener.Addr()) {
		n.Log.Warn("everyone who can connect can be a worker and forge results; see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}
	return &workersPort{listener: listener, server: server}, nil
}
