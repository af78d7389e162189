// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/spf13/cobra"
)

// Config is the flags of serve.
type Config struct {
	node.Config
	Listen          string
	MaxBlob         flags.Size // 0: half of the store
	DigestFunctions flags.DigestFunctions
	History         flags.Bytes
	BuildEvents     flags.Bytes
	ToolchainDrift  string // "" or allow
	MaxQueued       int
	StreamIdle      time.Duration
	CallerLimits    quota.Limits
	InstanceLimits  quota.Limits
	Auth            Auth
	Sampling        sampling
	Workers         workersConfig
	Web             webConfig
	jobsStated      bool
}

// Check validates the flags.
func (c *Config) Check(cmd *cobra.Command) error {
	c.jobsStated = cmd.Flags().Changed("jobs")
	switch {
	case c.History > 0 && c.History < 1<<20:
		return fmt.Errorf("--history-size %s: write at least 1MiB, such as 64MiB or 1GiB, or 0 for no history", &c.History)
	case c.BuildEvents > 0 && c.BuildEvents < 1<<20:
		return fmt.Errorf("--build-events-size %s: write at least 1MiB, such as 256MiB or 1GiB, or 0 for no Build Event Service", &c.BuildEvents)
	case c.ToolchainDrift != "" && c.ToolchainDrift != "allow":
		return fmt.Errorf("--toolchain-drift %+.80q: write allow, or omit it", c.ToolchainDrift)
	case c.MaxQueued < 1:
		return fmt.Errorf("--max-queued %d: write 1 or more", c.MaxQueued)
	case c.StreamIdle < 5*time.Second:
		return fmt.Errorf("--stream-idle %v: write at least 5s, so that slow networks have time", c.StreamIdle)
	case c.MaxBlob.Percent > 0:
		return fmt.Errorf("--max-blob %s: write 512MiB or 4GiB", &c.MaxBlob)
	}
	return errors.Join(c.checkWorkers(cmd), c.Config.Check(cmd), c.Auth.check(), c.Web.check(cmd, &c.Auth), c.Sampling.check(cmd))
}

// boundBlobs sets the size limit of a blob to at most half of the store, so that no blob can evict everything else.
func (c *Config) boundBlobs(storeBytes int64) error {
	switch half := storeBytes / 2; {
	case c.MaxBlob.Bytes == 0:
		c.MaxBlob.Bytes = max(half, 1)
	case c.MaxBlob.Bytes > half:
		return exit.New(exit.Usage, fmt.Errorf("--max-blob %s: write at most half of --max-size, which is %s here", &c.MaxBlob, sandbox.Bytes(storeBytes)))
	}
	return nil
}

// maxJobsNesting is the maximum of --jobs with a policy that permits remote APIs; see service.NewServer.
const maxJobsNesting = 200

// limitJobs refuses more jobs than a policy that permits remote APIs supports, and lowers the default to them.
func (c *Config) limitJobs(p *policy.Policy) error {
	if c.Jobs <= maxJobsNesting || !p.PermitsRemoteAPIs() {
		return nil
	}
	if c.jobsStated {
		return exit.New(exit.Usage, fmt.Errorf("--jobs %d: the policy permits remote APIs, with which at most %d actions run at once; "+
			"write %d or less, or use a policy without remote_apis", c.Jobs, maxJobsNesting, maxJobsNesting))
	}
	c.Jobs = maxJobsNesting
	return nil
}

