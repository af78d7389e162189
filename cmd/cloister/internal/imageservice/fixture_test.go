// SPDX-License-Identifier: Apache-2.0

package imageservice_test

import (
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/cloister/internal/imageservice"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A fixture is a registry and a server with a library of images.
type fixture struct {
	*testing.T
	host  string       // of the registry
	blobs atomic.Int64 // that it was asked for: a configuration and a layer for each image
	// gate, if set, is received from before each blob is sent.
	gate   atomic.Pointer[chan struct{}]
	stores atomic.Pointer[cas.Instances]
	images cloisterpb.ImagesClient
}

func newFixture(t *testing.T, local, allowed bool) *fixture {
	f := &fixture{T: t}
	stores := castest.Instances()
	f.stores.Store(&stores)
	r := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			f.blobs.Add(1)
			if gate := f.gate.Load(); gate != nil {
				<-*gate
			}
		}
		r.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	f.host = strings.TrimPrefix(s.URL, "http://")
	c := image.LibraryConfig{Config: image.Config{Function: cas.SHA256, Dir: t.TempDir()}}
	c.Instances = func(name string) (*cas.Instance, error) { return (*f.stores.Load())(name) }
	if allowed {
		c.Allowed = []string{f.host}
	}
	l := must.Get(image.OpenLibrary(c))(t)
	t.Cleanup(func() { _ = l.Close() })
	at := grpctest.Serve(t, func(r *grpc.Server) {
		imageservice.Register(r, imageservice.Config{
			Library: l, Instances: c.Instances, Local: local, Log: slog.New(slog.DiscardHandler),
		})
	})
	conn := grpctest.Dial(t, at)
	f.images = cloisterpb.NewImagesClient(conn)
	return f
}

// hold makes blobs wait until release is called or the test ends.
func (f *fixture) hold() (release func()) {
	gate := make(chan struct{})
	f.gate.Store(&gate)
	release = sync.OnceFunc(func() { close(gate) })
	f.Cleanup(release)
	return release
}

func newImage(t *testing.T) v1.Image {
	t.Helper()
	return must.Get(random.Image(1000, 1))(t)
}

// push stores a new image and returns its reference and the digest of its manifest.
func (f *fixture) push(repository string) (reference, digest string) {
	f.Helper()
	im := newImage(f.T)
	reference = f.host + "/" + repository
	to, err := name.ParseReference(reference)
	if err == nil {
		err = remote.Write(to, im)
	}
	d, derr := im.Digest()
	if err != nil || derr != nil {
		f.Fatal(err, derr)
	}
	return reference, d.String()
}

// pull returns the image, and reports each message about its progress.
func (f *fixture) pull(
	ctx context.Context, instance, ref string, progress func(*cloisterpb.ImagePull),
) (*cloisterpb.ContainerImage, error) {
	stream, err := f.images.Pull(ctx, &cloisterpb.PullImageRequest{InstanceName: instance, Reference: ref})
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if m.Image != nil {
			if _, err := stream.Recv(); err != io.EOF {
				f.Errorf("after the image: got %v, want the end", err)
			}
			return m.Image, nil
		}
		if progress != nil {
			progress(m.Progress)
		}
	}
}

func (f *fixture) mustPull(instance, ref string) *cloisterpb.ContainerImage {
	f.Helper()
	return must.Get(f.pull(f.Context(), instance, ref, nil))(f)
}

// begin pulls in the background and returns the error at the end.
func (f *fixture) begin(ctx context.Context, instance, ref string) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := f.pull(ctx, instance, ref, nil)
		done <- err
	}()
	return done
}

// list returns the references of the images that name identifies, and the pulls.
func (f *fixture) list(req *cloisterpb.ListImagesRequest) (string, []*cloisterpb.ImagePull) {
	f.Helper()
	m := must.Get(f.images.List(f.Context(), req))(f)
	var refs []string
	for _, e := range m.Images {
		refs = append(refs, e.InstanceName+" "+strings.TrimPrefix(e.Reference, f.host+"/"))
	}
	return strings.Join(refs, ", "), m.Pulls
}

// expectCode checks an error's code and that its message has every text.
func expectCode(t *testing.T, what string, err error, code codes.Code, texts ...string) {
	t.Helper()
	for _, text := range texts {
		expect.That(t, strings.Contains(status.Convert(err).Message(), text),
			"%s: got %v, want it to contain %q", what, err, text)
	}
	expect.Code(t, err, code, "%s", what)
}
