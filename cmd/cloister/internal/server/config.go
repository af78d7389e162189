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

	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/spf13/cobra"
)

// Config is the flags of serve.
type Config struct {
	node.Config
	Listen          string
	MaxBlob         flags.Size // 0: half of the store
	DigestFunctions flags.DigestFunctions
	History         flags.Bytes
	Auth            Auth
	Sampling        sampling
	Workers         workersConfig
}

// Check validates the flags.
func (c *Config) Check(cmd *cobra.Command) error {
	switch {
	case c.History > 0 && c.History < 1<<20:
		return fmt.Errorf("--history-size %s: write at least 1MiB, such as 64MiB or 1GiB, or 0 for no history", &c.History)
	case c.MaxBlob.Percent > 0:
		return fmt.Errorf("--max-blob %s: write 512MiB or 4GiB", &c.MaxBlob)
	}
	return errors.Join(c.checkWorkers(cmd), c.Config.Check(cmd), c.Auth.check(), c.Sampling.check(cmd))
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

// queueConfig returns the configuration of the queue.
func (s *server) queueConfig() queue.Config {
	n := s.node
	q := queue.Config{Head: s.Head, Renew: n.Local.RenewInputs, RenewEvery: s.Renew(), Hint: matchHint}
	if s.history != nil {
		q.Ended = execserver.RecordOperations(s.history)
	}
	if s.Head {
		return q
	}
	executor := worker.Executor(n.Local)
	if s.sampler != nil {
		executor = s.sampler
		if !s.sampler.Gate {
			q.Idle = s.sampler.Idle
		}
	}
	q.Executor, q.Slots, q.Offer, q.Logs = n.Telemetry.Executor(executor), s.Jobs, s.offer(n.Name), s.logs.Begin
	if n.Upstream != nil {
		q.Fetch, q.FetchBytes = n.Local.PrefetchInputs, n.Store.MaxBytes/8 // leases must leave room for outputs
	}
	return q
}

// openHistory opens the history, or returns nil if --history-size is 0. The caller closes it.
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

// addressFlags returns the flags with which a command on this machine finds this server.
func (c *Config) addressFlags(a net.Addr) []string {
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

// banner prints the properties of a server that has just started.
func (c *Config) banner(out io.Writer, n *node.Node, addr, workers string) {
	n.Banner(out)
	c.Sampling.banner(out)
	if text := c.Auth.summary(); text != "" {
		fmt.Fprintf(out, "access   %s\n", text)
	}
	// Programs wait for the first address, so it comes with everything that follows in one write.
	last := fmt.Sprintf("bazel    build --remote_executor=%s://%s\n", c.Auth.scheme(), addr)
	if c.Upstream.Server+c.Upstream.Bucket != "" {
		last += fmt.Sprintf("upstream %s   (write %s)\n", c.Upstream.Server+c.Upstream.Bucket, c.Upstream.WriteMode)
	}
	if workers != "" {
		last += fmt.Sprintf("workers  cloister join %s://%s\n", c.Auth.scheme(), workers)
	}
	io.WriteString(out, last)
}
