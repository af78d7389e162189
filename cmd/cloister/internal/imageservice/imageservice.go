// SPDX-License-Identifier: Apache-2.0

// Package imageservice lets operators list, pull, load and remove the container images of a server. Package image does
// the work.
package imageservice

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// progressInterval is the interval of messages about a pull.
var progressInterval = time.Second

// A Config configures the service. Library, Instances and Log are required.
type Config struct {
	Library *image.Library
	// Instances are those of the Library.
	Instances cas.Instances
	// Local permits Load, which reads files of this host.
	Local bool
	Log   *slog.Logger
}

// Register adds the service cloister.v1.Images to r, which decides who may call it.
func Register(r grpc.ServiceRegistrar, c Config) {
	cloisterpb.RegisterImagesServer(r, &server{Config: c})
}

type server struct {
	cloisterpb.UnimplementedImagesServer
	Config
}

func (s *server) List(_ context.Context, req *cloisterpb.ListImagesRequest) (*cloisterpb.ListImagesResponse, error) {
	m := &cloisterpb.ListImagesResponse{}
	found := map[string][]*image.Entry{} // by instance
	for _, e := range s.Library.List() {
		if !req.AllInstances && e.Instance != req.InstanceName {
			continue
		}
		if req.Name == "" {
			m.Images = append(m.Images, message(e))
		} else if _, done := found[e.Instance]; !done {
			found[e.Instance] = s.Library.Find(e.Instance, req.Name)
			for _, e := range found[e.Instance] {
				m.Images = append(m.Images, message(e))
			}
		}
	}
	if req.Name != "" {
		return m, nil
	}
	for _, p := range s.Library.Pulling() {
		if req.AllInstances || p.Instance == req.InstanceName {
			m.Pulls = append(m.Pulls, PullMessage(&p))
		}
	}
	return m, nil
}

func (s *server) Pull(
	req *cloisterpb.PullImageRequest, to grpc.ServerStreamingServer[cloisterpb.PullImageResponse],
) error {
	ref, err := image.ParseReference(req.Reference)
	if err != nil {
		return casstatus.Error(err)
	}
	type result struct {
		entry *image.Entry
		err   error
	}
	done := make(chan result, 1)
	go func() {
		e, err := s.get(to.Context(), req.InstanceName, ref)
		done <- result{e, err}
	}()
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case r := <-done:
			if r.err != nil {
				return s.failed(to.Context(), ref, r.err)
			}
			return to.Send(&cloisterpb.PullImageResponse{Image: message(r.entry)})
		case <-tick.C:
			if p := s.pulling(req.InstanceName, ref); p != nil {
				// If the client is gone, the context ends.
				_ = to.Send(&cloisterpb.PullImageResponse{Progress: PullMessage(p)})
			}
		}
	}
}

// get returns an image, all of whose blobs are in the store, with new leases.
func (s *server) get(ctx context.Context, instance string, ref image.Reference) (*image.Entry, error) {
	in, err := s.Instances(instance)
	if err != nil {
		return nil, err
	}
	e, err := s.Library.Get(ctx, instance, ref, cas.Digest{})
	if err != nil {
		return nil, err
	}
	var lost *tree.MissingError
	if _, err = tree.Load(ctx, in.Store, e.Root); !errors.As(err, &lost) {
		return e, err
	}
	return s.Library.Get(ctx, instance, ref, e.Root)
}

// pulling returns the pull of an image, or nil. With a tag it is the oldest one of the repository.
func (s *server) pulling(instance string, ref image.Reference) *image.Pulling {
	for _, p := range s.Library.Pulling() {
		if p.Instance == instance && strings.HasPrefix(p.Pinned, ref.Pin(ref.Digest())) {
			return &p
		}
	}
	return nil
}

func (s *server) Load(ctx context.Context, req *cloisterpb.LoadImageRequest) (*cloisterpb.LoadImageResponse, error) {
	switch {
	case !s.Local:
		return nil, status.Error(codes.PermissionDenied,
			"image load reads files of the server's host: run it there with --dir")
	case !filepath.IsAbs(req.Path):
		return nil, status.Errorf(codes.InvalidArgument, "path %+.256q: write an absolute path", req.Path)
	}
	e, err := s.Library.Load(ctx, req.InstanceName, req.Path, req.Selector, req.Reference)
	if err != nil {
		return nil, s.failed(ctx, image.Reference{}, err)
	}
	return &cloisterpb.LoadImageResponse{Image: message(e)}, nil
}

func (s *server) Remove(
	_ context.Context, req *cloisterpb.RemoveImageRequest,
) (*cloisterpb.RemoveImageResponse, error) {
	for _, e := range s.Library.Find(req.InstanceName, req.Reference) {
		if e.Reference == req.Reference {
			return &cloisterpb.RemoveImageResponse{}, casstatus.Error(s.Library.Remove(e))
		}
	}
	return nil, status.Errorf(codes.NotFound, "no image %+.256q in instance %q", req.Reference, req.InstanceName)
}

// failed returns the error of reading an image as a status.
func (s *server) failed(ctx context.Context, ref image.Reference, err error) error {
	code := casstatus.Code(err)
	_, local := errors.AsType[*fs.PathError](err)
	switch {
	case errors.Is(err, image.ErrNotAllowed):
		return status.Errorf(codes.FailedPrecondition, "%v: start the server with --images=%s to allow it", err,
			ref.Registry())
	case ctx.Err() != nil:
		return casstatus.Error(ctx.Err())
	case local && errors.Is(err, fs.ErrNotExist):
		return status.Error(codes.NotFound, err.Error())
	case local:
		s.Log.Error("cannot read or store an image", "err", err)
	case code == codes.Internal, code == codes.DeadlineExceeded: // by the registry or the image
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	return casstatus.Error(err)
}

func message(e *image.Entry) *cloisterpb.ContainerImage {
	return &cloisterpb.ContainerImage{
		InstanceName: e.Instance, Reference: e.Reference, Pinned: e.Pinned, Digest: e.Digest, Root: e.Root.String(),
		Env: e.Env, Entries: int64(e.Entries), Files: int64(e.Files), Bytes: e.Bytes, Dropped: int64(e.Dropped),
		Pulled: timestamppb.New(e.Pulled), Loaded: e.Loaded,
	}
}

// PullMessage returns p as a message, nil for nil.
func PullMessage(p *image.Pulling) *cloisterpb.ImagePull {
	if p == nil {
		return nil
	}
	return &cloisterpb.ImagePull{
		InstanceName: p.Instance, Pinned: p.Pinned, Started: timestamppb.New(p.Started),
		ReadBytes: p.Read, TotalBytes: p.Total, Waiting: int64(p.Waiting),
	}
}
