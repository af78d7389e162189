// SPDX-License-Identifier: Apache-2.0

// Package logstream serves logs while they grow: the output of running actions, and logs that clients write with the
// Log Stream API. It keeps no output of actions: while one runs, its output is read from the worker's buffer, and
// afterwards from the store. Authorization is the caller's job.
//
//	CreateLogStream ---> written by clients ---> finished --+--> dropped
//	                              `--- idle too long -------'
//	Begin -------------> written by a worker --> in the store, or lost --> dropped
//
// One mutex guards everything but the logs, which have their own.
//
// Readers share the one buffer that becomes the blob of the result, so they read exactly its bytes and cost no copies;
// the writer never waits for them. A stream ends with ABORTED if its run has no result. Names have 128 random bits and
// are the right to read; writing also requires a token. Streams belong to runs, so operations that share a run name the
// same streams. Clients' streams stay in memory, within limits: a client that writes a log need not have the right to
// write blobs.
package logstream

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"slices"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc"
)

// Config configures a Registry. Instances is required; every other zero value selects its default.
type Config struct {
	Instances cas.Instances
	// Keep is how long a stream can be read after its end; the default is five minutes, as for operations.
	Keep time.Duration
	// Idle is how long a client's stream lives without writes; the default is ten minutes.
	Idle time.Duration
	// MaxRuns limits the ended runs that are kept; the default is 10,000. The oldest are dropped first.
	MaxRuns int
	// MaxStreams limits the streams of clients, MaxBytes their total size and MaxStreamBytes the size of each; the
	// defaults are 1000, 128 MiB and 32 MiB. The streams of one caller may take half of MaxBytes. To make room, finished
	// streams of the caller that has the most are dropped, oldest first.
	MaxStreams               int
	MaxBytes, MaxStreamBytes int64
}

// A Registry holds the streams of a server. Use New; the zero Registry is not usable. It is safe for concurrent use.
type Registry struct {
	logpb.UnimplementedLogStreamServiceServer
	cfg  Config
	stop context.CancelFunc
	work sync.WaitGroup // sweep

	mu      sync.Mutex         // guards the fields below and the variable ones of each stream
	streams map[string]*stream // by ID
	ended   []*stream          // of runs, in order of their end
	clients []*stream          // of clients, in order of creation
	bytes   int64              // size of the streams of clients
	callers map[string]*usage  // of callers with streams
}

// A usage is the number and the total size of one caller's streams.
type usage struct {
	streams int
	bytes   int64
}

// ClientBytes returns the size of the streams of clients.
func (r *Registry) ClientBytes() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.bytes
}

// A stream is one log.
type stream struct {
	id, instance string
	token        string     // authorizes clients to write; "" if a worker writes
	release      func()     // ends the count of the client that created it; nil if a worker writes
	caller       string     // the key of that client, towards whose limit the stream counts
	writeMu      sync.Mutex // held to write a client's message, before Registry.mu

	// The fields below are guarded by Registry.mu.
	log      *worker.Log // nil once a run has ended
	size     int64       // bytes that clients wrote
	blob     cas.Digest  // output of an ended run; zero if it is lost
	finished bool        // clients write no more
	expires  time.Time   // when it is dropped; zero while a worker writes
}

// Reasons for the end of a log before it is complete.
var (
	errEnded   = errors.New("the run has ended")
	errIdle    = errors.New("it was idle for too long")
	errClosing = errors.New("the server is shutting down")
)

// New returns a Registry, which the caller closes. It fails without Instances.
func New(c Config) (*Registry, error) {
	if c.Instances == nil {
		return nil, errors.New("logstream: Config.Instances is missing")
	}
	c.Keep = cmp.Or(c.Keep, 5*time.Minute)
	c.Idle = cmp.Or(c.Idle, 10*time.Minute)
	c.MaxRuns = cmp.Or(c.MaxRuns, 10_000)
	c.MaxStreams = cmp.Or(c.MaxStreams, 1000)
	c.MaxBytes = cmp.Or(c.MaxBytes, 128<<20)
	c.MaxStreamBytes = min(cmp.Or(c.MaxStreamBytes, 32<<20), c.MaxBytes/2)
	r := &Registry{cfg: c, streams: make(map[string]*stream), callers: make(map[string]*usage)}
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	r.work.Go(func() { r.sweep(ctx) })
	return r, nil
}

