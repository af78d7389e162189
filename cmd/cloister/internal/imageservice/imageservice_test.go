// SPDX-License-Identifier: Apache-2.0

package imageservice_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"google.golang.org/grpc/codes"
)

// TestPullReportsProgress and returns the image, with a tag and with a digest.
func TestPullReportsProgress(t *testing.T) {
	f := newFixture(t, false, true)
	ref, digest := f.push("tools:1")
	other, _ := f.push("others:1")
	for instance, ref := range map[string]string{"a": ref, "b": f.host + "/tools@" + digest} {
		release := f.hold()
		older := []<-chan error{f.begin(t.Context(), instance, other), f.begin(t.Context(), "other than "+instance, ref)}
		must.Hold(t, "older pulls of another image and in another instance", func() bool {
			_, pulls := f.list(&cloisterpb.ListImagesRequest{AllInstances: true})
			return len(pulls) == len(older)
		})
		seen := 0
		m := must.Get(f.pull(t.Context(), instance, ref, func(p *cloisterpb.ImagePull) {
			if seen++; seen == 3 {
				release()
			}
			if p.Pinned != f.host+"/tools@"+digest || p.InstanceName != instance || p.Waiting != 1 ||
				time.Since(p.Started.AsTime()) > time.Hour {
				t.Errorf("progress: got %v", p)
			}
		}))(t)
		if seen < 3 || m.Reference != ref || m.Pinned != f.host+"/tools@"+digest || m.Digest != digest || m.Loaded ||
			m.InstanceName != instance || m.Files != 1 || m.Bytes != 1000 || time.Since(m.Pulled.AsTime()) > time.Hour {
			t.Errorf("got %d messages and %v", seen, m)
		}
		for _, done := range older {
			must.Succeed(t, <-done)
		}
	}
}

// TestClientsShareAPull: one of two clients leaves, and the other gets the image from the same pull. If both leave, the
// pull ends.
func TestClientsShareAPull(t *testing.T) {
	f := newFixture(t, false, true)
	ref, _ := f.push("tools:1")
	release := f.hold()
	waiting := func() int64 {
		_, pulls := f.list(&cloisterpb.ListImagesRequest{})
		if len(pulls) == 0 {
			return 0
		}
		return pulls[0].Waiting
	}
	ctx, leave := context.WithCancel(t.Context())
	alone := f.begin(ctx, "", ref)
	must.Hold(t, "a pull", func() bool { return waiting() == 1 })
	must.Hold(t, "its request for the configuration", func() bool { return f.blobs.Load() == 1 })
	leave()
	expectCode(t, "the only client", <-alone, codes.Canceled)
	must.Hold(t, "the end of a pull that nobody waits for", func() bool { return waiting() == 0 })

	before := f.blobs.Load()
	stays := f.begin(t.Context(), "", ref)
	ctx, leave = context.WithCancel(t.Context())
	leaves := f.begin(ctx, "", ref)
	must.Hold(t, "two clients", func() bool { return waiting() == 2 })
	leave()
	expectCode(t, "the client that leaves", <-leaves, codes.Canceled)
	must.Hold(t, "one client", func() bool { return waiting() == 1 })
	if all, pulls := f.list(&cloisterpb.ListImagesRequest{AllInstances: true}); all != "" || len(pulls) != 1 {
		t.Errorf("got images %q and %d pulls, want one pull", all, len(pulls))
	}
	if _, pulls := f.list(&cloisterpb.ListImagesRequest{InstanceName: "other"}); len(pulls) != 0 {
		t.Errorf("another instance: got pulls %v", pulls)
	}
	release()
	expect.Error(t, <-stays, nil, "the client that stays")
	expect.Equal(t, f.blobs.Load()-before, 2, "both clients: requests for blobs (those of one pull)")
}

// TestPullRefuses what it must, with the reasons and what to do.
func TestPullRefuses(t *testing.T) {
	f := newFixture(t, false, false)
	ref, _ := f.push("tools:1")
	_, err := f.pull(t.Context(), "", ref, nil)
	expectCode(t, "a registry that is not allowed", err, codes.FailedPrecondition, f.host, "--images="+f.host)
	_, err = f.pull(t.Context(), "", "Tools:1", nil)
	expectCode(t, "a malformed reference", err, codes.InvalidArgument, "Tools:1")
	_, err = f.pull(t.Context(), "a//b", ref, nil)
	expectCode(t, "a malformed instance", err, codes.InvalidArgument)

	f = newFixture(t, false, true)
	_, err = f.pull(t.Context(), "", f.host+"/absent:1", nil)
	expectCode(t, "an image that its registry lacks", err, codes.FailedPrecondition, "NAME_UNKNOWN")
	instances := cas.Instances(func(string) (*cas.Instance, error) { return nil, cas.ErrUnavailable })
	f.stores.Store(&instances)
	_, err = f.pull(t.Context(), "", f.host+"/absent:1", nil)
	expectCode(t, "without a store", err, codes.Unavailable)
}

