// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/imageservice"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"google.golang.org/grpc"
)

// imageServer serves the images of a store on its control socket and at a port. It returns the directory of the store,
// the address of the port, and a registry that is allowed.
func imageServer(t *testing.T) (dir, address, host string) {
	t.Helper()
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(s.Close)
	host = strings.TrimPrefix(s.URL, "http://")
	dir = filepath.Join(t.TempDir(), "store")
	store := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20}))(t)
	t.Cleanup(func() { store.Close() })
	l := must.Get(image.OpenLibrary(image.LibraryConfig{
		Config: image.Config{Function: cas.SHA256, Dir: t.TempDir()}, Path: filepath.Join(dir, image.LibraryFile),
		Instances: store.Instance, Allowed: []string{host},
	}))(t)
	t.Cleanup(func() { l.Close() })
	register := func(local bool) func(grpc.ServiceRegistrar) {
		return func(r grpc.ServiceRegistrar) {
			imageservice.Register(r, imageservice.Config{
				Library: l, Instances: store.Instance, Local: local, Log: slog.New(slog.DiscardHandler),
			})
		}
	}
	control := must.Get(diskctl.Serve(dir, store, register(true)))(t)
	t.Cleanup(func() { control.Close() })
	return dir, "grpc://" + grpctest.Serve(t, func(s *grpc.Server) { register(false)(s) }), host
}

// pushImage stores a new image with two variables and returns its digest.
func pushImage(t *testing.T, to string) string {
	t.Helper()
	im, err := random.Image(1000, 2)
	if err == nil {
		cf := must.Get(im.ConfigFile())(t)
		cf = cf.DeepCopy()
		cf.Config.Env = []string{"PATH=/opt/bin:/bin", "GREETING=hello \x1bworld"}
		im, err = mutate.ConfigFile(im, cf)
	}
	ref, rerr := name.ParseReference(to)
	if err != nil || rerr != nil {
		t.Fatal(err, rerr)
	}
	d, err := im.Digest()
	if err == nil {
		err = remote.Write(ref, im)
	}
	must.Succeed(t, err)
	return d.String()
}

// TestImageCommands pulls, lists, shows and removes images through the control socket.
func TestImageCommands(t *testing.T) {
	dir, _, host := imageServer(t)
	check := func(want int, args ...string) string {
		t.Helper()
		out, code := runCLI(t, append(append([]string{"image"}, args...), "--dir", dir)...)
		expect.That(t, code == want, "image %v: exit %d, want %d: %s", args, code, want, out)
		return out
	}
	contains := func(out string, texts ...string) {
		t.Helper()
		expect.Texts(t, out, texts)
	}
	expect.Equal(t, check(0, "ls"), "", "ls")
	ref := host + "/tools:1"
	digest := pushImage(t, ref)
	pinned := host + "/tools@" + digest
	expect.Equal(t, check(0, "pull", ref, "-q"), "docker://"+pinned+"\n", "pull -q")
	contains(check(0, "pull", "docker://"+ref), pinned)
	contains(check(0, "ls"), "image ", ref+" ", digest[7:19]+" ", "2.0 KiB ", "''")
	contains(check(0, "show", digest[7:15]),
		"image        "+ref+"\n", "pinned       "+pinned+"\n", "digest       "+digest+"\n", "root         ",
		"size         2.0 KiB in 2 files\n", "environment  PATH=/opt/bin:/bin\n", `$'GREETING=hello \033world'`,
		"pulled       ", " ago\n", `exec_properties = {"container-image": "docker://`+pinned+`"}`)
	var l imageList
	must.Succeed(t, json.Unmarshal([]byte(check(0, "ls", "--json")), &l))
	if len(l.Images) != 1 || l.Images[0].Property != "docker://"+pinned || l.Images[0].Bytes != 2000 || l.Pulls == nil {
		t.Errorf("ls --json: got %+v", l)
	}

	contains(check(exit.No, "pull", "registry.example.com/tools:1"), "not allowed", "--images=registry.example.com")
	contains(check(exit.No, "pull", host+"/absent:1"), "NAME_UNKNOWN", dir)
	contains(check(exit.Usage, "pull", "Tools"), "Tools", "REPOSITORY:TAG")
	contains(check(exit.Absent, "show", host+"/absent:1"), "no image", "in any instance", "image ls")
	contains(check(exit.Absent, "show", ref, "--instance", "main"), `in instance "main"`)
	check(0, "pull", ref, "--instance", "main")
	contains(check(exit.Usage, "rm", ref), `"" and "main"`, "--instance")
	contains(check(exit.Absent, "rm", ref, host+"/absent:1", "--instance", "main"), "absent:1")
	contains(check(0, "show", ref, "--instance", "main"), "main")
	expect.Equal(t, check(0, "rm", ref, ref, digest, "--instance", "main"), "removed  "+ref+"\n", "rm")
	check(0, "rm", "docker://"+pinned)
	expect.Equal(t, check(0, "ls"), "", "ls at the end")
}

