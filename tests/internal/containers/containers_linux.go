// SPDX-License-Identifier: Apache-2.0

// Package containers makes container images for tests, and serves them from a registry in the test's process.
package containers

import (
	"archive/tar"
	"bytes"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Registry serves an empty registry on loopback until the test ends, and returns its host and port.
func Registry(t testing.TB) string {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// Push pushes an image to a registry under a name with a tag, and returns its reference with a digest.
func Push(t testing.TB, ref string, im v1.Image) string {
	t.Helper()
	to, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(to, im); err != nil {
		t.Fatal(err)
	}
	digest, err := im.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return to.Context().Digest(digest.String()).String()
}

// Image makes an image for this architecture with programs of this host in /bin, and with the file /etc/marker, which
// contains mark and a newline. Its environment is PATH=/bin and MARK.
func Image(t testing.TB, mark string, programs ...string) v1.Image {
	t.Helper()
	layer := bytes.NewBuffer(files(t, mark, programs))
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	im, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	config, err := im.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config.Env = "linux", runtime.GOARCH, []string{"PATH=/bin", "MARK=" + mark}
	if im, err = mutate.ConfigFile(im, config); err != nil {
		t.Fatal(err)
	}
	return im
}

// files returns the files of an image as a tar archive.
func files(t testing.TB, mark string, programs []string) []byte {
	t.Helper()
	at := t.TempDir()
	root, err := os.OpenRoot(at)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	sandboxtest.CopyPrograms(t, root, programs...)
	if err := root.MkdirAll("etc", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := root.WriteFile("etc/marker", []byte(mark+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.AddFS(os.DirFS(at)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return archive.Bytes()
}
