// SPDX-License-Identifier: Apache-2.0

// Package logstream serves texts while they grow: the output of actions that run, and what clients write by the
// Log Stream API. It decides neither what runs nor who may call, and keeps no output of an action: while that
// runs, it is read from where the worker keeps it for the result, and afterwards from the store.
//
//	CreateLogStream ---> written by clients ---> whole -----+--> dropped
//	                              `--- nobody writes -------'
//	Begin -------------> written by a worker --> in the store, or lost --> dropped
//
// One mutex guards all but the texts, which have their own.
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

// Config configures a Registry. Instances is required; every other zero value means its default.
type Config struct {
	Instances cas.Instances
	// Keep is how long a stream can be read after it has ended; the default is five minutes, for which an
	// operation is kept, too.
	Keep time.Duration
	// Idle is after how long a client's stream ends that nobody has written to; the default is ten minutes.
	Idle time.Duration
	// MaxRuns is how many runs are kept that have ended; the default is 10,000. The oldest are dropped first.
	MaxRuns int
	// MaxStreams is how many streams of clients there may be, MaxBytes how much text together and MaxStreamBytes
	// each; the defaults are 1000, 128 MiB and 32 MiB. The oldest that are whole make room.
	MaxStreams               int
	MaxBytes, MaxStreamBytes int64
}

// A Registry knows the streams of a server by their names. It is safe for concurrent use. New makes it.
type Registry struct {
	logpb.UnimplementedLogStreamServiceServer
	cfg  Config
	stop context.CancelFunc
	work sync.WaitGroup // who drops what was kept for long enough

	mu      sync.Mutex         // guards everything below, and in each stream what is not fixed
	streams map[string]*stream // by id
	ended   []*stream          // of workers, in the order in which they ended
	clients []*stream          // of clients, in the order in which they were made
	bytes   int64              // that clients have
}

// A stream is one text with its names.
type stream struct {
	id, instance string
	token        string     // by which clients write; "" if a worker does
	writing      sync.Mutex // held for a message of a client, before Registry.mu

	// The rest is guarded by Registry.mu.
	log   *worker.Log // nil once a run has ended
	size  int64       // of what clients wrote
	blob  cas.Digest  // what the run's output became, zero if it is lost
	whole bool        // no client writes to it any more
	until time.Time   // when it is dropped; zero while a worker writes
}

// Why a text ends without being whole.
var (
	errMoved   = errors.New("the run has ended")
	errIdle    = errors.New("nobody wrote to it for too long")
	errClosing = errors.New("the server is shutting down")
)

// New returns a Registry, which the caller closes.
func New(c Config) *Registry {
	c.Keep = cmp.Or(c.Keep, 5*time.Minute)
	c.Idle = cmp.Or(c.Idle, 10*time.Minute)
	c.MaxRuns = cmp.Or(c.MaxRuns, 10_000)
	c.MaxStreams = cmp.Or(c.MaxStreams, 1000)
	c.MaxBytes = cmp.Or(c.MaxBytes, 128<<20)
	c.MaxStreamBytes = cmp.Or(c.MaxStreamBytes, 32<<20)
	r := &Registry{cfg: c, streams: make(map[string]*stream)}
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	r.work.Go(func() { r.sweep(ctx) })
	return r
}

// Register adds the LogStreamService to s. ByteStream, by which streams are read and written, is served by
// whoever has Read, Write and QueryWriteStatus.
func (r *Registry) Register(s grpc.ServiceRegistrar) { logpb.RegisterLogStreamServiceServer(s, r) }

// Close ends the streams of clients, whose readers are told that the server goes away. Those of runs are ended by
// their workers.
func (r *Registry) Close() {
	r.stop()
	r.work.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.clients {
		s.log.Close(errClosing)
	}
}

// Begin makes the streams of the run that t begins, as queue.Config.Logs wants it.
func (r *Registry) Begin(t *worker.Task) (*worker.Logs, func(*worker.Outcome)) {
	logs, run := &worker.Logs{}, unguessable()
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

// end has a stream of a run read from the store from now on.
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
			s.blob = f.Sum(nil) // a result of somebody else that says nothing of it
		}
	}
	log := s.log
	s.log, s.until = nil, time.Now().Add(r.cfg.Keep)
	log.Close(errMoved)
	r.ended = append(r.ended, s)
}

// dropOldest drops the stream of a run that ended first.
func (r *Registry) dropOldest() {
	delete(r.streams, r.ended[0].id)
	r.ended[0] = nil // else the array behind the slice would keep it
	r.ended = r.ended[1:]
}

// sweep drops, often enough, what was kept for long enough.
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
	for len(r.ended) > 0 && now.After(r.ended[0].until) {
		r.dropOldest()
	}
	for _, s := range slices.Clone(r.clients) {
		if now.After(s.until) {
			r.dropClient(s)
		}
	}
}

// dropClient drops the stream of a client.
func (r *Registry) dropClient(s *stream) {
	s.log.Close(errIdle)
	delete(r.streams, s.id)
	r.clients = slices.DeleteFunc(r.clients, func(other *stream) bool { return other == s })
	r.bytes -= s.size
}

// unguessable returns a name that only those know who are told: it is all that is needed to read a stream.
func unguessable() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