// TestPullCompletesImages: if the store has lost blobs of an image, a pull gets them again.
func TestPullCompletesImages(t *testing.T) {
	f := newFixture(t, false, true)
	ref, _ := f.push("tools:1")
	f.mustPull("", ref)
	empty := castest.Instances()
	f.stores.Store(&empty)
	m := f.mustPull("", ref)
	root := must.Get(cas.ParseDigest(m.Root))(t)
	in := must.Get(empty(""))(t)
	expect.Error(t, expect.Err(tree.Load(t.Context(), in.Store, root)), nil, "after the second pull")
}

// TestLoad loads an OCI layout and the output of docker save, only through the socket.
func TestLoad(t *testing.T) {
	im := newImage(t)
	dir, err := layout.Write(t.TempDir(), empty.Index)
	if err == nil {
		err = dir.AppendImage(im)
	}
	saved := filepath.Join(t.TempDir(), "saved.tar")
	var tag name.Tag
	if err == nil {
		tag, err = name.NewTag("example.com/saved:2")
	}
	if err == nil {
		err = tarball.WriteToFile(saved, tag, im)
	}
	must.Succeed(t, err)
	f := newFixture(t, true, false)
	load := func(req *cloisterpb.LoadImageRequest) (*cloisterpb.ContainerImage, error) {
		m, err := f.images.Load(t.Context(), req)
		return m.GetImage(), err
	}
	fromLayout, err := load(&cloisterpb.LoadImageRequest{InstanceName: "main", Path: string(dir), Reference: "laid:1"})
	must.Succeed(t, err)
	fromSaved := must.Get(load(&cloisterpb.LoadImageRequest{InstanceName: "main", Path: saved}))(t)
	expect.That(t, fromLayout.Loaded && fromSaved.Loaded && fromLayout.Root == fromSaved.Root,
		"got %v and %v, want the same tree twice", fromLayout, fromSaved)
	want := "main example.com/saved:2, main index.docker.io/library/laid:1"
	if got, _ := f.list(&cloisterpb.ListImagesRequest{InstanceName: "main"}); got != want {
		t.Errorf("got %s, want %s", got, want)
	}

	_, err = load(&cloisterpb.LoadImageRequest{Path: string(dir)})
	expectCode(t, "without a name", err, codes.InvalidArgument, "name")
	_, err = load(&cloisterpb.LoadImageRequest{Path: "saved.tar"})
	expectCode(t, "a relative path", err, codes.InvalidArgument, "absolute")
	_, err = load(&cloisterpb.LoadImageRequest{Path: saved + ".gone"})
	expectCode(t, "an absent file", err, codes.NotFound, "saved.tar.gone")
	_, err = load(&cloisterpb.LoadImageRequest{Path: filepath.Join(string(dir), "index.json"), Reference: "x"})
	expectCode(t, "another file", err, codes.FailedPrecondition, "docker save")

	f = newFixture(t, false, false)
	_, err = load(&cloisterpb.LoadImageRequest{Path: saved})
	expectCode(t, "not through the socket", err, codes.PermissionDenied, "image load", "--dir")
	if got, _ := f.list(&cloisterpb.ListImagesRequest{AllInstances: true}); got != "" {
		t.Errorf("after a refused load: got %s", got)
	}
}

// TestFindAndRemove: a name identifies images of its instance, and Remove removes exactly one.
func TestFindAndRemove(t *testing.T) {
	f := newFixture(t, false, true)
	one, digest := f.push("tools:1")
	two, _ := f.push("tools:2")
	f.mustPull("a", one)
	f.mustPull("a", two)
	f.mustPull("b", one)
	find := func(instance, name, want string) {
		t.Helper()
		req := &cloisterpb.ListImagesRequest{InstanceName: instance, AllInstances: instance == "*", Name: name}
		if got, _ := f.list(req); got != want {
			t.Errorf("%s in %s: got %q, want %q", name, instance, got, want)
		}
	}
	find("*", "", "a tools:1, a tools:2, b tools:1")
	find("a", "", "a tools:1, a tools:2")
	find("*", one, "a tools:1, b tools:1")
	find("a", digest, "a tools:1")
	find("b", strings.TrimPrefix(digest, "sha256:")[:8], "b tools:1")
	find("a", strings.TrimPrefix(digest, "sha256:")[:7], "")
	find("c", one, "")

	remove := func(instance, reference string) error {
		_, err := f.images.Remove(t.Context(), &cloisterpb.RemoveImageRequest{InstanceName: instance, Reference: reference})
		return err
	}
	expectCode(t, "an image of another instance", remove("b", two), codes.NotFound, "tools:2", `"b"`)
	expectCode(t, "a digest", remove("a", digest), codes.NotFound)
	must.Succeed(t, remove("a", one))
	expectCode(t, "a removed image", remove("a", one), codes.NotFound)
	find("*", "", "a tools:2, b tools:1")
}
