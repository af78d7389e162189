// SPDX-License-Identifier: Apache-2.0

// Package diskctl is how an operator looks at a store on a disk, verifies it and frees space in it, while a process
// serves it and while none does. The process that holds a store answers on a socket in the store's directory; a
// client asks it, or opens the store where nobody holds it. What is done is package disk's; nothing here is reachable
// from a network, and nothing here prints.
package diskctl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
)

// socket is the name of the socket in the directory of a store.
const socket = "control"

// scrubPause is how long Scrub waits after each round, and after it has given way.
const scrubPause = 10 * time.Minute

// A Server answers the operators of a store that this process holds. Serve makes it, and whoever made it closes it,
// before the store.
type Server struct {
	cache *disk.Cache
	grpc  *grpc.Server
	path  string // of the socket

	mu       sync.Mutex
	stopTurn context.CancelFunc // guarded by mu; ends the round of Scrub that is under way
}

// Serve answers on the socket DIR/control, which only this user can reach; dir is that of c, and so this user's alone.
// A socket that a process left which was killed is replaced: this one holds the store. Options are of the server.
func Serve(dir string, c *disk.Cache, options ...grpc.ServerOption) (*Server, error) {
	s := &Server{cache: c, grpc: grpc.NewServer(options...), path: filepath.Join(dir, socket), stopTurn: func() {}}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	listener, err := listen(dir)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	cloisterpb.RegisterStoreServer(s.grpc, &service{server: s})
	go s.grpc.Serve(listener) // ends with Close
	return s, nil
}

// Close ends the calls under way and removes the socket.
func (s *Server) Close() error {
	err := os.Remove(s.path)
	s.grpc.Stop()
	return err
}

// Scrub verifies the store again and again until ctx ends or the store is closed, and reads at most so many bytes a
// second. It gives way to an operator who verifies. Log is told how each round ended.
func (s *Server) Scrub(ctx context.Context, bytesPerSecond int64, log *slog.Logger) {
	for {
		turn, stop := context.WithCancel(ctx)
		s.mu.Lock()
		s.stopTurn = stop
		s.mu.Unlock()
		report, err := s.cache.Verify(turn, disk.VerifyOptions{BytesPerSecond: bytesPerSecond})
		gaveWay := turn.Err() != nil
		stop()
		switch {
		case ctx.Err() != nil || errors.Is(err, os.ErrClosed):
			return
		case err == nil:
			log.Info("the store was verified", "blobs", report.Blobs, "bytes", report.Bytes, "damaged", len(report.Damaged))
		case !gaveWay:
			log.Warn("the store cannot be verified", "err", err)
		}
		select {
		case <-time.After(scrubPause):
		case <-ctx.Done():
			return
		}
	}
}

// service is the gRPC service of a Server.
type service struct {
	cloisterpb.UnimplementedStoreServer
	server *Server
}

func (s *service) Stat(context.Context, *cloisterpb.StatRequest) (*cloisterpb.StatResponse, error) {
	return fromStats(s.server.cache.Stats()), nil
}

func (s *service) Forget(ctx context.Context, req *cloisterpb.ForgetRequest) (*cloisterpb.ForgetResponse, error) {
	action, err := cas.ParseDigest(req.Action)
	if err != nil {
		return nil, cas.Status(err)
	}
	recorded, err := forget(ctx, s.server.cache, req.Instance, action)
	return &cloisterpb.ForgetResponse{Recorded: recorded}, cas.Status(err)
}

func forget(ctx context.Context, c *disk.Cache, instance string, action cas.Digest) (bool, error) {
	in, err := c.Instance(instance)
	if err != nil {
		return false, err
	}
	return in.Actions.(*disk.Store).Forget(ctx, action)
}

func (s *service) Collect(ctx context.Context, req *cloisterpb.CollectRequest) (*cloisterpb.CollectResponse, error) {
	report, err := s.server.cache.Collect(ctx, disk.CollectOptions{
		MaxBytes: req.MaxBytes, OlderThan: req.OlderThan.AsDuration(), DryRun: req.DryRun,
	})
	if err != nil {
		return nil, cas.Status(err)
	}
	return fromCollect(&report), nil
}

func (s *service) Verify(req *cloisterpb.VerifyRequest, stream grpc.ServerStreamingServer[cloisterpb.VerifyResponse]) error {
	s.server.mu.Lock()
	s.server.stopTurn()
	s.server.mu.Unlock()
	named := 0 // of what is damaged
	answer := func(r disk.VerifyReport, done bool) error {
		m := fromVerify(&r)
		m.Done, m.Damaged = done, m.Damaged[named:]
		named = len(r.Damaged)
		return stream.Send(m)
	}
	report, err := s.server.cache.Verify(stream.Context(), disk.VerifyOptions{
		BytesPerSecond: req.BytesPerSecond, Restart: req.Restart,
		// A client that went away ends the context.
		Progress: func(r disk.VerifyReport) { _ = answer(r, false) },
	})
	if err != nil {
		return cas.Status(err)
	}
	return answer(report, true)
}
