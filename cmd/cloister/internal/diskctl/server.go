// SPDX-License-Identifier: Apache-2.0

// Package diskctl lets an operator inspect, verify and clean up a disk store, whether or not a process has it open.
// That process serves a socket in the directory of the store. A client connects to the socket, or opens the store
// itself if no process does. Package disk does the work. A server may also offer the service at its port, to callers
// with the right operate.
//
// A Unix socket admits only those who can enter the directory: its owner and root. The client checks with
// SO_PEERCRED that a process of the directory's owner answers, and prints its answers without control characters. No
// answer within ten seconds is an error that names the holder of the store, which is never opened twice.
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
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/unixsocket"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// socket is the name of the socket in the directory of a store.
const socket = "control"

// verifyPatience is the time for which a call of Verify waits for another one, which may just have been interrupted.
var verifyPatience = 10 * time.Second

// scrubInterval is the pause after each round of Scrub.
const scrubInterval = 10 * time.Minute

// A Server gives operators access to an open store. The caller of Serve closes it before the store.
type Server struct {
	cache *disk.Cache
	grpc  *grpc.Server
	path  string // of the socket
	// verifying is held by the call of Verify in progress.
	verifying chan struct{}

	mu        sync.Mutex
	stopScrub context.CancelFunc // guarded by mu; ends the current round of Scrub
}

// Serve listens on the socket DIR/control, which only this user can connect to. Dir is the directory of c. Serve
// replaces the socket of an earlier process, which cannot be running since c is open. register, if not nil, adds other
// services to the socket. On systems without Unix sockets, the error is errors.ErrUnsupported and the Server serves
// only what others Register.
func Serve(
	dir string, c *disk.Cache, register func(grpc.ServiceRegistrar), options ...grpc.ServerOption,
) (*Server, error) {
	s := &Server{cache: c, grpc: grpc.NewServer(options...), path: filepath.Join(dir, socket), verifying: make(chan struct{}, 1), stopScrub: func() {}}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	listener, err := unixsocket.Listen(dir, socket)
	if errors.Is(err, errors.ErrUnsupported) {
		return s, err
	}
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	s.Register(s.grpc)
	if register != nil {
		register(s.grpc)
	}
	go func() { _ = s.grpc.Serve(listener) }() // ends with Close
	return s, nil
}

// Register adds the service to another server, which decides who may call it.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	cloisterpb.RegisterStoreServer(r, &service{server: s})
}

// Index returns the service that finds blobs for clients. Call it once, since its limits are those of one service.
func (s *Server) Index() cloisterpb.BlobIndexServer {
	return &blobIndex{cache: s.cache, searching: make(chan struct{}, maxSearching), search: make(chan struct{}, 1)}
}

// Close cancels calls in progress and removes the socket.
func (s *Server) Close() error {
	err := os.Remove(s.path)
	s.grpc.Stop()
	return err
}

// Scrub verifies the store repeatedly, at a limited rate, until ctx ends or the store is closed. It logs the result
// of each round. A call of Verify by an operator interrupts the round.
func (s *Server) Scrub(ctx context.Context, bytesPerSecond int64, log *slog.Logger) {
	for {
		round, stop := context.WithCancel(ctx)
		s.mu.Lock()
		s.stopScrub = stop
		s.mu.Unlock()
		report, err := s.cache.Verify(round, disk.VerifyOptions{BytesPerSecond: bytesPerSecond})
		interrupted := round.Err() != nil
		stop()
		switch {
		case ctx.Err() != nil || errors.Is(err, os.ErrClosed):
			return
		case err == nil:
			log.Info("store verified", "blobs", report.Blobs, "bytes", report.Bytes, "damaged", len(report.Damaged))
		case !interrupted:
			log.Warn("cannot verify the store", "err", err)
		}
		select {
		case <-time.After(scrubInterval):
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
		return nil, casstatus.Error(err)
	}
	recorded, err := forget(ctx, s.server.cache, req.Instance, action)
	return &cloisterpb.ForgetResponse{Recorded: recorded}, casstatus.Error(err)
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
		return nil, casstatus.Error(err)
	}
	return fromCollect(&report), nil
}

func (s *service) Verify(
	req *cloisterpb.VerifyRequest, stream grpc.ServerStreamingServer[cloisterpb.VerifyResponse],
) error {
	select {
	case s.server.verifying <- struct{}{}:
		defer func() { <-s.server.verifying }()
	case <-stream.Context().Done():
		return stream.Context().Err()
	case <-time.After(verifyPatience):
		return status.Error(codes.Aborted, "another cas verify reads this store: wait for its end, or interrupt it")
	}
	s.server.mu.Lock()
	s.server.stopScrub()
	s.server.mu.Unlock()
	sent := 0 // number of damages
	send := func(r disk.VerifyReport, done bool) error {
		m := fromVerify(&r)
		m.Done, m.Damaged = done, m.Damaged[sent:]
		sent = len(r.Damaged)
		return stream.Send(m)
	}
	report, err := s.server.cache.Verify(stream.Context(), disk.VerifyOptions{
		BytesPerSecond: req.BytesPerSecond, Restart: req.Restart,
		// If the client is gone, the context ends.
		Progress: func(r disk.VerifyReport) { _ = send(r, false) },
	})
	if err != nil {
		return casstatus.Error(err)
	}
	return send(report, true)
}

// blobIndex is the gRPC service for clients.
type blobIndex struct {
	cloisterpb.UnimplementedBlobIndexServer
	cache *disk.Cache
	// searching holds a value for each call, and search one for the call that searches the index, so that clients keep at
	// most one processor busy.
	searching, search chan struct{}
}

const (
	maxFound     = 100 // blobs that Find returns
	maxSearching = 20  // calls of Find; more are refused
)

func (x *blobIndex) Find(ctx context.Context, req *cloisterpb.FindRequest) (*cloisterpb.FindResponse, error) {
	if req.Limit < 1 || req.Limit > maxFound {
		return nil, status.Errorf(codes.InvalidArgument, "limit %d: use a number from 1 to %d", req.Limit, maxFound)
	}
	in, err := x.cache.Instance(req.InstanceName)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	select {
	case x.searching <- struct{}{}:
		defer func() { <-x.searching }()
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "%d other searches for blobs wait or run; retry later", maxSearching)
	}
	select {
	case x.search <- struct{}{}:
		defer func() { <-x.search }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	found, err := in.Store.(*disk.Store).FindPrefix(ctx, req.Prefix, int(req.Limit))
	m := &cloisterpb.FindResponse{}
	for _, d := range found {
		m.Digests = append(m.Digests, d.String())
	}
	return m, casstatus.Error(err)
}