// Register adds the LogStreamService to s. The server's ByteStream service calls Read, Write and QueryWriteStatus.
func (r *Registry) Register(s grpc.ServiceRegistrar) { logpb.RegisterLogStreamServiceServer(s, r) }

// Close ends the streams of clients; their readers get UNAVAILABLE. Workers end the streams of runs.
func (r *Registry) Close() {
	r.stop()
	r.work.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.clients {
		s.log.Close(errClosing)
	}
}

// Begin creates the streams of a run of t. It is a queue.Config.Logs.
func (r *Registry) Begin(t *worker.Task) (*worker.Logs, func(*worker.Outcome)) {
	logs, run := &worker.Logs{}, randomID()
	stdout := &stream{id: run + "-stdout", instance: t.Instance, log: &logs.Stdout}
	stderr := &stream{id: run + "-stderr", instance: t.Instance, log: &logs.Stderr}
	logs.Stdout.Name, logs.Stderr.Name = stdout.name(), stderr.name()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.streams[stdout.id], r.streams[stderr.id] = stdout, stderr
	f := t.Action.Function()
	return logs, func(out *worker.Outcome) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.end(stdout, f, out, (*repb.ActionResult).GetStdoutDigest, (*repb.ActionResult).GetStdoutRaw)
		r.end(stderr, f, out, (*repb.ActionResult).GetStderrDigest, (*repb.ActionResult).GetStderrRaw)
		for len(r.ended) > 2*r.cfg.MaxRuns {
			r.dropOldest()
		}
	}
}

// end makes a stream of a run read from the store.
func (r *Registry) end(
	s *stream, f cas.Function, out *worker.Outcome,
	digest func(*repb.ActionResult) *repb.Digest, raw func(*repb.ActionResult) []byte,
) {
	if out != nil {
		d, err := cas.FromProto(f, digest(out.Result))
		switch {
		case err == nil:
			s.blob = d
		case len(raw(out.Result)) == 0:
			s.blob = f.Sum(nil) // a cached result without output
		}
	}
	log := s.log
	s.log, s.expires = nil, time.Now().Add(r.cfg.Keep)
	log.Close(errEnded)
	r.ended = append(r.ended, s)
}

// dropOldest drops the stream of the run that ended first.
func (r *Registry) dropOldest() {
	delete(r.streams, r.ended[0].id)
	r.ended[0] = nil // release it to the garbage collector
	r.ended = r.ended[1:]
}

// sweep periodically drops expired streams.
func (r *Registry) sweep(ctx context.Context) {
	tick := time.NewTicker(min(r.cfg.Keep, r.cfg.Idle)/4 + 1)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			r.expire(now)
		}
	}
}

func (r *Registry) expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.ended) > 0 && now.After(r.ended[0].expires) {
		r.dropOldest()
	}
	for _, s := range slices.Clone(r.clients) {
		if now.After(s.expires) {
			r.dropClient(s)
		}
	}
}

// dropClient drops the stream of a client.
func (r *Registry) dropClient(s *stream) {
	s.release()
	s.log.Close(errIdle)
	delete(r.streams, s.id)
	r.clients = slices.DeleteFunc(r.clients, func(other *stream) bool { return other == s })
	r.bytes -= s.size
	u := r.callers[s.caller]
	u.bytes -= s.size
	if u.streams--; u.streams == 0 {
		delete(r.callers, s.caller)
	}
}

// randomID returns an ID that cannot be guessed, since knowing it is enough to read a stream.
func randomID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