// imageLayout returns an OCI layout of a random image, and its digest.
func imageLayout(t *testing.T) (dir string, digest v1.Hash) {
	t.Helper()
	im := must.Get(random.Image(1000, 1))(t)
	at := must.Get(layout.Write(t.TempDir(), empty.Index))(t)
	must.Succeed(t, at.AppendImage(im))
	return string(at), must.Get(im.Digest())(t)
}

// TestImageLoadCommand loads an image from a file, which only the control socket permits.
func TestImageLoadCommand(t *testing.T) {
	dir, address, _ := imageServer(t)
	at, digest := imageLayout(t)
	property := "oci:tools@" + digest.String()
	out, code := runCLI(t, "image", "load", at, "--as", "tools:v3", "--dir", dir, "-q")
	expect.That(t, code == 0 && out == property+"\n", "load: exit %d, %q, want %s", code, out, property)
	for _, name := range []string{"tools:v3", property, digest.String()} {
		out, code := runCLI(t, "image", "show", name, "--server", address)
		expect.That(t, code == 0 && strings.Contains(out, `"`+property+`"}`) && strings.Contains(out, "loaded       "),
			"show %s: exit %d, %s", name, code, out)
	}
	for _, c := range []struct {
		code int
		want string
		args []string
	}{
		{exit.No, "--as", []string{at, "--dir", dir}},
		{exit.Absent, "absent", []string{at, "--as", "x", "--select", "absent", "--dir", dir}},
		{exit.Usage, "no such file", []string{"absent", "--dir", dir}},
		{exit.Usage, "--as", []string{at, "--as", "Tools", "--dir", dir}},
		{exit.No, "the server's host", []string{at, "--as", "x", "--server", address}},
		{exit.Unreachable, "cloister serve --dir", []string{at, "--as", "x", "--dir", t.TempDir()}},
	} {
		out, code := runCLI(t, append([]string{"image", "load"}, c.args...)...)
		expect.That(t, code == c.code && strings.Contains(out, c.want),
			"load %v: exit %d, %q, want %d and %q", c.args, code, out, c.code, c.want)
	}
}

// TestImageNames: a digest selects all names of an image, and nothing if it begins those of several images.
func TestImageNames(t *testing.T) {
	dir, address, _ := imageServer(t)
	at, digest := imageLayout(t)
	for _, name := range []string{"tools:1", "tools:2"} {
		if out, code := runCLI(t, "image", "load", at, "--as", name, "--dir", dir, "-q"); code != 0 {
			t.Fatalf("load: exit %d, %s", code, out)
		}
	}
	out, code := runCLI(t, "image", "show", digest.Hex[:8], "--server", address)
	expect.That(t, code == 0 && strings.Count(out, "image        ") == 2,
		"show: exit %d, %s, want both names", code, out)
	must.Hold(t, "completion offers the names, if the server answers within two seconds", func() bool {
		out, code := runCLI(t, "__complete", "image", "rm", "--dir", dir, "index.")
		return code == 0 && strings.HasPrefix(out, "index.docker.io/library/tools:1\t")
	})
	out, code = runCLI(t, "image", "rm", digest.String(), "--server", address)
	expect.That(t, code == 0 && strings.Count(out, "removed ") == 2, "rm: exit %d, %s, want both names", code, out)
	if out, code := runCLI(t, "image", "ls", "--server", "grpc://127.0.0.1:1"); code != exit.Unreachable {
		t.Errorf("nobody there: exit %d, %q", code, out)
	}

	ambiguous := grpctest.Serve(t, func(s *grpc.Server) { cloisterpb.RegisterImagesServer(s, twoImages{}) })
	if out, code := runCLI(t, "image", "rm", "9f2c1e77", "--server", "grpc://"+ambiguous); code != exit.Usage ||
		!strings.Contains(out, "9f2c1e77aa (one:1)") || !strings.Contains(out, "9f2c1e77bb (two:1)") {
		t.Errorf("an ambiguous name: exit %d, %q", code, out)
	}
}

// twoImages has two images whose digests have the same beginning.
type twoImages struct {
	cloisterpb.UnimplementedImagesServer
}

func (twoImages) List(context.Context, *cloisterpb.ListImagesRequest) (*cloisterpb.ListImagesResponse, error) {
	return &cloisterpb.ListImagesResponse{Images: []*cloisterpb.ContainerImage{
		{Reference: "one:1", Digest: "9f2c1e77aa"}, {Reference: "two:1", Digest: "9f2c1e77bb"},
	}}, nil
}
