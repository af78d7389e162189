// SPDX-License-Identifier: Apache-2.0

// Package load puts Remote Execution API servers under load and measures them. Run measures blob storage: small blobs
// in batches and streams, a large blob, and lookups. Execute measures actions that do nothing, or have many inputs or
// outputs. Servers alternate step by step, so that disturbances of the machine affect all of them; in Execute the bare
// machine takes part. The package uses only the API and starts no server.
//
// The client usually shares a machine with the server, so it is cheap: contents, digests and requests are prepared
// before the clock starts, and answers that take time to decode are checked after it has stopped.
package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// ErrAddress reports a malformed server address.
var ErrAddress = errors.New("write HOST:PORT, grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")

const (
	maxMessage   = 4 << 20  // bytes of a message that every server and client accepts
	entryBytes   = 160      // upper bound of a blob's overhead in a batch
	windowBytes  = 16 << 20 // flow-control window
	lookupsBatch = 10_000   // digests per FindMissingBlobs
)

// Config configures Run.
type Config struct {
	Salt     string // of the contents; unknown to the servers
	Blobs    int    // small blobs per step; 0 skips these steps
	Size     int64  // bytes of a small blob
	Large    int64  // bytes of a large blob; 0 skips its steps
	Lookups  int    // approximate number of digests to look up per step; 0 skips this step
	Parallel int    // calls in flight, on one connection
	Rounds   int    // repetitions of each step, each with new blobs
	Settle   bool   // before each step, wait until the watched processes are idle
	// Compressed also reads the large blob compressed with Zstandard; the servers must support it.
	Compressed bool
	// Progress, unless nil, is called before each round, counted from 1.
	Progress func(round int)
}

// A Server is a connection to a server. Only one Run or Execute uses it at a time.
type Server struct {
	Name     string
	instance string           // of the store
	conn     *grpc.ClientConn // to the store
	batch    int64            // bytes of blobs per batch
	pids     []int            // watched processes

	// Where actions are executed. DialStore changes only the store.
	execInstance string
	exec         *grpc.ClientConn
}

// Dial connects to a server and asks for its capabilities. The caller closes the Server. A malformed address is
// ErrAddress. The options override the defaults.
func Dial(ctx context.Context, name, address string, options ...grpc.DialOption) (*Server, error) {
	creds := insecure.NewCredentials()
	rest, secure := strings.CutPrefix(address, "grpcs://")
	if secure {
		creds = credentials.NewTLS(nil)
	} else {
		rest, _ = strings.CutPrefix(address, "grpc://")
	}
	target, instance, _ := strings.Cut(rest, "/")
	if host, port, err := net.SplitHostPort(target); err != nil || host == "" || port == "" {
		return nil, fmt.Errorf("malformed server address %+.256q: %w", address, ErrAddress)
	}
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(windowBytes),
		grpc.WithReadBufferSize(1 << 17), grpc.WithWriteBufferSize(1 << 17),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(2 * maxMessage)),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", address, err)
	}
	query := &repb.GetCapabilitiesRequest{InstanceName: instance}
	caps, err := repb.NewCapabilitiesClient(conn).GetCapabilities(ctx, query)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("reach %s: %w", address, err), conn.Close())
	}
	return &Server{
		Name: name, instance: instance, conn: conn, execInstance: instance, exec: conn,
		batch: cmp.Or(caps.GetCacheCapabilities().GetMaxBatchTotalSizeBytes(), maxMessage),
	}, nil
}

// DialStore moves the store of s to another address, as Dial.
func (s *Server) DialStore(ctx context.Context, address string, options ...grpc.DialOption) error {
	store, err := Dial(ctx, s.Name, address, options...)
	if err != nil {
		return err
	}
	s.instance, s.conn, s.batch = store.instance, store.conn, store.batch
	return nil
}

// Watch measures the resource usage of a process, which is the server or a part of it. It fails if there is no such
// process, and where the operating system does not report its usage.
func (s *Server) Watch(pid int) error {
	_, err := usageOf(pid)
	s.pids = append(s.pids, pid)
	return err
}

// Close closes the connections.
func (s *Server) Close() error {
	if s.exec == s.conn {
		return s.conn.Close()
	}
	return errors.Join(s.exec.Close(), s.conn.Close())
}

// usage is the resource usage of processes.
type usage struct {
	cpu  time.Duration
	peak int64 // maximum resident bytes
}

// usage returns the usage of the watched processes.
func (s *Server) usage() (usage, error) {
	var total usage
	for _, pid := range s.pids {
		u, err := usageOf(pid)
		if err != nil {
			return u, fmt.Errorf("watch process %d of %s: %w", pid, s.Name, err)
		}
		total.cpu += u.cpu
		total.peak += u.peak
	}
	return total, nil
}

const (
	quietTime  = 300 * time.Millisecond // of one observation
	quietCPU   = 10 * time.Millisecond  // of all watched processes in this time, at most
	quietTimes = 3                      // consecutive observations
	settleTime = 5 * time.Minute        // after which settle fails
)

// settle waits, if on is true, until the watched processes of all servers are idle and have finished deferred work, and
// until the kernel has written all dirty pages, which would slow down the next server that writes.
func settle(ctx context.Context, on bool, servers []*Server) error {
	if !on {
		return nil
	}
	start, quiet := time.Now(), 0
	for last := time.Duration(-1); quiet < quietTimes; {
		var cpu time.Duration
		for _, s := range servers {
			u, err := s.usage()
			if err != nil {
				return err
			}
			cpu += u.cpu
		}
		if quiet++; last < 0 || cpu-last > quietCPU {
			quiet = 0
		}
		last = cpu
		if time.Since(start) > settleTime {
			return fmt.Errorf("the servers are still busy after %v", settleTime)
		}
		select {
		case <-time.After(quietTime):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	flush()
	return nil
}

// Run measures servers under the same load. The first failed call or wrong answer ends it.
func Run(ctx context.Context, c Config, servers []*Server) (*Report, error) {
	report := newReport(servers)
	for round := range c.Rounds {
		if c.Progress != nil {
			c.Progress(round + 1)
		}
		content := newContent(&c, round)
		steps := make([][]step, len(servers))
		for i, s := range servers {
			var err error
			if steps[i], err = s.steps(&c, content); err != nil {
				return nil, err
			}
		}
		for n := range steps[0] {
			for turn := range servers {
				i := (turn + round) % len(servers) // each round begins with another server
				if err := settle(ctx, c.Settle, servers); err != nil {
					return nil, err
				}
				if err := servers[i].measure(ctx, steps[i][n], &report.Servers[i]); err != nil {
					return nil, fmt.Errorf("%s: %s: %w", servers[i].Name, steps[i][n].name, err)
				}
			}
		}
	}
	return report, nil
}

// measure runs one step and adds it to r.
func (s *Server) measure(ctx context.Context, st step, r *Result) error {
	runtime.GC() // now, not during the step
	before, err := s.usage()
	if err != nil {
		return err
	}
	start := time.Now()
	err = st.load(ctx)
	elapsed := time.Since(start)
	if err == nil && st.check != nil {
		err = st.check()
	}
	if err != nil {
		return err
	}
	after, err := s.usage()
	if err == nil {
		r.add(st, elapsed, before, after)
	}
	return err
}
