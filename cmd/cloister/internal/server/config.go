// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/fleet"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/logstream"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
)

// Config is what the flags of serve say.
type Config struct {
	node.Config
	Listen          string
	MaxBlob         flags.Size // 0: half of maxSize
	DigestFunctions flags.DigestFunctions
	History         flags.Bytes
	Auth            ServerAuth
	Sampling        sampling
	Workers         workersConfig
}

// Check returns what is wrong with the command line, before anything is made.
func (c *Config) Check(cmd *cobra.Command) error {
	switch {
	case c.History > 0 && c.History < 1<<20:
		return fmt.Errorf("--history-size %s: write at least 1MiB, as 64MiB or 1GiB, or 0 for none", &c.History)
	case c.MaxBlob.Percent > 0:
		return fmt.Errorf("--max-blob %s: write 512MiB or 4GiB", &c.MaxBlob)
	}
	return errors.Join(c.checkWorkers(cmd), c.Config.Check(cmd), c.Auth.check(), c.Sampling.check(cmd))
}

// boundBlobs fills in how large a blob may be, at most half of the store of that size: one must not push out everything else.
func (c *Config) boundBlobs(most int64) error {
	switch half := most / 2; {
	case c.MaxBlob.Bytes == 0:
		c.MaxBlob.Bytes = max(half, 1)
	case c.MaxBlob.Bytes > half:
		return exit.New(exit.Usage, fmt.Errorf("--max-blob %s: at most half of --max-size, which is %s here", &c.MaxBlob, sandbox.Bytes(most)))
	}
	return nil
}

// queue returns how actions wait for the node. Sampler and past are nil if there are none.
func (c *Config) queue(n *node.Node, sampler *repro.Sampler, logs *logstream.Registry, past *history.Log) queue.Config {
	line := queue.Config{Head: c.Head, Renew: n.Local.RenewInputs, RenewEvery: c.Renew(), Hint: matchHint}
	if past != nil {
		line.Ended = execserver.RecordOperations(past)
	}
	if c.Head {
		return line
	}
	executor := worker.Executor(n.Local)
	if sampler != nil {
		executor = sampler
	}
	line.Executor, line.Slots, line.Offer, line.Logs = n.Telemetry.Executor(executor), c.Jobs, c.offer(n.Name), logs.Begin
	if n.Upstream != nil {
		line.Fetch, line.FetchBytes = n.Local.PrefetchInputs, n.Store.MaxBytes/8 // so that leases leave room for outputs
	}
	if sampler != nil && !sampler.Gate {
		line.Idle = sampler.Idle
	}
	return line
}

// serveAll adds the services to server. The caller calls endUploads once the server has stopped.
func (c *Config) serveAll(server *grpc.Server, n *node.Node, work *queue.Queue, sampler *repro.Sampler, logs *logstream.Registry, past *history.Log) (alive *health.Server, endUploads func(), err error) {
	blobs := casserver.Config{
		Rights:       c.Auth.rights(),
		Instances:    n.Instances,
		Execution:    execserver.Capabilities(),
		MaxBlobBytes: c.MaxBlob.Bytes,
		Logs:         logs,
		FullHint:     "free disk space, raise --max-size or lower --lease",
	}
	execution := execserver.Config{Queue: work, Instances: n.Instances, Admit: n.Local.Admit, Action: n.Local.Action, Worker: n.Name, Log: n.Log}
	if sampler != nil {
		execution.Remark = sampler.Remark
	}
	if past != nil {
		blobs.OnLookup, blobs.OnUpdate = execserver.RecordLookups(past), execserver.RecordUploads(past)
		history.Register(server, past, n.Instances)
		n.Registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "cloister_history_lost_total", Help: "Answers that the history could not be told of.",
		}, func() float64 { return float64(past.Lost()) }))
	}
	endUploads = casserver.Register(server, blobs)
	logs.Register(server)
	execserver.Register(server, execution)
	fleet.Register(server, c.operators(n, work))
	alive = health.NewServer()
	healthpb.RegisterHealthServer(server, alive)
	for service := range server.GetServiceInfo() {
		alive.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}
	reflection.Register(server)
	if err := access.Check(server.GetServiceInfo()); err != nil {
		endUploads()
		return nil, nil, err
	}
	return alive, endUploads, nil
}

// operators returns what operators may ask of the node, and of whom it gives actions to.
func (c *Config) operators(n *node.Node, work *queue.Queue) fleet.Config {
	f := fleet.Config{
		Queue: work, Name: n.Name, Version: buildinfo.Version, Started: time.Now(), Unready: n.Ready.Reasons,
		Keep: func(s queue.DrainState) error { return keepDrains(n.Dir, s) },
	}
	if rules := c.Auth.rules; rules != nil {
		now := rules.Rules() // any will do: they look at who was admitted
		f.Viewers, f.Caller = now, now.Caller
	}
	return f
}

