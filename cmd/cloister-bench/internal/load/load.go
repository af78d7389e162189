// SPDX-License-Identifier: Apache-2.0

// Package load puts servers of the Remote Execution API under load and measures them. Run is for their blob
// storage: small blobs in batches and one by one, a large blob, and questions for missing blobs. Execute is for
// actions: such as do nothing, have many inputs, or many outputs. Several servers take turns, step by step, so
// that what disturbs the machine disturbs each of them; with Execute the bare machine takes its turn, too. It knows
// the API and no server, and starts none. RunStore and RunLocal do without a server: one fills a store of package disk,
// the other says what the machine itself can do.
//
// The client is cheap, since it usually shares a machine with what it measures: content, digests and
// requests are made before the clock starts, and answers are checked when it has stopped.
package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// ErrAddress says that the address of a server is malformed.
var ErrAddress = errors.New("address of a server is HOST:PORT, grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")

const (
	// maxMessage is the largest message, in bytes, that every server and client accepts, and
	// entryBytes more than what one blob of a batch takes there besides its data.
	maxMessage = 4 << 20
	entryBytes = 160
	// window is how many bytes a server may send ahead.
	window = 16 << 20
)

// Config says how much load there is.
type Config struct {
	Salt     string // of the contents: a server must not have seen it before
	Blobs    int    // small blobs of a step; 0: none
	Size     int64  // bytes of a small blob
	Large    int64  // bytes of a large blob; 0: none
	Chunk    int64  // bytes of one message of a ByteStream.Write, at most 3 MiB
	Lookups  int    // digests asked for in a step, about
	Parallel int    // calls in flight, on one connection
	Rounds   int    // how often each step is done, with other blobs each time
	Zstd     bool   // measure compressed blobs, too, where the server has them
	Verify   bool   // at the end read everything once more, and compare
	// Progress is told before each round, the first of which is 1, and may be nil.
	Progress func(round int)
}

// A Server is a connection to what is measured. Its calls are made by one Run at a time.
type Server struct {
	Name     string
	Address  string
	instance string           // of the store
	conn     *grpc.ClientConn // of the store
	batch    int64            // bytes of the blobs of a batch
	zstd     bool             // it serves compressed blobs
	pids     []int            // none: not watched

	// Where actions are executed: the same, unless DialStore has said otherwise.
	execInstance string
	exec         *grpc.ClientConn
}

// Dial connects to a server and asks it what it can do. The caller closes the Server. A malformed
// address is ErrAddress. Options come after our own and override them.
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
		return nil, fmt.Errorf("%+.256q: %w", address, ErrAddress)
	}
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window),
		grpc.WithReadBufferSize(1 << 17), grpc.WithWriteBufferSize(1 << 17),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(2 * maxMessage)),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", address, err)
	}
	caps, err := repb.NewCapabilitiesClient(conn).GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: instance})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("reach %s: %w", address, err), conn.Close())
	}
	c := caps.GetCacheCapabilities()
	return &Server{
		Name: name, Address: address, instance: instance, conn: conn, execInstance: instance, exec: conn,
		batch: cmp.Or(c.GetMaxBatchTotalSizeBytes(), maxMessage),
		zstd:  slices.Contains(c.GetSupportedCompressors(), repb.Compressor_ZSTD),
	}, nil
}

// DialStore has s keep blobs at another address than it executes actions at. A malformed address is ErrAddress. Options
// are as in Dial.
func (s *Server) DialStore(ctx context.Context, address string, options ...grpc.DialOption) error {
	store, err := Dial(ctx, s.Name, address, options...)
	if err != nil {
		return err
	}
	s.instance, s.conn, s.batch, s.zstd = store.instance, store.conn, store.batch, store.zstd
	return nil
}

// Watch measures also what the process pid uses, which should be the server, or one of several that are it. It fails
// if there is no such process, and where the operating system does not say what it uses.
func (s *Server) Watch(pid int) error {
	_, err := usageOf(pid)
	s.pids = append(s.pids, pid)
	return err
}

// Close ends the connections.
func (s *Server) Close() error {
	if s.exec == s.conn {
		return s.conn.Close()
	}
	return errors.Join(s.exec.Close(), s.conn.Close())
}

// usage is what a process has used.
type usage struct {
	cpu       time.Duration
	peak      int64 // bytes of resident memory at most
	anonymous int64 // bytes of it now that belong to no file
}

// usage returns what the server's processes have used, or nothing if they are not watched.
func (s *Server) usage() (usage, error) {
	var total usage
	for _, pid := range s.pids {
		u, err := usageOf(pid)
		if err != nil {
			return u, fmt.Errorf("watch the process %d of %s: %w", pid, s.Name, err)
		}
		total.cpu += u.cpu
		total.peak += u.peak
		total.anonymous += u.anonymous
	}
	return total, nil
}

// Run measures servers, each with the same load. It ends with the first call that fails or answer that is
// wrong.
func Run(ctx context.Context, c Config, servers []*Server) (*Report, error) {
	report := newReport(&c, servers)
	for round := range c.Rounds {
		if c.Progress != nil {
			c.Progress(round + 1)
		}
		content, err := newContent(&c, round, servers)
		if err != nil {
			return nil, err
		}
		steps := make([][]step, len(servers))
		for i, s := range servers {
			if steps[i], err = s.steps(&c, content); err != nil {
				return nil, err
			}
		}
		for n := range steps[0] {
			// No server is always the first.
			for turn := range servers {
				i := (turn + round) % len(servers)
				if err := servers[i].measure(ctx, steps[i][n], &report.Servers[i]); err != nil {
					return nil, err
				}
			}
		}
	}
	if c.Verify {
		if err := verify(ctx, &c, servers); err != nil {
			return nil, err
		}
	}
	return report, nil
}

// measure does one step and adds it to the result. A step that the server does not have is none.
func (s *Server) measure(ctx context.Context, st step, r *Result) error {
	if st.load == nil {
		return nil
	}
	runtime.GC() // of what was before, and not within the step
	before, err := s.usage()
	if err != nil {
		return err
	}
	start := time.Now()
	check, err := st.load(ctx)
	elapsed := time.Since(start)
	if err == nil {
		err = check()
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", s.Name, st.name, err)
	}
	after, err := s.usage()
	if err != nil {
		return err
	}
	r.add(st, elapsed, before, after)
	return nil
}

// verify reads what all rounds have written, and compares it.
func verify(ctx context.Context, c *Config, servers []*Server) error {
	for round := range c.Rounds {
		content, err := newContent(c, round, servers)
		if err != nil {
			return err
		}
		for _, s := range servers {
			if err := s.verify(ctx, c, content); err != nil {
				return fmt.Errorf("%s: verify: %w", s.Name, err)
			}
		}
	}
	return nil
}