// assembly returns the configuration of the services.
func (s *server) assembly() (c service.Config, err error) {
	n := s.node
	c = n.Assembly(func() []string { return s.runFlags })
	if err := s.limitJobs(c.Worker.Policy); err != nil {
		return c, err
	}
	c.Slots = s.Jobs
	c.Worker.Reproduce = s.withPage(c.Worker.Reproduce)
	c.ToolchainDrift = s.ToolchainDrift == "allow"
	if c.Queue.Drains, err = readDrains(n.Dir); err != nil {
		return c, err
	}
	c.Queue.Hint, c.Queue.Offer, c.Queue.MaxLive = matchHint, s.offer(), s.MaxQueued
	if n.Upstream != nil {
		c.Queue.FetchBytes = n.Store.Stats().MaxBytes / 8 // leases must leave room for outputs
	}
	c.Blobs = casserver.Config{MaxBlobBytes: s.MaxBlob.Bytes, StreamIdle: s.StreamIdle, FullHint: n.FullHint, Unstated: s.functions.report}
	c.Workers = buildbarn.ServerConfig{Silence: s.Workers.timeout, Toolchain: s.Workers.toolchain, Ready: n.CheckUpstream, Page: s.page}
	c.Actions = slices.Concat(s.Auth.checks(), s.limits.Options())
	c.Access, c.History, c.Sampler = s.Auth.access(), s.history, s.sampler()
	// Leases must leave room for everything else.
	c.FailureBytes = min(int64(s.History), n.Store.Stats().MaxBytes/8)
	c.Version, c.Unready, c.Notes = buildinfo.Version, n.Ready.Reasons, n.Notes
	c.KeepDrains = func(d queue.DrainState) error { return keepDrains(n.Dir, d) }
	return c, nil
}

// openHistory opens the history, or returns nil if --history-size is 0. The caller closes it.
func (c *Config) openHistory(log *slog.Logger) (*history.Log, error) {
	if c.History == 0 {
		return nil, nil
	}
	l, err := history.Open(history.Config{Dir: filepath.Join(c.Dir, "history"), MaxBytes: int64(c.History), Log: log})
	if err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("%w; make it readable for this user, move it away, or pass --history-size 0", err))
	}
	return l, nil
}

// openBuilds opens the events of builds, or returns nil if --build-events-size is 0.
func (c *Config) openBuilds(log *slog.Logger) (*buildevents.Store, error) {
	if c.BuildEvents == 0 {
		return nil, nil
	}
	s, err := buildevents.Open(buildevents.Config{Dir: filepath.Join(c.Dir, "builds"), MaxBytes: int64(c.BuildEvents), Log: log})
	if err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("%w; make it readable for this user, move it away, or pass --build-events-size 0", err))
	}
	return s, nil
}

// addressFlags returns the flags with which a command on this machine finds this server.
func (c *Config) addressFlags(a net.Addr) []string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || a.String() == client.DefaultAddress && c.Auth.cert == "" {
		return nil
	}
	return []string{"--server", c.Auth.scheme() + "://" + reachable(tcp, "127.0.0.1")}
}

// reachable returns the address of a listener as HOST:PORT for clients, with host in place of an unspecified address.
func reachable(a net.Addr, host string) string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || !tcp.IP.IsUnspecified() {
		return a.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(tcp.Port))
}

// banner prints the properties of a server that has just started.
func (c *Config) banner(out io.Writer, n *node.Node, addr, workers net.Addr, web string) {
	n.Banner(out)
	c.Sampling.banner(out)
	if text := c.Auth.summary(); text != "" {
		fmt.Fprintf(out, "access   %s\n", text)
	}
	// Programs wait for the first address, so it comes with everything that follows in one write.
	last := fmt.Sprintf("bazel    build --remote_executor=%s://%s\n", c.Auth.scheme(), reachable(addr, "127.0.0.1"))
	host, err := os.Hostname()
	if err != nil {
		host = "HOST"
	}
	if there := reachable(addr, host); there != reachable(addr, "127.0.0.1") {
		last += fmt.Sprintf("         on other machines --remote_executor=%s://%s\n", c.Auth.scheme(), there)
	}
	if c.Upstream.Server+c.Upstream.Bucket != "" {
		last += fmt.Sprintf("upstream %s   (write %s)\n", c.Upstream.Server+c.Upstream.Bucket, c.Upstream.WriteMode)
	}
	if workers != nil {
		last += fmt.Sprintf("workers  cloister join %s://%s\n", c.Auth.scheme(), reachable(workers, host))
	}
	if web != "" {
		last += "console  " + web + "\n"
	}
	io.WriteString(out, last+"ready\n")
}