// openHistory opens the record of what is asked for, or returns nil if none is to be kept. The caller closes it.
func (c *Config) openHistory(log *slog.Logger) (*history.Log, error) {
	if c.History == 0 {
		return nil, nil
	}
	l, err := history.Open(history.Config{Dir: filepath.Join(c.Dir, "history"), MaxBytes: int64(c.History), Log: log})
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	return l, nil
}

// reach returns what a command on this machine must be told to find this server.
func (c *Config) reach(a net.Addr) []string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || a.String() == client.DefaultAddress && c.Auth.cert == "" {
		return nil
	}
	host := tcp.IP.String()
	if tcp.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return []string{"--cas", c.Auth.scheme() + "://" + net.JoinHostPort(host, strconv.Itoa(tcp.Port))}
}

// banner prints what somebody wants to know who has just started it.
func (c *Config) banner(out io.Writer, n *node.Node, addr, workers string) {
	n.Banner(out)
	c.Sampling.banner(out)
	if line := c.Auth.summary(); line != "" {
		fmt.Fprintf(out, "access   %s\n", line)
	}
	// Programs look for the first address, and take it for a sign that all has been said.
	last := fmt.Sprintf("bazel    build --remote_executor=%s://%s\n", c.Auth.scheme(), addr)
	if c.Upstream.Server+c.Upstream.Bucket != "" {
		last += fmt.Sprintf("upstream %s   (write %s)\n", c.Upstream.Server+c.Upstream.Bucket, c.Upstream.WriteMode)
	}
	if workers != "" {
		last += fmt.Sprintf("workers  cloister join %s://%s\n", c.Auth.scheme(), workers)
	}
	io.WriteString(out, last)
}

// Check returns what is wrong with the flags.
func (c *Config) checkWorkers(cmd *cobra.Command) (err error) {
	changed := cmd.Flags().Changed
	c.Head, c.Fleet = c.Jobs == 0, c.Workers.listen != ""
	if !c.Fleet {
		for _, name := range []string{"worker-timeout", "property"} {
			if changed(name) {
				return fmt.Errorf("--%s goes with --worker-listen", name)
			}
		}
		if c.Head {
			return errors.New("--jobs 0: nothing would be executed; add --worker-listen for workers of other machines, or write 1 or more")
		}
		return nil
	}
	if c.Workers.timeout < 3*time.Second {
		return fmt.Errorf("--worker-timeout %v: write at least 3s, of which a worker is to call three times", c.Workers.timeout)
	}
	if c.Sampling.gate {
		return errors.New("--repro-gate: workers of other machines would record results without it; leave out --worker-listen")
	}
	if c.Head {
		for _, name := range []string{"policy", "sandbox", "source-tree", "mounted-trees", "property"} {
			if changed(name) {
				return fmt.Errorf("--%s with --jobs 0: this machine executes nothing; give it to cloister join of those that do", name)
			}
		}
		if changed("repro-sample") {
			return errors.New("--repro-sample with --jobs 0: this machine executes nothing, and what others execute is not run again; write --jobs 1 or more, or leave it out")
		}
	}
	c.Workers.properties, err = flags.ParseProperties(c.Workers.texts)
	return err
}

// offer is what this machine's own slots take.
func (c *Config) offer(name string) *queue.Offer {
	return &queue.Offer{Worker: name, Any: !c.Fleet, Properties: c.Workers.properties}
}

// openWorkers opens the port of the flags. The caller calls stop once nothing is executed any more.
func (c *Config) openWorkers(n *node.Node, work *queue.Queue) (*workersPort, error) {
	listener, err := node.Listen(c.Workers.listen, "--worker-listen")
	if err != nil {
		return nil, err
	}
	// A worker whose machine or network has gone is to be noticed while its call waits for an action.
	gone := grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second})
	server := grpc.NewServer(append(append(casserver.ServerOptions(n.Log), gone), c.Auth.workers()...)...)
	p := &workersPort{listener: listener, server: server}
	p.endUploads = casserver.Register(server, casserver.Config{Rights: c.Auth.workerRights(), Instances: n.Instances, MaxBlobBytes: c.MaxBlob.Bytes})
	p.queue = buildbarn.Register(server, buildbarn.ServerConfig{
		Queue: work, Instances: n.Instances, Action: n.Local.Action, Silence: c.Workers.timeout,
		Caller: c.Auth.caller(), Ready: n.CheckUpstream, Log: n.Log,
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
	if c.Auth.public(listener.Addr()) {
		n.Log.Warn("everybody who reaches this address can be a worker, and so decide what clients get: see --auth and --tls-client-ca",
			"address", listener.Addr().String())
	}
	return p, nil
}
